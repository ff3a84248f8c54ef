"""However a step's batch is cut, each token is computed once and attends to what is before it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.ranks.partition.batch_slice import BatchSlice, chunk_offsets, micro_batches
from moonpool.engine.ranks.partition.context_keys import chunk_keys
from moonpool.engine.ranks.partition.context_parallel import split_tokens

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


@given(BATCHES, st.integers(1, 3), st.integers(1, 40))
def test_micro_batches_of_a_pipeline(whole: StepInputs, num_stages: int, max_tokens: int) -> None:
    portions = micro_batches(whole, num_stages, max_tokens)
    check(portions, whole)
    if num_stages > 1:
        assert all(len(portion) <= max(max_tokens, len(portion.decodes)) for portion in portions)
        rows = np.concatenate([portion.rows(whole.num_decodes) for portion in portions])
        assert (np.diff(rows) == 1).all(), "a micro-batch reads what those before it wrote"


@given(BATCHES, st.integers(2, 4), st.integers(1, 3), st.sampled_from([1, BLOCK_SIZE]))
def test_micro_batches_split_over_cp_ranks(
    whole: StepInputs, cp_size: int, num_stages: int, block_size: int
) -> None:
    offsets = chunk_offsets(whole)
    split = [
        split_tokens(micro_batch, cp_size, offsets, block_size)
        for micro_batch in micro_batches(whole, num_stages, 32)
    ]
    for slices in split:
        sizes = [len(one) for one in slices]
        assert min(sizes) > 0
        assert max(sizes) - min(sizes) <= (2 if block_size == 1 else 4 * block_size)
    # With too few tokens every slice has all of them.
    distinct = [slices[:1] if slices[0] == slices[-1] else slices for slices in split]
    check([one for slices in distinct for one in slices], whole)


@given(st.integers(0, 500), st.integers(1, 50), st.integers(1, 5), st.sampled_from([1, BLOCK_SIZE]))
def test_slices_of_a_prompt_attend_to_equally_many_keys(
    cached: int, size: int, cp_size: int, block_size: int
) -> None:
    """Exactly so if its blocks can be divided evenly."""
    cached *= block_size
    whole = batch(0, [(cached, 2 * cp_size * size * block_size)])
    (micro_batch,) = micro_batches(whole, 1, 0)
    slices = split_tokens(micro_batch, cp_size, chunk_offsets(whole), block_size)
    seen = [int((cached + one.rows(0) + 1).sum()) for one in slices]
    assert len(set(seen)) == 1


@settings(max_examples=30)
@given(BATCHES, st.integers(2, 4), st.integers(1, 3))
def test_keys_of_all_cp_ranks_are_those_a_token_attends_to(
    whole: StepInputs, cp_size: int, num_stages: int
) -> None:
    """Each of them once, and none that is written later."""
    offsets = chunk_offsets(whole)
    for micro_batch in micro_batches(whole, num_stages, 32):
        portions = split_tokens(micro_batch, cp_size, offsets, BLOCK_SIZE)
        if portions[0] == portions[-1]:
            continue
        for cp_rank, portion in enumerate(portions):
            part = portion.select(whole)
            keys = chunk_keys(micro_batch, portions, cp_rank, whole, offsets, BLOCK_SIZE)
            starts = [] if part.chunk_starts is None else part.chunk_starts.tolist()
            for chunk, (start, end) in enumerate(pairwise(starts)):
                for i, row in enumerate(range(start, end)):
                    seen: list[int] = []
                    for some in keys:
                        if some is not None:
                            count = min(int(some.lens[chunk]), int(some.first[chunk]) + i + 1)
                            slots = some.table[chunk].repeat_interleave(BLOCK_SIZE) * BLOCK_SIZE
                            slots += torch.arange(len(slots), dtype=torch.int32) % BLOCK_SIZE
                            seen += slots[:count].tolist()
                    position = int(part.positions[part.num_decodes + row])
                    at = torch.arange(position + 1)
                    expected = part.chunk_table[chunk][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
                    assert sorted(seen) == expected.tolist()
                    # The newest is its own: keys of other cp ranks are all before it.
                    own = keys[cp_rank]
                    assert own is not None
                    assert int(own.first[chunk]) + i < int(own.lens[chunk])
