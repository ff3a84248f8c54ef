"""Log lines on stderr, each with the process's name and the id of the request it is about."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import ContextVar

from runtime.options import LogOptions

# Set by whoever begins to work on a request; rpc carries it from process to process.
request_id: ContextVar[str] = ContextVar("request_id", default="")


def setup_logging(options: LogOptions, process: str) -> None:
    """Send every logger of this process to stderr. Call once, before the first line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(process) if options.format == "json" else _TextFormatter(process))
    logging.basicConfig(level=options.level.upper(), handlers=[handler], force=True)
    # One line a connection or a callback is noise at our "debug".
    for name in ("grpc", "asyncio", "aiohttp.access"):
        logging.getLogger(name).setLevel(max(logging.getLogger().level, logging.INFO))


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
