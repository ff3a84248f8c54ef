"""However a step's batch is cut, each token is computed once and attends to what is before it."""

from __future__ import annotations

from itertools import chain, pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, micro_batches
from moonpool.engine.ranks.partition.context_parallel import ContextStep

BLOCK_SIZE = 4


def batch(num_decodes: int, chunks: list[tuple[int, int]]) -> StepInputs:
    """Decodes of contexts 1, 2, …, and (cached, new) prompt tokens; sequence i in blocks 100 i …."""
    lens = [*range(1, num_decodes + 1), *(cached + new for cached, new in chunks)]
    news = [1] * num_decodes + [new for _, new in chunks]
    positions = [np.arange(n - new, n) for n, new in zip(lens, news, strict=True)]
    slots = [100 * BLOCK_SIZE * i + at for i, at in enumerate(positions)]
    table = torch.arange(30, dtype=torch.int32) + 100 * torch.arange(len(lens), dtype=torch.int32)[:, None]
    total = sum(news)
    return StepInputs(
        torch.arange(total),
        torch.from_numpy(np.concatenate([*positions, np.zeros(0, np.int64)])),
        torch.from_numpy(np.concatenate([*slots, np.zeros(0, np.int64)])),
        num_decodes,
        table[:num_decodes],
        torch.tensor(lens[:num_decodes], dtype=torch.int32),
        *(
            (
                table[num_decodes:],
                torch.tensor(np.cumsum([0, *news[num_decodes:]]), dtype=torch.int32),
                torch.tensor(lens[num_decodes:], dtype=torch.int32),
            )
            if chunks
            else ()
        ),
    )


def check(portions: list[BatchSlice], whole: StepInputs) -> None:
    rows = np.concatenate([portion.rows(whole.num_decodes) for portion in portions])
    assert sorted(rows) == list(range(len(whole.token_ids)))
    for portion in portions:
        part = portion.select(whole)
        assert part.token_ids.tolist() == portion.rows(whole.num_decodes).tolist()
        assert len(part.token_ids) == len(portion)
        n = part.num_decodes
        tables, ends = list(part.decode_table), part.positions[:n] + 1
        assert part.decode_lens.tolist() == ends.tolist()
        spans = [(i, i + 1) for i in range(n)]
        if part.chunk_table is not None:
            starts = (n + part.chunk_starts).tolist()
            assert starts[-1] == len(portion)
            tables += list(part.chunk_table)
            spans += pairwise(starts)
            # The last of its tokens is the last its sequence has so far, as attention takes it.
            for (first, end), length in zip(spans[n:], part.chunk_lens.tolist(), strict=True):
                assert part.positions[first:end].tolist() == list(range(length - (end - first), length))
        for table, (first, end) in zip(tables, spans, strict=True):
            at = part.positions[first:end]
            slots = table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
            assert slots.tolist() == part.slots[first:end].tolist()


BATCHES = st.builds(
    batch,
    st.integers(0, 9),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 70)), max_size=5),
).filter(lambda whole: len(whole.token_ids))


WINDOWS = st.sampled_from([0, 1, 3, 4, 7, 30])


@given(BATCHES, st.integers(1, 3), st.integers(1, 40))
def test_micro_batches_of_a_pipeline(whole: StepInputs, num_stages: int, max_tokens: int) -> None:
    portions = micro_batches(whole, num_stages, max_tokens)
    check(portions, whole)
    if num_stages > 1:
        assert all(len(portion) <= max(max_tokens, len(portion.decodes)) for portion in portions)
        rows = np.concatenate([portion.rows(whole.num_decodes) for portion in portions])
        assert (np.diff(rows) == 1).all(), "a micro-batch reads what those before it wrote"


@given(BATCHES, st.integers(2, 4), st.integers(1, 3), st.integers(1, 9))
def test_micro_batches_split_over_cp_ranks(
    whole: StepInputs, cp_size: int, num_stages: int, min_tokens: int
) -> None:
    """Evenly, or every rank has all tokens; and each token's KV is written by one rank."""
    steps = [context_step(whole, rank, cp_size, min_tokens) for rank in range(cp_size)]
    for micro_batch in micro_batches(whole, num_stages, 32):
        expected = micro_batch.select(whole)
        parts = [step.inputs_for(micro_batch) for step in steps]
        tokens = [part.token_ids.tolist() for part in parts]
        if len(micro_batch) < max(min_tokens, cp_size):
            assert tokens == [expected.token_ids.tolist()] * cp_size
        else:
            assert list(chain(*tokens)) == expected.token_ids.tolist()
            sizes = [len(some) for some in tokens]
            assert max(sizes) - min(sizes) <= 1
            assert all(part.context.counts == tuple(sizes) for part in parts)
        slots = torch.stack([part.context.slots for part in parts])
        assert ((slots >= 0).sum(0) == 1).all()
        blocks = slots // BLOCK_SIZE * cp_size + torch.arange(cp_size)[:, None]
        found = torch.where(slots >= 0, blocks * BLOCK_SIZE + slots % BLOCK_SIZE, 0).sum(0)
        assert found.tolist() == expected.slots.tolist()


@settings(max_examples=50)
@given(
    BATCHES, st.integers(2, 4), st.integers(1, 3), st.sampled_from([0, 1, 3, 4, 7, 30]), st.integers(0, 99)
)
def test_keys_of_all_cp_ranks_are_those_a_token_attends_to(
    whole: StepInputs, cp_size: int, num_stages: int, window: int, seed: int
) -> None:
    """Each of them once, none that is written later, and none before a window. Blocks are anywhere."""
    elsewhere(whole, seed)
    steps = [context_step(whole, rank, cp_size, 1, window) for rank in range(cp_size)]
    for micro_batch in micro_batches(whole, num_stages, 32):
        part = micro_batch.select(whole)
        seen: list[list[int]] = [[] for _ in range(len(micro_batch))]
        for rank, step in enumerate(steps):
            query = 0
            for keys in step.inputs_for(micro_batch).context.keys_of(window):
                starts = range(keys.num_queries + 1) if keys.starts is None else keys.starts.tolist()
                assert starts[-1] == keys.num_queries
                for run, (start, end) in enumerate(pairwise(starts)):
                    for at in range(int(keys.first[run]), int(keys.first[run]) + end - start):
                        # As the kernels do: up to the query's position among the keys.
                        first = max(0, at - window + 1) if window else 0
                        for key in range(first, min(int(keys.lens[run]), at + 1)):
                            block = int(keys.table[run, key // BLOCK_SIZE])
                            assert block >= 0
                            seen[query].append((block * cp_size + rank) * BLOCK_SIZE + key % BLOCK_SIZE)
                        query += 1
            assert query == len(micro_batch)
        for query, position in enumerate(part.positions.tolist()):
            at = torch.arange(max(0, position - window + 1) if window else 0, position + 1)
            table = row_of(part, query)
            assert sorted(seen[query]) == sorted(
                (table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE).tolist()
            )


def context_step(whole: StepInputs, rank: int, cp_size: int, min_tokens: int, window: int = 0) -> ContextStep:
    return ContextStep(whole, rank, cp_size, block_size=BLOCK_SIZE, min_tokens=min_tokens, windows=[window])


def row_of(part: StepInputs, query: int) -> torch.Tensor:
    """The block table of a query's sequence."""
    if query < part.num_decodes:
        return part.decode_table[query]
    chunk = int((part.chunk_starts[1:] <= query - part.num_decodes).sum())
    return part.chunk_table[chunk]


def elsewhere(whole: StepInputs, seed: int) -> None:
    """Give every sequence other blocks, in no order."""
    tables = [whole.decode_table, *([] if whole.chunk_table is None else [whole.chunk_table])]
    others = torch.randperm(sum(map(torch.numel, tables)), generator=torch.Generator().manual_seed(seed))
    for table, blocks in zip(tables, others.split([table.numel() for table in tables]), strict=True):
        table.copy_(blocks.view(table.shape))
