"""What requests ask of the cluster, and whether they get it in time: totals that only grow."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Demand:
    """Totals since a start. ``prefill_s``: predicted, at arrival, of the tokens that were not cached."""

    num_requests: int = 0  # rejected ones included
    num_rejected: int = 0
    prefill_s: float = 0.0
    prefill_s2: float = 0.0  # sum of the squares
    prompt_tokens: int = 0
    hit_tokens: int = 0  # of those
    num_first_tokens: int = 0
    num_ttft_within: int = 0  # of those, within the SLO
    num_decoded: int = 0  # requests of more than one token that ended
    num_tbt_within: int = 0  # of those
    output_tokens: int = 0

    def plus(self, other: Demand) -> Demand:
        return Demand(*(getattr(self, name) + getattr(other, name) for name in _NAMES))

    def minus(self, other: Demand) -> Demand:
        return Demand(*(getattr(self, name) - getattr(other, name) for name in _NAMES))


_NAMES = tuple(field.name for field in fields(Demand))


class DemandCounter:
    """Counts for one conductor; the simulator uses it too."""

    __slots__ = ("_totals",)

    def __init__(self) -> None:
        self._totals: dict[str, float] = dict.fromkeys(_NAMES, 0)

    @property
    def total(self) -> Demand:
        return Demand(**self._totals)  # type: ignore[arg-type]

    def arrived(self, prefill_s: float, prompt_tokens: int, hit_tokens: int) -> None:
        """Nodes were chosen for a request for the first time; it may still be rejected."""
        totals = self._totals
        totals["num_requests"] += 1
        totals["prefill_s"] += prefill_s
        totals["prefill_s2"] += prefill_s * prefill_s
        totals["prompt_tokens"] += prompt_tokens
        totals["hit_tokens"] += hit_tokens

    def rejected(self) -> None:
        """A request was rejected because it would miss an SLO."""
        self._totals["num_rejected"] += 1

    def first_token(self, within: bool) -> None:
        self._totals["num_first_tokens"] += 1
        self._totals["num_ttft_within"] += within

    def ended(self, num_tokens: int, within: bool) -> None:
        """A request ended by itself. ``within``: its tokens after the first kept the SLO."""
        totals = self._totals
        totals["output_tokens"] += num_tokens
        if num_tokens > 1:
            totals["num_decoded"] += 1
            totals["num_tbt_within"] += within


class ClusterDemand:
    """The demand at all conductors together. What one told at first is not counted again."""

    def __init__(self, own: DemandCounter) -> None:
        self._own = own
        self._others: dict[str, Demand] = {}
        self._heard = Demand()

    @property
    def own(self) -> Demand:
        """What this conductor tells the others."""
        return self._own.total

    @property
    def total(self) -> Demand:
        """Only differences of it have a meaning."""
        return self._own.total.plus(self._heard)

    def hear(self, conductor_id: str, told: Demand) -> None:
        before = self._others.get(conductor_id, told)
        self._others[conductor_id] = told
        self._heard = self._heard.plus(told.minus(before))

    def forget(self, conductor_id: str) -> None:
        """It has left. Idempotent."""
        self._others.pop(conductor_id, None)
