"""Shared prefixes for traces that have only arrivals and lengths."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, islice

from moonpool.simulator.inputs.trace import TraceRequest

# Fitted to Mooncake's conversation trace: the part of the requests that begin like an earlier one, how many
# requests ago that one was (log-normal), and the part of the prompt that is equal (beta).
_REUSE = 0.55
_AGO, _AGO_SPREAD = 422, 0.98
_EQUAL = (2.0, 0.75)


def with_prefixes(requests: Sequence[TraceRequest], *, block_tokens: int, seed: int) -> list[TraceRequest]:
    """Return ``requests``, in order of arrival, with generated block ids.

    Lengths and arrivals are kept. Only full blocks are shared. The hit ratio of an LRU cache, by the part of
    the distinct blocks that it holds, is about that of the conversation trace.
    """
    rng, ids = random.Random(seed), count()
    chains: list[tuple[int, ...]] = []  # full blocks of each request
    found: list[TraceRequest] = []
    for request in requests:
        num_full, rest = divmod(request.input_tokens, block_tokens)
        begun: tuple[int, ...] = ()
        if chains and rng.random() < _REUSE:
            ago = min(max(round(rng.lognormvariate(math.log(_AGO), _AGO_SPREAD)), 1), len(chains))
            num_equal = round(rng.betavariate(*_EQUAL) * num_full)
            # Continue one that is long enough.
            older = (chain for chain in chains[-ago::-1] if len(chain) >= num_equal)
            begun = next(older, ())[:num_equal]
        chains.append((*begun, *islice(ids, num_full - len(begun))))
        found.append(replace(request, block_ids=(*chains[-1], *islice(ids, int(rest > 0)))))
    return found
