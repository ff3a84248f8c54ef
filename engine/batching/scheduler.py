"""Continuous batching: the sequences and blocks of the next step, and the effect of its tokens."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Plans
from operator import attrgetter
from typing import Protocol

from moonpool.engine.batching.micro_batch import MicroBatch
from moonpool.engine.batching.packer import Packer
from moonpool.engine.batching.sequence import FinishReason, Sequence, State, TokenLogprobs
from moonpool.engine.batching.step_plan import ENDS, Chunk, Draft, StepEvent, StepOutput, StepPlan
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.memory.packing import Packing
from moonpool.runtime import turns

_order = attrgetter("order")


class Speculator(Protocol):
    """Proposes tokens: ``engine.speculation.speculator.Speculator``."""

    def may_draft(self, decodes: list[Sequence]) -> bool: ...

    def proposing_s(self, decodes: list[Sequence]) -> float: ...

    def propose(self, decodes: list[Sequence]) -> list[Draft]: ...

    def verified(self, draft: Draft, num_accepted: int) -> None: ...

    def stepped(self, decodes: list[Sequence], seconds: float) -> None: ...


class Scheduler:
    """Continuous batching with chunked prefill, over a BlockPool. Pure bookkeeping, one thread.

    Every step has all decoding sequences of a micro-batch, of which there is one unless steps are pipelined.
    Prompts get the rest of the token budget, oldest first, and no more
    than lets the step end when the decoding sequences want their next token. A prompt
    is admitted with all its blocks, so a running prefill never waits for one. When a decoding sequence
    needs a block and none is free, the last sequence is preempted: it loses its blocks and is computed
    again later. Its sealed blocks stay cached, so that usually costs little. A sequence's priority orders it
    among those of its tenant only.

    Where all layers of a model have windows, a sequence releases the blocks that every window has passed,
    unless its blocks are for another node. Where only some have, what the others keep of such blocks goes
    into packs: see ``Packer``.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        max_batch_size: int,
        max_batch_tokens: int,
        max_len: int,
        window: int = 0,
        packing: Packing | None = None,
        num_micro_batches: int = 1,
    ) -> None:
        """``max_len``: most tokens of one sequence. The pool must have room for one such sequence.
        ``window``: the widest of all layers in tokens; 0: some layer attends to all tokens.
        ``packing``: of blocks where only some layers have windows; None: they are not packed.
        ``num_micro_batches``: that many steps may be in flight, see ``schedule``."""
        assert max_len <= pool.num_blocks * pool.block_size
        self.pool = pool
        self.max_running = min(max_batch_size, max_batch_tokens)
        self.max_batch_tokens = max_batch_tokens
        self.max_len = max_len
        self.window = window
        self._packer = None if packing is None else Packer(pool, packing)
        self.waiting: list[Sequence] = []  # by order; only those added with blocks have any
        self.ready: list[Sequence] = []  # by order; they only need a row, all KV is computed
        self.prefilling: list[Sequence] = []
        self.micro_batches = [MicroBatch(number) for number in range(num_micro_batches)]
        self.admission_paused = False  # while anything runs, to gather room for an older sequence
        self._newest = 0  # the micro-batch of the last plan
        # Called with a sequence and the index of its first full block, before these blocks are sealed.
        self.on_full: Callable[[Sequence, int], None] | None = None
        # Prompt tokens after the given number of earlier ones that fit into a step with these sequences, so
        # that it takes at most so many seconds. None: any number.
        self.timely_tokens: Callable[[list[Sequence], int, float], int] | None = None
        self.speculator: Speculator | None = None  # None: one token of a sequence a step
        # While a later step is in flight: blocks that only it may use.
        self._in_flight = False
        self._unused: list[list[int]] = []
        self.num_preemptions = 0
        pool.num_growing = lambda: self.num_running

    @property
    def decoding(self) -> list[Sequence]:
        """The decoding sequences. Do not change the list."""
        first, *others = self.micro_batches
        return first.decoding if not others else [s for batch in self.micro_batches for s in batch.decoding]

    @property
    def num_running(self) -> int:
        return sum(map(len, self.micro_batches)) + len(self.prefilling)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.ready)

    def add(self, sequence: Sequence) -> None:
        """Queue the sequence. The scheduler releases the blocks in its table from now on."""
        if sequence.block_table and sequence.num_computed_tokens >= sequence.num_tokens:
            self._drop_last_block(sequence)
        needs_only_row = sequence.block_table and sequence.num_computed_tokens == sequence.num_tokens - 1
        if needs_only_row and not sequence.prefill_only:
            queue = self.ready
        else:
            queue = self.waiting
        sequence.state = State.WAITING
        turns.join(queue, sequence)

    def take_blocks(self, sequence: Sequence, num_tokens: int, max_hit_tokens: int) -> bool:
        """Allocate blocks for ``num_tokens`` tokens, at most ``max_hit_tokens`` of them cached.

        Return False and change nothing when there is not enough room. One block for each running sequence
        must stay free, so that new sequences do not preempt running ones.
        """
        block_size, pool = self.pool.block_size, self.pool
        max_hit_blocks = max_hit_tokens // block_size
        sequence.hash_blocks(block_size, max_hit_blocks)
        hits = [] if sequence.prompt_logprobs else pool.match(sequence.keys[:max_hit_blocks])
        num_new = -(-num_tokens // block_size) - len(hits)
        if pool.num_free - pool.num_idle(hits) < num_new + self.num_running:
            return False
        pool.acquire(hits)
        sequence.block_table = hits + pool.allocate(num_new)
        sequence.num_sealed_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * block_size
        if sequence.num_preemptions == 0:
            sequence.num_cached_tokens = sequence.num_computed_tokens
        return True

    def extend(self, sequence: Sequence) -> bool:
        """Allocate blocks for tokens that were appended to a sequence in no queue, and for one more. Return
        False and change nothing without room: as ``take_blocks``."""
        missing = -(-(sequence.num_tokens + 1) // self.pool.block_size) - len(sequence.block_table)
        if missing > 0:
            if self.pool.num_free < missing + self.num_running:
                return False
            sequence.block_table += self.pool.allocate(missing)
        return True

    def schedule(self, in_flight: Plans[StepPlan] = ()) -> StepPlan | None:
        """Return the next step, with all blocks allocated, or None when nothing can run.

        ``in_flight``: the steps that have not ended, fewer than there are micro-batches. The new one has
        sequences of none of them. None then also means that one must end first, which may release blocks.
        """
        while self.ready and self.num_running < self.max_running:
            self._start_decoding(self.ready.pop(0))
        batch = self._next_micro_batch(in_flight)
        if in_flight and len(self._short_of_blocks(batch)) > self.pool.num_free:
            return None
        preempted = self._grow_tables(batch)
        if len(self.micro_batches) > 1:
            batch.give_surplus(self.micro_batches)
        budget = min(self.max_batch_tokens - len(batch), self._timely_tokens(batch.decoding))
        chunks: list[Chunk] = []
        stepping = {id(chunk.sequence) for plan in in_flight for chunk in plan.chunks}
        for sequence in self.prefilling:
            if id(sequence) not in stepping:
                budget -= self._add_chunk(chunks, sequence, budget)
        # A sequence that was just preempted would take its blocks back.
        takes_more = not preempted and (not self.admission_paused or self.num_running == 0)
        while budget > 0 and self.waiting and takes_more and self.num_running < self.max_running:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.pop(0)
            sequence.state = State.PREFILLING
            self.prefilling.append(sequence)
            budget -= self._add_chunk(chunks, sequence, budget)
        if not batch.decoding and not chunks and not preempted:
            return None
        self._newest = batch.number
        return self._plan(batch, chunks, preempted)

    def _next_micro_batch(self, in_flight: Plans[StepPlan]) -> MicroBatch:
        """Return the one after the newest step's that has sequences and no step in flight."""
        stepping = {plan.micro_batch for plan in in_flight}
        n = len(self.micro_batches)
        inorder = [self.micro_batches[(self._newest + 1 + i) % n] for i in range(n)]
        free = [batch for batch in inorder if batch.number not in stepping]
        return next((batch for batch in free if batch.decoding), free[0])

    def _plan(
        self,
        batch: MicroBatch,
        chunks: list[Chunk],
        preempted: list[Sequence],
        after: list[int] | None = None,
    ) -> StepPlan:
        moved = batch.take_moved()
        plan = StepPlan(
            batch.decoding.copy(), chunks, preempted, batch.version, moved, after, micro_batch=batch.number
        )
        if self._packer is not None:
            plan.moves = self._packer.moves(plan.sequences(), self.num_running)
        return plan

    def add_drafts(self, plan: StepPlan, drafts: list[Draft]) -> None:
        """Add proposals to the plan, the newest one, as far as the token budget and the pool have room."""
        left, size = self.max_batch_tokens - plan.num_tokens, self.pool.block_size
        for draft in drafts:
            sequence = draft.sequence
            index = sequence.num_tokens - sequence.num_prompt_tokens
            # The step's last sampled token is the last one of the sequence at most.
            ends = min(sequence.sampling.max_tokens - index, self.max_len - sequence.num_tokens) - 1
            num_tokens = min(draft.num_tokens, left, ends)
            # One block for each running sequence stays free.
            while sequence.num_tokens + num_tokens > len(sequence.block_table) * size:
                if self.pool.num_free <= self.num_running:
                    num_tokens = len(sequence.block_table) * size - sequence.num_tokens
                    break
                self._grow(sequence)
            if num_tokens > 0:
                left -= num_tokens
                plan.drafts.append(Draft(sequence, draft.start, draft.proposed[:num_tokens]))
        plan.moved_blocks += self.micro_batches[plan.micro_batch].take_moved()

    def _timely_tokens(self, decoding: list[Sequence]) -> int:
        """Most prompt tokens of the next step, at least a block: prompts always go on."""
        prompts = self.prefilling or self.waiting
        tbt_s = min([sequence.tbt_s for sequence in decoding], default=math.inf) if prompts else math.inf
        if self.timely_tokens is None or tbt_s == math.inf:
            return self.max_batch_tokens
        num_tokens = self.timely_tokens(decoding, prompts[0].num_computed_tokens, tbt_s)
        return max(num_tokens, self.pool.block_size)

    def schedule_ahead(self, last: StepPlan) -> StepPlan | None:
        """Return the step after ``last``, before its tokens are known: one more token of each decoding
        sequence, and of those that need only a row. None: there is other work, or the tokens are needed.
        With one micro-batch.

        A sequence that ends with ``last`` unforeseen has a row in it, too; its token is dropped.
        """
        if last.runs or self.waiting or self.prefilling or self.admission_paused:
            return None
        if self.speculator is not None and self.speculator.may_draft(self.decoding):
            return None
        if any(s.cancelled or s.withdrawn or s.sampling.needs_tokens for s in (*self.decoding, *self.ready)):
            return None
        rows = {id(sequence): row for row, sequence in enumerate(last.decodes)}
        ending = [id(s) in rows and self._ends_by_length(s) for s in self.decoding]
        num_joining = min(len(self.ready), self.max_running - self.num_running)
        if all(ending) and not num_joining:
            return None
        size = self.pool.block_size
        # The last token of ``last`` is not counted yet.
        growing = [
            s
            for s, ends in zip(self.decoding, ending, strict=True)
            if not ends and s.num_tokens + (id(s) in rows) > len(s.block_table) * size
        ]
        if len(growing) + num_joining > self.pool.num_free:
            return None
        for sequence in growing:
            self._grow(sequence)
        for _ in range(num_joining):
            sequence = self.ready.pop(0)
            self._start_decoding(sequence)
            if sequence.num_tokens > len(sequence.block_table) * size:
                self._grow(sequence)
            ending.append(False)
        after = [ENDS if ends else rows.get(id(s), -1) for s, ends in zip(self.decoding, ending, strict=True)]
        return self._plan(self.micro_batches[0], [], [], after)

    def step_ended(self, *, in_flight: bool) -> None:
        """Release the blocks that only the step that ended used. ``in_flight``: a later one was launched
        already, so that what ``postprocess`` releases is kept until that has ended, too."""
        unused, self._unused, self._in_flight = self._unused, [], in_flight
        for blocks in unused:
            self.pool.release(blocks)

    def _ends_by_length(self, sequence: Sequence) -> bool:
        """Whether the next token is the sequence's last one, whatever it is."""
        index = sequence.num_tokens - sequence.num_prompt_tokens
        return index + 1 >= sequence.sampling.max_tokens or sequence.num_tokens + 1 >= self.max_len

    def postprocess(self, plan: StepPlan, output: StepOutput, now_s: float) -> list[StepEvent]:
        """Apply the step's results: append tokens, seal full blocks, release finished sequences."""
        events = plan.preemptions()
        if self._packer is not None:
            self._packer.moved(plan.moves, self._note_packed, self._release_blocks)
        block_size = self.pool.block_size
        logprobs = output.logprobs
        drafts = self._verified_rows(plan, output) if plan.drafts else {}
        for i, sequence in enumerate(plan.decodes):
            for row in drafts.get(i, (i,)):
                if sequence.state is not State.DECODING:
                    break  # it ended while this step was in flight, or with a token of this step
                computed = sequence.num_computed_tokens + 1
                sequence.num_computed_tokens = computed
                if computed % block_size == 0:
                    self.seal_computed(sequence)
                self._take_token(sequence, output.token_ids[row], logprobs[row] if logprobs else None, events)
                events[-1].accepted = row != i and events[-1].token_id >= 0
                self._pass_blocks(sequence)
        sampled = len(plan.decodes) + sum(draft.num_tokens for draft in plan.drafts)
        for i, chunk in enumerate(plan.chunks):
            sequence = chunk.sequence
            sequence.num_computed_tokens += chunk.num_tokens
            sequence.prompt_rows += output.prompt_logprobs.get(i, ())
            self.seal_computed(sequence)
            if not chunk.last:
                if sequence.cancelled:
                    self.finish(sequence, FinishReason.CANCELLED, events)
                else:
                    events.append(StepEvent(sequence, sequence.num_computed_tokens))
                    self._pass_blocks(sequence)
                continue
            sequence.computed_s = now_s
            self.prefilling.remove(sequence)
            if sequence.prefill_only:
                sequence.state = State.KEPT_FOR_TRANSFER
                self._release_adapter(sequence)
            else:
                self._start_decoding(sequence)
            self._take_token(
                sequence, output.token_ids[sampled], logprobs[sampled] if logprobs else None, events
            )
            if sequence.prompt_logprobs:
                events[-1].prompt_logprobs = sequence.prompt_rows
                sequence.prompt_logprobs = False  # reported once, also when computed again
            sampled += 1
        return events

    def _verified_rows(self, plan: StepPlan, output: StepOutput) -> dict[int, list[int]]:
        """Return the rows of the step's tokens that sequences get, for each decode with a draft: its own, and
        those of drafted tokens as long as each is the token that was sampled before it."""
        assert self.speculator is not None
        rows: dict[int, list[int]] = {}
        first, tokens = len(plan.decodes), output.token_ids
        for draft in plan.drafts:
            valid = rows[draft.sequence.row] = [draft.sequence.row]
            for row, proposed in enumerate(draft.proposed, first):
                if proposed != tokens[valid[-1]]:
                    break
                valid.append(row)
            first += draft.num_tokens
            self.speculator.verified(draft, len(valid) - 1)
        return rows

    def seal_computed(self, sequence: Sequence) -> None:
        """Seal every computed full block. An equal sealed block replaces it in the block table."""
        block_size, table = self.pool.block_size, sequence.block_table
        num_full = sequence.num_computed_tokens // block_size
        sequence.hash_blocks(block_size, num_full)
        keys = sequence.keys
        if self.on_full is not None and num_full > sequence.num_sealed_blocks:
            self.on_full(sequence, sequence.num_sealed_blocks)
        for i in range(sequence.num_sealed_blocks, num_full):
            if self._in_flight:  # a step that reads this block, even if an equal one replaces it now
                self.pool.acquire(table[i : i + 1])
                self._unused.append(table[i : i + 1])
            block = self.pool.seal(table[i], keys[i], keys[i - 1] if i else None)
            if block != table[i]:
                table[i] = block
                if sequence.row >= 0:
                    self.micro_batches[sequence.micro_batch].move_block(sequence, i, block)
        sequence.num_sealed_blocks = max(num_full, sequence.num_sealed_blocks)

    def finish(
        self, sequence: Sequence, reason: FinishReason, events: list[StepEvent], error: str = ""
    ) -> None:
        """Remove the sequence from all queues, release its blocks, report it. Not during its step."""
        self._remove(sequence)
        sequence.finish_reason = reason
        self.release(sequence)
        events.append(StepEvent(sequence, sequence.num_computed_tokens, finish_reason=reason, error=error))

    def withdraw(self, sequence: Sequence) -> None:
        """Take the sequence out of the batch. It keeps its blocks. Not during its step."""
        self._remove(sequence)
        sequence.withdrawn = False
        sequence.state = State.KEPT_FOR_TRANSFER

    def release(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence that is in no queue, and its adapter's."""
        sequence.state = State.FINISHED
        self._release_table(sequence)
        self._release_adapter(sequence)

    def _release_adapter(self, sequence: Sequence) -> None:
        self._release_blocks(sequence.adapter_blocks)
        sequence.adapter_blocks = []

    def _release_blocks(self, blocks: list[int]) -> None:
        if self._in_flight:
            self._unused.append(blocks)
        else:
            self.pool.release(blocks)

    def _release_table(self, sequence: Sequence) -> None:
        blocks = [block for block in sequence.block_table if block >= 0]
        self._release_blocks(blocks)
        self._release_blocks(sequence.packs)
        sequence.block_table, sequence.packs, sequence.packed = [], [], {}
        sequence.num_passed_blocks = 0

    def _note_packed(self, sequence: Sequence, column: int) -> None:
        if sequence.row >= 0:
            self.micro_batches[sequence.micro_batch].move_block(sequence, column, -1)

    def _pass_blocks(self, sequence: Sequence) -> None:
        """Release the blocks before the window of the next token to compute."""
        if not self.window or sequence.prefill_only or not sequence.block_table:
            return
        first, table = sequence.num_passed_blocks, sequence.block_table
        end = (sequence.num_computed_tokens - self.window + 1) // self.pool.block_size
        if end > first:
            self.pool.release(table[first:end])
            table[first:end] = [-1] * (end - first)
            sequence.num_passed_blocks = end

    def _take_token(
        self, sequence: Sequence, token_id: int, logprobs: TokenLogprobs | None, events: list[StepEvent]
    ) -> None:
        if sequence.cancelled:
            self.finish(sequence, FinishReason.CANCELLED, events)
            return
        if sequence.automaton is not None and sequence.automaton.error:
            self.finish(sequence, FinishReason.ERROR, events, sequence.automaton.error)
            return
        sequence.append(token_id)
        index = sequence.num_tokens - sequence.num_prompt_tokens - 1
        reason = self._finish_reason(sequence, token_id, index)
        events.append(StepEvent(sequence, sequence.num_computed_tokens, token_id, index, reason, logprobs))
        if reason:
            sequence.finish_reason = reason
            if sequence.state is not State.KEPT_FOR_TRANSFER:
                self._remove(sequence)
                self.release(sequence)
        elif sequence.withdrawn and not self._in_flight:  # else the step in flight writes to its last block
            self.withdraw(sequence)

    def _finish_reason(self, sequence: Sequence, token_id: int, index: int) -> FinishReason:
        sampling = sequence.sampling
        if token_id in sequence.stop_ids and index >= sampling.min_tokens:
            return FinishReason.STOP
        if index + 1 >= sampling.max_tokens or sequence.num_tokens >= self.max_len:
            return FinishReason.LENGTH
        return FinishReason.NONE

    def _admit(self, sequence: Sequence) -> bool:
        """Allocate blocks for all tokens of a waiting sequence. Return False without enough room."""
        if self._give_blocks(sequence):
            return True
        if self.num_running == 0:
            # No running sequence will free a block, so take those of other waiting ones.
            for holder in reversed([s for s in self.waiting if s.block_table]):
                self._strip(holder)
                if self._give_blocks(sequence):
                    return True
        return False

    def _give_blocks(self, sequence: Sequence) -> bool:
        if not sequence.block_table:
            # Leave one token uncached: prefill needs a query row to produce logits.
            return self.take_blocks(sequence, sequence.num_tokens, sequence.num_tokens - 1)
        more = self._more_hits(sequence)
        missing = -(-sequence.num_tokens // self.pool.block_size) - len(sequence.block_table) - len(more)
        if missing > 0 or more:
            if self.pool.num_free - self.pool.num_idle(more) < missing + self.num_running:
                return False
            self.pool.acquire(more)
            if more:
                sequence.set_prefix(sequence.block_table + more, self.pool.block_size)
            sequence.block_table += self.pool.allocate(missing)
        return True

    def _more_hits(self, sequence: Sequence) -> list[int]:
        """Return blocks of its prefix that were sealed after its table was filled."""
        block_size, num_blocks = self.pool.block_size, len(sequence.block_table)
        if sequence.num_computed_tokens != num_blocks * block_size or sequence.prompt_logprobs:
            return []
        # Leave one token uncached: prefill needs a query row to produce logits.
        max_hits = (sequence.num_tokens - 1) // block_size
        sequence.hash_blocks(block_size, max_hits)
        return self.pool.match(sequence.keys[num_blocks:max_hits])

    def _strip(self, sequence: Sequence) -> None:
        """Release all blocks and reset the progress. Sealed blocks stay cached while there is room."""
        self._release_table(sequence)
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
        sequence.num_computed_tokens = sequence.num_sealed_blocks = 0

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        remaining = sequence.num_tokens - sequence.num_computed_tokens
        num_tokens = min(remaining, budget)
        if num_tokens > 0:
            chunks.append(Chunk(sequence, sequence.num_computed_tokens, num_tokens, num_tokens == remaining))
        return num_tokens

    def _short_of_blocks(self, batch: MicroBatch) -> list[Sequence]:
        """Return the sequences that need a block for their next token."""
        size = self.pool.block_size
        return [s for s in batch.decoding if s.num_tokens > len(s.block_table) * size]

    def _grow_tables(self, batch: MicroBatch) -> list[Sequence]:
        """Allocate the next block of every sequence that needs one. Return the preempted ones."""
        pool = self.pool
        preempted: list[Sequence] = []
        for sequence in sorted(self._short_of_blocks(batch), key=_order):
            while sequence.state is State.DECODING and pool.num_free == 0:
                preempted.append(self._preempt())
            if sequence.state is State.DECODING:
                self._grow(sequence)
        return preempted

    def _grow(self, sequence: Sequence) -> None:
        block = self.pool.allocate(1)[0]
        sequence.block_table.append(block)
        batch = self.micro_batches[sequence.micro_batch]
        batch.move_block(sequence, len(sequence.block_table) - 1, block)

    def _preempt(self) -> Sequence:
        victim = turns.last(self.decoding + self.prefilling)
        self._remove(victim)
        self._strip(victim)
        victim.prompt_rows.clear()
        victim.num_preemptions += 1
        self.num_preemptions += 1
        victim.state = State.WAITING
        turns.join(self.waiting, victim)
        return victim

    def _drop_last_block(self, sequence: Sequence) -> None:
        """Drop the last block, to compute it again: all KV is there, but the next token is not.

        The block may be shared, so a new one is written instead.
        """
        last = (sequence.num_tokens - 1) // self.pool.block_size
        self.pool.release(sequence.block_table[last:])
        del sequence.block_table[last:]
        sequence.num_sealed_blocks = min(sequence.num_sealed_blocks, last)
        sequence.num_computed_tokens = last * self.pool.block_size

    def _start_decoding(self, sequence: Sequence) -> None:
        min(self.micro_batches, key=len).add(sequence)

    def _remove(self, sequence: Sequence) -> None:
        match sequence.state:
            case State.DECODING:
                self.micro_batches[sequence.micro_batch].remove(sequence)
            case State.PREFILLING:
                self.prefilling.remove(sequence)
            case State.WAITING:
                for queue in (self.waiting, self.ready):
                    i = bisect_left(queue, sequence.order, key=_order)
                    if i < len(queue) and queue[i] is sequence:
                        del queue[i]
                        return
                raise AssertionError(f"{sequence} waits, but is in no queue")
