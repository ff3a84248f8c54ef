"""A request in the simulated cluster."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from moonpool.conductor.admission.turn import Turn
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.requests.life import RequestLife
from moonpool.runtime.config.options import ConductorOptions
from moonpool.simulator.cluster.memory import PinnedBlocks
from moonpool.simulator.inputs.trace import TraceRequest

_MAX_ATTEMPTS = ConductorOptions().max_attempts


@dataclass(slots=True, eq=False)
class Job:
    """``keys``: of the prompt's full blocks. Events of an earlier ``attempt`` are void."""

    number: int
    request: TraceRequest
    keys: list[bytes]
    conductor: int = 0  # the number of its own
    attempt: int = 0
    life: RequestLife = field(default_factory=lambda: RequestLife(max_attempts=_MAX_ATTEMPTS))
    absent_s: float = -1.0  # since when it has found no node; negative: it has one
    turn: Turn | None = None  # None: not admitted
    decodes_in_place: bool = False  # on the node of its prefill
    # Prompt tokens by the source of their KV: pool, host, ssd, peer, computed.
    use: Counter[str] = field(default_factory=Counter)
    slow: tuple[int, int] = (0, 0)  # blocks to load from host and SSD
    fetched_blocks: int = 0
    hold: PinnedBlocks = field(default_factory=PinnedBlocks)  # at the prefill node
    decode_hold: PinnedBlocks | None = None
    computing: bool = False  # its prefill has not ended
    computing_s: float = 0.0  # start of the prefill
    since_s: float = 0.0  # time of its latest token
    first_token_s: float = -1.0
    rtt_s: float = 0.0  # between its prefill node and where it comes from
    done_s: float = -1.0
    rejected: str = ""  # the stage
    num_produced: int = 0
    num_delivered: int = 0  # tokens of this attempt that the load of its decode node counts
    gaps_s: list[npt.NDArray[np.float64]] = field(default_factory=list)

    def slo(self, usual: Slo) -> Slo:
        """Its own, or the cluster's: ``usual``."""
        return self.request.slo or usual

    @property
    def num_tokens(self) -> int:
        """Tokens that a new attempt must prefill: the prompt and all output so far."""
        return self.request.input_tokens + self.num_produced

    @property
    def remaining(self) -> int:
        return self.request.output_tokens - self.num_produced

    def add_tokens(self, gaps_s: npt.NDArray[np.float64]) -> None:
        """Add tokens, each with the seconds since the one before."""
        if len(gaps_s):
            self.gaps_s.append(gaps_s)
            self.num_produced += len(gaps_s)
            self.since_s += float(gaps_s.sum())

    @property
    def ended(self) -> bool:
        return self.done_s >= 0
