"""The time of a request adds up: parts of a timeline, and the longest as a sentence."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.conductor.observing.timelines.parts import (
    SENTENCES,
    TimePart,
    explanation_of,
    parts_of,
    with_api,
)
from moonpool.conductor.observing.timelines.timeline import RequestTimeline

PLACED = {"placement": {"prefill": "p0", "decode": "d0"}}
PREFILLED = {"node": "p0", "queued_s": 0.0, "compute_s": 0.0, "chunks": ()}
TRANSFERRED = {"node": "d0", "transfer_s": 0.0}


def timeline(*events: tuple[str, float, dict[str, Any]]) -> dict[str, Any]:
    return {"events": [{"event": name, "at_s": at_s, **facts} for name, at_s, facts in events]}


def found(*events: tuple[str, float, dict[str, Any]]) -> dict[tuple[str, str], float]:
    return {(part.name, part.node): pytest.approx(part.seconds) for part in parts_of(timeline(*events))}


def test_each_stretch_has_its_cause() -> None:
    chunks = [{"seconds": 0.2}, {"seconds": 0.3}]
    prefilled = PREFILLED | {"queued_s": 0.5, "compute_s": 0.7, "chunks": chunks}
    loaded = {"load_s": 0.1, "disk_s": 0.07, "stale_s": 0.05, "fetch_s": 0.4, "fetch_from": "p1"}
    moved = {"source": "d0", "node": "d1", "downtime_s": 0.05}
    events = (
        ("queued", 0.0, {}),
        ("waits_for_node", 1.0, {}),
        ("placed", 3.0, PLACED),
        ("prefix_loaded", 3.6, loaded),
        ("prefilled", 5.0, prefilled),
        ("first_token", 5.1, {}),
        ("transferred", 7.1, TRANSFERRED | {"transfer_s": 0.5}),
        ("migrated", 8.1, moved | {"slowed_s": {"prompts": 0.25, "exchange": 0.1}}),
        ("preempted", 9.1, {}),
        ("done", 10.0, {"slowed_s": {"speculation": 0.3}}),
    )
    assert found(*events) == {
        ("conductor", ""): 1.0,
        ("no node", ""): 2.0,
        ("prefill", "p0"): 0.45,
        ("index lag", "p0"): 0.05,
        ("batch", "p0"): 0.2,
        ("queue", "p0"): 0.5,
        ("disk load", "p0"): 0.07,
        ("host load", "p0"): 0.03,
        ("fetch", "p0"): 0.4,
        ("messages", "p0"): 0.4,
        ("room", "d0"): 1.5,
        ("transfer", "d0"): 0.5,
        ("prompts", "d0"): 0.25,
        ("exchange", "d0"): 0.1,
        ("decode", "d0"): 0.6,
        ("migration", "d1"): 0.05,
        ("decode", "d1"): 1.0,
        ("speculation", "d1"): 0.3,
        ("recompute", "d1"): 0.6,
    }
    of_prefill = [part.name for part in parts_of(timeline(*events)) if part.node == "p0"]
    assert of_prefill == [
        "messages",
        "disk load",
        "host load",
        "fetch",
        "queue",
        "index lag",
        "prefill",
        "batch",
    ]
    sentence = "2 of 10 s: it waited for a node that takes requests"
    assert explanation_of(parts_of(timeline(*events))) == sentence


CROWD = {"tokens": 10_000, "tenant": "a", "tenant_tokens": 9000}


@pytest.mark.parametrize(
    ("queued", "scope", "end"),
    [
        (CROWD, None, ", which grew by tenant a's burst: 9,000 of 10,000 tokens were queued before it"),
        (CROWD, "a", ", which grew by tenant a's burst: 9,000 tokens were queued before it"),
        (CROWD, "b", ", which grew by another tenant's burst"),
        (CROWD | {"tenant_tokens": 4000}, None, ""),  # nobody's alone
        (CROWD | {"tenant_tokens": 4000}, "b", ""),
        (CROWD | {"tenant": ""}, None, ""),  # there are no tenants
        ({}, "b", ""),
    ],
)
def test_a_queue_names_the_tenant_it_grew_by_to_those_who_may_know(
    queued: dict[str, Any], scope: str | None, end: str
) -> None:
    told = RequestTimeline("r", 0.0, 0.0)
    told.add("placed", 0.5, queued=queued, **PLACED)
    told.add("prefilled", 2.0, **PREFILLED | {"queued_s": 1.2})
    seen = told.to_dict(scope)
    assert explanation_of(parts_of(seen)) == f"1.2 of 2 s: its prompt waited in the queue of p0{end}"
    if scope == "b":
        assert "'a'" not in str(seen) and "000" not in str(seen["events"][0]["queued"])
    assert "queued" not in told.placements()["placements"][0]  # which goes to the client


def test_an_attempt_that_failed_and_an_engine_that_says_little() -> None:
    attempt = ("queued", 0.0, {}), ("placed", 0.1, PLACED), ("retry", 2.1, {})
    again = ("placed", 2.2, PLACED), ("first_token", 3.0, {}), ("done", 3.5, {})
    assert found(*attempt, *again) == {
        ("conductor", ""): 0.2,
        ("failed", ""): 2.0,
        ("prefill", "p0"): 0.8,
        ("room", "d0"): 0.5,
    }
    assert found(*attempt[:2], ("done", 1.0, {})) == {("conductor", ""): 0.1, ("asked", "p0"): 0.9}


def test_a_node_that_computed_the_prompt_too_decodes_after_the_first_token() -> None:
    placed = {"placement": {"prefill": "b0", "decode": "b0"}}
    events = ("placed", 0.1, placed), ("prefilled", 0.4, PREFILLED | {"node": "b0", "compute_s": 0.3})
    done = ("done", 2.5, {"slowed_s": {"prompts": 9.0}})
    assert found(("queued", 0.0, {}), *events, ("first_token", 0.5, {}), done) == {
        ("conductor", ""): 0.1,
        ("prefill", "b0"): 0.3,
        ("messages", "b0"): 0.1,
        ("prompts", "b0"): 2.0,
    }


def test_what_the_api_and_the_client_took_is_not_the_nodes() -> None:
    events = (
        ("queued", 0.0, {}),
        ("placed", 0.1, PLACED),
        ("prefilled", 0.5, PREFILLED | {"compute_s": 0.4}),
        ("first_token", 0.5, {}),
        # The client took the first token late: its blocks had been there for long.
        ("transferred", 2.0, TRANSFERRED | {"delivered_s": {"detokenize": 0.01, "stream": 1.2}}),
        # The time of one that is inside another stretch is not lost.
        ("stayed", 2.5, {"delivered_s": {"stream": 0.4}}),
        ("done", 4.0, {"delivered_s": {"detokenize": 0.2, "stream": 0.1}, "slowed_s": {"prompts": 9.0}}),
    )
    told = parts_of(timeline(*events))
    assert {part.name: pytest.approx(part.seconds) for part in told} == {
        "conductor": 0.1,
        "prefill": 0.4,
        "detokenize": 0.21,
        "stream": 1.7,
        "room": 0.29,
        "prompts": 1.3,
    }
    # The last token was given on after the end of the sequence.
    whole = with_api(told, 4.5, {"detokenize": 0.22, "stream": 2.0})
    assert {part.name: pytest.approx(part.seconds) for part in whole if part.name in ("api", "stream")} == {
        "api": 0.19,
        "stream": 2.0,
    }
    assert sum(part.seconds for part in whole) == pytest.approx(4.5)
    assert with_api(told, 0.0, {}) == told, "it runs"
    assert explanation_of(whole).endswith("the API wrote its tokens, and waited until its client took them")


def test_what_has_not_begun_has_no_longest_part() -> None:
    assert explanation_of(parts_of(timeline(("queued", 0.0, {})))) == ""


def test_a_move_that_is_told_after_the_end_was_before_it() -> None:
    told = RequestTimeline("r", 100.0, 7.0)
    told.add("queued", 7.0)
    told.add("transferred", 8.0, **TRANSFERRED, num_blocks=1, reads=[])
    told.add("done", 9.0)
    told.add("migrated", 9.5, source="d0", node="d1", downtime_s=0.25)
    events = told.to_dict()["events"]
    assert [event["event"] for event in events] == ["queued", "transferred", "migrated", "done"]
    parts = {part.name: part.seconds for part in parts_of(told.to_dict())}
    assert parts == {"room": 1.0, "decode": 0.75, "migration": 0.25}


seconds = st.floats(0, 10)
facts = st.fixed_dictionaries(
    {
        "placement": st.sampled_from([{"prefill": "p0", "decode": name} for name in ("d0", "p0", None)]),
        "node": st.sampled_from(["p0", "d0", "d1"]),
        "source": st.sampled_from(["d0", "d1"]),
        "queued_s": seconds,
        "compute_s": seconds,
        "load_s": seconds,
        "disk_s": seconds,
        "stale_s": seconds,
        "delivered_s": st.dictionaries(st.sampled_from(["detokenize", "stream"]), seconds),
        "fetch_s": seconds,
        "transfer_s": seconds,
        "downtime_s": st.floats(-1, 10),
        "chunks": st.lists(st.fixed_dictionaries({"seconds": seconds}), max_size=3),
        "slowed_s": st.dictionaries(st.sampled_from(["prompts", "exchange", "speculation"]), seconds),
    }
)
NAMES = (
    *("waits_for_node", "placed", "prefix_loaded", "prefilled", "first_token", "transferred"),
    *("migrated", "preempted", "stayed", "cached", "retry", "recovered"),
)


@given(st.lists(st.tuples(st.sampled_from(NAMES), seconds, facts), max_size=12), seconds)
def test_the_parts_are_the_whole(events: list[tuple[str, float, dict[str, Any]]], more_s: float) -> None:
    at_s, known = 0.0, [("queued", 0.0, dict[str, Any]())]
    for name, after_s, said in events:
        # The prefix was loaded before its node said so.
        at_s += 0.0 if name == "prefix_loaded" else after_s
        known.append((name, at_s, said))
    known.append(("done", at_s + more_s, {}))
    parts: list[TimePart] = parts_of(timeline(*known))
    assert sum(part.seconds for part in parts) == pytest.approx(at_s + more_s)
    assert all(part.seconds > 0 and part.name in SENTENCES and part.sentence for part in parts)
