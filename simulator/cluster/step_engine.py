"""Continuous batching with chunked prefill, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.conductor.costs.model import Profile
from moonpool.simulator.cluster.clock import Clock, Event
from moonpool.simulator.cluster.job import Job

# Gets the gaps before the tokens of a job that leaves; None: it has ended.
OnGaps = Callable[[npt.NDArray[np.float64] | None], None]


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt to compute. ``num_tokens`` and ``num_cached`` are set when it starts."""

    job: Job
    order_s: float
    attempt: int  # of the job
    num_tokens: int = 0  # to compute
    num_cached: int = 0
    num_done: int = 0
    factor: float = 1.0  # real over expected seconds
    busy_s: float = 0.0  # of its steps


@dataclass(slots=True, eq=False)
class Decode:
    """A sequence in the batch, or about to join."""

    job: Job
    context: int  # tokens that its next step attends to
    remaining: int  # tokens still to produce
    since_s: float  # time of its last token before joining
    wait_s: float = 0.0  # from then until its first step
    first_step: int = 0
    last_step: int = 0


class Owner(Protocol):
    """Receives the results; may add more work meanwhile."""

    def start_prefill(self, prefill: Prefill) -> bool:
        """Set its lengths and reserve memory. False: there is no room now (see ``resume``)."""
        ...

    def prefilled(self, prefill: Prefill) -> None: ...

    def stepped(self, expected_s: float, actual_s: float) -> None:
        """Decode steps without a prompt have ended; ``expected_s``: by the profile of this node."""
        ...

    def work_factor(self) -> float:
        """Of the next run of decode steps: real over expected seconds."""
        ...

    def decoded(self, decode: Decode, gaps_s: npt.NDArray[np.float64]) -> None:
        """The sequence is complete; ``gaps_s`` are the seconds before each of its tokens."""
        ...


@dataclass(slots=True)
class _Run:
    """``count`` steps of the same batch; they take ``gap_s``, ``gap_s + slope_s``, …"""

    start_s: float
    gap_s: float
    slope_s: float
    count: int
    batch_size: int
    decode_s: float  # the batch's part of gap_s
    chunk: int  # tokens of the prefill in each step
    factor: float  # of decode steps
    end: Event | None = None

    def seconds(self, count: int) -> float:
        return count * self.gap_s + self.slope_s * count * (count - 1) / 2

    def steps(self, seconds: float) -> float:
        """Return the number of steps in these seconds, as a fraction: the inverse of ``seconds``."""
        b = self.gap_s - self.slope_s / 2
        root = b * b + 2 * self.slope_s * seconds
        below = b + math.sqrt(max(root, 0.0))
        return 2 * seconds / below if below > 0 else float(self.count)


class StepEngine:
    """The engine's scheduler without the model.

    Every decoding sequence is in every step; the rest of the step's tokens go to one prompt at a time, by
    ``order_s``, then arrival. All steps of an unchanged batch are one event.
    """

    def __init__(
        self, clock: Clock, profile: Profile, owner: Owner, *, chunk_tokens: int, max_batch_size: int
    ) -> None:
        self._clock = clock
        self._profile = profile
        self._owner = owner
        self._chunk_tokens = chunk_tokens
        self._max_batch_size = max_batch_size
        self._waiting: list[tuple[float, int, Prefill]] = []
        self._joining: list[Decode] = []
        self._prefill: Prefill | None = None
        self._batch_size = 0
        self._context = 0  # tokens that the batch attends to
        self._ends: list[tuple[int, int, Decode]] = []  # heap by last step
        self._run: _Run | None = None
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
        if self._prefill is None:
            self.resume()

    def join(self, decode: Decode) -> None:
        """Add to the batch at the end of the current step."""
        self._joining.append(decode)
        self.resume()

    def resume(self) -> None:
        """Start more work if there is room now."""
        if self._settling:
            return
        if self._run is None:
            self._begin()
        elif self._run.count > 1 and (self._joining or (self._waiting and self._prefill is None)):
            self._cut(self._run)

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

    def _done(self, run: _Run) -> int:
        """The steps of the run that have ended."""
        return min(int(run.steps(self._clock.now_s - run.start_s) + 1e-9), run.count)

    # ------------------------------------------------------------------ steps

    def _begin(self) -> None:
        """Start the next run of steps, if there is work."""
        clock, profile = self._clock, self._profile
        self._take_joining()
        if self._prefill is None:
            self._take_prefill()
        size, prefill = self._batch_size, self._prefill
        if not size and prefill is None:
            return
        gap_s = slope_s = decode_s = 0.0
        count, chunk, factor = 1 << 62, 0, 1.0
        if size:
            factor = self._owner.work_factor()
            decode_s = gap_s = factor * profile.step_s(size, self._context)
            slope_s = factor * size * profile.decode_context_s
            count = self._ends[0][0] - self._num_steps
        if prefill is not None:
            left = prefill.num_tokens - prefill.num_done
            chunk = min(max(self._chunk_tokens - size, 1), left)
            count = min(count, left // chunk)
            gap_s += prefill.factor * profile.prefill_s(chunk, prefill.num_cached + prefill.num_done)
            slope_s += prefill.factor * chunk * chunk * profile.prefill_attention_s
        run = self._run = _Run(clock.now_s, gap_s, slope_s, count, size, decode_s, chunk, factor)
        run.end = clock.at(run.start_s + run.seconds(count), self._end_run)

    def _take_joining(self) -> None:
        room = self._max_batch_size - self._batch_size
        for decode in self._joining[:room]:
            decode.first_step = self._num_steps
            decode.last_step = self._num_steps + decode.remaining
            decode.wait_s = self._clock.now_s - decode.since_s
            self._number += 1
            heappush(self._ends, (decode.last_step, self._number, decode))
            self._batch_size += 1
            self._context += decode.context
        del self._joining[:room]

    def _take_prefill(self) -> None:
        # Those that were placed again meanwhile are void.
        while self._waiting and self._waiting[0][2].attempt != self._waiting[0][2].job.attempt:
            heappop(self._waiting)
        if self._waiting and self._owner.start_prefill(self._waiting[0][2]):
            self._prefill = heappop(self._waiting)[2]

    def _cut(self, run: _Run) -> None:
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
        prefill = self._prefill
        # One that was placed again elsewhere ends with the step, and has no blocks here any more.
        is_void = prefill is not None and prefill.attempt != prefill.job.attempt
        if prefill is not None and (is_void or prefill.num_done == prefill.num_tokens):
            self._prefill = None
            if not is_void:
                self._owner.prefilled(prefill)
        while self._ends and self._ends[0][0] <= self._num_steps:
            decode = heappop(self._ends)[2]
            self._batch_size -= 1
            self._context -= decode.context + decode.last_step - decode.first_step
            self._owner.decoded(decode, self._gaps_of(decode, decode.last_step))
        self._let_go()
        self._settling = False
        if self._run is None:
            self._begin()

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
            self._context -= decode.context + self._num_steps - decode.first_step
            left(self._gaps_of(decode, self._num_steps))
        heapify(self._ends)

    def _settle(self, run: _Run) -> None:
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
        if self._prefill is not None:
            self._prefill.num_done += count * run.chunk
            self._prefill.busy_s += total_s
        elif decode_s:
            self._owner.stepped(decode_s / run.factor, decode_s)

    def _gaps_of(self, decode: Decode, last_step: int) -> npt.NDArray[np.float64]:
        gaps_s = self._gaps_s[decode.first_step : last_step].copy()
        if len(gaps_s):
            gaps_s[0] += decode.wait_s
        return gaps_s
