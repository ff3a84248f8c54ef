"""The tokens of a batch shared out to ranks that hold the same weights and the same KV: context parallel."""

from __future__ import annotations

from engine.parallel.portion import Portion, Run


def share_out(batch: Portion, num_shares: int) -> list[Portion]:
    """Each share's tokens of ``batch``: as many, and as much for each to attend to, as nearly as can be.

    A prompt's later tokens attend to more. So a run is cut into 2 × num_shares, of which a share takes one
    from the front and the one as far from the end: all pairs attend to as much. Which share takes which pair
    is chosen so that what cannot be divided evenly does not add up.
    """
    n, first = len(batch.decodes), batch.decodes.start
    decodes = [
        range(first + n * i // num_shares, first + n * (i + 1) // num_shares) for i in range(num_shares)
    ]
    runs: list[list[Run]] = [[] for _ in decodes]
    num_tokens = [len(some) for some in decodes]
    for run in batch.runs:
        pairs = sorted(_pairs(run, num_shares), key=lambda pair: -sum(map(len, pair)))
        shares = sorted(range(num_shares), key=num_tokens.__getitem__)
        for share, pair in zip(shares, pairs, strict=True):
            runs[share] += [half for half in pair if len(half)]
            num_tokens[share] += sum(map(len, pair))
    return [Portion(some, tuple(own)) for some, own in zip(decodes, runs, strict=True)]


def _pairs(run: Run, num_shares: int) -> list[tuple[Run, Run]]:
    """The i-th has the i-th of the run's 2 × num_shares parts, and the i-th from the end."""
    num_parts = 2 * num_shares
    borders = [run.first + len(run) * i // num_parts for i in range(num_parts + 1)]
    parts = [Run(run.chunk, borders[i], borders[i + 1]) for i in range(num_parts)]
    return [(parts[i], parts[-1 - i]) for i in range(num_shares)]
