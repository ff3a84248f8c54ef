"""An engine on a GPU as it is served: recorded steps, a pool of what fits, two processes that share it.

Everything else the engine promises is tested on a GPU by the same tests as on a CPU: ``pytest -m gpu``.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from moonpool.engine.device.selection import choose_device
from moonpool.engine.errors import GpuMemoryShort
from moonpool.runtime.config.options import TransferOptions
from moonpool.runtime.errors import ConfigError
from moonpool.transfer import AgentDescriptor, Span, TransferAgent
from tests.engine.conftest import Result, prompt

ROOT = Path(__file__).parents[2]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="cuda:99"):
        choose_device("cuda:99")


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 8, 13, 24])
async def test_recorded_steps_give_the_tokens_of_plain_ones(checkpoint, serve_on, batch_size) -> None:
    """A padded batch, too: rows that are not there must touch no block and change no other row."""
    said = []
    for decode_graphs in (True, False):
        words = {"max_batch_size": 24, "decode_graphs": decode_graphs}
        async with serve_on(choose_device("cuda"), checkpoint.path, **words) as driver:
            batch = [driver.sequence(prompt(5 + i, seed=i), max_tokens=24) for i in range(batch_size)]
            said.append([result.token_ids for result in await driver.run(*batch)])
    assert said[0] == said[1]


@pytest.mark.gpu
async def test_padded_rows_write_nothing(checkpoint, serve_on) -> None:
    async with serve_on(choose_device("cuda"), checkpoint.path, max_batch_size=8) as driver:
        engine = driver.engine
        sequences = [driver.sequence(prompt(9, seed=i), max_tokens=6) for i in range(3)]
        (warm,) = await driver.run(driver.sequence(prompt(4), max_tokens=1))
        assert warm.token_ids
        before = engine.pool_tensor.clone()
        torch.cuda.synchronize()
        used: set[int] = set()
        engine.pool.on_sealed = lambda block, key: used.add(block)
        tables = [sequence.block_table for sequence in sequences]
        engine.on_step = lambda events, then=engine.on_step: (
            used.update(block for s in sequences for block in s.block_table),
            then(events),
        )
        await driver.run(*sequences)
        used.update(block for table in tables for block in table)
        changed = (engine.pool_tensor != before).any(1).nonzero()[:, 0].tolist()
        assert changed
        assert set(changed) <= used


@pytest.mark.gpu
async def test_the_pool_is_sized_by_the_memory_fraction(checkpoint, serve_on) -> None:
    device = choose_device("cuda")
    memory = device.memory()
    assert memory is not None
    async with serve_on(device, checkpoint.path, num_blocks=0, gpu_memory=0.25) as driver:
        nbytes = driver.engine.pool.num_blocks * driver.engine.layout.block_nbytes
        assert 0.15 * memory.total_nbytes < nbytes < 0.25 * memory.total_nbytes
        (result,) = await driver.run(driver.sequence(prompt(20), max_tokens=9))
        assert result.token_ids == checkpoint.greedy(prompt(20), 9)
    too_many = 2 * memory.total_nbytes // driver.engine.layout.block_nbytes
    with pytest.raises(GpuMemoryShort, match="would fit"):
        async with serve_on(device, checkpoint.path, num_blocks=too_many):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("device_name", DEVICES)
async def test_a_prompt_of_another_process_is_decoded_here(checkpoint, serve_on, device_name) -> None:
    """Its blocks come over by the transfer agents: on a GPU, from its memory to ours."""
    tokens = prompt(45)
    expected = checkpoint.greedy(tokens, 20)
    command = [
        "tests/engine/gpu_peer.py",
        str(checkpoint.path),
        device_name,
        "0.3",
        ",".join(map(str, tokens)),
    ]
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with serve_on(choose_device(device_name), checkpoint.path, gpu_memory=0.3) as driver:
            line = await asyncio.wait_for(child.stdout.readline(), 100)
            assert line, f"the other process ended with {await child.wait()}"
            news = json.loads(line)
            engine = driver.engine
            sequence = driver.sequence(tokens, max_tokens=20)
            assert engine.reserve(sequence)
            async with await TransferAgent.start(TransferOptions(), agent_id="decode", epoch=2) as agent:
                region = agent.register(engine.pool_tensor, name="pool")
                peer = await agent.connect(AgentDescriptor.unpack(bytes.fromhex(news["agent"])))
                nbytes = engine.layout.block_nbytes
                here = [Span(region.id, block * nbytes, nbytes) for block in sequence.block_table]
                there = [Span(*span) for span in news["spans"]]
                await peer.read(here[: len(there)], there, deadline_s=30, checksums=news["checksums"])
                engine.seal_received(sequence, len(tokens))
                sequence.append(news["token"])
                driver.results[sequence.key] = Result([news["token"]])
                (result,) = await driver.run(sequence)
            assert result.token_ids == expected
    finally:
        child.stdin.close()
        try:
            await asyncio.wait_for(child.wait(), 20)
        finally:
            if child.returncode is None:
                child.kill()
