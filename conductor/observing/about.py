"""What this conductor is: its code, its machine, its options. Said beside what it did."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from moonpool.runtime.config.loading import shown_options
from moonpool.runtime.config.options import Config
from moonpool.runtime.machine.description import commit_here, describe_machine, versions_of

# Those that decide how fast, and how, it serves; torch and the like are the nodes' own.
_PACKAGES = ("aiohttp", "grpcio", "protobuf", "redis", "hiredis", "orjson", "uvloop", "tokenizers", "numpy")


def about(config: Config) -> dict[str, Any]:
    """Plain JSON types, without secrets. Asks git, so it takes some milliseconds: once, at the start."""
    return {
        "moonpool": version("moonpool"),
        "commit": commit_here(),
        "machine": describe_machine(),
        "versions": versions_of(_PACKAGES),
        "started_unix_s": time.time(),
        "options": shown_options(config),
    }
