"""What can go wrong with a peer."""

from __future__ import annotations

from runtime.errors import MoonpoolError


class PeerFailed(MoonpoolError):
    """A peer could not be installed, started or asked. Nothing of it is left running."""
