"""Why the cache is hit, or is not: what became of the prefixes that requests began with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding

# Fewer requests than this prove nothing.
LEAST_REQUESTS = 10
# A hit rate below this is as good as none.
_NONE = 0.01
# A cause is told from this share of the requests on.
_TOLD = 0.1
_BLIND_POLICIES = ("random", "round-robin", "least-loaded")


def check_hits(evidence: Evidence) -> Iterator[Finding]:
    """The hit rate as a whole, the causes of what was not hit by weight, then tenants that hit nothing."""
    prefixes = evidence.cluster.get("prefixes", {})
    outcomes: Mapping[str, int] = prefixes.get("outcomes", {})
    total, hits = sum(outcomes.values()), outcomes.get("hit", 0)
    if total < LEAST_REQUESTS:
        yield Finding("cache hits", "ok", f"{total} requests were placed here: too few to judge by")
        return
    fact = f"{hits} of {total} requests found a prefix{_tokens(evidence)}"
    none = hits < _NONE * total
    causes = sorted(
        ((count, name) for name, count in outcomes.items() if name not in ("hit", "new", "off")), reverse=True
    )
    causes = [(count, name) for count, name in causes if count >= _TOLD * total]
    rotating = _rotating_salts(prefixes, total, outcomes)
    blamed = bool(causes) or rotating is not None
    if none and not blamed:
        yield Finding(
            "cache hits",
            "slow",
            fact + f"; {outcomes.get('new', 0)} began with tokens never seen before",
            "nothing to mend if these requests have nothing in common; else look at what their prompts begin "
            "with: a block is found only if all tokens before it are the same too",
        )
    else:
        yield Finding("cache hits", "wrong" if none else "ok", fact, "the cause is next" if none else "")
    if rotating is not None:
        yield rotating
    for count, name in causes:
        share = f"{count} of {total} requests ({count / total:.0%})"
        if name != "salted" or rotating is None:
            yield _CAUSES[name](evidence, share, "wrong" if none else "slow")
    yield from _tenants(prefixes)


def _tokens(evidence: Evidence) -> str:
    metrics = evidence.live.get("metrics", {})
    queried = metrics.get("prefix_queried_tokens", 0)
    if not queried:
        return ""
    return f"; {metrics['prefix_hit_tokens'] / queried:.1%} of {queried:,.0f} prompt tokens were not computed"


def _rotating_salts(prefixes: Mapping[str, Any], total: int, outcomes: Mapping[str, int]) -> Finding | None:
    once, salts = prefixes.get("num_salts_once", 0), prefixes.get("num_salts", 0)
    if once < 0.5 * total:
        return None
    same = outcomes.get("salted", 0)
    return Finding(
        "tenants, salts",
        "wrong",
        f"{salts} different tenants and salts sent {total} requests, {once} of them a single one; {same} "
        "requests began with tokens that another salt had",
        "a cache is each tenant's and cache_salt's own: a salt that changes with the request never hits. "
        "Leave cache_salt out, or give one to all who may share",
    )


def _salted(evidence: Evidence, share: str, state: Any) -> Finding:
    return Finding(
        "tenants, salts",
        state,
        f"{share} began with tokens that were cached for another tenant or cache_salt",
        "give those who may share the same cache_salt and API key; if they may not, this is as it should be",
    )


def _short(evidence: Evidence, share: str, state: Any) -> Finding:
    size = evidence.cluster.get("block_size")
    return Finding(
        "short prompts",
        state,
        f"{share} had no more than one block of {size} tokens, and a part of a block is never shared",
        f"a smaller engine.block_size than {size} (on every process), or nothing: they cost little",
    )


def _headed(evidence: Evidence, share: str, state: Any) -> Finding:
    size = evidence.cluster.get("block_size")
    return Finding(
        "prompts' heads",
        state,
        f"{share} differed from an earlier one within the first {size} tokens, and were the same after that",
        "something at the start of the prompts changes (a date, a request id, a user's name): put it at the "
        "end",
    )


def _pending(evidence: Evidence, share: str, state: Any) -> Finding:
    return Finding(
        "bursts",
        state,
        f"{share} came while the first of the same beginning was still being computed or published",
        "send one request of a new prefix ahead of the others; hot prefixes are copied after that",
    )


def _unused(evidence: Evidence, share: str, state: Any) -> Finding:
    policy = evidence.cluster.get("facts", {}).get("policy", "")
    if policy in _BLIND_POLICIES:
        return Finding(
            "placement",
            state,
            f"{share} went to a node without their prefix though another had it: conductor.policy is "
            f"{policy}, which "
            "does not look at where blocks are",
            "conductor.policy=goodput (the default), or kv-aware",
        )
    return Finding(
        "placement",
        "slow",
        f"{share} were computed though a node had their prefix: that was estimated to be quicker than to "
        "wait for "
        "the node or to fetch",
        "the candidates in a request's timeline have the estimates; more prefill nodes, or a faster path",
    )


def _dropped(evidence: Evidence, share: str, state: Any) -> Finding:
    fact = f"{share} began as one before did, and no node has those blocks any more"
    evicted = sum(page.total("moonpool_store_evicted_blocks_total") for page in evidence.pages.values())
    room = sum(tier["num_blocks"] for node in evidence.nodes for tier in node["tiers"])
    if not evicted:
        return Finding(
            "lost prefixes",
            state,
            f"{fact}; nothing was evicted",
            "they were not published, or went with their node: see index, publishers and events below",
        )
    distance = _median_reuse(evidence)
    reach = f", and half of the uses come {distance:,.0f} blocks or more after the last" if distance else ""
    return Finding(
        "lost prefixes",
        state,
        f"{fact}: {evicted:,.0f} blocks were evicted, all tiers together have room for {room:,}{reach}",
        "more room: store.host.capacity_nbytes, a disk (store.ssd.path), store nodes; the dashboard's "
        "would-be hit ratio says how much helps",
    )


def _median_reuse(evidence: Evidence) -> float:
    """Blocks between two uses of one, first uses left out: a bound that half of them are beyond; 0: none is
    known."""
    counts: dict[float, float] = {}
    for page in evidence.pages.values():
        for labels, value in page.samples("moonpool_reuse_distance_blocks_bucket"):
            counts[float(labels["le"])] = counts.get(float(labels["le"]), 0.0) + value
    half = counts.get(float("inf"), 0.0) / 2
    return max((le for le, count in counts.items() if count < half), default=0.0)


_CAUSES = {
    "salted": _salted,
    "short": _short,
    "headed": _headed,
    "pending": _pending,
    "unused": _unused,
    "dropped": _dropped,
}


def _tenants(prefixes: Mapping[str, Any]) -> Iterator[Finding]:
    for name, outcomes in sorted(prefixes.get("tenants", {}).items()):
        total = sum(outcomes.values())
        if total >= LEAST_REQUESTS and not outcomes.get("hit"):
            cause, count = max(outcomes.items(), key=lambda item: item[1])
            yield Finding(
                "tenant",
                "wrong" if cause != "new" else "slow",
                f"{name}: none of {total} requests found a prefix; of {count} the outcome is “{cause}”",
                "docs/troubleshooting.md says what each outcome means and what to do",
            )
