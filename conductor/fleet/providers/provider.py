"""Providers: where nodes come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

STARTING: Final = "starting"
"""Its process was asked for, and has not said that it serves."""
RUNNING: Final = "running"
STOPPING: Final = "stopping"
"""It drains, or ends."""
FAILED: Final = "failed"
"""It ended and is not started again. Kept for a while, with the reason."""
REFUSED: Final = "refused"
"""It did not start with this model, and serves the one before it again. Kept for a while, with the reason."""


@dataclass(frozen=True, slots=True)
class SuppliedNode:
    """A node as its provider knows it. ``node_id``: as it registers in the index.

    ``can_stop``: False where others of its role have to go first.
    """

    node_id: str
    role: str
    state: str
    reason: str = ""  # why it failed, or does not start, as a sentence
    age_s: float = 0.0  # since it was started
    can_stop: bool = True
    drain_s: float = 0.0  # that it took to leave the model before this one; 0: it had no other

    @property
    def counts(self) -> bool:
        """Whether it serves, or will."""
        return self.state in (STARTING, RUNNING)


class Provider(Protocol):
    """Starts and stops nodes. It decides nothing.

    Every method raises ``ProviderFailed``, also where the provider does not answer in time; the call may
    have had its effect then, and ``list`` tells. ``fence``: the epoch of the planner's lease, 0 for an
    operator; a provider that can refuses one older than it has seen, with ``PlannerOutdated``.
    """

    name: str

    async def start(self, role: str, model: str, fence: int = 0) -> str:
        """Start a node of ``role`` ("prefill" or "decode") for ``model``, the served name. Returns its id
        once it is on its way; that it serves is seen in the index.
        """

    async def stop(self, node_id: str, fence: int = 0) -> None:
        """Have a node drain and end, and keep it from being started again. Returns at once. Idempotent."""

    async def list(self) -> Sequence[SuppliedNode]:
        """Return all nodes of this provider, those that failed lately included."""

    async def close(self) -> None:
        """Let go of connections; nodes stay. Idempotent."""


@runtime_checkable
class VersionedProvider(Provider, Protocol):
    """A provider that can start nodes with other settings than those before: ``section.key=value``.

    ``settings``: of this node alone. ``rollout``: the epoch of the rollout that asks; one older than it has
    seen is refused. 0: none asks.
    """

    async def start(
        self, role: str, model: str, fence: int = 0, *, settings: Sequence[str] = (), rollout: int = 0
    ) -> str: ...

    async def stop(self, node_id: str, fence: int = 0, *, rollout: int = 0) -> None: ...

    async def settle(self, settings: Sequence[str]) -> None:
        """Have all nodes that are started from now on have these settings."""


@runtime_checkable
class SwitchingProvider(Provider, Protocol):
    """A provider whose nodes can serve another model than before, where they are."""

    async def switch(self, node_id: str, role: str, model: str, fence: int = 0) -> None:
        """Have a node drain, and serve ``model`` with this role from then on. Returns at once. Where it
        does not start with it, it serves the former model again, and is ``REFUSED`` for the other one.
        """
