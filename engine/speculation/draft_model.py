"""A smaller model that proposes tokens, with KV of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence, State
from moonpool.engine.batching.step_plan import Chunk, StepPlan
from moonpool.engine.execution.cost_profile import StepCosts
from moonpool.engine.execution.runner import ModelRunner
from moonpool.engine.memory.block_pool import BlockPool

_GAIN = 0.1  # of an estimate, by proposal


class DraftModel:
    """Proposes the tokens that a smaller model samples next.

    It samples with each request's own parameters, seed and index, so that drawn tokens are often the same,
    too. Its KV is in a pool of its own. What is missing there is computed when tokens are proposed: a prompt,
    tokens after a hand-over or a pause, and accepted tokens that it did not propose. One thread at a time.
    """

    def __init__(self, runner: ModelRunner, costs: StepCosts, clock: Callable[[], float]) -> None:
        """``costs``: as measured of ``runner``."""
        self._runner = runner
        self._costs = costs
        self._clock = clock
        self._pool = BlockPool(runner.num_blocks, runner.options.block_size)
        # Of each sequence a copy with its own blocks and the tokens proposed last, those used longest ago
        # first. The KV of its first ``num_computed_tokens`` tokens is in the pool.
        self._copies: dict[Sequence, Sequence] = {}
        self._rows: list[Sequence] = []  # of the step before
        self._version = 0
        self._num_steps, self._steps_s = 0, 0.0
        self._beside_s = 0.0  # of a step, for the work beside it

    def propose(self, wanted: list[tuple[Sequence, int]]) -> list[list[int]]:
        """Return at most so many tokens, at least 1, for each sequence.

        A sequence gets none while its prompt takes several steps, where the pool has no room, and beyond the
        longest sequence of this model. After an error the KV of these sequences is computed anew.
        """
        for sequence in [s for s in self._copies if s.state is not State.DECODING]:
            self._drop(sequence)
        begun_s, num_before, before_s = self._clock(), self._num_steps, self._steps_s
        try:
            self._propose(wanted)
        except BaseException:
            for sequence, _ in wanted:
                self._drop(sequence)
            raise
        if num_steps := self._num_steps - num_before:
            beside_s = self._clock() - begun_s - (self._steps_s - before_s)
            self._beside_s += _GAIN * (beside_s / num_steps - self._beside_s)
        return [
            self._copies[sequence].token_ids[sequence.num_tokens :].tolist()
            if sequence in self._copies
            else []
            for sequence, _ in wanted
        ]

    def step_s(self, decodes: list[Sequence]) -> float:
        """Return the time in which one token is proposed for each of these sequences."""
        return self._costs.decode_s(decodes) + self._beside_s

    def missing_s(self, sequence: Sequence) -> float:
        """Return the time in which the KV that a sequence lacks is computed; 0: only its newest token's."""
        copy = self._copies.get(sequence)
        start = 0 if copy is None else min(copy.num_computed_tokens, sequence.num_tokens - 1)
        return self._costs.chunk_s(start, sequence.num_tokens - 1 - start)

    def check_integrity(self) -> None:
        """Assert that each used block belongs to a sequence, in time proportional to the pool."""
        self._pool.check_integrity()
        used = {block for copy in self._copies.values() for block in copy.block_table}
        assert len(used) == self._pool.num_used, "a block is used by no sequence"

    def _propose(self, wanted: list[tuple[Sequence, int]]) -> None:
        """Append the proposed tokens to the sequences' copies."""
        kept = {sequence for sequence, _ in wanted}
        decodes: list[tuple[Sequence, int]] = []
        last: list[tuple[Sequence, int]] = []  # of the last chunks
        chunks: list[Chunk] = []
        left = self._runner.options.max_batch_tokens - len(wanted)
        for sequence, most in wanted:
            copy = self._updated(sequence, most, kept)
            if copy is None:
                continue
            missing = copy.num_tokens - copy.num_computed_tokens
            if missing == 1:
                decodes.append((copy, most))
            elif (num_tokens := min(missing, left)) > 0:
                left -= num_tokens
                chunks.append(Chunk(copy, copy.num_computed_tokens, num_tokens, num_tokens == missing))
                if num_tokens == missing:
                    last.append((copy, most))
        self._run([copy for copy, _ in decodes], chunks)
        rows = sorted(decodes + last, key=lambda row: -row[1])
        step = 1
        while rows := [row for row in rows if row[1] > step]:
            self._run([copy for copy, _ in rows], [])
            step += 1

    def _run(self, decodes: list[Sequence], chunks: list[Chunk]) -> None:
        """Compute a step, and append its tokens."""
        if not decodes and not chunks:
            return
        if chunks or decodes != self._rows:
            self._version += 1
        self._rows = decodes
        plan = StepPlan(decodes, chunks, [], self._version, [])
        begun_s, predicted_s = self._clock(), self._costs.predict_s(plan)
        output = self._runner.execute(plan)
        took_s = self._clock() - begun_s
        self._costs.correct(plan, predicted_s, took_s)
        self._num_steps += 1
        self._steps_s += took_s
        for copy in decodes:
            copy.num_computed_tokens += 1
        for chunk in chunks:
            chunk.sequence.num_computed_tokens += chunk.num_tokens
        rows = [*decodes, *(chunk.sequence for chunk in chunks if chunk.last)]
        for copy, token_id in zip(rows, output.token_ids, strict=True):
            copy.append(token_id)

    def _updated(self, sequence: Sequence, most: int, kept: set[Sequence]) -> Sequence | None:
        """Return the sequence's copy with its present tokens, and blocks for ``most`` more. None without
        room, where no blocks but those of ``kept`` are in use."""
        n, size = sequence.num_tokens, self._pool.block_size
        num_blocks = -(-(n + most - 1) // size)  # the last token that is proposed has no KV
        before = self._copies.pop(sequence, None)
        copy = self._copy(sequence) if before is None else self._continued(sequence, before)
        self._copies[sequence] = copy
        self._seal(copy, sequence)
        if n + most - 1 > self._runner.max_len:
            self._drop(sequence)
            return None
        missing = num_blocks - len(copy.block_table)
        for other in [s for s in self._copies if s not in kept]:
            if self._pool.num_free >= missing:
                break
            self._drop(other)
        if self._pool.num_free < missing:
            self._drop(sequence)
            return None
        copy.block_table += self._pool.allocate(max(missing, 0))
        return copy

    def _copy(self, sequence: Sequence) -> Sequence:
        """Return a copy with the cached blocks of the sequence's tokens but the last."""
        sampling = sequence.sampling
        if sampling.num_logprobs >= 0:
            sampling = replace(sampling, num_logprobs=-1)
        copy = _of_same_tokens(sequence, sampling)
        size = self._pool.block_size
        # The engine hashes on another thread: only the keys that are there.
        hits = self._pool.match(sequence.keys[: (sequence.num_tokens - 1) // size])
        self._pool.acquire(hits)
        copy.set_prefix(hits, size)
        return copy

    def _continued(self, sequence: Sequence, before: Sequence) -> Sequence:
        """Return a copy that has taken over the blocks of the one before, as far as its tokens were right."""
        copy = _of_same_tokens(sequence, before.sampling)
        num_same = min(before.num_computed_tokens, sequence.num_tokens - 1)
        same = before.token_ids[:num_same] == sequence.token_ids[:num_same]
        copy.block_table, copy.num_sealed_blocks = before.block_table, before.num_sealed_blocks
        copy.num_computed_tokens = num_same if same.all() else int(same.argmin())
        return copy

    def _seal(self, copy: Sequence, sequence: Sequence) -> None:
        """Seal full blocks of tokens that the sequence has: another one with them can begin there."""
        keys, table = sequence.keys, copy.block_table
        num_full = min(len(keys), copy.num_computed_tokens // self._pool.block_size)
        for i in range(copy.num_sealed_blocks, num_full):
            table[i] = self._pool.seal(table[i], keys[i], keys[i - 1] if i else None)
            copy.num_sealed_blocks = i + 1

    def _drop(self, sequence: Sequence) -> None:
        """Release the blocks of a sequence. Idempotent."""
        if (copy := self._copies.pop(sequence, None)) is not None:
            self._pool.release(copy.block_table)


def _of_same_tokens(sequence: Sequence, sampling: Sampling) -> Sequence:
    copy = Sequence(
        sequence.request_id,
        sequence.attempt,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        sampling=sampling,
        root_key=sequence.root_key,
    )
    copy.stop_ids = sequence.stop_ids
    return copy
