"""Checks of the transfers: the transport of each pair of nodes, failures and bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from moonpool.doctor.evidence import Evidence
from moonpool.doctor.finding import Finding
from moonpool.runtime.config.options import Config

# Fewer bytes measure latency rather than bandwidth.
_LEAST_NBYTES = 16 << 20
_SLOW_FRACTION = 0.25
_MAX_FAILURE_FRACTION = 0.02

Route = Mapping[str, Any]


def check_paths(evidence: Evidence) -> Iterator[Finding]:
    nodes = {node["node_id"]: node for node in evidence.holders}
    routes: list[Route] = [
        route
        for route in evidence.live.get("routes", ())
        if {route["source"], route["target"]} <= nodes.keys()
    ]
    found: list[Finding] = []
    for route in routes:
        found += _same_host(route, nodes[route["source"]], nodes[route["target"]])
        found += _failing(route, nodes, evidence)
    found += _slower_than_others(routes)
    for node in evidence.holders:
        found += _of_node(node, evidence)
    yield from found
    if routes and not found:
        transports = sorted({route["transport"] for route in routes if route["transport"]})
        yield Finding("paths", "ok", f"{len(routes)} pairs of nodes by {', '.join(transports) or 'none yet'}")


def _same_host(route: Route, source: Mapping[str, Any], target: Mapping[str, Any]) -> Iterator[Finding]:
    one, other = source.get("agent", {}), target.get("agent", {})
    if not one.get("boot_id") or one["boot_id"] != other.get("boot_id"):
        return
    if route["transport"] not in ("tcp", "ucx"):
        return
    lacking = [node["node_id"] for node in (source, target) if "shm" not in node["agent"]["transports"]]
    if lacking:
        default = ", ".join(Config().transfer.transports)
        advice = f"transfer.transports of {', '.join(lacking)} lacks shm: leave it at its default ({default})"
    else:
        advice = (
            "shm failed or was slower: containers need one network namespace; `moonpool doctor` on that host "
            "says how its memory is read"
        )
    fact = f"goes by {route['transport']} though both are on one host ({_bandwidth(route)} while moving)"
    yield Finding(_pair(route), "slow", fact, advice)


def _failing(route: Route, nodes: Mapping[str, Mapping[str, Any]], evidence: Evidence) -> Iterator[Finding]:
    tries = route["transfers"] + route["failures"]
    if route["failures"] <= _MAX_FAILURE_FRACTION * tries:
        return
    fact = f"{route['failures']} of {tries} reads failed; their blocks were computed instead"
    ended = evidence.ended
    for name in (route["source"], route["target"]):
        if nodes[name].get("state") == "unreachable" or name in ended:
            how = "cannot be reached" if nodes[name].get("state") == "unreachable" else ended[name]
            yield Finding(
                _pair(route),
                "slow",
                f"{fact}. {name} {how}: reads fail when one of the two ends",
                f"see the log of {name} for why; nothing to do here unless reads fail while both run",
            )
            return
    advice = "the reader's log has each cause; do both have the same security.cluster_key and security.ca?"
    yield Finding(_pair(route), "wrong", fact, advice)


def _slower_than_others(routes: Sequence[Route]) -> Iterator[Finding]:
    by_transport: dict[str, list[Route]] = {}
    for route in routes:
        if route["nbytes"] >= _LEAST_NBYTES and route["seconds"] > 0:
            by_transport.setdefault(route["transport"], []).append(route)
    for transport, same in by_transport.items():
        usual = median(route["nbytes"] / route["seconds"] for route in same)
        for route in same if len(same) > 2 else ():
            if route["nbytes"] / route["seconds"] < _SLOW_FRACTION * usual:
                yield Finding(
                    _pair(route),
                    "slow",
                    f"{_bandwidth(route)} while moving, by {transport}; the median of the pairs is "
                    f"{usual / 1e6:,.0f} MB/s",
                    "check both hosts: busy cores, another network interface or speed, errors (moonpool top)",
                )


def _of_node(node: Mapping[str, Any], evidence: Evidence) -> Iterator[Finding]:
    name, page = node["node_id"], evidence.page(node)
    if node.get("options", {}).get("transfer.checksum") is False:
        yield Finding(
            name,
            "slow",
            "transfer.checksum is off: damaged blocks are used",
            "set transfer.checksum=true: it costs less than a copy of the bytes",
        )
    batches = page.total("moonpool_transfer_batch_seconds_count")
    retries = page.total("moonpool_transfer_retries_total")
    if retries > max(_MAX_FAILURE_FRACTION * batches, 3):
        samples = page.samples("moonpool_transfer_retries_total")
        paths = ", ".join(sorted({labels["path"] for labels, value in samples if value}))
        yield Finding(
            name,
            "slow",
            f"{retries:.0f} tries by {paths} failed and were repeated, of {batches:.0f} batches",
            "its log has the errors; `moonpool doctor` on its host says what each path needs",
        )
    if mismatches := page.total("moonpool_transfer_checksum_mismatches_total"):
        yield Finding(
            name,
            "wrong",
            f"{mismatches:.0f} blocks arrived damaged (checksum), and were computed again",
            "suspect the memory or the network card of one of the two hosts: its log names the peer",
        )


def _pair(route: Route) -> str:
    return f"{route['source']} to {route['target']}"


def _bandwidth(route: Route) -> str:
    if not route["seconds"]:
        return "nothing moved yet"
    return f"{route['nbytes'] / route['seconds'] / 1e6:,.0f} MB/s"
