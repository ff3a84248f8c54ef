"""What an engine's steps are of: prompts, decoding sequences, and runs of equal steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.simulator.cluster.clock import Event
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

    @property
    def is_void(self) -> bool:
        """Whether its request was placed again since."""
        return self.attempt != self.job.attempt

    @property
    def num_left(self) -> int:
        return self.num_tokens - self.num_done


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

    def work_factor(self, num_sequences: int, context_tokens: int) -> float:
        """Of the next run of decode steps, with such a batch: real over expected seconds."""
        ...

    def decoded(self, decode: Decode, gaps_s: npt.NDArray[np.float64]) -> None:
        """The sequence is complete; ``gaps_s`` are the seconds before each of its tokens."""
        ...


@dataclass(slots=True)
class Run:
    """``count`` steps of the same batch; they take ``gap_s``, ``gap_s + slope_s``, …"""

    start_s: float
    gap_s: float
    slope_s: float
    count: int
    batch_size: int
    decode_s: float  # the batch's part of gap_s
    chunks: list[tuple[Prefill, int]]  # prompts in each step, with their tokens; in several steps only one
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
