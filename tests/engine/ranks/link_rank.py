"""A rank that makes every exchange of a link with the others, and compares with plain torch.

Arguments: one line of JSON on stdin, its assignment and the rounds to make. Every rank knows what all give,
by the seed. Says so whenever it has made as many; ends with 3, a line saying when and why, when another rank
is lost.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.collectives.board import SharedBoard, SharedMemory
from moonpool.engine.collectives.exchange_clock import ExchangeClock
from moonpool.engine.collectives.link import Link
from moonpool.engine.errors import RankLost
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.link_factory import open_link
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard

MAX_TOKENS = 40


def close(found: Tensor, expected: Tensor) -> None:
    """Up to the order of a sum."""
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


class Exchanges:
    """Random ones, the same on every rank; every third fills the link to its largest size."""

    def __init__(
        self, link: Link, clock: ExchangeClock, config: ModelConfig, plan: ParallelPlan, shard: Shard
    ) -> None:
        self.link, self.clock, self.shard, self.hidden = link, clock, shard, config.hidden_size
        self.num_ranks = max(plan.tp, plan.cp)  # of one exchange within a stage
        self.place = shard.tp_rank + shard.cp_rank
        self.heads = {s.rank: s.vocab for s in plan.head_shards(config)}
        self.vocab_size = config.vocab_size
        self.draw = random.Random(0)
        self.kinds = [self.gather]
        if plan.tp > 1:
            self.kinds += [self.all_reduce, self.all_gather, self.reduce_scatter, self.all_to_all]
        if plan.cp > 1:
            self.kinds = [self.gather_cp, self.scatter_cp]
        if plan.pp > 1:
            self.kinds.append(self.pass_on)
        self.num_counted = 0

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
        self.num_counted += 1
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

    def gather_cp(self, total: int) -> None:
        counts = self.counts(total)
        parts = [self.rows(n) for n in counts]
        given = parts[self.place].clone()
        for found, part in zip(self.link.gather_cp(given, counts), parts, strict=True):
            assert found.equal(part)

    def scatter_cp(self, total: int) -> None:
        counts = self.counts(total)
        wholes = [self.rows(total) for _ in counts]
        given = wholes[self.place].clone()
        for found, whole in zip(self.link.scatter_cp(given, counts), wholes, strict=True):
            assert found.equal(whole.split(counts)[self.place])

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

    def pass_on(self, total: int) -> None:
        """Several pieces from stage to stage; each sends what another does not, and then writes over it."""
        n, num_pieces = max(1, total), 3
        for _ in range(num_pieces):
            of_stage = [self.rows(n) for _ in range(self.shard.pp)]
            if not self.shard.is_first:
                assert self.link.receive(n).equal(of_stage[self.shard.stage - 1])
            if not self.shard.is_last:
                self.link.send(of_stage[self.shard.stage])
                of_stage[self.shard.stage].zero_()
        self.num_counted += (0 if self.shard.is_last else num_pieces) - 1

    def gather(self, total: int) -> None:
        n = 1 + total % 4
        generator = torch.Generator().manual_seed(self.draw.randrange(1 << 30))
        whole = torch.randn(n, self.vocab_size, generator=generator)
        words = self.heads.get(self.shard.rank)
        ours = None if words is None else whole[:, words.start : words.stop].contiguous()
        if self.shard.rank == 0:
            found = self.link.gather(ours, n)
            assert found is not None
            assert found.equal(whole)
        elif ours is not None:
            self.link.gather(ours, n)
        else:
            self.num_counted -= 1


def main() -> None:
    torch.set_num_threads(1)
    words = json.loads(sys.stdin.readline())
    assignment = Assignment.unpack(words["assignment"])
    config = ModelConfig.from_checkpoint(Path(assignment.model))
    plan, shard = assignment.plan, assignment.shard(config)
    timeout_s = assignment.options.parallel.timeout_s
    board = SharedBoard(SharedMemory.open(assignment.board), shard.rank, plan.world_size, timeout_s)
    clock = ExchangeClock()
    try:
        exchanges = Exchanges(open_link(assignment, config, board, clock), clock, config, plan, shard)
        for i in count():
            exchanges.one(i)
            if (i + 1) % words["rounds"] == 0:
                assert clock.num_collectives == exchanges.num_counted
                assert len(clock.all_to_all_samples_s) == clock.num_all_to_alls
                assert clock.all_to_all_ns <= clock.collective_ns
                assert (clock.num_all_to_alls > 0) == (exchanges.all_to_all in exchanges.kinds)
                print("all were right", flush=True)
    except RankLost as error:
        print(f"{time.monotonic()} {error}", flush=True)
        # Threads of Gloo that still wait would make an end in order one by a signal.
        os._exit(3)


if __name__ == "__main__":
    # As in a step.
    with torch.inference_mode():
        main()
