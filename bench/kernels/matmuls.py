"""Matrix products: linear layers, experts and adapters."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.bench.kernels.clock import Work
from moonpool.bench.kernels.contest import Contest
from moonpool.bench.kernels.device_limits import Machine, name_of
from moonpool.kernels import PackedExperts, PackedLinear, add_lora, reference
from moonpool.runtime.reports.report import Row, versus


def linear_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Ours is for CPUs; on a GPU a linear layer is torch's."""
    if machine.is_cuda:
        return
    f32, bf16 = torch.float32, torch.bfloat16
    for shape in ((256, 1408), (704, 256), (2048, 2048), (4096, 4096))[: 1 if quick else 4]:
        for dtype, stored in ((f32, f32), (f32, bf16), (bf16, bf16)):
            yield from _linear(machine, *shape, dtype, stored, (1, 8, 32, 128, 512)[: 2 if quick else 5])


def _linear(
    machine: Machine, ins: int, outs: int, dtype: torch.dtype, stored: torch.dtype, rows: tuple[int, ...]
) -> Iterator[Row]:
    nbytes = ins * outs * stored.itemsize
    copies = max(1, min(256, machine.cold_nbytes // nbytes))
    weights = [torch.randn(outs, ins).to(stored) for _ in range(copies)]
    packed = [PackedLinear(weight) for weight in weights]
    plain = [weight.to(dtype) for weight in weights]
    case = f"linear {ins}x{outs} {name_of(dtype)}"
    if stored is not dtype:
        case += f", weight {name_of(stored)}"
    for n in rows:
        x = torch.randn(n, ins).to(dtype)
        contestants: dict[str, Work] = {
            "ours": lambda x=x: [linear(x) for linear in packed],  # type: ignore[misc]
            "torch": lambda x=x: [F.linear(x, weight) for weight in plain],  # type: ignore[misc]
        }
        seconds = machine.clock.seconds_of(contestants, machine.rounds)
        flops = 2 * n * ins * outs * copies / 1e9
        row = Row(f"{case}, {n} rows", "rate", flops / seconds["ours"], "GFLOP/s")
        yield versus(row, "torch", flops / seconds["torch"])
        yield Row(f"{case}, {n} rows", "weights read", nbytes * copies / seconds["ours"] / 1e9, "GB/s")


def expert_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Grouped products of a mixture: two of eight experts a token, Mixtral's shape on a GPU."""
    num_experts, k = 8, 2
    ins, outs = (4096, 14336) if machine.is_cuda else (512, 1408)
    copies = 1 if machine.is_cuda else 4  # the weights of one exceed every cache
    weights = [
        torch.empty(num_experts, outs, ins, device=machine.device, dtype=machine.dtype).normal_(std=0.02)
        for _ in range(copies)
    ]
    packed = [PackedExperts(weight) for weight in weights]
    for tokens in (16,) if quick else (2, 16, 128, 2048):
        ids = torch.randint(0, num_experts, (tokens, k), dtype=torch.int32, device=machine.device)
        _, offsets = reference.group_by_expert(ids, num_experts)
        bounds = offsets.tolist()
        x = torch.randn(tokens * k, ins, device=machine.device).to(machine.dtype)

        def looped(x: Tensor = x, bounds: list[int] = bounds) -> list[Tensor]:
            return [
                x[bounds[e] : bounds[e + 1]] @ weight[e].T for weight in weights for e in range(num_experts)
            ]

        flops = 2 * tokens * k * ins * outs
        used = sum(1 for e in range(num_experts) if bounds[e] < bounds[e + 1])
        read = used * ins * outs * machine.dtype.itemsize
        # Bound by what takes longer of reading the weights and multiplying.
        reading = read / machine.limits["copy"] > flops / machine.limits["matmul"]
        yield from Contest(
            f"experts {num_experts} of {ins}x{outs}, {name_of(machine.dtype)}, {tokens} tokens",
            lambda x=x, offsets=offsets: [experts(x, offsets) for experts in packed],  # type: ignore[misc]
            copies,
            read if reading else flops,
            "copy" if reading else "matmul",
            machine.dtype,
            lambda x=x, offsets=offsets: (  # type: ignore[misc]
                packed[0](x, offsets),
                reference.grouped_matmul(x.double(), weights[0].double(), offsets),
            ),
            {"loop of products": looped},
        ).rows(machine)


def lora_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Adapters of rank 16, eight of them in a batch, next to a loop over them."""
    size, rank, adapters = 4096 if machine.is_cuda else 1024, 16, 8
    a, b = (
        torch.empty(shape, device=machine.device, dtype=machine.dtype).normal_(std=0.02)
        for shape in ((adapters, rank, size), (adapters, size, rank))
    )
    scales = torch.ones(adapters, device=machine.device)
    for n in (8,) if quick else (8, 64, 256):
        x, y = torch.randn(2, n, size, device=machine.device).to(machine.dtype).unbind(0)
        ids = (torch.arange(n, device=machine.device) % adapters).int()

        def looped(x: Tensor = x, y: Tensor = y, n: int = n) -> None:
            for j in range(min(n, adapters)):
                y[j::adapters] += (x[j::adapters] @ a[j].T) @ b[j].T

        def error(x: Tensor = x, y: Tensor = y, ids: Tensor = ids) -> tuple[Tensor, Tensor]:
            found, expected = torch.zeros_like(y), torch.zeros_like(y, dtype=torch.float64)
            add_lora(found, x, a, b, ids, scales)
            reference.add_lora(expected, x.double(), a.double(), b.double(), ids, scales)
            return found, expected

        # A row reads its own adapter, and all rows of one adapter read the same bytes.
        nbytes = (a.nbytes + b.nbytes) * min(n, adapters) // adapters + 3 * x.nbytes
        yield from Contest(
            f"lora {adapters} adapters of rank {rank}, {size}x{size}, {name_of(machine.dtype)}, {n} rows",
            lambda x=x, y=y, ids=ids: add_lora(y, x, a, b, ids, scales),  # type: ignore[misc]
            1,
            nbytes,
            "copy",
            machine.dtype,
            error,
            {"loop over adapters": looped},
        ).rows(machine)
