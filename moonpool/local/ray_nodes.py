"""The nodes of ``moonpool up --on ray://…``: their conductor is here, they are on a Ray cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from moonpool.conductor.fleet.errors import ProviderFailed
from moonpool.conductor.fleet.providers.provider import FAILED, RUNNING
from moonpool.conductor.fleet.providers.ray import RayProvider
from moonpool.local.node_configs import models_to_start
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError

_READY_TIMEOUT_S = 300.0  # Ray may have to start machines
_LOOK_S = 0.5


class RayNodes:
    """Started with a cluster and ended with it, those that its conductor started included."""

    def __init__(self, config: Config, report: Callable[[str], None]) -> None:
        """``config``: final. Raises ``ConfigError``, also for several models."""
        first, *others = models_to_start(config)
        if others:
            raise ConfigError(
                "on Ray `moonpool up` starts the nodes of one model, and there are "
                f"{len(others) + 1}: start one cluster for each, with an index.namespace of its own",
                "models.served",
            )
        self._provider = RayProvider(first.config)
        self._counts = first.config.cluster
        self._address = config.fleet.ray
        self._report = report

    async def connect(self) -> None:
        """Find the Ray cluster. Raises ``ProviderFailed``: none answers."""
        self._report(f"looking for the Ray cluster at {self._address}")
        await self._provider.list()

    async def start(self) -> list[str]:
        """Start the nodes that ``cluster.*`` names; return their ids once they serve.

        Raises ``ProviderFailed``: one failed, or Ray had no room for it. ``stop`` ends the others.
        """
        by_role = {role: getattr(self._counts, role) for role in ("prefill", "decode", "both")}
        names = [
            await self._provider.start(role, "") for role, count in by_role.items() for _ in range(count)
        ]
        missing = dict.fromkeys(names, "")
        try:
            async with asyncio.timeout(_READY_TIMEOUT_S):
                while missing:
                    for node in await self._provider.list():
                        if node.node_id not in missing:
                            continue
                        missing[node.node_id] = node.reason
                        if node.state == FAILED:
                            raise ProviderFailed(f"{node.node_id} on Ray: {node.reason}")
                        if node.state == RUNNING:
                            del missing[node.node_id]
                            self._report(f"{node.node_id} is ready on Ray after {node.age_s:.1f} s")
                    await asyncio.sleep(_LOOK_S)
        except TimeoutError:
            late = "; ".join(f"{name}: {why or 'it loads'}" for name, why in missing.items())
            raise ProviderFailed(f"not ready within {_READY_TIMEOUT_S:.0f} s: {late}") from None
        return names

    async def stop(self) -> None:
        """End all nodes at once. Idempotent."""
        try:
            await self._provider.stop_all()
        except ProviderFailed as error:
            self._report(f"nodes may be left on Ray: {error}")
        await self._provider.close()
