"""The limits of this machine, and the least time that a model needs within them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.kernels.cpu.library import load
from moonpool.kernels.cpu.memory import weight_memory


def measure_device(device: torch.device, num_threads: int = 1) -> tuple[float, float]:
    """Bytes a second of a large read on so many threads, or of a GPU's copy, read and written; and the best
    operations a second of torch's products in bfloat16, on a CPU in float32 where that is faster."""
    if device.type != "cuda":
        return _measure_cpu(num_threads)
    source = torch.empty(4 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    n = 8192
    left, right = torch.randn(2, n, n, device=device).bfloat16().unbind(0)

    def work(call: Callable[[], object]) -> None:
        torch.cuda.synchronize(device)
        call()
        torch.cuda.synchronize(device)

    copy_s = best_s(lambda: work(lambda: target.copy_(source)))
    return 2 * source.nbytes / copy_s, 2 * n**3 / best_s(lambda: work(lambda: left @ right))


def _measure_cpu(num_threads: int) -> tuple[float, float]:
    """Each thread reads and multiplies for itself: OpenMP's threads would wait for each other. What it reads
    lies in memory as weights do."""
    reads = [weight_memory(64 << 20).view(torch.float32).fill_(1) for _ in range(num_threads)]
    weights = [torch.randn(1024, 1024) for _ in range(num_threads)]

    def multiply(dtype: torch.dtype) -> Callable[[], object]:
        x, *pieces = (each.to(dtype) for each in (weights[0], *weights))
        return lambda: list(threads.map(partial(F.linear, x), pieces))

    with ThreadPoolExecutor(num_threads, initializer=partial(torch.set_num_threads, 1)) as threads:
        read_s = best_s(lambda: list(threads.map(torch.sum, reads)))
        # Processors without instructions for bfloat16 are several times faster in float32.
        product_s = min(best_s(multiply(dtype)) for dtype in (torch.bfloat16, torch.float32))
    return num_threads * reads[0].nbytes / read_s, num_threads * 2 * 1024**3 / product_s


def instruction_limit(num_threads: int) -> float | None:
    """Operations a second of multiply-adds on registers alone, on so many threads: in bfloat16 where the
    processor has a dot product for it, else in float32. Without AMX. None without the compiled library."""
    library = load()
    if library is None:
        return None
    multiply, rounds = library.gil_released["multiply_registers"][None], 2_000_000
    values = [torch.ones(2) for _ in range(num_threads)]
    with ThreadPoolExecutor(num_threads) as threads:

        def work() -> int:
            return sum(threads.map(lambda each: int(multiply(each.data_ptr(), rounds)), values))

        return work() / best_s(work)


def best_s(work: Callable[[], object], times: int = 30) -> float:
    """The least seconds of so many calls, after one that does not count."""

    def once() -> float:
        begun_s = time.perf_counter()
        work()
        return time.perf_counter() - begun_s

    once()
    return min(once() for _ in range(times))


@dataclass(frozen=True)
class Floor:
    """The least time on one machine, from its measured limits."""

    config: ModelConfig
    nbytes_per_s: float  # of a large read on a CPU; on a GPU of a copy, bytes read and written both counted
    flops_per_s: float  # of large products: see ``measure_device``

    def num_layer_weights(self, num_tokens: int = 1) -> float:
        """The weights that a step of so many tokens reads: of experts, those expected to be chosen."""
        config, moe = self.config, self.config.moe
        attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
        mlps = 3.0 * config.intermediate_size * config.num_layers
        if moe is not None:
            chosen = moe.num_experts * (1 - (1 - moe.top_k / moe.num_experts) ** num_tokens)
            sparse = moe.num_experts + 3 * (chosen * moe.expert_inter + moe.shared_inter)
            mlps += len(moe.layers) * (sparse - 3 * config.intermediate_size)
        return config.hidden_size * (config.num_layers * attention + mlps)

    def decode_s(self, batch: int, context: float, itemsize: int = 2, weight_nbytes: int = 0) -> float:
        """Every weight that is used and every cached K and V read once. ``weight_nbytes``: of all weights
        that a step reads; 0: as many as they have of ``itemsize``."""
        config = self.config
        num_weights = self.num_layer_weights(batch) + config.vocab_size * config.hidden_size
        kv = 2 * config.num_layers * config.num_kv_heads * config.head_dim * batch * context
        return (kv * itemsize + (weight_nbytes or num_weights * itemsize)) / self.nbytes_per_s

    def prefill_s(self, num_tokens: int) -> float:
        """Every product of the layers, half of the attention square, one row of logits."""
        config = self.config
        products = 2 * num_tokens * self.num_layer_weights() + 2 * config.vocab_size * config.hidden_size
        attention = 2 * num_tokens**2 * config.num_layers * config.num_heads * config.head_dim
        return (products + attention) / self.flops_per_s
