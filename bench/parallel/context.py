"""Context parallelism: the largest prompt, memory of a rank, and the time and work of a long prompt."""

from __future__ import annotations

import statistics
from collections.abc import AsyncIterator
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from moonpool.bench.engine.driver import Session
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread
from moonpool.bench.parallel.steps import MAX_BATCH_TOKENS, Settings, running
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.model.inputs import RankKeys, StepInputs
from moonpool.engine.ranks.partition.batch_slice import micro_batches
from moonpool.engine.ranks.partition.context_parallel import ContextStep
from moonpool.engine.setup import EngineSetup
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.runtime.config.options import EngineOptions, ModelOptions, ParallelOptions
from moonpool.runtime.reports.report import Row, versus

COUNTED_TOKENS = 16_384
_SIZES = (1, 2, 4)
_RANK_TOKENS = 1024
"""What the pool of a rank has room for where the largest prompt is measured."""


async def context_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """cp 1 first: the others are compared with it."""
    options = EngineOptions()
    setup = EngineSetup.choose(settings.model, options, ModelOptions(device=settings.device), None)
    config, size = setup.config, options.block_size
    rank_nbytes = _RANK_TOKENS // size * setup.whole_layout.block_nbytes
    alone: tuple[int, float] | None = None
    for cp in _SIZES[: 2 if run.quick else None]:
        if cp > settings.max_ranks:
            run.say(f"cp {cp} is left out: it needs {cp} GPUs, there are {settings.max_ranks}")
            continue
        run.say(f"cp {cp}")
        parallel, case = ParallelOptions(cp=cp), f"cp {cp}, pools of {_RANK_TOKENS} tokens"
        pools = running(settings.model, settings.device, parallel, pool_nbytes=rank_nbytes * cp)
        async with pools as session:
            largest = session.engine.max_model_len - 1
            await session.first_token_s(largest)
            row = Row(case, "largest prompt served", largest, "tokens")
            yield row if alone is None else versus(row, "cp 1", alone[0])
            yield Row(case, "KV of a rank", max(_pool_nbytes(session)), "bytes")
        prompt = f"cp {cp}, prompt of {settings.prompt_tokens}"
        async with running(settings.model, settings.device, parallel) as session:
            await session.first_token_s(settings.prompt_tokens)
            seconds = [await session.first_token_s(settings.prompt_tokens) for _ in range(run.rounds)]
        row = spread(prompt, "first token", seconds, "ms", 1e3)
        yield row if alone is None else versus(row, "cp 1", 1e3 * alone[1])
        alone = alone or (largest, statistics.median(seconds))
        if cp > 1 and config.moe is None:
            speedup = counted_speedup(config, size, COUNTED_TOKENS, cp)
            counted = f"cp {cp}, prompt of {COUNTED_TOKENS}, by counted multiplications"
            yield Row(counted, "speedup over one rank", speedup, "×")


def _pool_nbytes(session: Session) -> list[int]:
    """Bytes of the pools that this process sees: of all ranks, on GPUs its own."""
    engine = session.engine
    others = engine.ranks.pools if engine.ranks is not None else []
    return [engine.pool_tensor.nbytes, *(pool.nbytes for pool in others)]


def counted_speedup(config: ModelConfig, block_size: int, num_tokens: int, cp: int) -> float:
    """Return one rank's multiplications of a prompt over those of the busiest cp rank in each step, from a
    pool that is as full as after the start of a node. Exchanges, norms and rotations are not in it."""
    matrices = expected_tensors(config).items()
    token = sum(prod(shape) for name, shape in matrices if name.startswith("model.layers."))
    pair = 2 * config.num_layers * config.num_heads * config.head_dim
    num_blocks = -(-num_tokens // block_size)
    blocks = np.array(BlockPool(num_blocks + cp, block_size).allocate(num_blocks), np.int32)
    busiest = 0
    for start in range(0, num_tokens, MAX_BATCH_TOKENS):
        inputs = _chunk(blocks, block_size, range(start, min(start + MAX_BATCH_TOKENS, num_tokens)))
        (micro_batch,) = micro_batches(inputs, 1, 0)
        work = []
        for cp_rank in range(cp):
            step = ContextStep(inputs, cp_rank, cp, block_size=block_size, min_tokens=1, windows=[0])
            part = step.inputs_for(micro_batch)
            assert part.context is not None
            (keys,) = part.context.keys_of(0)
            work.append(len(part.token_ids) * token + _num_pairs(keys) * pair)
        busiest += max(work)
    return (num_tokens * token + num_tokens * (num_tokens + 1) // 2 * pair) / busiest


def _chunk(blocks: npt.NDArray[np.int32], block_size: int, at: range) -> StepInputs:
    """A prompt's tokens at these positions; those before are cached."""
    positions = np.arange(at.start, at.stop)
    slots = blocks[positions // block_size].astype(np.int64) * block_size + positions % block_size
    return StepInputs(
        torch.zeros(len(at), dtype=torch.int64),
        torch.from_numpy(positions),
        torch.from_numpy(slots),
        0,
        torch.zeros((0, 1), dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.from_numpy(blocks[None]),
        torch.tensor([0, len(at)], dtype=torch.int32),
        torch.tensor([at.stop], dtype=torch.int32),
    )


def _num_pairs(keys: RankKeys) -> int:
    """Return the pairs of a query and a key that it sees."""
    assert keys.starts is not None
    sizes = keys.starts.diff().long()
    number = torch.arange(keys.num_queries) - keys.starts[:-1].long().repeat_interleave(sizes)
    first, lens = (each.long().repeat_interleave(sizes) for each in (keys.first, keys.lens))
    return int(torch.minimum(first + number + 1, lens).sum())
