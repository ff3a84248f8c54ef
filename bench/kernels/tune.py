"""Tune ``kernels/triton/launch.json`` for the GPU of this machine: ``python -m moonpool.bench.kernels.tune``.

Each shape of the table is tried with each tile and number of warps and stages that compiles without a fault.
The fastest becomes the row of this GPU's architecture. ``--table FILE`` writes the table there instead, again
after each shape. ``--list`` prints the candidates, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from moonpool.bench.kernels.attention import Decode, Heads, Prefill
from moonpool.bench.kernels.device_limits import CudaClock, Machine
from moonpool.kernels.compilation.attention_cases import AttentionCase, decode_case, prefill_case
from moonpool.kernels.compilation.compiler import compile_all
from moonpool.kernels.reference import FP8
from moonpool.kernels.triton import launch
from moonpool.kernels.triton.launch import DecodeChoice, PrefillChoice

HEAD_DIMS = (128, 64, 256)  # what most models have first: the table is written after each shape
GROUPS = (4, 32)  # of decode: 16 and 32 rows


@dataclass(frozen=True)
class Slot:
    """One row of the table to be filled."""

    of: str  # decode or prefill
    pages: torch.dtype
    head_dim: int
    group: int

    @property
    def row(self) -> dict[str, Any]:
        kind = launch.kind_of(torch.bfloat16, self.pages)
        row: dict[str, Any] = {"kind": kind, "head_dim": self.head_dim}
        return row | ({"rows": launch.padded(self.group, 16)} if self.of == "decode" else {})

    @property
    def attended(self) -> AttentionCase:
        return AttentionCase(torch.bfloat16, self.pages, self.head_dim, self.group)


def slots() -> Iterator[Slot]:
    for pages, head_dim in product((torch.bfloat16, FP8), HEAD_DIMS):
        for group in GROUPS:
            yield Slot("decode", pages, head_dim, group)
        yield Slot("prefill", pages, head_dim, 4)


def candidates(slot: Slot) -> list[DecodeChoice | PrefillChoice]:
    """Before it is known which are fit for use."""
    if slot.of == "decode":
        shapes = product((32, 64, 128), (4, 8), (2, 3, 4, 5))
        return [DecodeChoice(tile, warps, stages, 1) for tile, warps, stages in shapes]
    blocks = product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    return [PrefillChoice(rows, tile, warps, stages) for rows, tile, warps, stages in blocks]


def fit(slot: Slot, arch: int) -> list[DecodeChoice | PrefillChoice]:
    """Those that compile without a fault; of decode, with as many programs as then fit a multiprocessor."""
    found: list[DecodeChoice | PrefillChoice] = []
    choices = candidates(slot)
    make = decode_case if slot.of == "decode" else prefill_case
    compiled = compile_all([make(slot.attended, arch, choice) for choice in choices], arch)
    for choice, (made, faults) in zip(choices, compiled, strict=True):
        if faults:
            continue
        if isinstance(choice, DecodeChoice):
            choice = replace(choice, programs_per_multiprocessor=min(8, made.resident))
        found.append(choice)
    return found


def put(slot: Slot, arch: int, choice: DecodeChoice | PrefillChoice) -> None:
    """The table's row of this slot and architecture, in memory, for the next call of a kernel."""
    rows = launch.table()[slot.of]
    key = slot.row | {"arch": arch}
    rows[:] = [row for row in rows if {name: row.get(name) for name in key} != key]
    rows.append(key | {"choice": asdict(choice)})
    launch.decode_choice.cache_clear()
    launch.prefill_choice.cache_clear()


def seconds(slot: Slot, machine: Machine) -> float:
    """Of one representative case with the row that is in the table now."""
    heads = Heads(8 * slot.group, 8, slot.head_dim, 16)
    case: Decode | Prefill
    if slot.of == "decode":
        case = Decode(heads, torch.bfloat16, slot.pages, 32, 4096)
    else:
        case = Prefill(heads, torch.bfloat16, slot.pages, 8192, 8192)
    rows = list(case.rows(machine, ()))
    wrong = [row for row in rows if row.metric == "error" and row.reached is False]
    return float("inf") if wrong else next(row.value for row in rows if row.metric == "time") / 1e6


def write(path: Path) -> None:
    def line(row: dict[str, Any]) -> str:
        order = ("kind", "arch", "head_dim", "rows", "choice")
        return "  " + json.dumps({name: row[name] for name in order if name in row})

    parts = [f' "{of}": [\n' + ",\n".join(map(line, rows)) + "\n ]" for of, rows in launch.table().items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="say what would be tried, and end")
    parser.add_argument("--table", type=Path, default=launch.TABLE_PATH, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.list:
        for slot in slots():
            print(slot.of, slot.row, f"{len(candidates(slot))} candidates")
        return 0
    if not torch.cuda.is_available():
        print("tune: torch sees no CUDA device here; --list says what would be tried", file=sys.stderr)
        return 2
    device = torch.device("cuda")
    arch = launch.architecture(device)
    machine = Machine.of(device, rounds=5)
    assert isinstance(machine.clock, CudaClock)
    for slot in slots():
        times: dict[DecodeChoice | PrefillChoice, float] = {}
        for choice in fit(slot, arch):
            put(slot, arch, choice)
            times[choice] = seconds(slot, machine)
        best = min(times, key=lambda choice: times[choice])
        put(slot, arch, best)
        print(f"ours: {slot.of} {slot.row}: {best}, {times[best] * 1e6:.0f} µs, of {len(times)} tried")
        write(arguments.table)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
