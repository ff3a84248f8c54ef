"""A rank that makes every exchange of a link with the others, and compares with plain torch.

Arguments: one line of JSON on stdin. Every rank knows what all give, by the seed. Says so when it has made
the rounds asked for, and goes on; ends with 3, a line saying when and why, when another rank is lost.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from engine.config import ModelConfig
from engine.errors import RankLost
from engine.parallel.board import Board, SharedMemory
from engine.parallel.clock import ExchangeClock
from engine.parallel.link import Link
from engine.parallel.plan import ParallelPlan
from engine.parallel.shm_link import ExchangeShape, ShmLink
from engine.parallel.torch_link import TorchLink

MAX_TOKENS = 40


def shape(config: ModelConfig, plan: ParallelPlan) -> ExchangeShape:
    return ExchangeShape.of(config, plan, max_tokens=MAX_TOKENS, max_rows=4, dtype=torch.float32)


def opened(words: dict[str, Any], config: ModelConfig, plan: ParallelPlan, clock: ExchangeClock) -> Link:
    shard = plan.shard(config, words["rank"])
    if words["link"] == "shm":
        board = Board(SharedMemory.open(words["board"]), shard.rank, plan.world_size, words["timeout_s"])
        memory = SharedMemory.open(words["exchange"])
        return ShmLink(board, memory, shape(config, plan), config, plan, shard, clock)
    store = TCPStore("127.0.0.1", words["port"], timeout=timedelta(seconds=60))
    cpu, dtype = torch.device("cpu"), torch.float32
    return TorchLink("gloo", store, words["timeout_s"], 60, config, plan, shard, dtype, cpu, clock)


def close(found: Tensor, expected: Tensor) -> None:
    """Up to the order of a sum."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


class Exchanges:
    """Random ones, the same on every rank; every third fills the link to its largest size."""

    def __init__(self, link: Link, clock: ExchangeClock, place: int, num_ranks: int, hidden: int) -> None:
        self.link, self.clock, self.place, self.num_ranks, self.hidden = link, clock, place, num_ranks, hidden
        self.draw = random.Random(0)
        self.kinds = [self.all_reduce, self.all_gather, self.reduce_scatter, self.all_to_all]

    def rows(self, n: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[n, hidden] that another call does not give."""
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        return torch.randn(n, self.hidden, generator=generator).mul(100).to(dtype)

    def counts(self, total: int) -> list[int]:
        """Of ``num_ranks`` runs of ``total`` in all, some of them empty."""
        cuts = sorted(
            self.draw.choice([0, total, self.draw.randint(0, total)]) for _ in range(self.num_ranks - 1)
        )
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]

    def one(self, i: int) -> None:
        total = MAX_TOKENS if i % 3 == 0 else self.draw.choice([0, 1, self.draw.randint(0, MAX_TOKENS)])
        self.draw.choice(self.kinds)(total)

    def all_reduce(self, total: int) -> None:
        parts = [self.rows(total) for _ in range(self.num_ranks)]
        close(self.link.all_reduce(parts[self.place].clone()), sum(parts))

    def all_gather(self, total: int) -> None:
        counts = self.counts(total)
        dtype = self.draw.choice([torch.float32, torch.int32, torch.bfloat16])
        parts = [self.rows(n, dtype) for n in counts]
        assert self.link.all_gather(parts[self.place], counts).equal(torch.cat(parts))

    def reduce_scatter(self, total: int) -> None:
        counts = self.counts(total)
        parts = [self.rows(total) for _ in counts]
        expected = sum(parts).split(counts)[self.place]  # type: ignore[union-attr]
        close(self.link.reduce_scatter(parts[self.place], counts), expected)

    def swap(self, total: int) -> None:
        counts = self.counts(total)
        parts = [self.rows(n) for n in counts]
        given = parts[self.place].clone()
        take = self.link.swap(given, counts)
        given.zero_()
        for share in self.draw.sample(range(self.num_ranks), self.num_ranks):
            if share != self.place:
                assert take(share).equal(parts[share])

    def all_to_all(self, total: int) -> None:
        counts = [self.counts(total) for _ in range(self.num_ranks)]
        parts = [self.rows(total) for _ in counts]
        received = [of_rank[self.place] for of_rank in counts]
        before = self.clock.num_all_to_alls, self.clock.all_to_all_nbytes
        arrived = self.link.all_to_all(parts[self.place], counts[self.place], received)
        pieces = [part.split(sent)[self.place] for part, sent in zip(parts, counts, strict=True)]
        assert arrived.equal(torch.cat(pieces))
        nbytes = total * self.hidden * 4
        assert (self.clock.num_all_to_alls, self.clock.all_to_all_nbytes) == (
            before[0] + 1,
            before[1] + nbytes,
        )


def main() -> None:
    torch.set_num_threads(1)
    words = json.loads(sys.stdin.readline())
    config = ModelConfig.from_checkpoint(Path(words["model"]))
    plan = ParallelPlan(words["tp"], cp=words["cp"])
    clock = ExchangeClock()
    try:
        link = opened(words, config, plan, clock)
        exchanges = Exchanges(link, clock, words["rank"], plan.world_size, config.hidden_size)
        if plan.cp > 1:
            exchanges.kinds = [exchanges.swap]
        for i in count():
            exchanges.one(i)
            if i + 1 == words["rounds"]:
                assert clock.num_collectives == i + 1
                assert len(clock.all_to_all_samples_s) == clock.num_all_to_alls
                assert 0 <= clock.all_to_all_ns < clock.collective_ns
                assert (clock.num_all_to_alls > 0) == (exchanges.all_to_all in exchanges.kinds)
                print("all were right", flush=True)
    except RankLost as error:
        print(f"{time.monotonic()} {error}", flush=True)
        # Threads of Gloo that still wait would make an end in order one by a signal.
        os._exit(3)


if __name__ == "__main__":
    main()
