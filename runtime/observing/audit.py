"""Audit and usage lines: JSON in files that rotate, apart from the log.

    DIR/audit-NAME.jsonl    each administrative call and each refused one: who, what, from where, why
    DIR/usage-NAME.jsonl    each request: tenant, model, tokens, outcome

Refusals of one kind from one host are written a few times in a period, then counted, so that a flood fills
neither the disk nor the reader's day. Neither secrets nor texts of prompts and answers are written.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from moonpool.runtime.config.options import AuditOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.observing.log import request_id
from moonpool.runtime.observing.rotating_file import LineWriter, RotatingFile, claim

PERIOD_S = 10.0
_EACH = 10
"""Lines of one kind of refusal from one host in a period."""
_ALL = 100
"""Lines of all refusals in a period."""
_MAX_CHARS = 256


class RefusalBound:
    """Which refusals get a line of their own, and how many others there were. For several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._began_s = clock()
        self._seen: dict[tuple[str, str], list[int]] = {}  # refusals, lines
        self._lines = 0

    def admits(self, host: str, kind: str) -> bool:
        """Count a refusal. Memory is bounded: hosts beyond ``_ALL`` count as one."""
        with self._lock:
            if (host, kind) not in self._seen and len(self._seen) >= _ALL:
                host, kind = "others", ""
            counts = self._seen.setdefault((host, kind), [0, 0])
            counts[0] += 1
            if counts[1] >= _EACH or self._lines >= _ALL:
                return False
            counts[1] += 1
            self._lines += 1
            return True

    def ended(self, now: bool = False) -> list[tuple[str, str, int]]:
        """At the end of a period, or ``now``: (host, kind, refusals without a line)."""
        with self._lock:
            if not now and self._clock() - self._began_s < PERIOD_S:
                return []
            seen, self._seen = self._seen, {}
            self._lines, self._began_s = 0, self._clock()
        return [(host, kind, count - lines) for (host, kind), (count, lines) in seen.items() if count > lines]


class AuditLog:
    """The files of this process. ``name``: of the process. Raises ``ConfigError``: no file can be made."""

    def __init__(self, options: AuditOptions, name: str) -> None:
        self._process = name
        directory = Path(options.path)
        try:
            claimed, self._claim = claim(directory, quote(name, safe="@:"))
        except OSError as error:
            raise ConfigError(
                f"audit.path: {directory} cannot be written: {error.strerror}", "audit.path"
            ) from error

        def writer(kind: str, more: Callable[[bool], Iterator[dict[str, Any]]]) -> LineWriter:
            file = directory / f"{kind}-{claimed}.jsonl"
            return LineWriter(RotatingFile(file, options.file_nbytes, options.files), more)

        self._bound = RefusalBound()
        self._audit = writer("audit", self._counted)
        # Made by the first request: nodes have none.
        self._new_usage: Callable[[], LineWriter] = lambda: writer("usage", lambda _: iter(()))
        self._usage: LineWriter | None = None

    def refused(self, what: str, why: str, *, who: str, origin: str, kind: str, request_id: str) -> None:
        if self._bound.admits(_host(origin), kind):
            line = {"who": who, "what": what, "origin": origin, "why": why, "request_id": request_id}
            self._audit.write(self._line("refused", **line))

    def administrative(self, what: str, outcome: str, *, who: str, origin: str) -> None:
        self._audit.write(self._line("administrative", who=who, what=what, origin=origin, outcome=outcome))

    def usage(self, **fields: Any) -> None:
        if self._usage is None:
            self._usage = self._new_usage()
        self._usage.write(self._line("usage", **fields))

    def close(self) -> None:
        for writer in (self._audit, self._usage):
            if writer is not None:
                writer.close()

    def _counted(self, last: bool) -> Iterator[dict[str, Any]]:
        for host, kind, count in self._bound.ended(last):
            yield self._line("refused_more", origin=host, why=kind, more=count)

    def _line(self, event: str, **fields: Any) -> dict[str, Any]:
        about = fields.pop("request_id", "") or request_id.get()
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"time": now, "process": self._process, "event": event, **fields, "request_id": about}
        return {
            name: value[:_MAX_CHARS] if isinstance(value, str) else value
            for name, value in line.items()
            if value != ""
        }


def _host(origin: str) -> str:
    """The host of ``ipv4:10.0.0.1:5000``, ``ipv6:[::1]:5000`` or ``10.0.0.1``."""
    kind, colon, rest = origin.partition(":")
    return rest.rpartition(":")[0] if colon and kind in ("ipv4", "ipv6") else origin


_current: AuditLog | None = None


@contextmanager
def audited(options: AuditOptions, name: str) -> Iterator[None]:
    """Write the lines of this process during the block, where ``audit.path`` is set.

    Raises:
        ConfigError: the directory cannot be written.
    """
    global _current
    if not options.path:
        yield
        return
    written = _current = AuditLog(options, name)
    try:
        yield
    finally:
        _current = None
        written.close()


def refused(
    what: str, why: str, *, who: str = "", origin: str = "", kind: str = "", request_id: str = ""
) -> None:
    """A call had no effect, for the reason ``why``. ``kind``: of reasons; few.

    ``request_id``: without it that of the current request.
    """
    if _current is not None:
        _current.refused(what, why, who=who, origin=origin, kind=kind or why, request_id=request_id)


def administrative(what: str, outcome: str, *, who: str = "", origin: str = "") -> None:
    """Record a change. outcome: ``ok``, or the name of an error."""
    if _current is not None:
        _current.administrative(what, outcome, who=who, origin=origin)


def usage(**fields: Any) -> None:
    """A request ended. ``fields``: names, numbers and outcome, never texts."""
    if _current is not None:
        _current.usage(**fields)
