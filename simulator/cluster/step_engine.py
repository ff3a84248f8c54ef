"""Continuous batching with chunked prefill, in virtual time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

import numpy as np
import numpy.typing as npt

from moonpool.conductor.costs.model import Profile
from moonpool.simulator.cluster.clock import Clock
from moonpool.simulator.cluster.job import Job
from moonpool.simulator.cluster.steps import Decode, OnGaps, Owner, Prefill, Run

# The tokens of a prompt that fit into a step change as the prompt grows: they are counted again so often.
_STEADY_STEPS = 8


class StepEngine:
    """The engine's scheduler without the model.

    Every decoding sequence is in every step; the rest of the step's tokens go to prompts, by ``order_s``,
    then arrival: no more than let it end within ``tbt_s`` where sequences decode. All steps of an unchanged
    batch are one event.
    """

    def __init__(
        self,
        clock: Clock,
        profile: Profile,
        owner: Owner,
        *,
        chunk_tokens: int,
        max_batch_size: int,
        block_tokens: int = 1,
        tbt_s: float = math.inf,
        adapter_s: float = 0.0,
    ) -> None:
        """``block_tokens``: of a prompt that are in each step, however long that takes. ``adapter_s``: that
        each LoRA adapter adds to a step."""
        self._clock = clock
        self._profile = profile
        self._owner = owner
        self._chunk_tokens = chunk_tokens
        self._max_batch_size = max_batch_size
        self._block_tokens = block_tokens
        self._tbt_s = tbt_s
        self._adapter_s = adapter_s
        self._adapters: Counter[str] = Counter()  # of the batch
        self._waiting: list[tuple[float, int, Prefill]] = []
        self._joining: list[Decode] = []
        self._joining_later: list[Decode] = []  # they miss the step that begins now
        self._prefilling: list[Prefill] = []
        self._batch_size = 0
        self._context = 0  # tokens that the batch attends to
        self._ends: list[tuple[int, int, Decode]] = []  # heap by last step
        self._run: Run | None = None
        self._leaving: dict[Job, OnGaps] = {}
        self._settling = False
        self._number = 0
        self._num_steps = 0  # with a decode batch
        self._num_produced = 0  # tokens of all runs that have ended
        self._gaps_s = np.empty(1024)
        self.prefill_busy_s = 0.0
        self.decode_busy_s = 0.0

    # ------------------------------------------------------------------ work comes

    def add_prefill(self, prefill: Prefill) -> None:
        self._number += 1
        heappush(self._waiting, (prefill.order_s, self._number, prefill))
        self.resume()

    def join(self, decode: Decode) -> None:
        """Add to the batch at the end of the current step. What a step has prefilled here joins one step
        later: the engine tells of a step's tokens while the next one runs."""
        (self._joining_later if self._settling else self._joining).append(decode)
        self.resume()

    def resume(self) -> None:
        """Start more work if there is room now."""
        if self._settling:
            return
        run = self._run
        if run is None:
            self._begin()
        elif run.count > 1 and (
            self._joining
            or (self._waiting and not run.chunks)
            or any(prefill.is_void for prefill, _ in run.chunks)
        ):
            self._cut(run)

    def leave(self, job: Job, left: OnGaps) -> None:
        """Take a job out of the batch at the end of the current step, if it does not end there."""
        self._leaving[job] = left
        if self._run is not None and self._run.count > 1:
            self._cut(self._run)

    def stop(self) -> list[tuple[Decode, npt.NDArray[np.float64]]]:
        """Stop for good. Returns the sequences in the batch, with the gaps before their tokens."""
        self._stop_run()
        self._settling = True
        leaving, self._leaving = self._leaving, {}
        for left in leaving.values():
            left(None)
        return [(entry[2], self._gaps_of(entry[2], self._num_steps)) for entry in self._ends]

    # ------------------------------------------------------------------ questions

    def decoding(self) -> Iterator[tuple[Job, int]]:
        """The jobs in the batch, with the tokens that each has produced in it."""
        done, run = self._num_steps, self._run
        if run is not None and run.batch_size:
            done += self._done(run)
        for _, _, decode in self._ends:
            yield decode.job, done - decode.first_step

    def num_produced(self) -> int:
        """Tokens that decoding has produced so far."""
        run = self._run
        if run is None or not run.batch_size:
            return self._num_produced
        return self._num_produced + self._done(run) * self._batch_size

    def batch(self) -> tuple[int, int]:
        """The sequences that decode, and the tokens that they attend to."""
        run = self._run
        done = self._done(run) if run is not None and run.batch_size else 0
        return self._batch_size, self._context + done * self._batch_size

    def _done(self, run: Run) -> int:
        """The steps of the run that have ended."""
        return min(int(run.steps(self._clock.now_s - run.start_s) + 1e-9), run.count)

    # ------------------------------------------------------------------ steps

    def _begin(self) -> None:
        """Start the next run of steps, if there is work."""
        clock, profile = self._clock, self._profile
        # One that was placed again elsewhere ends with its step, and has no blocks here any more.
        self._prefilling = [one for one in self._prefilling if not one.is_void]
        self._take_joining()
        size = self._batch_size
        chunks = self._take_chunks(size)
        if not size and not chunks:
            return
        gap_s = slope_s = decode_s = 0.0
        count, factor = 1 << 62, 1.0
        if size:
            factor = self._owner.work_factor(size, self._context)
            decode_s = gap_s = factor * profile.step_s(size, self._context)
            slope_s = factor * size * profile.decode_context_s
            count = self._ends[0][0] - self._num_steps
        for prefill, tokens in chunks:
            # One prompt alone may fill several steps.
            count = min(count, prefill.num_left // tokens if len(chunks) == 1 else 1)
            gap_s += prefill.factor * profile.prefill_s(tokens, prefill.num_cached + prefill.num_done)
            slope_s += prefill.factor * tokens * tokens * profile.prefill_attention_s
        if self._adapter_s:
            # Those of prompts are few beside them.
            decode_s += self._adapter_s * len(self._adapters)
            gap_s += self._adapter_s * len(self._adapters)
        if size and chunks and self._tbt_s < math.inf:
            count = min(count, _STEADY_STEPS)
        run = self._run = Run(clock.now_s, gap_s, slope_s, count, size, decode_s, chunks, factor)
        run.end = clock.at(run.start_s + run.seconds(count), self._end_run)

    def _take_joining(self) -> None:
        room = max(self._max_batch_size - self._batch_size - len(self._prefilling), 0)
        for decode in self._joining[:room]:
            decode.first_step = self._num_steps
            decode.last_step = self._num_steps + decode.remaining
            decode.wait_s = self._clock.now_s - decode.since_s
            self._number += 1
            heappush(self._ends, (decode.last_step, self._number, decode))
            self._batch_size += 1
            self._context += decode.context
            self._adapters.update(_adapter_of(decode))
        del self._joining[:room]

    def _take_chunks(self, size: int) -> list[tuple[Prefill, int]]:
        """Prompts of the next step with their tokens: those that have begun, then those that wait."""
        if not self._prefilling and not self._waiting:
            return []
        chunks: list[tuple[Prefill, int]] = []
        budget = self._prompt_tokens(size)
        for prefill in self._prefilling:
            if tokens := min(prefill.num_left, budget):
                chunks.append((prefill, tokens))
                budget -= tokens
        while budget > 0 and size + len(self._prefilling) < self._max_batch_size:
            while self._waiting and self._waiting[0][2].is_void:
                heappop(self._waiting)
            if not self._waiting or not self._owner.start_prefill(self._waiting[0][2]):
                break
            prefill = heappop(self._waiting)[2]
            self._prefilling.append(prefill)
            tokens = min(prefill.num_left, budget)
            chunks.append((prefill, tokens))
            budget -= tokens
        return chunks

    def _prompt_tokens(self, size: int) -> int:
        """Most prompt tokens of the next step."""
        budget = max(self._chunk_tokens - size, 1)
        if not size or self._tbt_s == math.inf:
            return budget
        first = self._prefilling[0] if self._prefilling else None
        start = first.num_cached + first.num_done if first is not None else 0
        step_s = self._profile.step_s(size, self._context)
        timely = self._profile.timely_tokens(step_s, start, self._tbt_s)
        return min(budget, max(timely, self._block_tokens))

    def _cut(self, run: Run) -> None:
        """Shorten the run to end with the current step."""
        done = run.steps(self._clock.now_s - run.start_s)
        count = max(math.ceil(done - 1e-9), 1)
        if count < run.count:
            run.count = count
            assert run.end is not None
            run.end.cancel()
            run.end = self._clock.at(run.start_s + run.seconds(count), self._end_run)

    def _stop_run(self) -> None:
        """End the run now; the current step does not count."""
        run = self._run
        if run is not None:
            assert run.end is not None
            run.end.cancel()
            run.count = self._done(run)
            self._settle(run)

    def _end_run(self) -> None:
        run = self._run
        assert run is not None
        self._settling = True
        self._settle(run)
        ended = [one for one in self._prefilling if not one.num_left]
        self._prefilling = [one for one in self._prefilling if one.num_left]
        for prefill in ended:
            if not prefill.is_void:
                self._owner.prefilled(prefill)
        while self._ends and self._ends[0][0] <= self._num_steps:
            decode = heappop(self._ends)[2]
            self._batch_size -= 1
            self._without(decode)
            self._context -= decode.context + decode.last_step - decode.first_step
            self._owner.decoded(decode, self._gaps_of(decode, decode.last_step))
        self._let_go()
        self._settling = False
        self._begin()
        if self._joining_later:
            self._joining += self._joining_later
            self._joining_later = []
            self.resume()

    def _let_go(self) -> None:
        """Take those that leave out of the batch."""
        if not self._leaving:
            return
        leaving, self._leaving = self._leaving, {}
        found = {entry[2].job: entry for entry in self._ends if entry[2].job in leaving}
        for job, left in leaving.items():
            if job not in found:
                left(None)
                continue
            decode = found[job][2]
            self._ends.remove(found[job])
            self._batch_size -= 1
            self._without(decode)
            self._context -= decode.context + self._num_steps - decode.first_step
            left(self._gaps_of(decode, self._num_steps))
        heapify(self._ends)

    def _without(self, decode: Decode) -> None:
        """Count its adapter no longer."""
        for name in _adapter_of(decode):
            self._adapters[name] -= 1
            if not self._adapters[name]:
                del self._adapters[name]

    def _settle(self, run: Run) -> None:
        """Account for the run's steps."""
        count, total_s = run.count, run.seconds(run.count)
        self._run = None
        decode_s = 0.0
        if run.batch_size and count:
            end = self._num_steps + count
            if end > len(self._gaps_s):
                self._gaps_s = np.concatenate((self._gaps_s, np.empty(max(len(self._gaps_s), count))))
            self._gaps_s[self._num_steps : end] = run.gap_s + run.slope_s * np.arange(count)
            growth_s = run.factor * self._batch_size * self._profile.decode_context_s
            decode_s = count * run.decode_s + growth_s * count * (count - 1) / 2
            self._num_steps = end
            self._context += count * self._batch_size
            self._num_produced += count * self._batch_size
        self.decode_busy_s += decode_s
        self.prefill_busy_s += total_s - decode_s
        for prefill, tokens in run.chunks:
            prefill.num_done += count * tokens
            prefill.busy_s += total_s
        if decode_s and not run.chunks:
            self._owner.stepped(decode_s / run.factor, decode_s)

    def _gaps_of(self, decode: Decode, last_step: int) -> npt.NDArray[np.float64]:
        gaps_s = self._gaps_s[decode.first_step : last_step].copy()
        if len(gaps_s):
            gaps_s[0] += decode.wait_s
        return gaps_s


def _adapter_of(decode: Decode) -> tuple[str, ...]:
    """Return the name of its LoRA adapter, if it has one."""
    return (decode.job.request.adapter,) if decode.job.request.adapter else ()
