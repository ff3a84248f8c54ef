"""Whether what nodes hold is in the index, and the index is with the conductor."""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.doctor.evidence import Evidence, lapsed
from moonpool.doctor.finding import Finding

# A mirror is some milliseconds behind; with this much, requests miss what is there.
_LATE_S = 1.0
# Blocks of a pool that are not in the index: fewer are those just computed.
_LEAST_UNPUBLISHED = 32


def check_index(evidence: Evidence) -> Iterator[Finding]:
    index = evidence.cluster["index"]
    if not index["connected"]:
        yield Finding(
            "index",
            "wrong",
            f"the conductor has lost Redis: it goes by the {index['num_blocks']:,} blocks it knew, and "
            "learns of none",
            "is Redis up, and reachable from the conductor's host (index.redis_url)? It catches up by itself",
        )
    elif index["lag_s"] > _LATE_S:
        yield Finding(
            "index",
            "slow",
            f"the conductor is {index['lag_s']:.1f} s behind the changes that nodes publish",
            "is the conductor's core, or Redis, busy? More conductors, or a Redis of its own",
        )
    else:
        late_ms = 1e3 * index["lag_s"]
        yield Finding("index", "ok", f"{index['num_blocks']:,} blocks, {late_ms:.1f} ms behind Redis")
    yield from _publishers(evidence)
    yield from _lapsed(evidence)
    yield from _redis(evidence)
    yield from _stale(evidence)


def _publishers(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.holders:
        name = node["node_id"]
        connected = evidence.page(node).samples("moonpool_index_publisher_connected")
        cached = sum(tier.get("num_cached_blocks", 0) for tier in node["tiers"] if tier["name"] == "pool")
        unpublished = cached - node["num_index_blocks"]
        if connected and not connected[0][1]:
            yield Finding(
                name,
                "wrong",
                f"its publisher has lost Redis: none of the {cached:,} blocks it has cached since is found "
                "by anybody",
                f"can {node['host']} reach Redis (index.redis_url)? Its log says what the last try answered",
            )
        elif unpublished >= _LEAST_UNPUBLISHED and unpublished > cached / 2:
            yield Finding(
                name,
                "wrong",
                f"the index knows {node['num_index_blocks']:,} blocks of the {cached:,} that its pool has "
                "cached",
                "moonpool index verify --redis URL --repair; its log says what its publisher does",
            )


def _lapsed(evidence: Evidence) -> Iterator[Finding]:
    for name, address in sorted(lapsed(evidence.live, evidence.cluster).items()):
        if name in evidence.alive:
            yield Finding(
                name,
                "wrong",
                f"it runs and answers at {address}, but its lease in the index has ended: it publishes "
                "nothing",
                "it cannot reach Redis: look at its log, and at index.redis_url from its host",
            )
        else:
            yield Finding(
                name,
                "slow",
                f"its lease has ended, and nothing answers at {address}",
                "see its log and its host",
            )


def _redis(evidence: Evidence) -> Iterator[Finding]:
    """What Redis itself has, against what the conductor goes by."""
    if evidence.records is None:
        return
    seen = {node["node_id"] for node in evidence.holders}
    unseen = sorted(
        name for name, record in evidence.records.items() if name not in seen and record.role != "external"
    )
    gone = sorted(seen - evidence.records.keys())
    if unseen:
        yield Finding(
            "index",
            "wrong",
            f"in Redis, and unknown to the conductor: {', '.join(unseen)}",
            "do both mean the same index (index.redis_url, index.namespace)? See the conductor's log",
        )
    if gone:
        yield Finding(
            "index",
            "wrong",
            f"known to the conductor, and not in Redis: {', '.join(gone)}",
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
            f"{stale:,.0f} blocks that requests were placed by were not there any more, {hits:,.0f} were",
            "blocks are evicted as soon as they are made: more room; or moonpool index verify --repair",
        )
