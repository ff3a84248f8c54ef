"""Pairs of nodes that move blocks by a worse way than there could be, or worse than others by the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding
from moonpool.runtime.config.options import Config

# Less than this moved says more of latency than of bandwidth.
_LEAST_NBYTES = 16 << 20
_FAR_BELOW = 0.25
_MANY_FAILURES = 0.02
_SAME_HOST = ("local", "cuda-ipc", "shm")


def check_paths(evidence: Evidence) -> Iterator[Finding]:
    nodes = {node["node_id"]: node for node in evidence.holders}
    found: list[Finding] = []
    routes = [
        route
        for route in evidence.live.get("routes", ())
        if {route["source"], route["target"]} <= nodes.keys()
    ]
    for route in routes:
        found += _same_host(route, nodes[route["source"]], nodes[route["target"]])
        found += _failing(route)
    found += _slower_than_others(routes)
    found += _of_nodes(evidence)
    yield from found
    if routes and not found:
        ways = sorted({route["transport"] for route in routes if route["transport"]})
        yield Finding("paths", "ok", f"{len(routes)} pairs of nodes by {', '.join(ways) or 'none yet'}")


def _same_host(
    route: Mapping[str, Any], source: Mapping[str, Any], target: Mapping[str, Any]
) -> Iterator[Finding]:
    one, other = source.get("agent", {}), target.get("agent", {})
    if not one.get("boot_id") or one["boot_id"] != other.get("boot_id"):
        return
    if route["transport"] not in ("tcp", "ucx"):
        return
    name = _pair(route)
    lacks = [
        node["node_id"]
        for node, agent in ((source, one), (target, other))
        if "shm" not in agent["transports"]
    ]
    fact = f"goes by {route['transport']} though both are on one host ({_rate(route)} while moving)"
    if lacks:
        best = ", ".join(Config().transfer.transports)
        advice = f"transfer.transports of {', '.join(lacks)} lacks shm: leave it at its default ({best})"
    else:
        advice = (
            "shm failed or was slower: in containers they need one /dev/shm and PID namespace, or --cap-add "
            "SYS_PTRACE (kernel.yama.ptrace_scope=0); `moonpool doctor` on that host says which"
        )
    yield Finding(name, "slow", fact, advice)


def _failing(route: Mapping[str, Any]) -> Iterator[Finding]:
    tries = route["transfers"] + route["failures"]
    if route["failures"] and route["failures"] > _MANY_FAILURES * tries:
        yield Finding(
            _pair(route),
            "wrong",
            f"{route['failures']} of {tries} reads failed; what they were for was computed instead",
            "the reader's log has each cause; do both have the same transfer.secret and transfer.tls?",
        )


def _slower_than_others(routes: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    by_transport: dict[str, list[Mapping[str, Any]]] = {}
    for route in routes:
        if route["nbytes"] >= _LEAST_NBYTES and route["seconds"] > 0:
            by_transport.setdefault(route["transport"], []).append(route)
    for transport, same in by_transport.items():
        usual = median(route["nbytes"] / route["seconds"] for route in same)
        for route in same if len(same) > 2 else ():
            if route["nbytes"] / route["seconds"] < _FAR_BELOW * usual:
                yield Finding(
                    _pair(route),
                    "slow",
                    f"{_rate(route)} while moving, by {transport}; half of the pairs reach "
                    f"{usual / 1e6:,.0f} MB/s",
                    "look at both hosts: busy cores, another network interface or speed, errors (moonpool "
                    "top)",
                )


def _of_nodes(evidence: Evidence) -> Iterator[Finding]:
    for node in evidence.holders:
        name, page = node["node_id"], evidence.page(node)
        if node.get("options", {}).get("transfer.checksum") is False:
            yield Finding(
                name,
                "slow",
                "transfer.checksum is off: blocks that arrive damaged are used",
                "transfer.checksum=true: it costs less than a copy of the bytes",
            )
        batches = page.total("moonpool_transfer_batch_seconds_count")
        retries = page.total("moonpool_transfer_retries_total")
        if retries > max(_MANY_FAILURES * batches, 3):
            ways = {
                labels["path"] for labels, value in page.samples("moonpool_transfer_retries_total") if value
            }
            yield Finding(
                name,
                "slow",
                f"{retries:.0f} tries by {', '.join(sorted(ways))} failed and were repeated, of "
                f"{batches:.0f} batches",
                "its log says what failed; `moonpool doctor` on its host says what each path needs",
            )
        if mismatches := page.total("moonpool_transfer_checksum_mismatches_total"):
            yield Finding(
                name,
                "wrong",
                f"{mismatches:.0f} blocks arrived with other bytes than promised, and were computed anew",
                "suspect the memory or the network card of one of the two hosts: its log names the peer",
            )


def _pair(route: Mapping[str, Any]) -> str:
    return f"{route['source']} to {route['target']}"


def _rate(route: Mapping[str, Any]) -> str:
    return (
        f"{route['nbytes'] / route['seconds'] / 1e6:,.0f} MB/s" if route["seconds"] else "nothing moved yet"
    )
