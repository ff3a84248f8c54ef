"""Which path to a peer is taken: the order of preference, what was measured, and what failed lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.transfer.connections.backoff import Backoff
from moonpool.transfer.paths.base import Path

# Weight of the newest batch in the moving average.
_NEW_WEIGHT = 0.2
# Smaller batches measure latency, not bandwidth.
_MIN_SAMPLE_NBYTES = 1 << 20
# A path lower in the order must have been this much faster to be taken instead.
_CLEARLY_FASTER = 1.25


Where = tuple[bool, bool]
"""Which bytes lie in a device's memory: (ours, theirs). A path's speed for one says nothing of the others."""
_HOSTS: Where = (False, False)


@dataclass(slots=True)
class _Record:
    """bandwidth: the kind measured last comes last."""

    path: Path
    backoff: Backoff
    bandwidth: dict[Where, float] = field(default_factory=dict)


class PathChoice:
    """The paths to one peer, best first by nature; ``bandwidth`` in bytes/s as measured."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._records = {path.name: _Record(path, Backoff(clock)) for path in paths}

    def __iter__(self) -> Iterator[Path]:
        return (record.path for record in self._records.values())

    def ranked(self, where: Where = _HOSTS) -> list[Path]:
        """Paths to try, in this order. Paused ones come last: better than nothing."""
        ready: list[_Record] = []
        paused: list[_Record] = []
        for record in self._records.values():
            (ready if record.backoff.ready else paused).append(record)
        paused.sort(key=lambda record: record.backoff.paused_until)
        for place in range(len(ready) - 1, 0, -1):
            above, below = ready[place - 1], ready[place]
            reached, other = above.bandwidth.get(where, 0.0), below.bandwidth.get(where, 0.0)
            if reached and other > _CLEARLY_FASTER * reached:
                ready[place - 1], ready[place] = below, above
        return [record.path for record in ready + paused]

    def succeeded(self, path: Path, nbytes: int, seconds: float, where: Where = _HOSTS) -> None:
        record = self._records[path.name]
        record.backoff.succeeded()
        if nbytes >= _MIN_SAMPLE_NBYTES and seconds > 0:
            sample = nbytes / seconds
            old = record.bandwidth.pop(where, sample)
            record.bandwidth[where] = old + _NEW_WEIGHT * (sample - old)

    def failed(self, path: Path) -> None:
        """Leave it alone for a while, longer each time; after that the next batch tries it again."""
        self._records[path.name].backoff.failed()

    @property
    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by path, of those that were measured, for the kind of memory they moved last."""
        measured = {name: list(record.bandwidth.values()) for name, record in self._records.items()}
        return {name: speeds[-1] for name, speeds in measured.items() if speeds}
