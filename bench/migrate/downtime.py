"""The gap in a stream while its request moves to another decode node, beside the time of its decode steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.services import local_cluster
from moonpool.bench.harness.turns import gaps, quantile, spread
from moonpool.bench.serve.client.answer import Answer
from moonpool.bench.serve.client.http_client import HttpClient
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed, Server, new_request_id
from moonpool.bench.serve.client.workload import Prompts
from moonpool.client import Client
from moonpool.errors import ApiError
from moonpool.runtime.reports.report import Row

OUTPUT_TOKENS = 384
# The request moves when so many parts of its answer have arrived: it decodes evenly by then.
_PARTS_BEFORE = 24
_NEAR = 4  # tokens on either side of a switch
_STEPS = 3  # of which a gap may be long, besides
_CONFLICT = 409
_CLUSTER = ("cluster.prefill=1", "cluster.decode=2", "cluster.both=0", "conductor.rejection=none")


@dataclass(frozen=True, slots=True)
class Moved:
    """One request that moved. ``gap_s``: the longest between tokens next to the first of its target, at the
    client; ``longest_s``: the longest gap from the call on until its answer. ``event``: of the
    conductor's timeline."""

    step_s: float
    gap_s: float
    longest_s: float
    other_gaps_s: Sequence[float]
    took_s: float
    event: dict[str, Any]


async def downtime_rows(run: Run, contexts: Sequence[int], moves: int, sets: Sequence[str]) -> list[Row]:
    """Each request is the only one, has a prompt of its own, and moves once.

    Raises ``RequestFailed``: no request of a context moved, or one failed.
    """
    found, rows = dict[int, list[Moved]](), list[Row]()
    async with local_cluster((*_CLUSTER, *sets)) as url, HttpClient(url) as http, Client(url) as client:
        server, prompts = await Server.find("ours", http), Prompts(0, "migrate")
        for context in contexts:
            run.say(f"{context:,} tokens of context")
            await _move(server, client, prompts.draw(context))  # opens connections
            tried = [await _move(server, client, prompts.draw(context)) for _ in range(moves)]
            found[context] = [one for one in tried if one is not None]
            if not found[context]:
                raise RequestFailed(f"no request of {context:,} tokens moved before it ended")
            rows += rows_of(context, found[context], moves)
    least, most = min(found), max(found)
    if least != most:
        beyond = [median(one.gap_s - one.step_s for one in found[context]) for context in (most, least)]
        metric = f"downtime beyond a step, client: more than with {least:,}"
        rows.append(Row(_case(most), metric, 1e3 * (beyond[0] - beyond[1]), "ms"))
    return rows


async def _move(server: Server, client: Client, prompt: Sequence[int]) -> Moved | None:
    """None: it ended, or stayed, before it could move. Raises ``RequestFailed``."""
    name, decodes, num_parts = new_request_id(), asyncio.Event(), 0

    def on_packet() -> None:
        nonlocal num_parts
        num_parts += 1
        if num_parts >= _PARTS_BEFORE:
            decodes.set()

    body = server.dialect.body(prompt, OUTPUT_TOKENS)
    stream = asyncio.create_task(server.http.post(COMPLETIONS, body, {"x-request-id": name}, on_packet))
    waits = asyncio.create_task(decodes.wait())
    await asyncio.wait((stream, waits), return_when=asyncio.FIRST_COMPLETED)
    waits.cancel()
    began_s = time.perf_counter()
    try:
        await client.migrate(name)
        stayed = False
    except ApiError as error:
        if error.status != _CONFLICT:
            raise
        stayed = True
    ended_s = time.perf_counter()
    answer = server.answered(await stream)
    if stayed:
        return None
    events = (await client.timeline(name))["events"]
    if [one["event"] for one in events if one["event"] in ("retry", "preempted")]:
        raise RequestFailed(f"{name} was placed again or preempted")
    return moved(answer, began_s, ended_s, next(one for one in events if one["event"] == "migrated"))


def moved(answer: Answer, began_s: float, ended_s: float, event: dict[str, Any]) -> Moved:
    """The gaps of an answer. Its move was asked for at ``began_s`` and answered at ``ended_s``."""
    assert len(answer.token_s) == answer.output_tokens, "an event has one token"
    first, others, longest_s = event["first_index"], [], 0.0
    # The source's last tokens may arrive together with the target's first: the gap is before them then.
    gap_s = max(gaps(answer.token_s[max(first - _NEAR, 0) : first + _NEAR]))
    for earlier_s, later_s in pairwise(answer.token_s):
        if earlier_s <= ended_s and later_s >= began_s:
            longest_s = max(longest_s, later_s - earlier_s)
        else:
            others.append(later_s - earlier_s)
    # Several tokens may arrive at once.
    return Moved(fmean(others), gap_s, longest_s, others, ended_s - began_s, event)


def _case(context: int) -> str:
    return f"{context:,} tokens of context"


def rows_of(context: int, moved: Sequence[Moved], tried: int) -> list[Row]:
    case = _case(context)
    step_s = median(one.step_s for one in moved)
    gaps_s = [one.gap_s for one in moved]
    downtimes_s = [one.event["downtime_s"] for one in moved]
    limit_s = _STEPS * step_s
    rows = [
        Row(case, "moves", float(len(moved)), "moves"),
        Row(case, "ended or stayed before a move", float(tried - len(moved)), "requests"),
        spread(case, "decode step", [one.step_s for one in moved], "ms", 1e3),
        spread(case, "gap without a move", [gap for one in moved for gap in one.other_gaps_s], "ms", 1e3),
        spread(case, "downtime, client", gaps_s, "ms", 1e3),
        spread(case, "downtime, conductor", downtimes_s, "ms", 1e3),
        spread(case, "longest gap until the move was done", [one.longest_s for one in moved], "ms", 1e3),
        Row(
            case,
            f"downtime p99 beyond {_STEPS} steps, client",
            1e3 * (quantile(gaps_s, 0.99) - limit_s),
            "ms",
        ),
        Row(
            case,
            f"downtime p99 beyond {_STEPS} steps, conductor",
            1e3 * (quantile(downtimes_s, 0.99) - limit_s),
            "ms",
        ),
        spread(case, "a whole move", [one.took_s for one in moved], "ms", 1e3),
        spread(case, "source stopped", [one.event["stopped_s"] for one in moved], "ms", 1e3),
    ]
    for metric, name, unit, scale in (
        ("reads", "stages", "reads", 1.0),
        ("blocks read", "num_blocks", "blocks", 1.0),
        ("blocks read while it stood still", "num_last_blocks", "blocks", 1.0),
        ("blocks there already", "num_local_blocks", "blocks", 1.0),
        ("bytes read", "nbytes", "MiB", 1 / (1 << 20)),
    ):
        rows.append(Row(case, f"{metric}, mean", scale * fmean(one.event[name] for one in moved), unit))
    return rows
