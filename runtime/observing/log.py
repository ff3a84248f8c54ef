"""Log lines on stderr with the name of the process and the id of the request."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

from moonpool.runtime.config.options import LogOptions
from moonpool.runtime.redaction import redacted

# Most lines of one message (format string) in a period of this length: a failing cluster logs the same
# message for every request.
_REPEATS = 10
_REPEATS_S = 10.0

# ``extra`` of lines without this limit.
WHOLE = {"whole": True}

# Set where the work on a request begins; rpc propagates it between processes.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def setup_logging(options: LogOptions, process: str) -> None:
    """Send every logger of this process to stderr. Call once, before the first line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if options.format == "json" else _TextFormatter(process))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    # Their debug lines, one a connection or callback, would hide ours.
    for name in ("grpc", "asyncio", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.INFO))


class RepeatLimit(logging.Filter):
    """Drops the lines of a message after the first ``_REPEATS`` in each period of ``_REPEATS_S`` seconds.

    The next line after that tells the number of dropped ones. Memory is bounded by the number of messages in
    the code. Debug lines and lines with ``extra=WHOLE`` are never dropped.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}  # message -> (start, lines)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or getattr(record, "whole", False):
            return True
        message = (record.name, record.levelno, str(record.msg))
        now_s = self._clock()
        since_s, lines = self._seen.get(message, (now_s, 0))
        dropped = 0
        if now_s - since_s >= _REPEATS_S:
            dropped = max(lines - _REPEATS, 0)
            since_s, lines = now_s, 0
        self._seen[message] = (since_s, lines + 1)
        if dropped:
            record.msg, record.args = f"{record.getMessage()} ({dropped} more of these were dropped)", ()
        return lines < _REPEATS


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process.replace('%', '%%')} %(name)s: %(message)s",
            datefmt="%H:%M:%S",
        )

    def format(self, record: logging.LogRecord) -> str:
        line = redacted(super().format(record))
        about = request_id.get()
        return f"{line} [{about}]" if about else line


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": redacted(record.getMessage()),
        }
        if about := request_id.get():
            fields["request_id"] = about
        if record.exc_info:
            fields["exception"] = redacted(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)
