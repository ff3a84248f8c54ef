"""The command ``moonpool bench kernels``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
from rich.console import Console

from bench import report
from bench.kernels.cases import AttentionCase, LinearCase, step_row
from bench.report import Report, Row
from kernels import backend_report

_PATH = click.Path(path_type=Path)
_PACKAGES = ("torch", "numpy")
_F32, _BF16 = torch.float32, torch.bfloat16
PARTS = ("step", "linear", "decode", "prefill")


def step_rows(rounds: int, quick: bool) -> Iterator[Row]:
    for dtype, stored in ((_F32, _BF16), (_F32, _F32), (_BF16, _BF16))[: 1 if quick else 3]:
        for batch, limit_ms in ((1, 0.5), (8, 1.0)):
            # The bounds are for a checkpoint in bf16, as the shipped one is.
            yield step_row(dtype, stored, batch, 192, limit_ms if stored is _BF16 else None, rounds)


def linear_rows(rounds: int, quick: bool) -> Iterator[Row]:
    shapes = ((256, 1408), (704, 256), (2048, 2048), (4096, 4096))[: 1 if quick else 4]
    for shape in shapes:
        for dtype, stored in ((_F32, _F32), (_F32, _BF16), (_BF16, _BF16)):
            yield from LinearCase(*shape, dtype, stored).rows(
                (1, 8, 32, 128, 512)[: 2 if quick else 5], rounds
            )


def decode_rows(rounds: int, quick: bool) -> Iterator[Row]:
    shapes = ((8, 4, 32, 16), (16, 16, 64, 16), (32, 8, 128, 16), (32, 8, 128, 64))
    for shape in shapes[: 1 if quick else 4]:
        for dtype in (_F32, _BF16):
            yield AttentionCase(*shape, dtype).decode_row(8, 2048, rounds)


def prefill_rows(rounds: int, quick: bool) -> Iterator[Row]:
    for shape in ((8, 4, 32, 16), (32, 8, 128, 16))[: 1 if quick else 2]:
        for dtype in (_F32, _BF16):
            for new, context in ((512, 512), (512, 2048))[: 1 if quick else 2]:
                yield AttentionCase(*shape, dtype).prefill_row(new, context, rounds)


@click.command()
@click.option("--part", "parts", multiple=True, type=click.Choice(PARTS), help="Repeatable; default: all.")
@click.option("--rounds", default=9, show_default=True, help="Readings of each contestant, in turn.")
@click.option("--quick", is_flag=True, help="A few cases only.")
@click.option("--json", "json_path", type=_PATH, metavar="FILE", help="Write the report there.")
def kernels(parts: tuple[str, ...], rounds: int, quick: bool, json_path: Path | None) -> None:
    """Measure the CPU kernels on one thread, beside torch's own and beside what memory gives."""
    torch.set_num_threads(1)
    cpu = backend_report()["cpu"]
    console = Console(stderr=True, highlight=False)
    console.print(f"kernels: {cpu['form']} ({cpu['reason']}); medians of {rounds}, CPU time of one thread")
    measures = {"step": step_rows, "linear": linear_rows, "decode": decode_rows, "prefill": prefill_rows}
    rows: list[Row] = []
    for part in parts or PARTS:
        for row in measures[part](rounds, quick):
            rows.append(row)
            console.print(f"  {row.case}: {row.metric} {report.number(row.value)} {row.unit}", style="dim")
    found = Report(report.measure_environment(_PACKAGES), rows)
    if json_path is not None:
        report.write(found, json_path)
    report.show(found)
