"""The engine as nodes use it: handing over, cancelling, running short, failing, closing."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence, State
from moonpool.engine.engine import Engine
from moonpool.engine.errors import DuplicateSequence, EngineClosed, SequenceTooLong, UnknownToken
from moonpool.engine.execution import step_loop
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from tests.engine.conftest import prompt


@pytest.fixture(params=["inline", "in a thread"], autouse=True)
def where_steps_run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_loop, "INLINE_STEP_S", 1e9 if request.param == "inline" else -1.0)


def blocks(engine: Engine) -> Any:
    """The pool's bytes, a row a block."""
    pool = engine._loop.runner.pool
    return pool.view(pool.shape[0], -1)


@pytest.mark.parametrize("n", [5, 8, 21, 24])
async def test_a_sequence_prefilled_here_is_decoded_there(checkpoint, serve, n) -> None:
    tokens = prompt(n)
    expected = checkpoint.greedy(tokens, 20)
    async with serve(checkpoint.path) as prefill, serve(checkpoint.path) as decode:
        for cached in (0, n // 8 * 8):
            source = prefill.sequence(tokens, max_tokens=20)
            (first,) = await prefill.run(source, prefill_only=True)
            assert first.token_ids == expected[:1]
            assert source.state is State.KEPT_FOR_TRANSFER
            target = decode.sequence(tokens, max_tokens=20)
            assert decode.engine.reserve(target)
            assert target.num_computed_tokens == cached, "what it decoded before, it has"
            for ours, theirs in list(zip(target.block_table, source.block_table, strict=False))[
                cached // 8 :
            ]:
                blocks(decode.engine)[ours] = blocks(prefill.engine)[theirs]
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # as a transfer has, before it says that it is done
            decode.engine.seal_received(target, n)
            prefill.engine.release(source)
            prefill.engine.release(source)
            target.append(first.token_ids[0])
            decode.results[target.key] = type(first)(token_ids=list(first.token_ids))
            (result,) = await decode.run(target)
            assert result.token_ids == expected
            assert not any(event.num_computed_tokens < n for event in result.events), (
                "nothing is computed twice"
            )


async def test_a_first_token_that_ends_the_request_still_waits_for_release(checkpoint, serve) -> None:
    async with serve(checkpoint.path) as driver:
        sequence = driver.sequence(prompt(20), max_tokens=1)
        (result,) = await driver.run(sequence, prefill_only=True)
        assert result.finish_reason is FinishReason.LENGTH
        assert driver.engine.pool.num_used == 3
        driver.engine.release(sequence)
        assert driver.engine.pool.num_used == 0
        assert not driver.engine.cancel(*sequence.key)


async def test_a_sequence_with_all_kv_but_without_its_next_token(checkpoint, serve) -> None:
    """All blocks of its tokens are cached: one is computed again, into a block of its own."""
    tokens = prompt(24)
    expected = checkpoint.greedy(tokens, 10)
    async with serve(checkpoint.path) as driver:
        await driver.run(driver.sequence(tokens, max_tokens=10))
        sequence = driver.sequence(tokens, max_tokens=10)
        assert driver.engine.reserve(sequence)
        assert sequence.num_computed_tokens == 24
        (result,) = await driver.run(sequence)
        assert result.token_ids == expected


async def test_preemption_loses_nothing(checkpoint, serve) -> None:
    batch = [prompt(n, seed=n) for n in (9, 16, 17, 30)]
    expected = checkpoint.greedy_each(batch, 40)
    async with serve(checkpoint.path, num_blocks=16, max_batch_tokens=24) as driver:
        results = await driver.run(*(driver.sequence(tokens, max_tokens=40) for tokens in batch))
        assert [result.token_ids for result in results] == expected
        assert driver.engine.stats().num_preemptions > 0
        assert any(event.preempted for result in results for event in result.events)


async def test_equal_prompts_at_once_share_their_blocks_in_the_end(checkpoint, serve) -> None:
    tokens = prompt(40)
    expected = checkpoint.greedy(tokens, 20)
    async with serve(checkpoint.path) as driver:
        results = await driver.run(*(driver.sequence(tokens, max_tokens=20) for _ in range(4)))
        assert [result.token_ids for result in results] == [expected] * 4
        assert driver.engine.pool.num_cached == (40 + 19) // 8


async def test_cancelling_at_any_time_frees_the_blocks_and_disturbs_no_other_sequence(
    checkpoint, serve
) -> None:
    tokens = prompt(12)
    expected = checkpoint.greedy(tokens, 60)
    async with serve(checkpoint.path, max_batch_size=3, max_batch_tokens=16) as driver:
        steady = driver.sequence(tokens, max_tokens=60)
        driver.engine.add(steady)
        for wait in range(12):
            other = driver.sequence(prompt(70, seed=wait), max_tokens=50)
            driver.engine.add(other)
            steps = driver.num_steps + wait
            await driver.until(lambda steps=steps: driver.num_steps >= steps)
            assert driver.engine.cancel(*other.key)
            assert not driver.engine.cancel(*other.key)
            await driver.until(
                lambda other=other: other.key in driver.results and other.state is State.FINISHED
            )
            assert other.block_table == []
            await driver.until(lambda other=other: bool(driver.results[other.key].finish_reason))
            assert driver.results[other.key].finish_reason is FinishReason.CANCELLED
            if steady.state is State.FINISHED:
                break
        await driver.until(lambda: bool(driver.results[steady.key].finish_reason))
        assert driver.results[steady.key].token_ids == expected


async def test_a_failed_step_ends_its_sequences_and_no_others(checkpoint, serve, monkeypatch) -> None:
    async with serve(checkpoint.path, max_batch_size=2) as driver:
        runner = driver.engine._loop.runner
        real, calls = runner.launch, []

        def launch(plan: Any, *sampled: Any) -> Any:
            calls.append(plan)
            if len(calls) == 4:
                raise RuntimeError("the tensors caught fire")
            return real(plan, *sampled)

        monkeypatch.setattr(runner, "launch", launch)
        tokens = prompt(9)
        results = await driver.run(*(driver.sequence(tokens, max_tokens=9) for _ in range(3)))
        assert [r.finish_reason for r in results] == [FinishReason.ERROR] * 2 + [FinishReason.LENGTH]
        assert results[0].events[-1].error == "RuntimeError: the tensors caught fire"
        assert results[2].token_ids == checkpoint.greedy(tokens, 9)
        assert driver.engine.stats().num_failed_steps == 1


async def test_a_listener_that_fails_stops_the_engine_loudly(checkpoint) -> None:
    engine = Engine(checkpoint.path, EngineOptions(pool_nbytes=1 << 20), ModelOptions(device="cpu"))

    def on_step(events: Any) -> None:
        raise KeyError("listener")

    engine.on_step = on_step
    await engine.start()
    engine.add(Sequence("r", 0, [1, 2], 2, sampling=Sampling(), root_key=b"r" * 16))
    with pytest.raises(KeyError, match="listener"):
        await engine.wait()
    with pytest.raises(EngineClosed):
        engine.add(Sequence("s", 0, [1, 2], 2, sampling=Sampling(), root_key=b"r" * 16))
    await engine.close()


async def test_closing_during_work_ends_every_sequence(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=12, max_batch_size=2) as driver:
        sequences = [driver.sequence(prompt(20, seed=i), max_tokens=60) for i in range(5)]
        for sequence in sequences:
            driver.engine.add(sequence)
        held = driver.sequence(prompt(80, seed=9), max_tokens=9)
        waiter = asyncio.create_task(driver.engine.reserved(held))
        await driver.until(lambda: driver.num_steps >= 4)
        await driver.engine.close()
        await driver.engine.close()
        await driver.engine.wait()
        assert {driver.results[s.key].finish_reason for s in sequences} == {FinishReason.CANCELLED}
        with pytest.raises(EngineClosed):
            await waiter
        with pytest.raises(EngineClosed):
            driver.engine.add(driver.sequence([1]))


async def test_reservations_are_granted_in_order_as_room_comes(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=10) as driver:
        engine = driver.engine
        first = driver.sequence(prompt(40, seed=1))
        assert engine.reserve(first)
        granted: list[str] = []

        async def reserve(name: str, n: int, priority: int = 0) -> Any:
            sequence = driver.sequence(prompt(n, seed=len(name)), priority=priority)
            await engine.reserved(sequence)
            granted.append(name)
            return sequence

        big = asyncio.create_task(reserve("big", 60))
        small = asyncio.create_task(reserve("small", 5))
        given_up = asyncio.create_task(reserve("given up", 30, priority=-1))
        urgent = asyncio.create_task(reserve("urgent", 10, priority=-1))
        await asyncio.sleep(0)
        assert not engine.reserve(driver.sequence([1])), "nobody overtakes those who wait"
        assert engine.stats().num_waiting >= 2
        given_up.cancel()
        engine.release(first)
        sequences = [await task for task in (urgent, big)]
        assert granted[:2] == ["urgent", "big"]
        for sequence in sequences:
            engine.release(sequence)
        engine.release(await small)
        with pytest.raises(asyncio.CancelledError):
            await given_up
        assert engine.pool.num_used == 0


async def test_a_reservation_is_granted_when_the_one_before_it_is_given_up(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=10) as driver:
        engine = driver.engine
        first = driver.sequence(prompt(40, seed=1))
        assert engine.reserve(first)
        big, small = driver.sequence(prompt(60, seed=2)), driver.sequence(prompt(5, seed=3))
        waiting = asyncio.create_task(engine.reserved(big))
        granted = asyncio.create_task(engine.reserved(small))
        for _ in range(5):
            await asyncio.sleep(0)  # the engine's loop goes idle
        assert not granted.done(), "nobody overtakes those who wait"
        waiting.cancel()
        await asyncio.wait_for(granted, 60)
        for sequence in (first, small):
            engine.release(sequence)
        assert engine.pool.num_used == 0


async def test_a_reservation_that_fits_is_granted_while_nothing_runs(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=16) as driver:
        engine = driver.engine
        kept, large = driver.sequence(prompt(40, seed=1)), driver.sequence(prompt(100, seed=2), max_tokens=2)
        await driver.run(kept, prefill_only=True)
        engine.add(large)  # waits for the blocks of the other
        while engine._loop._wake.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0)  # until the engine's loop is idle
        older = driver.sequence(prompt(5, seed=3), arrived_s=0.5)
        await asyncio.wait_for(engine.reserved(older), 60)
        assert large.state is State.WAITING
        for sequence in (older, kept):
            engine.release(sequence)
        await driver.until(lambda: large.state is State.FINISHED)


async def test_reservations_do_not_overtake_an_older_prompt(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=16) as driver:
        engine = driver.engine
        others = [driver.sequence(prompt(n, seed=n)) for n in (100, 20)]
        assert all(map(engine.reserve, others)) and engine.pool.num_free == 0
        waiting = driver.sequence(prompt(12, seed=1), max_tokens=2, ignore_eos=True, arrived_s=3.0)

        async def reserve(sequence: Sequence) -> State:
            """Returns the state of the prompt then."""
            await engine.reserved(sequence)
            return waiting.state

        older, younger = (driver.sequence(prompt(n, seed=n), arrived_s=s) for n, s in ((5, 1.0), (10, 5.0)))
        reserving = [asyncio.create_task(reserve(one)) for one in (older, younger)]
        engine.add(waiting)
        await asyncio.sleep(0)
        assert engine.stats().num_waiting == 3
        engine.release(others[1])  # 3 blocks: the two older ones take 1 and 2
        async with asyncio.timeout(60):
            assert await reserving[0] is not State.FINISHED
            assert await reserving[1] is State.FINISHED
        for sequence in (older, younger, others[0]):
            engine.release(sequence)


async def test_younger_sequences_do_not_take_the_room_that_an_older_one_waits_for(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=12) as driver:
        engine = driver.engine
        engine.add(driver.sequence(prompt(40, seed=1), max_tokens=24, ignore_eos=True))
        await driver.until(lambda: driver.num_steps >= 2)
        old, young = driver.sequence(prompt(80, seed=2)), driver.sequence(prompt(20, seed=3), max_tokens=2)
        waiter = asyncio.create_task(engine.reserved(old))
        await asyncio.sleep(0)
        engine.add(young)  # there is room for it at once
        await waiter
        assert young.key not in driver.results
        engine.release(old)
        await driver.until(lambda: young.key in driver.results and driver.results[young.key].finish_reason)


async def test_the_only_one_that_runs_may_have_to_wait_for_room(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=12) as driver:
        others = driver.sequence(prompt(80, seed=1))
        assert driver.engine.reserve(others)
        sequence = driver.sequence(prompt(8, seed=2), max_tokens=4, ignore_eos=True)
        driver.engine.add(sequence)
        await driver.until(lambda: sequence.num_preemptions > 0)
        driver.engine.release(others)
        await driver.until(lambda: bool(driver.results[sequence.key].finish_reason))
        assert driver.results[sequence.key].finish_reason is FinishReason.LENGTH
        assert driver.engine.stats().num_failed_steps == 0


async def test_the_context_of_the_whole_batch_is_counted(checkpoint, serve) -> None:
    async with serve(checkpoint.path) as driver:
        engine, report, seen = driver.engine, driver.engine.on_step, []

        def on_step(events) -> None:
            seen.append(engine.stats().num_context_tokens)
            report(events)

        engine.on_step = on_step
        await driver.run(*(driver.sequence(prompt(20, seed=seed), max_tokens=10) for seed in range(2)))
        assert 2 * 20 < max(seen) <= 2 * 30
        assert engine.stats().num_context_tokens == 0


async def test_what_cannot_run_is_refused_at_once(checkpoint, serve) -> None:
    async with serve(checkpoint.path, num_blocks=6) as driver:
        assert driver.engine.max_model_len == 48, "the pool is the limit"
        with pytest.raises(SequenceTooLong, match="has 48 tokens; this node serves at most 48"):
            driver.engine.add(driver.sequence(prompt(48)))
        with pytest.raises(SequenceTooLong):
            await driver.engine.reserved(driver.sequence(prompt(50)))
        for wrong in ([1, 160], [-1, 2]):
            with pytest.raises(UnknownToken, match="outside the model's vocabulary of 160"):
                driver.engine.add(driver.sequence(wrong))
        with pytest.raises(UnknownToken, match="logit_bias for token 999"):
            driver.engine.add(driver.sequence([1], logit_bias={999: 1.0}))
        sequence = driver.sequence(prompt(47), max_tokens=9, stop_token_ids=frozenset({5000}), min_tokens=3)
        driver.engine.add(sequence)
        with pytest.raises(DuplicateSequence):
            driver.engine.add(driver.sequence([1], request_id=sequence.request_id))
        await driver.until(lambda: bool(driver.results.get(sequence.key)))
        assert driver.results[sequence.key].finish_reason is FinishReason.LENGTH


async def test_the_pool_lies_in_the_memory_given(checkpoint) -> None:
    options = EngineOptions(block_size=8)
    memory = np.zeros(100_000, np.uint8)
    engine = Engine(checkpoint.path, options, ModelOptions(device="cpu"), pool_memory=memory)
    assert engine.pool.num_blocks == 100_000 // engine.layout.block_nbytes
    await engine.start()
    memory[:] = 0
    done = asyncio.Event()
    engine.on_step = lambda events: done.set()
    sequence = Sequence("r", 0, prompt(8), 8, sampling=Sampling(max_tokens=1), root_key=b"r" * 16)
    engine.add(sequence, prefill_only=True)
    await done.wait()
    first = sequence.block_table[0] * engine.layout.block_nbytes
    assert memory[first : first + engine.layout.block_nbytes].any()
    engine.release(sequence)
    await engine.close()


async def test_the_profile_predicts_what_was_measured(checkpoint, serve) -> None:
    async with serve(checkpoint.path) as driver:
        profile = driver.engine.profile()
        assert set(profile) == {
            "prefill_base_s",
            "prefill_token_s",
            "prefill_attention_s",
            "decode_base_s",
            "decode_sequence_s",
            "decode_context_s",
        }
        assert all(value >= 0 for value in profile.values())
        assert profile["decode_base_s"] + profile["decode_sequence_s"] > 0
