"""``python -m moonpool.bench.gpu``: run the parts, whatever becomes of each, within one limit of time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click

from moonpool.bench.gpu.jobs import DEFAULT, PARTS, Part
from moonpool.runtime.reports import report
from moonpool.runtime.reports.report import Report, Row
from moonpool.runtime.reports.schema import validate

ROOT = Path(__file__).parents[3]
_PACKAGES = ("torch", "triton", "numpy", "transformers", "pytest")
_NAMES = [part.name for part in PARTS]


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    code: int | None  # None: it was stopped at its limit
    seconds: float
    log: Path
    rows: list[Row]

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def verdict(self) -> str:
        return "ok" if self.code == 0 else "stopped" if self.code is None else f"failed ({self.code})"


def run_part(part: Part, timeout_s: float, directory: Path) -> Outcome:
    """Run it with its output in ``directory / NAME.log`` (and its end here), for ``timeout_s`` at most."""
    log, json_path = directory / f"{part.name}.log", directory / f"{part.name}.json"
    json_path.unlink(missing_ok=True)
    begun_s = time.monotonic()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        # A process group of its own, so that what it started goes with it.
        child = subprocess.Popen(
            part.command(json_path),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | None
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end_group(child)
    rows = _read_rows(json_path) if part.report and json_path.exists() else []
    return Outcome(part, code, time.monotonic() - begun_s, log, rows)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(child.pid, 9)
    except ProcessLookupError:
        return
    finally:
        child.wait()


def _read_rows(path: Path) -> list[Row]:
    content = json.loads(path.read_text())
    validate(content)
    return [Row(**row) for row in content["rows"]]


def _gpu() -> tuple[str, dict[str, str]]:
    """The GPU's name, and the versions of what drives it; "" where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        return "", {}
    versions = {"cuda": str(torch.version.cuda), "device": torch.cuda.get_device_name(0)}
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
        versions["driver"] = driver.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        versions["driver"] = "unknown"
    return versions["device"], versions


def _num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _tail(path: Path, num_lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])


@click.command()
@click.argument("names", nargs=-1, metavar="[PART]…")
@click.option(
    "--within", "within_s", default=570.0, show_default=True, help="Seconds for all parts together."
)
@click.option("--results", default="bench/results", show_default=True, help="Where the report is written.")
@click.option("--logs", default="run/gpu", show_default=True, help="Where the parts' output goes.")
@click.option("--anyway", is_flag=True, help="Also without a GPU, to see what is missing.")
def main(names: tuple[str, ...], within_s: float, results: str, logs: str, anyway: bool) -> None:
    """Run the tests and measurements that need a GPU.

    Every part runs whatever became of the others. Exit code 1 where one failed or there was no time for it,
    2 without a GPU.
    """
    unknown = [name for name in names if name not in _NAMES]
    if unknown:
        raise click.UsageError(f"there is no part {unknown[0]}: {', '.join(_NAMES)}")
    gpu, versions = _gpu()
    if not gpu and not anyway:
        click.echo(
            "moonpool: torch sees no GPU here: `make gpu` needs one (--anyway runs what can run)", err=True
        )
        sys.exit(2)
    directory, end_s = Path(logs), time.monotonic() + within_s
    directory.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    num_gpus = _num_gpus()
    for part in (part for part in PARTS if part.name in (names or DEFAULT)):
        if num_gpus < part.gpus > 1:
            click.echo(f"{part.name:16} left out: it needs {part.gpus} GPUs, there are {num_gpus}")
            continue
        left_s = end_s - time.monotonic()
        if left_s < 5:
            click.echo(f"{part.name:16} no time left")
            outcomes.append(Outcome(part, None, 0.0, directory / f"{part.name}.log", []))
            continue
        outcome = run_part(part, min(part.timeout_s, left_s), directory)
        outcomes.append(outcome)
        click.echo(f"{part.name:16} {outcome.verdict} after {outcome.seconds:.0f} s ({outcome.log})")
        click.echo(_tail(outcome.log, 40 if outcome.failed else 3))
    _write(outcomes, gpu, versions, Path(results), directory)
    sys.exit(any(outcome.failed for outcome in outcomes))


def _write(
    outcomes: list[Outcome], gpu: str, versions: dict[str, str], results: Path, directory: Path
) -> None:
    """All figures in one report, named for the GPU and the day, and what failed in one log."""
    measured = report.measure_environment(_PACKAGES)
    name = gpu.lower().replace("nvidia ", "").replace(" ", "-") or "no-gpu"
    stem = f"{name}-{datetime.now(UTC):%Y-%m-%d}"
    environment = replace(
        measured,
        machine=f"{gpu or 'no GPU'}, {measured.machine}",
        versions={**measured.versions, **versions},
    )
    rows = [row for outcome in outcomes for row in outcome.rows]
    rows += [Row("make gpu", outcome.part.name, outcome.seconds, "s") for outcome in outcomes]
    found = Report(environment, rows)
    failures = directory / "failures.log"
    with failures.open("w") as log:
        for outcome in outcomes:
            if outcome.failed and outcome.log.exists():
                log.write(f"==== {outcome.part.name}: {outcome.verdict}\n{_tail(outcome.log, 400)}\n")
    if gpu:
        results.mkdir(parents=True, exist_ok=True)
        path = results / f"{stem}.json"
        report.write(found, path)
        click.echo(f"figures: {path}; failures: {failures}")
    report.show(found)


if __name__ == "__main__":
    main()
