"""Code, machine and options of this conductor."""

from __future__ import annotations

import time
from importlib.metadata import version
from typing import Any

from moonpool.runtime.config.loading import shown_options
from moonpool.runtime.config.options import Config
from moonpool.runtime.machine.description import commit_here, describe_machine, versions_of

# Packages that affect how it serves.
_PACKAGES = ("aiohttp", "grpcio", "protobuf", "redis", "hiredis", "orjson", "uvloop", "tokenizers", "numpy")


def about(config: Config) -> dict[str, Any]:
    """Plain JSON types, without secrets. Runs git, some milliseconds: call once."""
    return {
        "moonpool": version("moonpool"),
        "commit": commit_here(),
        "machine": describe_machine(),
        "versions": versions_of(_PACKAGES),
        "started_unix_s": time.time(),
        "options": shown_options(config),
    }
