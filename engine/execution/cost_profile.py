"""Step costs: measured at the start, corrected by every step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import numpy as np

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import Chunk, StepPlan
from moonpool.engine.execution.runner import ModelRunner
from moonpool.runtime.cost_profile import CostProfile

# How much one step's error moves the estimates.
_GAIN = 0.05
# Of a drafted token, which takes a small part of a step: the step's noise is larger.
_DRAFT_GAIN = 0.02
# Of a prediction, at most: a step that took longer was disturbed.
_MOST_TIMES = 4.0
_BUDGET_S = 1.2
_REPETITIONS = 4
_ENOUGH_S = 0.02  # of one shape: it is then repeated once, which leaves time for the others


@dataclass(slots=True)
class StepCosts:
    """A measured profile, with correction factors for prefills, for decode steps, and for steps with both:
    these read the weights once."""

    profile: CostProfile[float]
    prefill_scale: float = 1.0
    decode_scale: float = 1.0
    mixed_scale: float = 1.0
    draft_scale: float = 1.0

    def coefficients(self) -> dict[str, float]:
        """The fields of ``protos.Profile``, corrected, for decisions of this node."""
        return asdict(self.profile.scaled(self.prefill_scale, self.decode_scale))

    def published(self) -> dict[str, float]:
        """The fields of ``protos.Profile`` as measured. Conductors correct them: two corrections in series
        would overshoot."""
        return asdict(self.profile)

    def predict_s(self, plan: StepPlan) -> float:
        """Seconds the step will take."""
        seconds = 0.0
        if plan.decodes:
            seconds = self.decode_s(plan.decodes)
        for draft in plan.drafts:
            seconds += self._drafted_token_s * draft.num_tokens
        for chunk in plan.chunks:
            seconds += self.chunk_s(chunk.start, chunk.num_tokens)
        return self.mixed_scale * seconds if plan.decodes and plan.chunks else seconds

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Seconds of a step with so many prompt tokens after ``start`` earlier ones; 0 for none."""
        return self.prefill_scale * self.profile.prefill_s(num_tokens, start) if num_tokens > 0 else 0.0

    def decode_s(self, decodes: list[Sequence]) -> float:
        """Seconds of a step with one token of each of these sequences."""
        contexts = sum([sequence.num_tokens for sequence in decodes])
        return self.decode_scale * self.profile.step_s(len(decodes), contexts)

    def draft_row_cost(self, decodes: list[Sequence], proposing_s: float = 0.0) -> float:
        """Time that a drafted token adds to a step of these sequences, as a part of what the step takes for
        each of its tokens. ``proposing_s``: time in which one is proposed for each."""
        added_s = self._drafted_token_s * len(decodes) + proposing_s
        return added_s / max(self.decode_s(decodes), 1e-9)

    @property
    def _drafted_token_s(self) -> float:
        return max(self.draft_scale, 0.0) * self.profile.prefill_token_s

    def timely_tokens(self, decodes: list[Sequence], start: int, tbt_s: float) -> int:
        """Prompt tokens after ``start`` earlier ones that fit into a step with ``decodes`` of ``tbt_s``."""
        corrected = self.profile.scaled(self.prefill_scale, self.decode_scale)
        return corrected.timely_tokens(self.decode_s(decodes), start, tbt_s / self.mixed_scale)

    def correct(self, plan: StepPlan, predicted_s: float, actual_s: float) -> None:
        """Learn from a step. A single outlier (a busy machine) changes little."""
        if predicted_s <= 0:
            return
        gain = 1 + _GAIN * (min(actual_s / predicted_s, _MOST_TIMES) - 1)
        if plan.drafts:
            num_tokens = sum(draft.num_tokens for draft in plan.drafts)
            plain_s = predicted_s - self._drafted_token_s * num_tokens
            if (tokens_s := self.profile.prefill_token_s * num_tokens) > 0:
                # A difference of two noisy times may be below 0. Only if it counts, too, is the mean right.
                found = (min(actual_s, _MOST_TIMES * (plain_s + tokens_s)) - plain_s) / tokens_s
                self.draft_scale += _DRAFT_GAIN * (found - self.draft_scale)
        elif plan.decodes and plan.chunks:
            self.mixed_scale *= gain
        elif plan.decodes:
            self.decode_scale *= gain
        else:
            self.prefill_scale *= gain


NOT_MEASURED = StepCosts(CostProfile(0.0, 0.0, 0.0, 0.0, 0.0, 0.0))


def measure(runner: ModelRunner, clock: Callable[[], float]) -> StepCosts:
    """Time a few prefill and decode shapes for about a second and fit the coefficients.

    Writes to the pool's first blocks: call it before any request. For a slow model only the cheapest shapes
    are timed; coefficients that these do not determine are 0.
    """
    bench = _Bench(runner, clock)
    if runner.device.runs_ahead:
        bench.warm_up()
    prefill = _fit(
        [
            ([1.0, n, n * (start + n / 2)], bench.prefill_s(start, n))
            for start, n in bench.in_time(bench.prefill_shapes())
        ]
    )
    decode = _fit(
        [
            ([1.0, n, n * context], bench.decode_s(n, context))
            for n, context in bench.in_time(bench.decode_shapes())
        ]
    )
    return StepCosts(CostProfile(*prefill, *decode))


class _Bench:
    """Steps over synthetic sequences in the pool's first blocks."""

    def __init__(self, runner: ModelRunner, clock: Callable[[], float]) -> None:
        self._runner = runner
        self._clock = clock
        self._end_s = 0.0
        self._version = -2
        options = runner.options
        self._block_size = options.block_size
        self._num_blocks = runner.num_blocks
        self._room = min(runner.max_len, self._num_blocks * options.block_size) - 1
        self._max_tokens = min(options.max_batch_tokens, self._room)
        self._max_rows = min(options.max_batch_size, options.max_batch_tokens)

    def warm_up(self) -> None:
        """Run each shape once: a GPU compiles its kernels when it first meets a shape."""
        self._end_s = self._clock()
        for shape in self.prefill_shapes():
            self.prefill_s(*shape)
        for shape in self.decode_shapes():
            self.decode_s(*shape)

    def in_time(self, shapes: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Yield the first shape, and the others while half of the time budget lasts."""
        self._end_s = self._clock() + _BUDGET_S / 2
        yield shapes[0]
        for shape in shapes[1:]:
            if self._clock() >= self._end_s:
                return
            yield shape

    def prefill_shapes(self) -> list[tuple[int, int]]:
        """Return (cached tokens, new tokens) pairs, cheap ones first."""
        some, many = max(1, self._max_tokens // 16), max(1, self._max_tokens // 4)
        cached = max(0, min(1024, self._room - many))
        return [(0, 1), (0, some), (cached, some), (0, many), (cached, many)]

    def decode_shapes(self) -> list[tuple[int, int]]:
        """Return (sequences, context of each) pairs."""
        long = min(1024, self._room)
        short = min(64, long)
        few = min(8, self._max_rows, self._num_blocks // self._blocks(long))
        return [(1, short), (few, short), (1, long), (few, long)]

    def prefill_s(self, start: int, n: int) -> float:
        sequence = self._sequence(start + n)
        return self._time(StepPlan([], [Chunk(sequence, start, n, True)], [], -1, []))

    def decode_s(self, n: int, context: int) -> float:
        self._version -= 1
        return self._time(StepPlan([self._sequence(context, i) for i in range(n)], [], [], self._version, []))

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _sequence(self, num_tokens: int, i: int = 0) -> Sequence:
        """Return the i-th such sequence. Its blocks are its own: shared ones would stay in the CPU's
        caches."""
        sequence = Sequence(
            "profile", 0, np.zeros(num_tokens, np.int32), num_tokens, sampling=Sampling(), root_key=b""
        )
        num_blocks = self._blocks(num_tokens)
        sequence.block_table = list(range(i * num_blocks, (i + 1) * num_blocks))
        return sequence

    def _time(self, plan: StepPlan) -> float:
        """Return the shortest of a few runs, in seconds."""
        seconds: list[float] = []
        for _ in range(_REPETITIONS):
            begun_s = self._clock()
            self._runner.execute(plan)
            seconds.append(self._clock() - begun_s)
            if self._clock() >= self._end_s or (len(seconds) > 1 and sum(seconds) >= _ENOUGH_S):
                break
        return min(seconds)


def _fit(samples: list[tuple[list[float], float]]) -> tuple[float, float, float]:
    """Fit three coefficients, none below 0, to (features, seconds) by least squares of relative errors.

    Fewer than three samples determine the first coefficients only.
    """
    features = np.array([row for row, _ in samples])
    seconds = np.array([s for _, s in samples])
    weights = 1 / np.maximum(seconds, 1e-9)
    active = list(range(min(3, len(samples))))
    while True:
        solution, *_ = np.linalg.lstsq(features[:, active] * weights[:, None], seconds * weights, rcond=None)
        if (solution >= 0).all():
            break
        del active[int(np.argmin(solution))]
    coefficients = np.zeros(3)
    coefficients[active] = solution
    return float(coefficients[0]), float(coefficients[1]), float(coefficients[2])
