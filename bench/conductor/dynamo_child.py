"""Dynamo's RadixTree, in its own Python environment."""

from __future__ import annotations

import json
import random
import statistics
import time

from dynamo._core import RadixTree  # type: ignore[import-not-found,unused-ignore]

_CHAIN_BLOCKS = 128
_COPIES = (1, 1, 1, 2, 4)


class Tree:
    """A tree over chains of blocks, each on some of the nodes."""

    def __init__(self, num_nodes: int, num_blocks: int) -> None:
        self._rng = rng = random.Random(0)
        self._tree = RadixTree()
        self._chains = []
        for number in range(num_blocks // _CHAIN_BLOCKS):
            chain = [rng.getrandbits(63) for _ in range(_CHAIN_BLOCKS)]
            self._chains.append(chain)
            blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
            data = {"stored": {"parent_hash": None, "blocks": blocks}}
            packed = json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode()
            for node in rng.sample(range(num_nodes), rng.choice(_COPIES)):
                self._tree.apply_event(node, packed)

    def lookup_s(self, count: int) -> float:
        """Median seconds of so many lookups, with a random part of each prompt known."""
        prompts = []
        for _ in range(count):
            cut = self._rng.randrange(_CHAIN_BLOCKS + 1)
            rest = [self._rng.getrandbits(63) for _ in range(_CHAIN_BLOCKS - cut)]
            prompts.append(self._rng.choice(self._chains)[:cut] + rest)
        return self._median_s(prompts)

    def hop_s(self, count: int) -> float:
        """Median seconds of so many empty lookups."""
        return self._median_s([[]] * count)

    def _median_s(self, prompts: list[list[int]]) -> float:
        seconds = []
        for prompt in prompts:
            began_s = time.perf_counter()
            self._tree.find_matches(prompt)
            seconds.append(time.perf_counter() - began_s)
        return statistics.median(seconds)
