"""Which path to a peer is taken: the order of preference, what was measured, and what failed lately."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from transfer.backoff import Backoff
from transfer.path import Path

# Weight of the newest batch in the moving average.
_NEW_WEIGHT = 0.2
# Smaller batches measure latency, not bandwidth.
_MIN_SAMPLE_NBYTES = 1 << 20
# A path lower in the order must have been this much faster to be taken instead.
_CLEARLY_FASTER = 1.25


@dataclass(slots=True)
class _Record:
    path: Path
    backoff: Backoff
    bandwidth: float = 0.0


class PathChoice:
    """The paths to one peer, best first by nature; ``bandwidth`` in bytes/s as measured."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._records = {path.name: _Record(path, Backoff(clock)) for path in paths}

    def __iter__(self) -> Iterator[Path]:
        return (record.path for record in self._records.values())

    def ranked(self) -> list[Path]:
        """Paths to try, in this order. Paused ones come last: better than nothing."""
        ready: list[_Record] = []
        paused: list[_Record] = []
        for record in self._records.values():
            (ready if record.backoff.ready else paused).append(record)
        paused.sort(key=lambda record: record.backoff.paused_until)
        for place in range(len(ready) - 1, 0, -1):
            above, below = ready[place - 1], ready[place]
            if above.bandwidth and below.bandwidth > _CLEARLY_FASTER * above.bandwidth:
                ready[place - 1], ready[place] = below, above
        return [record.path for record in ready + paused]

    def succeeded(self, path: Path, nbytes: int, seconds: float) -> None:
        record = self._records[path.name]
        record.backoff.succeeded()
        if nbytes >= _MIN_SAMPLE_NBYTES and seconds > 0:
            sample = nbytes / seconds
            old = record.bandwidth
            record.bandwidth = old + _NEW_WEIGHT * (sample - old) if old else sample

    def failed(self, path: Path) -> None:
        """Leave it alone for a while, longer each time; after that the next batch tries it again."""
        self._records[path.name].backoff.failed()

    @property
    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by path, of those that were measured."""
        return {name: record.bandwidth for name, record in self._records.items() if record.bandwidth}
