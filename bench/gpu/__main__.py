"""``python -m moonpool.bench.gpu``: run the parts, also after one failed, within one limit of time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import click
import torch

from moonpool.bench.gpu.jobs import DEFAULT, PARTS, Part
from moonpool.runtime.reports import report
from moonpool.runtime.reports.conditions import Conditions, merged
from moonpool.runtime.reports.output import finish
from moonpool.runtime.reports.report import Report, Row

ROOT = Path(__file__).resolve().parents[2]
_PACKAGES = ("torch", "triton", "numpy", "transformers", "pytest")
_MIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    part: Part
    code: int | None  # None: it was stopped at its limit
    seconds: float
    log: Path
    rows: list[Row]
    conditions: Conditions | None = None

    @property
    def failed(self) -> bool:
        return self.code != 0

    @property
    def verdict(self) -> str:
        return "ok" if self.code == 0 else "stopped" if self.code is None else f"failed ({self.code})"

    def tail(self, num_lines: int) -> str:
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def run_part(part: Part, timeout_s: float, directory: Path) -> Outcome:
    """Run it for at most ``timeout_s``, with its output in ``directory / NAME.log``."""
    log, json_path = directory / f"{part.name}.log", directory / f"{part.name}.json"
    json_path.unlink(missing_ok=True)
    began_s = time.monotonic()
    places = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": places, "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        # A process group of its own, so that the processes that it started end with it.
        child = subprocess.Popen(
            part.command(json_path),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code = None
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pass  # reported as stopped
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    took_s = time.monotonic() - began_s
    if not (part.report and json_path.exists()):
        return Outcome(part, code, took_s, log, [])
    written = report.read(json_path)
    return Outcome(part, code, took_s, log, list(written.rows), written.environment.conditions)


def keep(outcome: Outcome, environment: report.Environment, stem: Path) -> None:
    """Write what a part measured as soon as it has ended: STEM-PART.json, and a launch table as it is."""
    part, target = outcome.part, stem.with_name(f"{stem.name}-{outcome.part.name}.json")
    target.parent.mkdir(parents=True, exist_ok=True)
    written = outcome.log.with_name(f"{part.name}.json")
    if part.table and written.exists():
        shutil.copyfile(written, target)
    elif outcome.rows:
        finish(Report(replace(environment, conditions=outcome.conditions), outcome.rows), target)


def _run_all(names: tuple[str, ...], within_s: float, directory: Path) -> Iterator[Outcome]:
    end_s, num_gpus = time.monotonic() + within_s, torch.cuda.device_count()
    for part in (part for part in PARTS if part.name in names):
        left_s = end_s - time.monotonic()
        if lacking := part.lacks(num_gpus):
            click.echo(f"{part.name:16} left out: it needs {lacking}")
        elif left_s < _MIN_S:
            click.echo(f"{part.name:16} no time left")
            yield Outcome(part, None, 0.0, directory / f"{part.name}.log", [])
        else:
            outcome = run_part(part, min(part.timeout_s, left_s), directory)
            click.echo(f"{part.name:16} {outcome.verdict} after {outcome.seconds:.0f} s ({outcome.log})")
            click.echo(outcome.tail(40 if outcome.failed else 3))
            yield outcome


def _environment() -> tuple[report.Environment, str]:
    """This machine, and a name for the result file."""
    options = click.get_current_context().params
    command = " ".join(["make gpu", *sys.argv[1:]])
    measured = report.measure_environment(_PACKAGES, command=command, options=options)
    if not torch.cuda.is_available():
        return replace(measured, machine=f"no GPU, {measured.machine}"), "no-gpu"
    gpu, driver = torch.cuda.get_device_name(0), "unknown"
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        driver = done.stdout.splitlines()[0].strip()
    versions = {**measured.versions, "cuda": str(torch.version.cuda), "device": gpu, "driver": driver}
    name = gpu.lower().replace("nvidia ", "").replace(" ", "-")
    return replace(measured, versions=versions), name


@click.command()
@click.argument("names", nargs=-1, metavar="[PART]…", type=click.Choice([part.name for part in PARTS]))
@click.option(
    "--within", "within_s", default=1500.0, show_default=True, help="Seconds of all parts together."
)
@click.option("--results", default="bench/results", show_default=True, help="Directory of the report.")
@click.option("--logs", default="run/gpu", show_default=True, help="Directory of the parts' output.")
@click.option("--anyway", is_flag=True, help="Also without a GPU, to see what is missing.")
def main(names: tuple[str, ...], within_s: float, results: str, logs: str, anyway: bool) -> None:
    """Run the tests and measurements that need a GPU.

    Exit code 1: a part failed or there was no time for it; 2: there is no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not anyway:
        needed = "`make gpu` needs one (--anyway runs the parts that can run)"
        click.echo(f"moonpool: torch sees no GPU here: {needed}", err=True)
        sys.exit(2)
    directory = Path(logs)
    directory.mkdir(parents=True, exist_ok=True)
    environment, name = _environment()
    stem = Path(results) / f"{name}-{datetime.now(UTC):%Y-%m-%d}"
    outcomes = []
    for outcome in _run_all(names or DEFAULT, within_s, directory):
        outcomes.append(outcome)
        if has_gpu:
            keep(outcome, environment, stem)
    failures = directory / "failures.log"
    failed = [outcome for outcome in outcomes if outcome.failed]
    failures.write_text("".join(f"==== {one.part.name}: {one.verdict}\n{one.tail(400)}\n" for one in failed))
    rows = [row for outcome in outcomes for row in outcome.rows]
    rows += [Row("make gpu", outcome.part.name, outcome.seconds, "s") for outcome in outcomes]
    path = None
    if has_gpu:
        path = stem.with_name(f"{stem.name}.json")
        click.echo(f"figures: {path}; failures: {failures}")
    conditions = merged({one.part.name: one.conditions for one in outcomes if one.conditions is not None})
    finish(Report(replace(environment, conditions=conditions), rows), path)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
