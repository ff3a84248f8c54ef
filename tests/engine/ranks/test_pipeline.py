"""A pipeline with several steps in flight gives the tokens of one process, and ends as a whole."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prometheus_client import generate_latest
from prometheus_client.core import REGISTRY

from moonpool.bench.parallel.stages import bubble
from moonpool.engine.batching.sequence import Sequence, State
from moonpool.engine.errors import RankLost
from moonpool.engine.model.transformer import Model
from moonpool.engine.node.metrics import observe_engine
from moonpool.engine.ranks.leader import StepTimes
from moonpool.runtime.config.engine_options import SpeculativeOptions
from tests.engine.conftest import Driver, prompt
from tests.engine.ranks.conftest import serving
from tests.engine.ranks.test_exact import SHAPE, named

DRAWN: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "frequency_penalty": 0.4}


@pytest.fixture
def path(make_checkpoint) -> Path:
    return make_checkpoint("qwen3", **SHAPE).path


def requests(driver: Driver) -> list[Sequence]:
    """Long and short ones, greedy and drawn, one that needs its prompt's logits in several parts."""
    words = [{"max_tokens": 40 - 3 * i, **(DRAWN | {"seed": i} if i % 2 else {})} for i in range(9)]
    words[3] |= {"num_logprobs": 2}
    made = [driver.sequence(prompt(5 + 4 * i, i), ignore_eos=True, **w) for i, w in enumerate(words)]
    made += [driver.sequence(prompt(90, 90), max_tokens=8, ignore_eos=True, prompt_logprobs=True)]
    return made


def in_flight(driver: Driver) -> list[int]:
    """Note how many steps are in flight whenever one is waited for."""
    loop, found = driver.engine._loop, []
    end_first = loop._end_first

    def noted(flights: Any) -> Any:
        found.append(len(flights))
        return end_first(flights)

    loop._end_first = noted
    return found


@pytest.mark.parametrize(
    ("plan", "most"),
    [
        ({"pp": 2}, 2),
        *(
            pytest.param(plan, most, marks=pytest.mark.slow)
            for plan, most in (
                ({"pp": 2, "micro_batches": 1}, 0),
                ({"pp": 2, "micro_batches": 4}, 4),
                ({"pp": 3}, 3),
                ({"pp": 3, "micro_batches": 8}, 8),
                ({"pp": 2, "tp": 2}, 2),
                ({"pp": 2, "cp": 2}, 2),
                ({"pp": 2, "link": "gloo"}, 2),
                ({"pp": 3, "link": "gloo", "micro_batches": 4}, 4),
                ({"pp": 2, "speculative": SpeculativeOptions(method="ngram")}, 0),
            )
        ),
    ],
    ids=lambda value: named(value) if isinstance(value, dict) else "",
)
async def test_tokens_are_those_of_one_process(path, plan, most) -> None:
    """Prompts in chunks beside decodes, too few blocks for all, a second time with some from the cache."""
    words = {"max_batch_tokens": 32, "num_blocks": 36}
    results = []
    for some in ({}, {**plan, "micro_batch_tokens": 8, "cp_min_tokens": 1}):
        async with serving(path, **words, **some) as driver:
            depths = in_flight(driver)
            results.append(await driver.run(*requests(driver)))
            again = await driver.run(*requests(driver))
            assert [one.token_ids for one in again] == [one.token_ids for one in results[-1]]
            assert driver.engine.stats().num_preemptions > 0
            assert max(depths, default=0) == (most if some else 0)
    for alone, together in zip(*results, strict=True):
        assert alone.token_ids == together.token_ids
        mine, theirs = ([e.logprobs.logprob for e in r.events if e.logprobs] for r in (alone, together))
        np.testing.assert_allclose(mine, theirs, atol=1e-4)
    (mine,), (theirs,) = ([e.prompt_logprobs for e in r[-1].events if e.prompt_logprobs] for r in results)
    np.testing.assert_allclose([r.logprob for r in mine], [r.logprob for r in theirs], atol=1e-4)


async def test_sequences_leave_while_steps_are_in_flight(path) -> None:
    """Cancelled or withdrawn in the midst of a step, or between two of theirs; the others go on exactly."""
    async with serving(path, max_batch_tokens=64) as driver:
        expected = [result.token_ids for result in await driver.run(*requests(driver))]
    async with serving(path, max_batch_tokens=64, pp=2) as driver:
        depths, sequences = in_flight(driver), requests(driver)
        running = asyncio.create_task(driver.run(*sequences))
        await driver.until(lambda: all(sequence.num_output_tokens > 2 for sequence in sequences[:6]))
        for sequence in sequences[:2]:
            driver.engine.cancel(*sequence.key)
        for sequence in sequences[2:4]:
            driver.engine.withdraw(sequence)
        await driver.until(lambda: all(s.state is State.KEPT_FOR_TRANSFER for s in sequences[2:4]))
        for sequence in sequences[2:4]:
            driver.engine.resume(sequence)
        results = await running
        assert max(depths) == 2
    for tokens, result in zip(expected[2:], results[2:], strict=True):
        assert result.token_ids == tokens
    for tokens, result in zip(expected[:2], results[:2], strict=True):
        assert result.token_ids == tokens[: len(result.token_ids)]


async def test_a_lost_rank_ends_the_sequences_of_all_steps_in_flight(path) -> None:
    async with serving(path, pp=2) as driver:
        sequences = [driver.sequence(prompt(9, i), max_tokens=200, ignore_eos=True) for i in range(4)]
        for sequence in sequences:
            driver.engine.add(sequence)
        await driver.until(lambda: all(sequence.num_output_tokens > 2 for sequence in sequences))
        os.kill(driver.engine.ranks.ranks[0].pid, signal.SIGKILL)
        with pytest.raises(RankLost, match="rank 1 is lost: it ended by signal 9"):
            await asyncio.wait_for(driver.engine.wait(), 60)
        ended = [result.events[-1].ended_life for result in driver.results.values()]
        assert ended.count(True) >= 2


async def test_exchanges_and_steps_are_counted_by_kind(path) -> None:
    async with serving(path, pp=2) as driver:
        collector = observe_engine(driver.engine)
        try:
            before = _samples()
            await driver.run(
                *(driver.sequence(prompt(20, i), max_tokens=5, ignore_eos=True) for i in range(2))
            )
            clock, found = driver.engine.exchange_clock(), _samples()
        finally:
            REGISTRY.unregister(collector)
    assert {operation for operation, _ in clock.counts} == {"send", "gather"}
    count = partial(_total, found, "moonpool_exchange_seconds_count")
    assert count('operation="send"') + count('operation="gather"') == clock.num_collectives
    assert _total(found, "moonpool_exchange_bytes_total", "") == clock.collective_nbytes
    assert _total(found, "moonpool_exchange_seconds_bucket", 'le="+Inf"') == clock.num_collectives

    def tokens(kind: str) -> float:
        name, label = "moonpool_step_tokens_sum", f'kind="{kind}"'
        return _total(found, name, label) - _total(before, name, label)

    assert (tokens("prompt"), tokens("decoded"), tokens("speculated")) == (40, 8, 0)


def _samples() -> dict[str, float]:
    lines = generate_latest(REGISTRY).decode().splitlines()
    return {
        name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
    }


def _total(samples: dict[str, float], name: str, label: str) -> float:
    return sum(value for key, value in samples.items() if key.startswith(name) and label in key)


STAGE_S = 0.1
# What a stage computes takes so long, whatever else runs on this machine.
SLEEPING = f"""
import os
if "MOONPOOL_RANK" in os.environ:
    import time
    from moonpool.engine.model.transformer import Model
    forward = Model.forward
    Model.forward = lambda *arguments: (time.sleep({STAGE_S}), forward(*arguments))[1]
"""


@pytest.mark.slow
@pytest.mark.parametrize(("micro_batches", "least", "most"), [(1, 0.4, 1.0), (2, 0.0, 0.3)])
async def test_stages_compute_different_micro_batches_at_a_time(
    path, tmp_path, monkeypatch, micro_batches, least, most
) -> None:
    """Two stages of equal time: with one micro-batch each waits half of the time."""
    (tmp_path / "sitecustomize.py").write_text(SLEEPING)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    async with serving(path, pp=2, pp_layers="2+1", micro_batches=micro_batches) as driver:
        forward = Model.forward
        monkeypatch.setattr(Model, "forward", lambda *words: (time.sleep(STAGE_S), forward(*words))[1])
        times: list[StepTimes] = []
        sequences = [driver.sequence(prompt(9, i), max_tokens=30, ignore_eos=True) for i in range(4)]
        running = asyncio.create_task(driver.run(*sequences))
        await driver.until(lambda: all(sequence.num_output_tokens > 2 for sequence in sequences))
        driver.engine.observe_steps(times.append)
        await driver.until(lambda: len(times) >= 16)
        found = bubble(times[1:16])
        await running
    print(f"{micro_batches} micro-batches: bubble {found:.3f}")
    assert least <= found <= most
