"""Matrix products: linear layers and adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from moonpool.bench.kernels.contest import contest, error_row
from moonpool.bench.kernels.device_limits import Machine, Work, name_of
from moonpool.kernels.dispatch import add_lora
from moonpool.kernels.packed import PackedLinear
from moonpool.kernels.quantised import Linear, QuantisedLinear
from moonpool.kernels.reference import LINE_NBYTES, QuantisedWeight
from moonpool.runtime.reports.report import Row, versus


def linear_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Ours is for CPUs; on a GPU a linear layer is torch's."""
    if machine.is_cuda:
        return
    f32, bf16 = torch.float32, torch.bfloat16
    for ins, outs in ((256, 1408), (704, 256), (2048, 2048), (4096, 4096))[: 1 if quick else 4]:
        for dtype, stored in ((f32, f32), (f32, bf16), (bf16, bf16)):
            nbytes = ins * outs * stored.itemsize
            copies = max(1, min(256, machine.cold_nbytes // nbytes))
            weights = [torch.randn(outs, ins).to(stored) for _ in range(copies)]
            case = f"linear {ins}x{outs} {name_of(dtype)}"
            if stored is not dtype:
                case += f", weight {name_of(stored)}"
            for n in (1, 8, 32, 128, 512)[: 2 if quick else 5]:
                yield from _linear(machine, f"{case}, {n} rows", weights, torch.randn(n, ins).to(dtype))


def _linear(machine: Machine, case: str, weights: list[Tensor], x: Tensor) -> Iterator[Row]:
    packed = [PackedLinear(weight) for weight in weights]
    plain = [weight.to(x.dtype) for weight in weights]
    contestants: dict[str, Work] = {
        "ours": lambda: [linear(x) for linear in packed],
        "torch": lambda: [F.linear(x, weight) for weight in plain],
    }
    if x.dtype == torch.bfloat16:
        # Without instructions for bfloat16 torch is several times faster in float32.
        wide, widened = x.float(), [weight.float() for weight in weights]
        contestants["torch in float32"] = lambda: [F.linear(wide, weight) for weight in widened]
    seconds = machine.clock.seconds_of(contestants, machine.rounds)
    ours_s = seconds.pop("ours")
    peer = min(seconds, key=seconds.__getitem__)
    flops = 2 * len(x) * sum(weight.numel() for weight in weights) / 1e9
    yield versus(Row(case, "rate", flops / ours_s, "GFLOP/s"), peer, flops / seconds[peer])
    nbytes = sum(weight.nbytes for weight in weights)
    yield Row(case, "weights read", nbytes / ours_s / 1e9, "GB/s")


def quantised_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Weights in few bits beside bfloat16 ones, and beside reading them."""
    shapes = ((4096, 14336), (14336, 4096)) if machine.is_cuda else ((1024, 6144), (3072, 1024))
    for (ins, outs), n in product(shapes[: 1 if quick else 2], (1, 8) if quick else (1, 8, 64, 512)):
        yield from _quantised(machine, ins, outs, torch.randn(n, ins, device=machine.device).bfloat16())


def _quantised(machine: Machine, ins: int, outs: int, x: Tensor) -> Iterator[Row]:
    plain = torch.randn(outs, ins) * 0.02
    float8 = (plain * 1000).to(torch.float8_e4m3fn).view(torch.uint8)
    forms = {
        "int8": QuantisedWeight.of(plain, "int8"),
        "int4": QuantisedWeight.of(plain, "int4", 64),
        "fp8": QuantisedWeight("fp8", float8, torch.full((outs, 1), 1e-3), ins),
    }
    device, narrow = str(machine.device), plain.bfloat16().to(machine.device)

    def several(make: Callable[[], Linear]) -> list[Linear]:
        """As many as the caches do not hold."""
        first = make()
        return [first, *(make() for _ in range(machine.cold_nbytes // first.nbytes))]

    linears = {"bfloat16": several(lambda: PackedLinear(narrow.clone()))}
    for kind, weight in forms.items():
        linears[kind] = several(lambda weight=weight: QuantisedLinear(weight, None, device))  # type: ignore[misc]
    works: dict[str, Work] = {
        name: lambda made=made: [linear(x) for linear in made]  # type: ignore[misc]
        for name, made in linears.items()
    }
    seconds = machine.clock.seconds_of(works, machine.rounds)
    each = {name: seconds[name] / len(made) for name, made in linears.items()}
    for kind, weight in forms.items():
        case = f"linear {ins}x{outs} bfloat16, weight {kind}, {len(x)} rows"
        row = Row(case, "rate", 2 * len(x) * ins * outs / each[kind] / 1e9, "GFLOP/s")
        yield versus(row, "bfloat16 weight", 2 * len(x) * ins * outs / each["bfloat16"] / 1e9)
        read = Row(case, "weights read", linears[kind][0].nbytes / each[kind] / 1e9, "GB/s")
        yield versus(read, "large read", machine.limits["read"] / 1e9)
        expected = x.double() @ weight.dequantised().double().T.to(x.device)
        yield error_row(case, linears[kind][0](x), expected, x.dtype)


def lora_rows(machine: Machine, quick: bool) -> Iterator[Row]:
    """Adapters of rank 16, eight of them in a batch, beside a loop over them."""
    size, rank, adapters = 4096 if machine.is_cuda else 1024, 16, 8
    # The rows of A, then those of B.
    weights = torch.empty((2, adapters * rank, size), device=machine.device, dtype=machine.dtype)
    weights.normal_(std=0.02)
    for n in (8,) if quick else (8, 64, 256):
        yield from _lora(machine, weights, n, rank)


def _lora(machine: Machine, weights: Tensor, n: int, rank: int) -> Iterator[Row]:
    a, b = weights
    adapters, size = len(a) // rank, a.shape[1]
    firsts = torch.arange(0, len(a), rank, device=machine.device)
    extents = torch.stack((firsts, torch.full_like(firsts, rank)), 1).int()
    lines = torch.arange(2 * len(a), device=machine.device).view(2, -1).T * (a[0].nbytes // LINE_NBYTES)
    x, y = torch.randn(2, n, size, device=machine.device).to(machine.dtype).unbind(0)
    ids = (torch.arange(n, device=machine.device) % adapters).int()
    where = weights.view(-1), ids, extents, lines.int().contiguous(), rank

    def loop(y: Tensor, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        for j in range(min(n, adapters)):
            some = slice(j * rank, (j + 1) * rank)
            y[j::adapters] += (x[j::adapters] @ a[some].T) @ b[some]
        return y

    def error() -> tuple[Tensor, Tensor]:
        found = torch.zeros_like(y)
        add_lora(found, x, *where)
        return found, loop(torch.zeros_like(y, dtype=torch.float64), x.double(), a.double(), b.double())

    # All rows of an adapter read the same bytes.
    nbytes = weights.nbytes * min(n, adapters) // adapters + 3 * x.nbytes
    case = f"lora {adapters} adapters of rank {rank}, {size}x{size}, {name_of(machine.dtype)}, {n} rows"
    ours = lambda: add_lora(y, x, *where)  # noqa: E731
    peers = {"loop over adapters": lambda: loop(y, x, a, b)}
    yield from contest(machine, case, ours, calls=1, amount=nbytes, limit="copy", error=error, peers=peers)
