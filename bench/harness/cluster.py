"""How a benchmark gets a cluster: from whoever runs the command, because bench knows nothing above it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import click

from moonpool.runtime.errors import ConfigError


class StartCluster(Protocol):
    """Starts a cluster of processes on this machine, with options as ``key=value``.

    Gives the URL of its API; at the end of the context every process is gone. ``moonpool`` passes its own as
    the object of click's context.
    """

    def __call__(self, sets: Sequence[str]) -> AbstractAsyncContextManager[str]: ...


def cluster_starter() -> StartCluster:
    """The one of the running command.

    Raises:
        ConfigError: the command was not started through ``moonpool``.
    """
    found = click.get_current_context().find_root().obj
    if not callable(found):
        raise ConfigError("this command cannot start a cluster by itself: name one with --url", key="url")
    starter: StartCluster = found
    return starter
