"""Laws of the scheduler, on a model that is a hash.

Whatever is batched, shared, preempted or cancelled, every sequence gets the tokens its lineage means, and
reads only KV that was written for it.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.scheduler import Scheduler
from moonpool.engine.batching.sequence import FinishReason, Sequence, State
from moonpool.engine.batching.step_plan import Chunk, StepEvent, StepOutput, StepPlan
from moonpool.engine.device.device import CpuDevice
from moonpool.engine.execution.input_builder import InputBuilder
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.speculation.speculator import Speculator
from moonpool.runtime.config.engine_options import SpeculativeOptions

BLOCK_SIZE = 4


def next_token(tokens: np.ndarray) -> int:
    """The hash model: few tokens, so that sequences often share prefixes."""
    return blake2b(tokens.astype(np.int32).tobytes()).digest()[0] % 3


def sequence(
    name: str,
    prompt: list[int],
    max_tokens: int,
    priority: int,
    arrived_s: float,
    patience_s: float = 0.0,
    tenant: str = "",
) -> Sequence:
    return Sequence(
        name,
        0,
        np.array(prompt, np.int32),
        len(prompt),
        sampling=Sampling(max_tokens=max_tokens),
        root_key=b"r" * 16,
        priority=priority,
        arrived_s=arrived_s,
        patience_s=patience_s,
        tenant=tenant,
    )


class HashModel:
    """Runs plans. The "KV" of a token is the hash of its prefix, checked by whoever reads it."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = np.zeros((num_blocks * BLOCK_SIZE,), np.uint64)

    def execute(self, plan: StepPlan) -> StepOutput:
        # The tokens that each row may know, itself the last.
        rows = [(s, s.token_ids) for s in plan.decodes]
        for draft in plan.drafts:
            tokens = np.concatenate((draft.sequence.token_ids, draft.token_ids))
            ends = range(draft.start + 1, len(tokens) + 1)
            rows += [(draft.sequence, tokens[:end]) for end in ends]
        for s, tokens in rows:
            self._write(s, tokens, len(tokens) - 1, 1)
        for chunk in plan.chunks:
            s, end = chunk.sequence, chunk.start + chunk.num_tokens
            self._write(s, s.token_ids, chunk.start, chunk.num_tokens)
            rows.append((s, s.token_ids[:end]))
        token_ids = []
        for s, tokens in rows:
            self._check(s, tokens)
            if len(tokens) >= s.num_tokens:
                token_ids.append(next_token(tokens))
        return StepOutput(token_ids, [], {})

    def _check(self, s: Sequence, tokens: np.ndarray) -> None:
        """Read what the last token attends to."""
        for position in range(len(tokens)):
            expected = self._kv(tokens, position)
            assert self.pool[self._slot(s, position)] == expected, f"{s} reads foreign KV"

    def _write(self, s: Sequence, tokens: np.ndarray, start: int, n: int) -> None:
        for position in range(start, start + n):
            self.pool[self._slot(s, position)] = self._kv(tokens, position)

    @staticmethod
    def _slot(s: Sequence, position: int) -> int:
        return s.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    @staticmethod
    def _kv(tokens: np.ndarray, position: int) -> np.uint64:
        data = tokens[: position + 1].astype(np.int32).tobytes()
        return np.uint64(int.from_bytes(blake2b(data, digest_size=8).digest(), "little"))


class Cluster:
    """A scheduler stepping over the hash model until told otherwise."""

    def __init__(
        self, num_blocks: int, max_batch_size: int = 4, max_batch_tokens: int = 8, **words: Any
    ) -> None:
        """``words``: of the scheduler."""
        self.pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.pool,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            max_len=num_blocks * BLOCK_SIZE,
            **words,
        )
        self.model = HashModel(num_blocks)
        self.events: list[StepEvent] = []
        self.num_drafted = 0

    def step(self) -> bool:
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        if self.scheduler.speculator is not None and not plan.chunks:
            self.scheduler.add_drafts(plan, self.scheduler.speculator.propose(plan.decodes))
        assert len(plan.decodes) + len(plan.chunks) <= self.scheduler.max_running
        self.num_drafted += sum(draft.num_tokens for draft in plan.drafts)
        assert plan.num_tokens <= self.scheduler.max_batch_tokens
        assert [s.row for s in plan.decodes] == list(range(len(plan.decodes)))
        self.events += self.scheduler.postprocess(plan, self.model.execute(plan), 0.0)
        self.pool.check_integrity()
        return True

    def run(self, limit: int = 3000) -> None:
        for _ in range(limit):
            if not self.step():
                return
        raise AssertionError("the scheduler goes round in circles")


class Guesser:
    """Proposes tokens that are right, but for some."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        tokens = sequence.token_ids.tolist()
        for _ in range(most):
            token = next_token(np.array(tokens))
            tokens.append((token + (len(tokens) % 5 == 0)) % 3)
        return tokens[sequence.num_tokens :]


class Failing:
    """Proposes one wrong token, and then fails."""

    def __init__(self) -> None:
        self.has_failed = False

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        if sequence.num_output_tokens:
            assert not self.has_failed, "asked again"
            self.has_failed = True
            raise RuntimeError("no idea")
        return [9]


def speculating(cluster: Cluster, proposer: str) -> None:
    made = {"guess": Guesser, "fail": Failing}
    method = "suffix" if proposer == "suffix" else "ngram"
    speculator = Speculator(SpeculativeOptions(method=method, num_tokens=5))
    speculator._make = made.get(proposer, speculator._make)
    cluster.scheduler.speculator = speculator


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), min_size=1, max_size=20),  # prompt
        st.integers(1, 12),  # max_tokens
        st.integers(0, 1),  # priority
        st.sampled_from(["", "a"]),  # tenant
        st.integers(0, 15),  # step it arrives at
        st.one_of(st.none(), st.integers(0, 40)),  # step it is cancelled at
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=160, deadline=None)
@given(
    requests=REQUESTS,
    num_blocks=st.integers(8, 24),
    max_batch_size=st.integers(1, 5),
    proposer=st.sampled_from(["none", "guess", "ngram", "suffix", "fail"]),
)
def test_nothing_is_dropped_repeated_or_leaked(requests, num_blocks, max_batch_size, proposer) -> None:
    cluster = Cluster(num_blocks, max_batch_size)
    if proposer != "none":
        speculating(cluster, proposer)
    nothing_is_lost(cluster, requests)


def nothing_is_lost(cluster: Cluster, requests: list[Any]) -> None:
    """Run the requests: see ``REQUESTS``."""
    sequences = {}
    for step in range(80):
        for i, (prompt, max_tokens, priority, tenant, arrives, cancelled) in enumerate(requests):
            if arrives == step:
                sequences[i] = sequence(f"r{i}", prompt, max_tokens, priority, float(step), tenant=tenant)
                cluster.scheduler.add(sequences[i])
            if cancelled == step and i in sequences and sequences[i].state is not State.FINISHED:
                cluster.scheduler.finish(sequences[i], FinishReason.CANCELLED, cluster.events)
        cluster.step()
    cluster.run()
    assert cluster.pool.num_used == 0
    assert cluster.scheduler.num_running == cluster.scheduler.num_waiting == 0
    for i, (prompt, max_tokens, *_) in enumerate(requests):
        events = [event for event in cluster.events if event.sequence is sequences[i]]
        tokens = [event.token_id for event in events if event.token_id >= 0]
        expected = list(prompt)
        for _ in range(max_tokens):
            expected.append(next_token(np.array(expected)))
        finishes = [event.finish_reason for event in events if event.finish_reason]
        assert len(finishes) == 1, "every sequence ends exactly once"
        if finishes == [FinishReason.LENGTH]:
            assert tokens == expected[len(prompt) :]
        else:
            assert finishes == [FinishReason.CANCELLED]
            assert tokens == expected[len(prompt) : len(prompt) + len(tokens)]
        assert [event.index for event in events if event.token_id >= 0] == list(range(len(tokens)))


def test_room_for_what_runs_is_not_spare() -> None:
    cluster = Cluster(num_blocks=8, max_batch_size=2)
    assert cluster.pool.num_spare == 8
    for i in range(2):
        cluster.scheduler.add(sequence(f"r{i}", [i] * 6, 8, 1, float(i)))
    cluster.step()
    assert cluster.scheduler.num_running == 2
    assert cluster.pool.num_spare == cluster.pool.num_free - 2
    # Nothing less than none.
    cluster.pool.allocate(cluster.pool.num_free - 1)
    assert cluster.pool.num_spare == 0


def test_admission_is_by_priority_then_arrival() -> None:
    cluster = Cluster(num_blocks=32, max_batch_size=1)
    for i, priority in enumerate([1, 1, 0, 1]):
        cluster.scheduler.add(sequence(f"r{i}", [i] * 6, 2, priority, float(i)))
    cluster.run()
    finished = [e.sequence.request_id for e in cluster.events if e.finish_reason]
    assert finished == ["r2", "r0", "r1", "r3"]


def test_what_waits_ends_only_out_of_its_queue() -> None:
    """A sequence that is not found there, because its turn is another's, would run without an owner."""
    cluster = Cluster(num_blocks=8)
    older, younger = sequence("older", [0] * 6, 2, 0, 0.0), sequence("younger", [1] * 6, 2, 0, 1.0)
    cluster.scheduler.add(older)
    cluster.scheduler.add(younger)
    younger.order = older.order
    with pytest.raises(AssertionError, match=r"younger.*is in no queue"):
        cluster.scheduler.finish(younger, FinishReason.CANCELLED, cluster.events)
    cluster.scheduler.finish(older, FinishReason.CANCELLED, cluster.events)
    cluster.run()
    assert cluster.pool.num_used == 0


def test_a_priority_is_heard_by_its_own_tenant_only() -> None:
    cluster = Cluster(num_blocks=32, max_batch_size=1)
    asked = [("a", 0), ("b", 0), ("a", 0), ("a", -9), ("b", -1)]
    for i, (tenant, priority) in enumerate(asked):
        cluster.scheduler.add(sequence(f"{tenant}{i}", [i] * 6, 2, priority, float(i), tenant=tenant))
    cluster.run()
    finished = [e.sequence.request_id for e in cluster.events if e.finish_reason]
    assert finished == ["a3", "b4", "a0", "a2", "b1"]


def test_a_priority_preempts_nobody_elses() -> None:
    def preempted(*priorities: int) -> list[str]:
        cluster = Cluster(num_blocks=12, max_batch_size=3)
        for i, (tenant, priority) in enumerate(zip("aba", priorities, strict=True)):
            name = f"{tenant}{i}"
            cluster.scheduler.add(sequence(name, [i] * 6, 20, priority, float(i), tenant=tenant))
        cluster.run()
        return [event.sequence.request_id for event in cluster.events if event.preempted]

    plain, bold = preempted(0, 0, 0), preempted(0, 5, -9)
    assert plain[0] == "a2"
    assert bold[0] == "a0", "its own tenant's"
    assert [name[0] for name in bold] == [name[0] for name in plain]


def test_a_patient_one_lets_those_pass_that_come_in_time() -> None:
    cluster = Cluster(num_blocks=32, max_batch_size=1)
    for i, patience_s in enumerate([0.0, 1.5, 0.0, 0.0]):
        cluster.scheduler.add(sequence(f"r{i}", [i] * 6, 2, 0, float(i), patience_s))
    cluster.run()
    finished = [e.sequence.request_id for e in cluster.events if e.finish_reason]
    assert finished == ["r0", "r2", "r1", "r3"]


def test_the_youngest_gives_its_blocks_and_loses_nothing() -> None:
    cluster = Cluster(num_blocks=8, max_batch_size=2)
    old, young = sequence("old", [0] * 6, 22, 0, 0.0), sequence("young", [1] * 6, 20, 0, 1.0)
    cluster.scheduler.add(old)
    cluster.scheduler.add(young)
    cluster.run()
    preempted = [event.sequence for event in cluster.events if event.preempted]
    assert set(preempted) == {young}
    assert cluster.scheduler.num_preemptions == len(preempted) > 0
    for s, n in ((old, 22), (young, 20)):
        assert sum(e.sequence is s and e.token_id >= 0 for e in cluster.events) == n


def test_a_long_prompt_does_not_stop_decoding() -> None:
    cluster = Cluster(num_blocks=40, max_batch_size=4, max_batch_tokens=8)
    talker = sequence("talker", [0], 12, 0, 0.0)
    cluster.scheduler.add(talker)
    cluster.step()
    cluster.scheduler.add(sequence("reader", [1] * 60, 1, 0, 1.0))
    for _ in range(5):
        before = talker.num_tokens
        cluster.step()
        assert talker.num_tokens == before + 1
    cluster.run()
    chunks = [e for e in cluster.events if e.sequence.request_id == "reader"]
    assert [e.num_computed_tokens for e in chunks] == [7, 14, 21, 28, 35, 42, 49, 56, 60]


def test_a_prefix_is_computed_once_and_one_token_is_always_left_to_compute() -> None:
    cluster = Cluster(num_blocks=40)
    for name, prompt in (("a", [0, 1] * 6), ("b", [0, 1] * 6), ("c", [0, 1] * 8)):
        s = sequence(name, prompt, 1, 0, 0.0)
        cluster.scheduler.add(s)
        cluster.run()
        assert s.num_cached_tokens == {"a": 0, "b": 8, "c": 12}[name]


def test_sequences_that_come_with_blocks_do_not_keep_each_other_out() -> None:
    cluster = Cluster(num_blocks=8)
    for i in range(2):
        s = sequence(f"r{i}", [i] * 28, 2, 0, float(i))
        s.block_table = cluster.pool.allocate(4)
        cluster.scheduler.add(s)
    cluster.run()
    assert sum(event.finish_reason is FinishReason.LENGTH for event in cluster.events) == 2
    assert cluster.pool.num_used == 0


def with_prefix(cluster: Cluster, name: str, prompt: list[int], num_blocks: int) -> Sequence:
    """A prefill that comes with the first blocks of its prompt, which the pool holds."""
    s = sequence(name, prompt, 4, 0, 1.0)
    s.prefill_only = True
    s.hash_blocks(BLOCK_SIZE, num_blocks)
    blocks = cluster.pool.match(s.keys[:num_blocks])
    assert len(blocks) == num_blocks
    cluster.pool.acquire(blocks)
    s.set_prefix(blocks, BLOCK_SIZE)
    return s


def test_a_prefill_with_one_token_left_ends_with_its_first_token() -> None:
    cluster = Cluster(num_blocks=16)
    prompt = [0, 1] * 4 + [1]
    cluster.scheduler.add(sequence("first", prompt, 1, 0, 0.0))
    cluster.run()
    again = with_prefix(cluster, "again", prompt, 2)
    cluster.scheduler.add(again)
    cluster.run()
    assert again.state is State.KEPT_FOR_TRANSFER
    assert sum(event.sequence is again for event in cluster.events) == 1
    assert again.num_cached_tokens == 8
    cluster.scheduler.release(again)
    assert cluster.pool.num_used == 0


def test_a_prefill_that_came_with_blocks_takes_what_has_come_to_the_pool_since() -> None:
    cluster = Cluster(num_blocks=16)
    prompt = [0, 1] * 8
    cluster.scheduler.add(sequence("first", prompt[:5], 1, 0, 0.0))
    cluster.run()
    late = with_prefix(cluster, "late", prompt, 1)
    cluster.scheduler.add(sequence("other", prompt, 1, 0, 0.0))
    cluster.run()
    cluster.scheduler.add(late)
    cluster.run()
    assert late.num_cached_tokens == 12
    cluster.scheduler.release(late)
    assert cluster.pool.num_used == 0


def test_a_prompt_takes_no_more_of_a_step_than_the_decoding_sequences_leave() -> None:
    """At least a block, so that it ends."""
    pool = BlockPool(64, BLOCK_SIZE)
    scheduler = Scheduler(pool, max_batch_size=8, max_batch_tokens=64, max_len=64)
    model = HashModel(64)
    asked: list[float] = []

    def timely_tokens(decodes: list[Sequence], start: int, tbt_s: float) -> int:
        asked.append(tbt_s)
        return 6 if start == 0 else 0

    scheduler.timely_tokens = timely_tokens
    decoding = sequence("a", [1, 2, 1], 50, 0, 0.0)
    decoding.tbt_s = 0.05
    scheduler.add(decoding)
    while not scheduler.decoding:
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.postprocess(plan, model.execute(plan), 0.0)
    assert asked == []
    scheduler.add(sequence("b", [2] * 20, 4, 0, 1.0))
    sizes = []
    while scheduler.waiting or scheduler.prefilling:
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.decodes == [decoding]
        sizes += [chunk.num_tokens for chunk in plan.chunks]
        scheduler.postprocess(plan, model.execute(plan), 0.0)
    assert sizes == [6, 4, 4, 4, 2]
    assert set(asked) == {0.05}


def test_sequences_that_join_beside_a_part_of_a_prompt_are_in_the_next_step_too() -> None:
    """The inputs of steps that only decode are kept while the batch is the same, whatever came in between."""
    inputs = InputBuilder(
        max_batch_size=4, max_batch_tokens=16, max_len=32, block_size=BLOCK_SIZE, device=CpuDevice()
    )
    decoding = [sequence(name, [1, 2], 8, 0, 0.0) for name in "ab"]
    for block, one in enumerate(decoding):
        one.block_table = [block]
    prompt = sequence("c", [1] * 6, 8, 0, 0.0)
    prompt.block_table = [2, 3]
    assert inputs.prepare(StepPlan(decoding[:1], [], [], 1, [])).num_decodes == 1
    assert inputs.prepare(StepPlan(decoding, [Chunk(prompt, 0, 6, True)], [], 2, [])).num_decodes == 2
    after = inputs.prepare(StepPlan(decoding, [], [], 2, []))
    assert (after.num_decodes, len(after.token_ids), len(after.decode_lens)) == (2, 2, 2)
