"""The provider that the options name."""

from __future__ import annotations

from moonpool.conductor.fleet.providers.local import LocalProvider
from moonpool.conductor.fleet.providers.provider import Provider
from moonpool.runtime.config.options import FleetOptions


def provider_of(options: FleetOptions) -> Provider | None:
    """None: nodes are started and stopped by others."""
    return LocalProvider(options.supervisor) if options.provider == "local" else None
