"""Checks of the index: nodes publish their blocks, and the conductor follows."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.doctor.evidence import Evidence, lapsed
from moonpool.doctor.finding import Finding
from moonpool.kvstore.events.curve import PLAIN_EVENTS

# A mirror lags by milliseconds; with this lag, requests miss blocks that exist.
_LATE_S = 1.0
# Fewer blocks missing in the index are those just computed.
_LEAST_UNPUBLISHED = 32


def check_index(evidence: Evidence) -> Iterator[Finding]:
    index = evidence.cluster["index"]
    blocks, lag_s = f"{index['num_blocks']:,} blocks", index["lag_s"]
    if not index["connected"]:
        yield Finding(
            "index",
            "wrong",
            f"the conductor has lost Redis: it uses the {blocks} it knew, and learns of no new ones",
            "is Redis up, and reachable from the conductor's host (index.redis_url)? It catches up by itself",
        )
    elif lag_s > _LATE_S:
        yield Finding(
            "index",
            "slow",
            f"the conductor is {lag_s:.1f} s behind the changes that nodes publish",
            "is the conductor's core, or Redis, busy? Add conductors, or give Moonpool a Redis of its own",
        )
    else:
        yield Finding("index", "ok", f"{blocks}, {1e3 * lag_s:.1f} ms behind Redis")
    yield from _publishers(evidence)
    yield from _lapsed(evidence)
    yield from _redis(evidence)
    yield from _stale(evidence)
    yield from _plain_events(evidence)


def _publishers(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.holders:
        name, published = node["node_id"], node["num_index_blocks"]
        connected = evidence.page(node).samples("moonpool_index_publisher_connected")
        cached = sum(tier.get("num_cached_blocks", 0) for tier in node["tiers"] if tier["name"] == "pool")
        if connected and not connected[0][1]:
            yield Finding(
                name,
                "wrong",
                f"its publisher has lost Redis: the {cached:,} blocks it has cached since cannot be found",
                f"can {node['host']} reach Redis (index.redis_url)? Its log has the error of the last try",
            )
        elif cached - published >= _LEAST_UNPUBLISHED and cached - published > cached / 2:
            yield Finding(
                name,
                "wrong",
                f"the index knows {published:,} blocks of the {cached:,} that its pool has cached",
                "moonpool index verify --redis URL --repair; its log says what its publisher does",
            )


def _lapsed(evidence: Evidence) -> Iterator[Finding]:
    for name, address in sorted(lapsed(evidence.live, evidence.cluster).items()):
        if name in evidence.alive:
            yield Finding(
                name,
                "wrong",
                f"it runs and answers at {address}, but its lease in the index has ended: it cannot publish",
                "it cannot reach Redis: see its log, and index.redis_url from its host",
            )
        else:
            fact = f"its lease has ended, and nothing answers at {address}"
            yield Finding(name, "slow", fact, "see its log and its host")


def _redis(evidence: Evidence) -> Iterator[Finding]:
    """Compare the nodes in Redis with those the conductor knows."""
    if evidence.records is None:
        return
    known = {node["node_id"] for node in evidence.holders}
    registered = {name for name, record in evidence.records.items() if record.role != "external"}
    if unknown := sorted(registered - known):
        yield Finding(
            "index",
            "wrong",
            f"in Redis, and unknown to the conductor: {', '.join(unknown)}",
            "do both use the same index (index.redis_url, index.namespace)? See the conductor's log",
        )
    if absent := sorted(known - evidence.records.keys()):
        yield Finding(
            "index",
            "wrong",
            f"known to the conductor, and not in Redis: {', '.join(absent)}",
            "they cannot publish: see their logs; or this Redis or namespace is not the conductor's",
        )


def _stale(evidence: Evidence) -> Iterator[Finding]:
    pages = evidence.pages.values()
    stale = sum(page.total("moonpool_index_stale_hits_total") for page in pages)
    hits = sum(page.total("moonpool_store_hit_blocks_total") for page in pages)
    if stale > 0.05 * (hits + stale) and stale >= _LEAST_UNPUBLISHED:
        yield Finding(
            "index",
            "slow",
            f"{stale:,.0f} blocks that requests were placed by were gone, {hits:,.0f} were there",
            "blocks are evicted right after they are made: add capacity; or moonpool index verify --repair",
        )


def _plain_events(evidence: Evidence) -> Iterator[Finding]:
    for name, record in (evidence.records or {}).items():
        if endpoint := record.extra.get(PLAIN_EVENTS):
            yield Finding(
                name,
                "slow",
                f"its KV events come in clear from {endpoint} (--plain): who can reach that network can read "
                "prompts, and lead requests astray",
                "follow the engine from its own machine (tcp://127.0.0.1), or through an encrypted network",
            )
