"""Log lines on stderr, each with the process's name and the id of the request it is about."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextvars import ContextVar

from moonpool.runtime.config.options import LogOptions

# Of one sentence, whatever its facts, so many lines are written in so long; a cluster in trouble says the
# same thing for every request, and the disk and the reader are to survive it.
_REPEATS = 10
_REPEATS_S = 10.0

# ``extra`` of lines that were asked for one by one: all of them are written.
WHOLE = {"whole": True}

# Set by whoever begins to work on a request; rpc carries it from process to process.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def setup_logging(options: LogOptions, process: str) -> None:
    """Send every logger of this process to stderr. Call once, before the first line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if options.format == "json" else _TextFormatter(process))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    # One line a connection or a callback is noise at our "debug".
    for name in ("grpc", "asyncio", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.INFO))


class RepeatLimit(logging.Filter):
    """Lets through the first ``_REPEATS`` lines of a sentence in each stretch of ``_REPEATS_S`` seconds; the
    first one after that says how many were left out. Errors' tracebacks count as their sentence. Memory is
    bounded by the number of sentences in the code. Whoever asks for debugging gets every line of it, and so
    does who asks for people's words (``WHOLE``).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int, str], tuple[float, int]] = {}  # (since, lines)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG or getattr(record, "whole", False):
            return True
        sentence = (record.name, record.levelno, str(record.msg))
        now_s = self._clock()
        since_s, lines = self._seen.get(sentence, (now_s, 0))
        left_out = 0
        if now_s - since_s >= _REPEATS_S:
            left_out = max(lines - _REPEATS, 0)
            since_s, lines = now_s, 0
        self._seen[sentence] = (since_s, lines + 1)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} ({left_out} more of these before)", ()
        return lines < _REPEATS


class _TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process.replace('%', '%%')} %(name)s: %(message)s",
            datefmt="%H:%M:%S",
        )

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
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
            "message": record.getMessage(),
        }
        if about := request_id.get():
            fields["request_id"] = about
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False)
