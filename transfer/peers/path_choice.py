"""The order in which batches try the paths to a peer: by preference, measured bandwidth and failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from moonpool.transfer.connections.backoff import Backoff
from moonpool.transfer.metrics import MIN_SAMPLE_NBYTES, moving_average
from moonpool.transfer.paths.base import Path

# A path lower in the order must be this much faster to be tried first.
_CLEARLY_FASTER = 1.25

MemoryKinds = tuple[bool, bool]
"""Whether (our, their) bytes are in device memory. A path's bandwidth is measured for each kind."""
_HOST_ONLY: MemoryKinds = (False, False)


@dataclass(slots=True)
class _Record:
    """bandwidth: in bytes/s; the kind measured last comes last."""

    path: Path
    backoff: Backoff
    bandwidth: dict[MemoryKinds, float] = field(default_factory=dict)


class PathChoice:
    """The paths to one peer, in order of preference."""

    def __init__(self, paths: Sequence[Path], clock: Callable[[], float] = time.monotonic) -> None:
        self._records = {path.name: _Record(path, Backoff(clock)) for path in paths}
        # Of ``first``; None: to be found out.
        self._first: Path | None = None

    def __iter__(self) -> Iterator[Path]:
        return (record.path for record in self._records.values())

    def ranked(self, kinds: MemoryKinds = _HOST_ONLY) -> list[Path]:
        """Paths in the order to try them. Paused ones come last."""
        ready: list[_Record] = []
        paused: list[_Record] = []
        for record in self._records.values():
            (ready if record.backoff.ready else paused).append(record)
        paused.sort(key=lambda record: record.backoff.paused_until)
        for index in range(len(ready) - 1, 0, -1):
            above, below = ready[index - 1], ready[index]
            reached, other = above.bandwidth.get(kinds, 0.0), below.bandwidth.get(kinds, 0.0)
            if reached and other > _CLEARLY_FASTER * reached:
                ready[index - 1], ready[index] = below, above
        return [record.path for record in ready + paused]

    def first(self) -> Path | None:
        """The path that batches between host memories try first; None while a path is paused."""
        if self._first is None and all(record.backoff.ready for record in self._records.values()):
            self._first = next((path for path in self.ranked() if not path.for_devices), None)
        return self._first

    def succeeded(self, path: Path, nbytes: int, seconds: float, kinds: MemoryKinds = _HOST_ONLY) -> None:
        record = self._records[path.name]
        record.backoff.succeeded()
        if nbytes >= MIN_SAMPLE_NBYTES and seconds > 0:
            self._first = None
            record.bandwidth[kinds] = moving_average(record.bandwidth.pop(kinds, 0.0), nbytes / seconds)

    def failed(self, path: Path) -> None:
        """Pause the path, longer each time. The next batch after the pause tries it again."""
        self._first = None
        self._records[path.name].backoff.failed()

    @property
    def bandwidth(self) -> dict[str, float]:
        """Bytes/s by name of the measured paths, for the kind of memory they moved last."""
        measured = {name: list(record.bandwidth.values()) for name, record in self._records.items()}
        return {name: speeds[-1] for name, speeds in measured.items() if speeds}
