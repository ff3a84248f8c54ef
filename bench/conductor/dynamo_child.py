"""Runs in the environment of ai-dynamo-runtime and imports nothing of ours.

Fills its RadixTree, then for each line on standard input, a number, answers with the median seconds of so
many lookups, and of as many empty ones.
"""

import json
import random
import statistics
import sys
import time

from dynamo._core import RadixTree  # type: ignore[import-not-found]

CHAIN_BLOCKS = 128
COPIES = (1, 1, 1, 2, 4)


def main(num_nodes: int, num_blocks: int) -> None:
    rng = random.Random(0)
    tree = RadixTree()
    chains = []
    for number in range(num_blocks // CHAIN_BLOCKS):
        chain = [rng.getrandbits(63) for _ in range(CHAIN_BLOCKS)]
        chains.append(chain)
        blocks = [{"block_hash": block, "tokens_hash": block} for block in chain]
        event = {
            "event_id": number,
            "data": {"stored": {"parent_hash": None, "blocks": blocks}},
            "dp_rank": 0,
        }
        packed = json.dumps(event).encode()
        for node in rng.sample(range(num_nodes), rng.choice(COPIES)):
            tree.apply_event(node, packed)
    print("ready", flush=True)
    for line in sys.stdin:
        seconds: list[float] = []
        hops: list[float] = []
        for _ in range(int(line)):
            cut = rng.randrange(CHAIN_BLOCKS + 1)
            question = rng.choice(chains)[:cut] + [rng.getrandbits(63) for _ in range(CHAIN_BLOCKS - cut)]
            for keys, times in ((question, seconds), ([], hops)):
                began = time.perf_counter()
                tree.find_matches(keys)
                times.append(time.perf_counter() - began)
        print(json.dumps([statistics.median(seconds), statistics.median(hops)]), flush=True)


main(int(sys.argv[1]), int(sys.argv[2]))
