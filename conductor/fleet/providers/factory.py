"""The provider that the options name."""

from __future__ import annotations

from moonpool.conductor.fleet.providers.kubernetes import KubernetesProvider
from moonpool.conductor.fleet.providers.local import LocalProvider
from moonpool.conductor.fleet.providers.provider import Provider
from moonpool.conductor.fleet.providers.ray import RayProvider
from moonpool.runtime.config.options import Config


def provider_of(config: Config) -> Provider | None:
    """None: nodes are started and stopped by others. Raises ``ConfigError``: its package is not installed."""
    match config.fleet.provider:
        case "local":
            return LocalProvider(config.fleet.supervisor, config.model.served_name)
        case "ray":
            return RayProvider(config)
        case "kubernetes":
            return KubernetesProvider(config.fleet)
    return None
