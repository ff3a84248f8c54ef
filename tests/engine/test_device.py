"""What a GPU changes: steps end later than they are launched, decode steps are padded and replayed, the pool
is as large as what is left. Told by a device that does its work late, on a thread."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence, State
from moonpool.engine.batching.step_plan import StepPlan
from moonpool.engine.device.device import CpuDevice, DeviceMemory
from moonpool.engine.engine import Engine
from moonpool.engine.errors import DeviceLost, EngineClosed, GpuMemoryShort, WeightsTooLarge
from moonpool.engine.execution import runner
from moonpool.engine.execution.decode_graphs import padded_sizes
from moonpool.engine.execution.gpu_memory import CONTEXT_NBYTES, MemoryNeeds, pool_room
from moonpool.engine.execution.input_builder import InputBuilder
from moonpool.engine.memory.block_bytes import DeviceBytes
from moonpool.engine.setup import EngineSetup
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.transfer import checksum
from tests.engine.conftest import Driver, prompt
from tests.engine.late_device import LateDevice

GIB = 1 << 30


@pytest.mark.parametrize("decode_graphs", [True, False])
async def test_the_tokens_are_the_same(checkpoint, serve_on, decode_graphs) -> None:
    """Also with too few blocks for all: sequences come, go and move between the rows of a batch."""
    batch = [prompt(n, seed=n) for n in (5, 16, 30, 2, 9)]
    expected = checkpoint.greedy_each(batch, 40)
    device = LateDevice()
    words = {"num_blocks": 20, "max_batch_tokens": 24, "max_batch_size": 5, "decode_graphs": decode_graphs}
    async with serve_on(device, checkpoint.path, **words) as driver:
        results = await driver.run(*(driver.sequence(tokens, max_tokens=40) for tokens in batch))
        assert [result.token_ids for result in results] == expected
        assert driver.engine.stats().num_preemptions > 0
    assert (device.num_replays > 40) == decode_graphs


async def test_sampled_tokens_and_logprobs_are_the_same(checkpoint, serve_on) -> None:
    words = [{}, {"temperature": 0.9, "top_p": 0.8, "seed": 5}, {"temperature": 1.2, "num_logprobs": 3}]
    said = []
    for device in (CpuDevice(), LateDevice()):
        async with serve_on(device, checkpoint.path) as driver:
            some = [
                driver.sequence(prompt(9 + i), max_tokens=20, **more, request_id=f"r{i}")
                for i, more in enumerate(words)
            ]
            results = await driver.run(*some)
            said.append([[(e.token_id, e.logprobs and e.logprobs.rank) for e in r.events] for r in results])
    assert said[0] == said[1]


async def test_nothing_is_sealed_before_the_device_has_ended_the_step(checkpoint, serve_on) -> None:
    """A chunk that samples nothing is no exception, though nothing of it comes back to the host."""
    device = LateDevice()
    async with serve_on(device, checkpoint.path, max_batch_tokens=16) as driver:
        sealed: list[int] = []
        driver.engine.pool.on_sealed = lambda block, key: sealed.append(block)
        sequence = driver.sequence(prompt(40), max_tokens=2)
        device.steps.hold()
        given = device.steps.num_given
        driver.engine.add(sequence)
        for n in range(3):
            await device.steps.until_given(given + n + 1)
            assert len(sealed) == 2 * n, "a block was given its key before its kernels had run"
            device.steps.let(1)
        device.steps.release()
        await driver.until(lambda: sequence.key in driver.results and sequence.state is State.FINISHED)
        assert len(sealed) == 5


async def test_a_step_is_told_while_the_next_one_runs(checkpoint, serve_on) -> None:
    device = LateDevice()
    async with serve_on(device, checkpoint.path) as driver:
        sequence = driver.sequence(prompt(5), max_tokens=30)
        device.steps.hold()
        given = device.steps.num_given
        driver.engine.add(sequence)
        for n in range(3):
            await device.steps.until_given(given + n + 1)
            if n:  # told while the next step is held
                told = lambda: driver.results.get(sequence.key)  # noqa: E731
                await driver.until(lambda n=n, told=told: told() and len(told().token_ids) == n)
            device.steps.let(1)
        assert driver.engine.cancel(*sequence.key)
        device.steps.release()


class CountingDevice(LateDevice):
    uploaded_nbytes = 0

    def upload(self, host: torch.Tensor) -> torch.Tensor:
        self.uploaded_nbytes += host.nbytes
        return super().upload(host)


def test_only_the_changes_of_block_tables_are_uploaded() -> None:
    device = CountingDevice()
    builder = InputBuilder(max_batch_size=16, max_batch_tokens=64, max_len=4096, block_size=8, device=device)
    sequences = []
    for row in range(16):
        tokens = np.zeros(2000, np.int32)
        sequence = Sequence("r", row, tokens, 2000, sampling=Sampling(), root_key=b"")
        sequence.block_table, sequence.row = list(range(row * 250, row * 250 + 250)), row
        sequences.append(sequence)

    def table(moved: list[tuple[Sequence, int, int]], version: int) -> tuple[int, torch.Tensor]:
        before = device.uploaded_nbytes
        inputs = builder.prepare(StepPlan(list(sequences), [], [], version, moved))
        return device.uploaded_nbytes - before, inputs.decode_table[:, :250]

    whole, found = table([], 0)
    assert whole >= 16 * 250 * 4
    rest, _ = table([], 0)
    # Two rows grow or get an equal block, one sequence ends and the last one takes its row.
    sequences[3].block_table[7], sequences[5].block_table[249] = 4001, 4002
    moved_nbytes, found = table([(sequences[3], 7, 4001), (sequences[5], 249, 4002)], 0)
    assert moved_nbytes - rest <= 2 * 3 * 8
    assert found.tolist() == [sequence.block_table for sequence in sequences]
    sequences[2] = sequences.pop()
    sequences[2].row = 2
    row_nbytes, found = table([], 1)
    assert row_nbytes - rest <= 250 * 4 + 8
    assert found.tolist() == [sequence.block_table for sequence in sequences]


def test_checksums_of_blocks_are_computed_on_the_device() -> None:
    class WithoutCopies(LateDevice):
        def copy(self, *_: object) -> Any:
            raise AssertionError("blocks were copied to be hashed")

    pool = torch.randint(0, 256, (6, 2048), dtype=torch.uint8)
    expected = [checksum(block.numpy().data) for block in pool]
    assert DeviceBytes(pool, WithoutCopies()).checksums([4, 0, 5]) == [expected[i] for i in (4, 0, 5)]


def accelerator_error(text: str) -> Exception:
    """As PyTorch raises it for an error code of CUDA."""
    return torch.AcceleratorError(f"CUDA error: {text}\nCUDA kernel errors might be reported later")


@pytest.mark.parametrize(
    "error",
    [
        accelerator_error("an illegal memory access was encountered"),
        accelerator_error("device-side assert triggered"),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
    ],
    ids=["address", "assertion", "ecc"],
)
async def test_an_error_that_every_later_call_has_ends_the_engine(checkpoint, error) -> None:
    device = LateDevice()
    options = EngineOptions(block_size=8, pool_nbytes=1 << 20)
    engine = Engine(checkpoint.path, options, ModelOptions(), device=device)
    driver = Driver(engine)
    await engine.start()
    try:
        sequence = driver.sequence(prompt(5), max_tokens=1000, ignore_eos=True)
        engine.add(sequence)
        await driver.until(lambda: driver.num_steps >= 3)
        device.error = error
        with pytest.raises(DeviceLost, match=rf"lost to this process \({type(error).__name__}: CUDA error: "):
            await asyncio.wait_for(engine.wait(), 60)
        assert driver.results[sequence.key].events[-1].ended_life
        # It can be computed elsewhere.
        assert driver.results[sequence.key].finish_reason is FinishReason.NONE
        with pytest.raises(EngineClosed):
            engine.add(driver.sequence([1]))
    finally:
        await engine.close()


async def test_an_error_that_later_calls_do_not_have_ends_the_step(checkpoint, serve_on, monkeypatch) -> None:
    async with serve_on(LateDevice(), checkpoint.path) as driver:
        runner = driver.engine._loop.runner
        compute, errors = runner._compute, [accelerator_error("invalid argument")]

        def once(*arguments: Any) -> Any:
            if errors:
                raise errors.pop()
            return compute(*arguments)

        monkeypatch.setattr(runner, "_compute", once)
        (failed,) = await driver.run(driver.sequence(prompt(5), max_tokens=4))
        assert failed.finish_reason is FinishReason.ERROR
        assert "invalid argument" in failed.events[-1].error
        (result,) = await driver.run(driver.sequence(prompt(5), max_tokens=4))
        assert result.token_ids == checkpoint.greedy(prompt(5), 4)


async def test_blocks_of_a_failed_step_serve_nobody_until_what_it_launched_has_ended(
    checkpoint, serve_on, monkeypatch
) -> None:
    """The host may fail far ahead of the kernels, which write KV to the blocks."""
    device = LateDevice()
    async with serve_on(device, checkpoint.path) as driver:
        runner = driver.engine._loop.runner

        def fails(*_: Any) -> Any:
            device.steps.give(lambda: None)
            raise torch.OutOfMemoryError("CUDA out of memory")

        monkeypatch.setattr(runner.model, "forward", fails)
        sequence = driver.sequence(prompt(5), max_tokens=4)
        device.steps.hold()
        kernel_and_end = device.steps.num_given + 2
        driver.engine.add(sequence)
        ending = asyncio.create_task(driver.until(lambda: sequence.key in driver.results))
        waiting = asyncio.create_task(device.steps.until_given(kernel_and_end))
        await asyncio.wait((ending, waiting), return_when=asyncio.FIRST_COMPLETED)
        assert not ending.done() and driver.engine.pool.num_used == 1, "its kernels have not run"
        device.steps.release()
        await asyncio.gather(ending, waiting)
        assert driver.results[sequence.key].finish_reason is FinishReason.ERROR
        assert driver.engine.pool.num_used == 0


@pytest.mark.gpu
def test_a_failed_assertion_on_a_gpu_is_found_by_its_check() -> None:
    """In a process of its own, whose GPU is lost then."""
    program = """
import torch
from moonpool.engine.device.selection import choose_device
device = choose_device("cuda")
device.check()
try:
    device.run(lambda: torch.zeros(4, device="cuda")[torch.tensor([9], device="cuda")]).wait()
except torch.AcceleratorError as error:
    print("step:", str(error).splitlines()[0])
try:
    device.check()
except torch.AcceleratorError as error:
    print("check:", str(error).splitlines()[0])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert "check: CUDA error: device-side assert triggered" in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
async def test_a_pool_of_what_fits(checkpoint, serve_on) -> None:
    device = LateDevice(DeviceMemory(2 * GIB, 2 * GIB, 100 << 20))
    async with serve_on(
        device,
        checkpoint.path,
        num_blocks=0,
    ) as driver:
        engine = driver.engine
        nbytes = engine.pool.num_blocks * engine.layout.block_nbytes
        assert 0.2 * GIB < nbytes < 0.9 * 2 * GIB - CONTEXT_NBYTES
        assert engine.pool_tensor.shape == (engine.pool.num_blocks, engine.layout.block_nbytes)
        (result,) = await driver.run(driver.sequence(prompt(20), max_tokens=4))
        assert result.token_ids == checkpoint.greedy(prompt(20), 4)


async def test_a_pool_that_does_not_fit_says_what_would(checkpoint, serve_on) -> None:
    full = LateDevice(DeviceMemory(80 * GIB, 1 * GIB, 1 << 20))
    with pytest.raises(GpuMemoryShort, match=r"0 blocks of 8 tokens would fit"):
        async with serve_on(
            full,
            checkpoint.path,
            num_blocks=0,
        ):
            pass
    small = LateDevice(DeviceMemory(2 * GIB, 2 * GIB, 1 << 20))
    with pytest.raises(GpuMemoryShort, match=r"engine\.gpu_memory") as caught:
        async with serve_on(
            small,
            checkpoint.path,
            num_blocks=1_000_000,
        ):
            pass
    assert 0 < caught.value.room_nbytes < caught.value.wanted_nbytes


async def test_weights_that_do_not_fit_are_named_with_what_is_free(checkpoint, serve_on, monkeypatch) -> None:
    def full(*args: object, **words: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner, "Model", full)
    with pytest.raises(WeightsTooLarge, match=r"in the 2,147,483,648 bytes of free GPU memory"):
        async with serve_on(LateDevice(DeviceMemory(80 * GIB, 2 * GIB, 0)), checkpoint.path):
            pass


@pytest.mark.parametrize(
    ("gib", "tokens", "sequences"), [(None, 512, 64), (24, 2048, 128), (48, 4096, 256), (80, 8192, 256)]
)
def test_steps_are_as_large_as_the_device_deserves(checkpoint, gib, tokens, sequences) -> None:
    device = CpuDevice() if gib is None else LateDevice(DeviceMemory(gib * GIB, gib * GIB, 0))
    options = EngineOptions()
    chosen = EngineSetup.choose(checkpoint.path, options, ModelOptions(), device).options
    assert (chosen.max_batch_tokens, chosen.max_batch_size) == (tokens, sequences)
    chosen = EngineSetup.choose(
        checkpoint.path, replace(options, max_batch_tokens=100), ModelOptions(), device
    ).options
    assert (chosen.max_batch_tokens, chosen.max_batch_size) == (100, sequences)


def test_the_room_for_a_pool() -> None:
    needs = MemoryNeeds(weights_nbytes=16 * GIB, step_nbytes=2 * GIB, graphs_nbytes=1 * GIB)
    alone = DeviceMemory(total_nbytes=100 * GIB, free_nbytes=83 * GIB, reserved_nbytes=16 * GIB)
    assert pool_room(alone, 0.9, needs) == 90 * GIB - 16 * GIB - CONTEXT_NBYTES - 3 * GIB
    # Two that take half each get the same, whoever came first, as long as neither takes more than its share.
    second = DeviceMemory(total_nbytes=100 * GIB, free_nbytes=39 * GIB, reserved_nbytes=16 * GIB)
    assert pool_room(second, 0.45, needs) == pool_room(alone, 0.45, needs)
    crowded = DeviceMemory(total_nbytes=100 * GIB, free_nbytes=10 * GIB, reserved_nbytes=16 * GIB)
    assert pool_room(crowded, 0.9, needs) == 10 * GIB - 2 * GIB - 3 * GIB
    assert pool_room(DeviceMemory(100 * GIB, 1 * GIB, 16 * GIB), 0.9, needs) == 0


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 64, 100, 256])
def test_padded_sizes(most: int) -> None:
    sizes = padded_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for n in range(1, most + 1):
        size = next(size for size in sizes if size >= n)
        assert size <= max(n + 31, 2 * n) and (n > 64 or size <= max(n + 7, 2 * n))
