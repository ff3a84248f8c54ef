"""How far a simulated cluster differs from what its scheduler believes."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Errors:
    """Standard deviations of the logarithm of real over believed values; 0: belief and truth are the same.

    The scheduler begins with data sheets, and corrects them by what it observes, as a live conductor does.
    """

    node: float = 0.0  # of the costs of each node, as long as it lives
    work: float = 0.0  # of the seconds of each prefill, and of each run of decode steps
    # Of steps and prefills, for each factor of four in their sizes beyond what a node measures at its start.
    size: float = 0.0
    link: float = 0.0  # of the bandwidth of each node's link, as long as it lives
    index_s: float = 0.0  # not a deviation: mean seconds until a change of the index is seen

    def __bool__(self) -> bool:
        return any(getattr(self, field.name) for field in fields(self))

    def scaled(self, scale: float) -> Errors:
        """Every error so many times as large."""
        return Errors(**{field.name: scale * getattr(self, field.name) for field in fields(self)})
