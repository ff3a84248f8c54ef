"""``moonpool report``: a run as one self-contained HTML file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import click
import orjson

from moonpool.client import Client
from moonpool.commands.options import DEFAULT_URL, api_key_option, console, output_option, run_with_client
from moonpool.commands.single_page import single_page
from moonpool.errors import ApiError, ReportSourceInvalid
from moonpool.runtime.machine.description import own_version
from moonpool.runtime.reports.schema import ReportInvalid, validate


@click.command("report")
@click.argument("results", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--url", envvar="MOONPOOL_URL", help=f"The conductor's API (default, without RESULTS: {DEFAULT_URL})."
)
@api_key_option
@click.option("--seconds", default=3.0, show_default=True, help="Watch the cluster for so long.")
@click.option("--requests", default=20, show_default=True, help="Draw the timelines of the latest N.")
@click.option("--title", default="Moonpool report", show_default=True)
@output_option(default="report.html", show_default=True)
def report_command(
    results: tuple[Path, ...], url: str | None, seconds: float, requests: int, title: str, output: Path
) -> None:
    """Write a run into one HTML file that makes no network requests.

    It holds a cluster's configuration (no secrets), versions, figures and timelines (no prompts, no answers).
    RESULTS, files of `moonpool bench ... --json`, are drawn with their conditions, limits and peers.
    """
    cluster = None
    if url is not None or not results:
        cluster = run_with_client(
            url or DEFAULT_URL, lambda client: cluster_facts(client, seconds=seconds, num_requests=requests)
        )
    page = single_page(title, report_data(title, cluster, benchmark_facts(results)))
    output.write_text(page, encoding="utf-8")
    console.print(f"{output}: {len(page.encode()) / 1e3:.0f} KB, open it in a browser")


async def cluster_facts(client: Client, *, seconds: float, num_requests: int) -> dict[str, Any]:
    """Watch a cluster for ``seconds`` and at least two snapshots, so that rates can be drawn.

    The result holds no prompts and no generated text. Raises ``ApiError``.
    """
    about = await client.about()
    samples: list[dict[str, Any]] = []
    async with aclosing(client.live()) as live:
        async for sample in live:
            samples.append(sample)
            if len(samples) > 1 and sample["unix_s"] - samples[0]["unix_s"] >= seconds:
                break
    if len(samples) < 2:
        raise ApiError(client.url, 0, "the conductor stopped while it was watched")
    timelines = []
    for request in samples[-1]["requests"][:num_requests]:
        timelines.append({"id": request["id"], "timeline": await client.timeline(request["id"])})
    for sample in samples[:-1]:
        # Rates need no request lists of the earlier snapshots.
        sample["requests"] = []
    return {
        "url": client.url,
        "about": about,
        "cluster": samples[-1].get("cluster"),  # None: the key is a tenant's
        "samples": samples,
        "timelines": timelines,
        "seconds": round(samples[-1]["unix_s"] - samples[0]["unix_s"], 1),
    }


def benchmark_facts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read and check files of ``moonpool bench … --json``. Raises ``ReportSourceInvalid``."""
    return [{"name": path.name, "report": _read(path)} for path in paths]


def _read(path: Path) -> Any:
    try:
        report = orjson.loads(path.read_bytes())
        validate(report)
    except (OSError, ValueError, ReportInvalid) as error:
        raise ReportSourceInvalid(path, str(error)) from error
    return report


def report_data(
    title: str, cluster: dict[str, Any] | None, benchmarks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Return the data that ``conductor/dashboard/static/report.js`` draws."""
    return {
        "title": title,
        "made_unix_s": time.time(),
        "moonpool": own_version(),
        "benchmarks": list(benchmarks),
        **(cluster or {"cluster": None, "timelines": []}),
    }
