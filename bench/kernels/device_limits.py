"""The device, its clock, and its limits at the plainest work."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from moonpool.bench.kernels.clock import Clock, CpuClock, CudaClock


@dataclass
class Machine:
    """``limits``: ``copy`` and ``read`` in bytes/s (a copy counts what it reads and what it writes),
    ``matmul`` in FLOP/s, each measured in this run."""

    device: torch.device
    clock: Clock
    rounds: int
    dtype: torch.dtype  # of activations
    limits: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, device: torch.device, rounds: int) -> Machine:
        cuda = device.type == "cuda"
        clock, dtype = (CudaClock(), torch.bfloat16) if cuda else (CpuClock(), torch.float32)
        found = cls(device, clock, rounds, dtype)
        found.limits = found._measured_limits()
        return found

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def cold_nbytes(self) -> int:
        """More bytes than the caches hold: work is rotated over them."""
        if not self.is_cuda:
            return 64 << 20
        return max(256 << 20, 4 * int(torch.cuda.get_device_properties(self.device).L2_cache_size))

    @property
    def free_nbytes(self) -> int:
        """Memory that a case may use."""
        if not self.is_cuda:
            return 2 << 30
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0] * 0.85)

    def _measured_limits(self) -> dict[str, float]:
        size = 4 * self.cold_nbytes
        source = torch.zeros(size // 4, device=self.device)
        target = torch.empty_like(source)
        side = 8192 if self.is_cuda else 1024
        a, b = torch.randn(2, side, side, device=self.device).to(self.dtype).unbind(0)
        out = torch.empty_like(a)
        seconds = self.clock.seconds_of(
            {
                "copy": lambda: target.copy_(source),
                "read": source.sum,
                "matmul": lambda: torch.mm(a, b, out=out),
            },
            self.rounds,
        )
        return {
            "copy": 2 * source.nbytes / seconds["copy"],
            "read": source.nbytes / seconds["read"],
            "matmul": 2 * side**3 / seconds["matmul"],
        }


def name_of(dtype: torch.dtype) -> str:
    return {torch.float8_e4m3fn: "fp8"}.get(dtype, str(dtype).removeprefix("torch."))
