"""Checks of the cache: the hit rate, and the causes of misses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from moonpool.conductor.observing.prefix_outcomes import MISSED, OUTCOMES
from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding, State

# Fewer requests prove nothing.
LEAST_REQUESTS = 10
# Below this hit rate the cache counts as unused.
_NO_HITS = 0.01
# A cause is reported if it explains this fraction of the requests.
_MIN_FRACTION = 0.1
# The latest requests that are listed one by one.
_NUM_LISTED = 10
_BLIND_POLICIES = ("random", "round-robin", "least-loaded")

# Outcome of a request's prefix: subject, fact and advice. {requests}: "N of M requests (P%)".
_CAUSES = {
    "salted": (
        "salts",
        "{requests} had tokens that were cached for the same tenant with another cache_salt",
        "give requests that may share blocks the same cache_salt; otherwise this is intended",
    ),
    "layout": (
        "layouts",
        "{requests} had blocks that only nodes of another layout have, which are not used here",
        "`incompatible` in /v1/cluster says what differs: start them with the same, if they should share",
    ),
    "short": (
        "short prompts",
        "{requests} had at most one block of {block_size} tokens, and partial blocks are never shared",
        "set a smaller engine.block_size than {block_size} on every process, or ignore it: they cost little",
    ),
    "headed": (
        "prompts' heads",
        "{requests} differed from an earlier one within the first {block_size} tokens, and matched after",
        "the start of the prompts changes (a date, a request id, a user's name): put it at the end",
    ),
    "pending": (
        "bursts",
        "{requests} came while the first of the same beginning was still being computed or published",
        "send one request of a new prefix ahead of the others; hot prefixes are copied after that",
    ),
}


def check_hits(evidence: Evidence) -> Iterator[Finding]:
    """Report the hit rate, the causes of misses by their weight, and tenants without any hit."""
    prefixes = evidence.cluster.get("prefixes", {})
    outcomes: Mapping[str, int] = prefixes.get("outcomes", {})
    total, hits = sum(outcomes.values()), outcomes.get("hit", 0)
    if total < LEAST_REQUESTS:
        yield Finding("cache hits", "ok", f"{total} requests were placed here: too few to judge by")
        return
    fact = f"{hits} of {total} requests found a prefix{_hit_tokens(evidence)}"
    none = hits < _NO_HITS * total
    missed = {name: count for name, count in outcomes.items() if name not in ("hit", "new", "off")}
    # Of hits that ended early, too; computing a short rest is no fault.
    for name in ("dropped", "layout", "salted"):
        missed[name] = missed.get(name, 0) + prefixes.get("missed", {}).get(name, 0)
    causes = [(count, name) for name, count in missed.items() if count >= _MIN_FRACTION * total]
    causes.sort(reverse=True)
    rotating = _rotating_salts(prefixes, total, outcomes)
    if none and not causes and rotating is None:
        yield Finding(
            "cache hits",
            "slow",
            f"{fact}; {outcomes.get('new', 0)} began with tokens never seen before",
            "ignore it if these requests have nothing in common; else compare how their prompts begin: a "
            "block is found only if all tokens before it match",
        )
    else:
        yield Finding("cache hits", "wrong" if none else "ok", fact, "the cause is next" if none else "")
    if rotating is not None:
        yield rotating
    for count, name in causes:
        if name != "salted" or rotating is None:
            requests = f"{count} of {total} requests ({count / total:.0%})"
            yield _cause(name, evidence, requests, "wrong" if none else "slow")
    yield from _tenants(prefixes)


def check_requests(evidence: Evidence) -> Iterator[Finding]:
    """List the latest requests that have ended: what of each prompt was cached, and why no more was."""
    requests = evidence.live.get("requests", ())
    ended = [one for one in requests if one.get("prefix_outcome") and one.get("status") != "running"]
    for one in ended[:_NUM_LISTED]:
        outcome, computed = one["prefix_outcome"], max(one["prompt_tokens"] - one["cached_tokens"], 0)
        places = ", ".join(f"{name} {count:,}" for name, count in one.get("cached_from", {}).items())
        fact = f"{one['prompt_tokens']:,} prompt tokens: {one['cached_tokens']:,} from the cache"
        fact += f" ({places}), " if places else ", "
        fact += f"{computed:,} computed; {outcome}: {OUTCOMES.get(outcome, '')}"
        if missed := one.get("prefix_missed"):
            fact += f"; {missed}: {MISSED.get(missed, '')}"
        yield Finding(str(one["id"]), "ok", fact)


def _cause(name: str, evidence: Evidence, requests: str, state: State) -> Finding:
    if name == "unused":
        return _never_reused(evidence, requests, state)
    if name == "dropped":
        return _evicted(evidence, requests, state)
    values = {"requests": requests, "block_size": evidence.cluster.get("block_size")}
    what, fact, advice = (text.format(**values) for text in _CAUSES[name])
    return Finding(what, state, fact, advice)


def _hit_tokens(evidence: Evidence) -> str:
    metrics = evidence.live.get("metrics", {})
    queried = metrics.get("prefix_queried_tokens", 0)
    if not queried:
        return ""
    return f"; {metrics['prefix_hit_tokens'] / queried:.1%} of {queried:,.0f} prompt tokens were cached"


def _rotating_salts(prefixes: Mapping[str, Any], total: int, outcomes: Mapping[str, int]) -> Finding | None:
    once, salts = prefixes.get("num_salts_once", 0), prefixes.get("num_salts", 0)
    if once < 0.5 * total:
        return None
    return Finding(
        "tenants, salts",
        "wrong",
        f"{salts} different tenants and salts sent {total} requests, {once} of them a single one; "
        f"{outcomes.get('salted', 0)} requests began with tokens that another salt had",
        "blocks are isolated by tenant and cache_salt: a salt that changes with the request never hits. "
        "Leave cache_salt out, or give one to all that may share",
    )


def _never_reused(evidence: Evidence, requests: str, state: State) -> Finding:
    policy = evidence.cluster.get("facts", {}).get("policy", "")
    if policy in _BLIND_POLICIES:
        return Finding(
            "placement",
            state,
            f"{requests} went to a node without their prefix though another had it: conductor.policy is "
            f"{policy}, which ignores where blocks are",
            "set conductor.policy=goodput (the default) or kv-aware",
        )
    return Finding(
        "placement",
        "slow",
        f"{requests} were computed though a node had their prefix: the estimate was lower than for waiting "
        "or fetching",
        "a request's timeline lists the candidates' estimates; add prefill nodes, or a faster path",
    )


def _evicted(evidence: Evidence, requests: str, state: State) -> Finding:
    fact = f"{requests} began like an earlier one, and no node has all of those blocks any more"
    evicted = sum(page.total("moonpool_store_evicted_blocks_total") for page in evidence.pages.values())
    capacity = sum(tier["num_blocks"] for node in evidence.nodes for tier in node["tiers"])
    if not evicted:
        return Finding(
            "lost prefixes",
            state,
            f"{fact}; nothing was evicted",
            "they were not published, or were lost with their node: see index, publishers and events below",
        )
    distance = _median_reuse(evidence)
    reuse = f", and half of the uses come {distance:,.0f} blocks or more after the last" if distance else ""
    return Finding(
        "lost prefixes",
        state,
        f"{fact}: {evicted:,.0f} blocks were evicted, all tiers together have room for {capacity:,}{reuse}",
        "add capacity: store.host.capacity_nbytes, a disk (store.ssd.path), store nodes; the dashboard's "
        "would-be hit ratio says how much helps",
    )


def _median_reuse(evidence: Evidence) -> float:
    """Return a lower bound of the median reuse distance in blocks; 0: unknown. First uses do not count."""
    counts: dict[float, float] = {}
    for page in evidence.pages.values():
        for labels, value in page.samples("moonpool_reuse_distance_blocks_bucket"):
            counts[float(labels["le"])] = counts.get(float(labels["le"]), 0.0) + value
    half = counts.get(float("inf"), 0.0) / 2
    return max((le for le, count in counts.items() if count < half), default=0.0)


def _tenants(prefixes: Mapping[str, Any]) -> Iterator[Finding]:
    for name, outcomes in sorted(prefixes.get("tenants", {}).items()):
        total = sum(outcomes.values())
        if total >= LEAST_REQUESTS and not outcomes.get("hit"):
            cause, count = max(outcomes.items(), key=lambda item: item[1])
            yield Finding(
                "tenant",
                "wrong" if cause != "new" else "slow",
                f"{name}: none of {total} requests found a prefix; of {count} the outcome is “{cause}”",
                "docs/troubleshooting.md explains each outcome",
            )
