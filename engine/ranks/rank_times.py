"""Time of each rank in steps, and the ranks that the others wait for."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.engine.sharding.stage_cut import better_cut

WINDOW_S = 8.0
PARTS = ("compute", "exchange", "wait", "bubble")
# Fewer steps in the window prove nothing.
_LEAST_STEPS = 8
# Other processes for a moment stay below, and less than this a step: rank 0 shares its process with the node.
_SLOW_RATIO = 1.5
_LEAST_EXCESS_S = 0.005
# A stall is a step of so many times the median rank's time, and this much longer.
_STALL_RATIO = 3.0
_STALL_S = 0.1
_SLOW_STALLS = 2


@dataclass(frozen=True, slots=True)
class Pace:
    """A rank's own time in the steps of the last ``WINDOW_S``: compute and its part of exchanges, no waiting.

    ratio: over the median rank's. cause: compute or exchange, whichever exceeds the median rank's by more.
    num_stalls: since the start, see ``_STALL_S``.
    """

    rank: int
    ratio: float
    cause: str
    num_stalls: int
    is_slow: bool


class RankTimes:
    """Seconds of each rank since the start, and its pace in the last ``WINDOW_S``.

    Compute is compared within a stage, because stages have unequal work; a stage of one rank is compared only
    in exchanges and stalls. With an even number of ranks the median is the faster one of the two in the
    middle. The thread of the steps writes; any thread reads.
    """

    def __init__(
        self, layers: Sequence[int], stage_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """layers: of each stage. stage_size: ranks of a stage."""
        self._layers = layers
        self._stages = np.repeat(np.arange(len(layers)), stage_size)  # of each rank
        self._num_steps = 0
        self._totals_s = np.zeros((len(PARTS), len(self._stages)))
        self._num_stalls = [0] * len(self._stages)
        # When; compute and exchange [2, world_size]; the rank that stalled, or -1.
        self._recent: deque[tuple[float, npt.NDArray[np.float64], int]] = deque()
        self._clock = clock
        self._lock = threading.Lock()

    def observe(
        self,
        compute_s: Sequence[float],
        exchange_s: Sequence[float],
        collective_s: Sequence[float],
        bubble_s: Sequence[float],
    ) -> None:
        """Add one step; [world_size] each. Compute excludes rank 0's sampling, which others do not have.
        collective_s: exchange_s and the waiting for other ranks."""
        step_s = np.array([compute_s, exchange_s, collective_s, bubble_s])
        step_s[2] -= step_s[1]
        with self._lock:
            self._totals_s += step_s
            self._num_steps += 1
            stalled = _stalled(step_s[:2].sum(0))
            if stalled >= 0:
                self._num_stalls[stalled] += 1
            self._recent.append((self._clock(), step_s[:2], stalled))
            self._drop_old()

    def totals_s(self) -> dict[str, list[float]]:
        """Return seconds since the start by part, [world_size] each."""
        with self._lock:
            return dict(zip(PARTS, self._totals_s.tolist(), strict=True))

    def paces(self) -> list[Pace]:
        """Return the pace of each rank; all alike after few steps."""
        with self._lock:
            self._drop_old()
            num_steps, num_stalls = len(self._recent), list(self._num_stalls)
            stalled = [rank for _, _, rank in self._recent]
            parts_s = sum((step_s for _, step_s, _ in self._recent), np.zeros_like(self._totals_s[:2]))
        if num_steps < _LEAST_STEPS:
            return [Pace(rank, 1.0, "compute", num, False) for rank, num in enumerate(num_stalls)]
        compute_s, exchange_s = parts_s
        median_s = np.array(
            [
                [_median(compute_s[self._stages == stage]) for stage in self._stages],
                [_median(exchange_s)] * len(num_stalls),
            ]
        )
        excess_s = parts_s - median_s
        found = []
        for rank, num in enumerate(num_stalls):
            ratio = parts_s[:, rank].sum() / max(median_s[:, rank].sum(), 1e-9)
            lags = ratio >= _SLOW_RATIO and excess_s[:, rank].sum() >= _LEAST_EXCESS_S * num_steps
            stalls = stalled.count(rank) >= _SLOW_STALLS
            cause = PARTS[excess_s[:, rank].argmax()]
            found.append(Pace(rank, float(ratio), cause, num, bool(lags or stalls)))
        return found

    def better_layers(self) -> str:
        """Return the ``engine.parallel.pp_layers`` that would balance the stages; empty if they are balanced
        or after few steps. The slowest rank of a stage counts."""
        with self._lock:
            num_steps, compute_s = self._num_steps, self._totals_s[0].copy()
        stages_s = [float(compute_s[self._stages == stage].max()) for stage in range(len(self._layers))]
        return "+".join(map(str, better_cut(stages_s, self._layers, num_steps) or ()))

    def is_judged(self) -> bool:
        """Whether there were steps enough in the window to tell slow ranks from others."""
        with self._lock:
            self._drop_old()
            return len(self._recent) >= _LEAST_STEPS

    def slowest(self) -> Pace | None:
        """Return the slow rank with the highest ratio; None when none is slow."""
        return max((pace for pace in self.paces() if pace.is_slow), key=lambda pace: pace.ratio, default=None)

    def sentence(self) -> str:
        """Name the slowest rank; empty when none is slow."""
        if (slow := self.slowest()) is None:
            return ""
        num_ranks = len(self._stages)
        return (
            f"rank {slow.rank} of {num_ranks} is slow ({slow.cause}): it takes {slow.ratio:.1f} times "
            f"as long as the median rank; stalls of over {_STALL_S:g} s since the start: {slow.num_stalls}"
        )

    def _drop_old(self) -> None:
        oldest_s = self._clock() - WINDOW_S
        while self._recent and self._recent[0][0] < oldest_s:
            self._recent.popleft()


def _median(of_ranks_s: npt.NDArray[np.float64]) -> float:
    return float(np.sort(of_ranks_s)[(len(of_ranks_s) - 1) // 2])


def _stalled(own_s: npt.NDArray[np.float64]) -> int:
    """Return the rank that stalled in a step, or -1."""
    slowest = int(own_s.argmax())
    median_s = _median(own_s)
    stalled = own_s[slowest] >= max(median_s + _STALL_S, _STALL_RATIO * median_s)
    return slowest if stalled else -1
