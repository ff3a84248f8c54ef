"""The tokens of a batch shared out to ranks that hold the same weights and the same KV: context parallel."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.engine.ranks.partition.batch_slice import BatchSlice, TokenRange


def split_tokens(
    batch: BatchSlice, num_shares: int, offsets: Sequence[int], block_size: int
) -> list[BatchSlice]:
    """Each share's tokens of ``batch``: as many, and as much for each to attend to, as nearly as can be.
    Where that leaves a share without any, every share gets all.

    A prompt's later tokens attend to more. So a run is cut into 2 × num_shares, of which a share takes one
    from the front and the one as far from the end: all pairs attend to as much. Cuts are between blocks, so
    that a block's new keys are all of one share. Which share takes which pair is chosen so that what cannot
    be divided evenly does not add up.

    offsets: of each chunk, from the number of a prompt token of the batch to its position in its sequence.
    """
    n, first = len(batch.decodes), batch.decodes.start
    decodes = [
        range(first + n * i // num_shares, first + n * (i + 1) // num_shares) for i in range(num_shares)
    ]
    runs: list[list[TokenRange]] = [[] for _ in decodes]
    num_tokens = [len(some) for some in decodes]
    for run in batch.runs:
        pairs = _pairs(run, num_shares, offsets[run.chunk], block_size)
        pairs.sort(key=lambda pair: -sum(map(len, pair)))
        shares = sorted(range(num_shares), key=num_tokens.__getitem__)
        for share, pair in zip(shares, pairs, strict=True):
            runs[share] += [part for part in pair if len(part)]
            num_tokens[share] += sum(map(len, pair))
    if not all(num_tokens):
        return [batch] * num_shares
    return [BatchSlice(some, tuple(own)) for some, own in zip(decodes, runs, strict=True)]


def _pairs(
    run: TokenRange, num_shares: int, offset: int, block_size: int
) -> list[tuple[TokenRange, TokenRange]]:
    """The i-th has the i-th of the run's 2 × num_shares parts, and the i-th from the end."""
    num_parts = 2 * num_shares
    borders = [run.first]
    for i in range(1, num_parts):
        position = offset + run.first + len(run) * i // num_parts
        border = (position + block_size // 2) // block_size * block_size - offset
        borders.append(min(max(border, run.first), run.end))
    borders.append(run.end)
    parts = [TokenRange(run.chunk, borders[i], borders[i + 1]) for i in range(num_parts)]
    return [(parts[i], parts[-1 - i]) for i in range(num_shares)]
