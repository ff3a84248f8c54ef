"""The conductor: the one object the API talks to."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from conductor.request import GenerateRequest, TokenEvent
from conductor.served_model import ServedModel
from conductor.timeline import RequestTimeline
from runtime.options import ConductorOptions, IndexOptions


class Conductor:
    """Places requests on nodes and streams their tokens. All methods are called on one event loop."""

    def __init__(self, model: ServedModel, options: ConductorOptions, index: IndexOptions) -> None:
        self.model = model

    async def start(self) -> None:
        """Follow the index and connect to the nodes in it. Returns at once; see ``ready``."""
        raise NotImplementedError

    async def close(self) -> None:
        """Cancel every request in flight everywhere and close all connections. Idempotent."""
        raise NotImplementedError

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenEvent, None]:
        """The request's tokens: exactly once, in order, over any number of re-placements.

        Leave it with ``aclose`` (use ``contextlib.aclosing``) or by cancelling the task: either cancels the
        request on every node, without waiting for them.

        Raises (from the iteration):
            RequestRejected: nothing was computed; carries ``retry_after_s``.
            NoNodes: nobody of a role is left; tokens streamed before it are valid.
            DeadlineExceeded: likewise.
            RequestFailed: placed as often as allowed; likewise.
        """
        raise NotImplementedError

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """What happened to a request, while it runs and for a while after; None: unknown or forgotten."""
        raise NotImplementedError

    def cluster(self) -> dict[str, Any]:
        """For ``GET /v1/cluster``: nodes with their load, the index, this conductor, prediction errors."""
        raise NotImplementedError

    def ready(self) -> tuple[bool, list[str]]:
        """Whether requests can be served now, and what is degraded, in sentences."""
        raise NotImplementedError
