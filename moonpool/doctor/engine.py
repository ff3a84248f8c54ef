"""Checks of an engine of others with Moonpool's connector: what its requests hit, missed, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import aiohttp
from yarl import URL

from moonpool.doctor.evidence import Evidence, Page
from moonpool.doctor.finding import Finding
from moonpool.errors import ApiError
from moonpool.kvstore.index.redis.node_record import LAYOUT_FACTS
from moonpool.runtime.observing.metrics_server import REQUESTS_PAGE, metrics_headers
from moonpool.runtime.security import process

_TIMEOUT_S = 5.0
# The latest requests that are listed one by one.
_NUM_LISTED = 10
# A reason is advised about if it explains this fraction of the requests.
_MIN_FRACTION = 0.1

# What to do about the reasons of misses that are faults.
_ADVICE = {
    "failed": "the engine's log names the cause, once a minute",
    "evicted": "add capacity: store.host.capacity_nbytes, a disk (store.ssd.path), store nodes",
    "layout": "see the findings about layouts",
    "salted": "give requests that may share the same cache_salt; otherwise this is intended",
}


@dataclass(frozen=True, slots=True)
class EngineEvidence:
    page: Page
    node_id: str
    facts: Mapping[str, str]
    others: Mapping[str, Mapping[str, str]] | None  # facts of engines of other layouts; None: not known
    requests: list[Mapping[str, Any]]  # newest first
    reasons: Mapping[str, str]  # of misses, in words


def is_engine(url: str) -> bool:
    """Whether this is the metrics page of a node, not a conductor."""
    return URL(url).path.rstrip("/") == "/metrics"


async def gather_engine(url: str) -> EngineEvidence:
    """Read the pages of the engine with this ``/metrics``. Raises ``ApiError``: there is none."""
    try:
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
            trust_env=False,
            raise_for_status=True,
            headers=metrics_headers(process.current()),
        ) as session:
            async with session.get(url) as answer:
                page = Page(await answer.text())
            async with session.get(URL(url).with_path(REQUESTS_PAGE)) as answer:
                shown = await answer.json()
    except aiohttp.ClientResponseError as error:
        raise ApiError(url, error.status, error.message) from error
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise ApiError(url, 0, f"it is not the metrics page of an engine: {error!r}") from error
    return EngineEvidence(page, **shown)


def diagnose_engine(evidence: EngineEvidence) -> Iterator[Finding]:
    facts = evidence.facts
    texts = (facts.get("model", "?"), facts.get("dtype", "?"), f"blocks of {facts.get('block_size')} tokens")
    yield Finding(evidence.node_id, "ok", f"vLLM {facts.get('vllm', '?')}: {', '.join(texts)}")
    yield from _store(evidence)
    yield from check_layouts({evidence.node_id: facts, **(evidence.others or {})})
    yield from _hits(evidence)
    for request in evidence.requests[:_NUM_LISTED]:
        yield Finding(str(request["request_id"]), "ok", sentence_of(request, evidence.reasons))


def check_engines(evidence: Evidence) -> Iterator[Finding]:
    """Report engines in the index with different layouts."""
    records = evidence.records or {}
    yield from check_layouts(
        {name: record.extra[LAYOUT_FACTS] for name, record in records.items() if LAYOUT_FACTS in record.extra}
    )


def check_layouts(engines: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    """``engines``: facts that form blocks, by engine. Report each pair that shares nothing, and why."""
    for (one, own), (other, theirs) in combinations(sorted(engines.items()), 2):
        names = sorted(name for name in own.keys() | theirs.keys() if own.get(name) != theirs.get(name))
        if names and names != ["model"]:
            differ = ", ".join(f"{name} {own.get(name)} and {theirs.get(name)}" for name in names)
            yield Finding(
                "layouts",
                "slow",
                f"{one} and {other} share no blocks: {differ}",
                "start both with the same, if they should share; otherwise this is intended",
            )


def _store(evidence: EngineEvidence) -> Iterator[Finding]:
    page = evidence.page
    connected = page.samples("moonpool_index_publisher_connected")
    if connected and not connected[0][1]:
        yield Finding(
            "index",
            "wrong",
            "the engine has lost Redis: its new blocks are not found by others",
            "is Redis up, and reachable from the engine's host? It catches up by itself",
        )
    corrupt = page.total("moonpool_store_corrupt_blocks_total")
    if corrupt := corrupt + page.total("moonpool_transfer_checksum_mismatches_total"):
        yield Finding(
            "checksums",
            "wrong",
            f"{corrupt:.0f} blocks did not match their checksum; their prompts were computed",
            "suspect the memory, the disk or the network card of this host or of the peer that its log names",
        )
    loads = {labels["end"]: value for labels, value in page.samples("moonpool_connector_loads_total")}
    if failed := {end: value for end, value in loads.items() if end != "done" and value}:
        ends = ", ".join(f"{value:.0f} {end}" for end, value in failed.items())
        yield Finding(
            "loads", "slow", f"of {sum(loads.values()):.0f} loads failed: {ends}", "see the engine's log"
        )
    if unsaved := page.total("moonpool_connector_failed_saves_total"):
        yield Finding(
            "saves", "slow", f"{unsaved:.0f} saves failed: those blocks are not kept", "see its log"
        )


def _hits(evidence: EngineEvidence) -> Iterator[Finding]:
    tokens = {
        labels["origin"]: value
        for labels, value in evidence.page.samples("moonpool_connector_prompt_tokens_total")
    }
    if not (total := sum(tokens.values())):
        yield Finding("cache hits", "ok", "no request was computed yet")
        return
    shares = ", ".join(f"{origin} {value / total:.1%}" for origin, value in tokens.items() if value)
    yield Finding("cache hits", "ok", f"{total:,.0f} prompt tokens: {shares}")
    missed = {
        labels["reason"]: value
        for labels, value in evidence.page.samples("moonpool_connector_missed_requests_total")
    }
    all_missed = sum(missed.values())
    for reason, count in sorted(missed.items(), key=lambda item: -item[1]):
        if count >= _MIN_FRACTION * all_missed:
            meaning, advice = evidence.reasons.get(reason, ""), _ADVICE.get(reason, "")
            fact = f"{reason}: {count:.0f} of {all_missed:.0f} requests with missing blocks; {meaning}"
            yield Finding("misses", "slow" if advice else "ok", fact, advice)


def sentence_of(request: Mapping[str, Any], reasons: Mapping[str, str]) -> str:
    """What an engine's request hit where, what it missed and why."""
    parts = []
    if request["engine_tokens"]:
        parts.append(f"{request['engine_tokens']:,} in the engine")
    if request["loaded_tokens"]:
        where = f"the {request['tier']} tier" if request["tier"] != "peer" else request["source"]
        parts.append(f"{request['loaded_tokens']:,} from {where} in {request['load_s']:.3f} s")
    parts.append(f"{request['computed_tokens']:,} computed")
    if reason := request["reason"]:
        at = f" ({request['detail']})" if request["detail"] else ""
        parts.append(f"missed: {reason}{at}, {reasons.get(reason, '')}")
    if request["num_failed"]:
        parts.append(f"{request['num_failed']} loads failed")
    return f"{request['prompt_tokens']:,} prompt tokens: {', '.join(parts)}"
