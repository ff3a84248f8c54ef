"""The doctor reads an engine's pages: what its requests hit where, what they missed, and why."""

from __future__ import annotations

import asyncio

import pytest

from moonpool.doctor.diagnosis import check_engine
from moonpool.doctor.engine import check_layouts
from moonpool.doctor.finding import Finding
from tests.connectors.conftest import Redis
from tests.connectors.small_engine import BLOCK, Peer, Request, SmallEngine, until


def findings(url: str) -> list[Finding]:
    return asyncio.run(check_engine(url))


def test_hits_misses_and_why(redis: Redis) -> None:
    wide = Peer(redis.url, "wide", dtype="float32")
    near = Peer(redis.url, "near", dtype="bfloat16")
    one = SmallEngine(redis.url, "one", dtype="bfloat16")
    try:
        near.hold("a", 4)
        wide.hold("b", 4)
        one.until_hit("a", 4)  # from its peer
        until(lambda: one.hits_itself("a", 4))
        one.serve(Request("again", 6 * BLOCK + 1, "a"))
        one.serve(Request("salted", 6 * BLOCK + 1, "a", cache_salt="of another"))
        for i in range(one.num_asked):  # a reason of few requests is not worth a line
            one.serve(Request(f"salted-{i}", 6 * BLOCK + 1, "a", cache_salt=f"of number {i}"))
        one.serve(Request("other-layout", 6 * BLOCK + 1, "b"))
        one.serve(Request("short", 5))
        found = findings(one.node._metrics_url)
    finally:
        for each in (one, wide, near):
            each.close()
    facts = {finding.what: finding.fact for finding in found}
    assert facts["again"].startswith("97 prompt tokens: 64 from the host tier in ")
    assert facts["again"].endswith("33 computed, missed: new, this engine has not seen it before")
    assert facts["salted"] == (
        "97 prompt tokens: 97 computed, missed: salted, the same tokens came before with another cache_salt"
    )
    assert "97 computed, missed: layout (wide)" in facts["other-layout"]
    assert facts["short"] == "5 prompt tokens: 5 computed"
    assert facts["layouts"] == "one and wide share no blocks: dtype bfloat16 and float32"
    assert any(
        finding.what == "misses" and f"salted: {one.num_asked + 1} of" in finding.fact for finding in found
    )
    assert {"peer", "host", "computed"} <= set(facts["cache hits"].replace(":", " ").split())


def test_no_engine_there() -> None:
    [finding] = findings("http://127.0.0.1:9/metrics")
    assert (finding.what, finding.state) == ("engine", "missing")


@pytest.mark.parametrize(
    "other", [{"block_size": "32"}, {"checkpoint": "other"}, {"block_size": "16", "x": "1"}]
)
def test_layouts_that_differ(other: dict[str, str]) -> None:
    own = {"model": "m", "checkpoint": "own", "block_size": "16"}
    assert not list(check_layouts({"a": own, "b": own | {"model": "a copy"}}))
    [finding] = check_layouts({"a": own, "b": own | other})
    assert "a and b share no blocks" in finding.fact
