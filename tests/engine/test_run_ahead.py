"""Decode steps that are launched before the last one's tokens are on the host, over a device that is late."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.engine.batching.sequence import FinishReason, State
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.execution.step_loop import DEVICE_IDLE_SECONDS
from tests.engine.conftest import Result, prompt
from tests.engine.late_device import LateDevice

NOTHING = Result()


def launches() -> tuple[float, float]:
    """Steps launched while there was work, and those of them before the last step's end."""
    samples = [sample for metric in DEVICE_IDLE_SECONDS.collect() for sample in metric.samples]
    count = next(sample.value for sample in samples if sample.name.endswith("_count"))
    return count, next(sample.value for sample in samples if sample.labels.get("le") == "0.0")


def idle_launches() -> float:
    count, before = launches()
    return count - before


async def test_a_step_is_launched_before_the_tokens_of_the_last_one_are_there(checkpoint, serve_on) -> None:
    device = LateDevice()
    async with serve_on(device, checkpoint.path) as driver:
        sequence = driver.sequence(prompt(5), max_tokens=30)
        device.steps.hold()
        given = device.steps.num_given
        driver.engine.add(sequence)
        await device.steps.until_given(given + 1)
        device.steps.let(1)  # the prompt
        for n in range(5):
            await device.steps.until_given(given + n + 3)
            assert len(driver.results[sequence.key].token_ids) == n + 1
            device.steps.let(1)
            await driver.until(lambda n=n: len(driver.results[sequence.key].token_ids) == n + 2)
        device.steps.release()
        await driver.until(lambda: bool(driver.results[sequence.key].finish_reason))
        assert driver.results[sequence.key].token_ids == checkpoint.greedy(prompt(5), 30)
    # The last one was foreseen: one step for each token, and those that measured.
    assert device.steps.num_given == given + 30


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_p": 0.8, "seed": 5},
    "least": {"temperature": 1.1, "seed": 3, "min_tokens": 12, "stop_token_ids": frozenset(range(0, 160, 4))},
    "stopped": {"temperature": 1.0, "seed": 9, "stop_token_ids": frozenset(range(0, 160, 9))},
    "biased": {"logit_bias": {7: 3.0, 9: -5.0}},
    "penalized": {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "logprobs": {"temperature": 1.2, "seed": 2, "num_logprobs": 3},
}


@pytest.mark.parametrize(
    ("names", "num_blocks"),
    [
        (["greedy", "seeded", "least", "stopped", "biased"], 128),
        (["greedy", "penalized", "stopped"], 128),
        (["seeded", "logprobs", "stopped"], 128),
        (["greedy", "seeded", "stopped", "biased"], 17),  # with preemptions
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
async def test_tokens_are_those_of_steps_one_by_one(checkpoint, serve_on, names, num_blocks) -> None:
    """Sequences of different lengths end by length, by stop tokens, and join others."""
    said = []
    for device in (CpuDevice(), LateDevice()):
        async with serve_on(device, checkpoint.path, num_blocks=num_blocks, max_batch_size=5) as driver:
            some = [
                driver.sequence(
                    prompt(7 + 3 * i, i), max_tokens=18 + 7 * i, **REQUESTS[name], request_id=f"{name}{i}"
                )
                for i, name in enumerate(names * 2)
            ]
            results = await driver.run(*some)
            said.append(
                [
                    (
                        r.finish_reason,
                        [(e.token_id, e.index, e.logprobs and e.logprobs.rank) for e in r.events],
                    )
                    for r in results
                ]
            )
            stats = driver.engine.stats()
        assert (stats.num_preemptions > 0) == (num_blocks < 20)

    def tokens(entry: Any) -> Any:
        return entry[0], [event for event in entry[1] if event[0] >= 0]

    assert [tokens(entry) for entry in said[0]] == [tokens(entry) for entry in said[1]]


async def test_blocks_of_an_ended_sequence_serve_nobody_until_the_step_in_flight_has_ended(
    checkpoint, serve_on
) -> None:
    expected = checkpoint.greedy(prompt(5), 3)
    device = LateDevice()
    async with serve_on(device, checkpoint.path) as driver:
        pool = driver.engine.pool
        sequence = driver.sequence(prompt(5), max_tokens=30, stop_token_ids=frozenset([expected[2]]))
        other = driver.sequence(prompt(5, 1), max_tokens=60, ignore_eos=True)
        device.steps.hold()
        given = device.steps.num_given
        driver.engine.add(sequence)
        driver.engine.add(other)
        await device.steps.until_given(given + 1)
        device.steps.let(1)
        await device.steps.until_given(given + 3)
        device.steps.let(1)
        await device.steps.until_given(given + 4)
        before = pool.num_used
        device.steps.let(1)  # the step that samples the stop token; the next one is in flight
        await driver.until(lambda: driver.results[sequence.key].finish_reason is FinishReason.STOP)
        assert sequence.state is State.FINISHED
        assert pool.num_used >= before, "a step that still runs writes to the sequence's last block"
        used = pool.num_used
        device.steps.let(1)
        await driver.until(lambda: len(driver.results[other.key].token_ids) == 4)
        assert pool.num_used < used
        assert driver.results[sequence.key].token_ids == expected
        device.steps.release()
        await driver.until(lambda: bool(driver.results[other.key].finish_reason))
        assert driver.results[other.key].token_ids == checkpoint.greedy(prompt(5, 1), 60)


async def test_cancelled_sequences_end_and_others_go_on(checkpoint, serve_on) -> None:
    async with serve_on(LateDevice(), checkpoint.path) as driver:
        sequences = [driver.sequence(prompt(9, i), max_tokens=60, ignore_eos=True) for i in range(4)]
        running = asyncio.create_task(driver.run(*sequences))
        await driver.until(lambda: driver.num_steps > 12)
        assert driver.engine.cancel(*sequences[1].key)
        assert driver.engine.cancel(*sequences[3].key)
        results = await running
        reasons = [FinishReason.LENGTH, FinishReason.CANCELLED] * 2
        assert [result.finish_reason for result in results] == reasons
        for i in (0, 2):
            assert results[i].token_ids == checkpoint.greedy(prompt(9, i), 60)


async def test_the_device_does_not_wait_between_decode_steps(checkpoint, serve_on) -> None:
    async with serve_on(LateDevice(), checkpoint.path) as driver:
        before = launches()
        await driver.run(driver.sequence(prompt(5), max_tokens=40))
        after = launches()
    assert after[0] - before[0] == 39
    assert after[1] - before[1] == 38  # all but the first decode step


async def test_a_sequence_that_needs_only_a_row_joins_without_a_pause(checkpoint, serve_on) -> None:
    """As after a hand-over: its newest token is known on the host, those of the others are not."""
    tokens = prompt(16, 7)
    expected = checkpoint.greedy(tokens, 12)
    device = LateDevice()
    async with serve_on(device, checkpoint.path) as driver:
        await driver.run(driver.sequence(tokens, max_tokens=1))  # its two blocks are cached now
        other = driver.sequence(prompt(5, 1), max_tokens=40, ignore_eos=True)
        driver.engine.add(other)
        await driver.until(lambda: len(driver.results.get(other.key, NOTHING).token_ids) > 5)
        joining = driver.sequence([*tokens, expected[0]], num_prompt_tokens=16, max_tokens=12)
        assert driver.engine.reserve(joining)
        assert joining.num_computed_tokens == 16
        driver.results[joining.key] = Result([expected[0]])
        idle = idle_launches()
        (result,) = await driver.run(joining)
        assert result.token_ids == expected
        await driver.until(lambda: bool(driver.results[other.key].finish_reason))
        assert driver.results[other.key].token_ids == checkpoint.greedy(prompt(5, 1), 40)
        assert idle_launches() == idle, "a step was launched after the device had become idle"
