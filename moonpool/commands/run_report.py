"""``moonpool report``: a run in one HTML file, to keep and to share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import aclosing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import orjson

from moonpool.client import Client
from moonpool.errors import ApiError, ReportSourceInvalid
from moonpool.runtime.reports.schema import ReportInvalid, validate


async def cluster_facts(client: Client, *, seconds: float, num_requests: int) -> dict[str, Any]:
    """What a cluster says of itself, watched for ``seconds`` (two snapshots at least, for its rates).

    Holds no prompts and no generated text: a conductor keeps neither. Raises ``ApiError``.
    """
    about = await client.about()
    samples: list[dict[str, Any]] = []
    async with aclosing(client.live()) as live:
        async for sample in live:
            samples.append(sample)
            if len(samples) > 1 and sample["unix_s"] - samples[0]["unix_s"] >= seconds:
                break
    if len(samples) < 2:
        raise ApiError(client.url, 0, "it stopped while it was watched")
    timelines = []
    for request in samples[-1]["requests"][:num_requests]:
        timelines.append({"id": request["id"], "timeline": await client.timeline(request["id"])})
    for sample in samples[:-1]:
        # Of the earlier ones only what rates are made of.
        sample["requests"] = []
    return {
        "url": client.url,
        "about": about,
        "cluster": samples[-1]["cluster"],
        "samples": samples,
        "timelines": timelines,
        "seconds": round(samples[-1]["unix_s"] - samples[0]["unix_s"], 1),
    }


def benchmark_facts(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The files of ``moonpool bench … --json``, checked. Raises ``ReportSourceInvalid``."""
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
    """What ``conductor/dashboard/static/report.js`` draws."""
    return {
        "title": title,
        "made_unix_s": time.time(),
        "moonpool": version("moonpool"),
        "benchmarks": list(benchmarks),
        **(cluster or {"cluster": None, "timelines": []}),
    }
