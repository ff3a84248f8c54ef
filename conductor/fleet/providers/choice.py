"""The provider that the options name."""

from __future__ import annotations

from moonpool.conductor.fleet.providers.kubernetes import KubernetesProvider
from moonpool.conductor.fleet.providers.local import LocalProvider
from moonpool.conductor.fleet.providers.provider import Provider
from moonpool.runtime.config.options import FleetOptions


def provider_of(options: FleetOptions) -> Provider | None:
    """None: nodes are started and stopped by others. Raises ``ConfigError``: its package is not installed."""
    if options.provider == "local":
        return LocalProvider(options.supervisor)
    return KubernetesProvider(options) if options.provider == "kubernetes" else None
