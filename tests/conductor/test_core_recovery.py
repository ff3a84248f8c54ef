"""Failures of attempts are classed, counted and timed, and so is what is computed twice."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import REGISTRY

from moonpool.conductor.errors import RequestFailed
from moonpool.conductor.requests.recovery import Recovery
from moonpool.protos import node_pb2
from moonpool.runtime.failures import FailureClass
from tests.conductor.core_nodes import (
    PROMPT,
    Script,
    ScriptedNode,
    continuation,
    redis_process,
    request,
    running,
)
from tests.conductor.faults import breaks, dies, ends, once


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with redis_process() as process:
        yield process.url


def value(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


class Change:
    """How much samples have grown since."""

    def __init__(self, *samples: tuple[str, dict[str, str]]) -> None:
        self._samples = samples
        self._before = [value(name, **labels) for name, labels in samples]

    def __call__(self) -> list[float]:
        return [
            value(name, **labels) - was
            for (name, labels), was in zip(self._samples, self._before, strict=True)
        ]


def seconds(part: str, failure: str) -> tuple[str, dict[str, str]]:
    return f"moonpool_failure_{part}_seconds_count", {"class": failure}


@pytest.mark.parametrize(
    ("fault", "failure", "cause"),
    [(dies, "node", "lost"), (breaks, "worker", "error"), (ends, "rank", "ended_life")],
)
async def test_a_failed_attempt_has_its_class_everywhere(
    url: str, fault: Script, failure: str, cause: str
) -> None:
    change = Change(
        ("moonpool_failures_total", {"class": failure, "cause": cause}),
        *(seconds(part, failure) for part in ("detect", "contain", "recover")),
        ("moonpool_failure_retries_total", {"class": failure, "outcome": "recovered"}),
        ("moonpool_failure_retries_total", {"class": failure, "outcome": "failed"}),
    )
    async with running(url, "p0", "d0", "d1", namespace=f"class-{failure}") as cluster:
        streamed = asyncio.Event()

        async def once_streamed(node: ScriptedNode, work: node_pb2.Work, index: int) -> None:
            # Tokens on their way would not count: they are dropped with the attempt.
            await streamed.wait()
            await fault(node, work, index)

        script = once(3, once_streamed)
        for name in ("d0", "d1"):
            cluster.nodes[name].script = script
        tokens = []
        async for event in cluster.conductor.generate(request()):
            tokens.append(event.token_id)
            if len(tokens) == 3:
                streamed.set()
        assert tokens == continuation(PROMPT, 8)
        timeline = cluster.conductor.timeline("r")
    assert change() == [1, 1, 1, 1, 1, 0]
    assert timeline is not None
    events: dict[str, Any] = {event["event"]: event for event in timeline.to_dict()["events"]}
    retry, recovered = events["retry"], events["recovered"]
    assert (retry["class"], retry["cause"]) == (recovered["class"], recovered["cause"]) == (failure, cause)
    assert 0 <= recovered["contain_s"] <= recovered["recover_s"]
    # The last token had no KV, and scripted nodes say that they had 16 tokens.
    assert recovered["recomputed_tokens"] == len(PROMPT) + retry["streamed_tokens"] - 1 - 16


async def test_a_request_that_is_given_up_has_the_class_of_its_last_failure(url: str) -> None:
    change = Change(
        ("moonpool_failures_total", {"class": "worker", "cause": "error"}),
        ("moonpool_failure_retries_total", {"class": "worker", "outcome": "failed"}),
    )
    async with running(url, "p0", "d0", namespace="given-up") as cluster:
        cluster.nodes["p0"].script = breaks
        with pytest.raises(RequestFailed) as gave_up:
            await cluster.generate(request())
        timeline = cluster.conductor.timeline("r")
    attempts = gave_up.value.attempts
    assert change() == [attempts, attempts - 1]
    assert gave_up.value.failure is FailureClass.WORKER
    assert timeline is not None and timeline.events[-1].facts["class"] == "worker"


def test_the_times_count_from_the_first_failure_and_tokens_from_what_had_kv() -> None:
    recovery = Recovery()
    recovery.placed(0.0)
    assert recovery.token(100, 32, 1.0) is None
    recovery.failed(FailureClass.NODE, "lost", now_s=5.0, silent_s=0.5, num_tokens=121)
    recovery.placed(5.25)
    recovery.failed(FailureClass.STORE, "error", now_s=6.0, silent_s=0.1, num_tokens=121)
    recovery.placed(6.5)
    found = recovery.token(121, 64, 8.0)
    assert found == {
        "class": "store",
        "cause": "error",
        "silent_s": 0.5,
        "contain_s": 0.5,
        "recover_s": 3.0,
        "recomputed_tokens": 120 - 64,
    }
    assert recovery.token(122, 0, 9.0) is None


def test_nothing_is_computed_twice_that_no_attempt_had() -> None:
    recovery = Recovery()
    recovery.failed(FailureClass.NODE, "lost", now_s=1.0, silent_s=0.0, num_tokens=100)
    recovery.placed(1.0)
    found = recovery.token(100, 0, 2.0)
    assert found is not None and found["recomputed_tokens"] == 0
