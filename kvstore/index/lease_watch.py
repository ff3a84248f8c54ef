"""When a lapsed lease may be believed."""

from __future__ import annotations


class LeaseWatch:
    """A node's heartbeat may be late because the node is gone, or because Redis (or we) stood still or was
    away. Only who has watched Redis answer for one whole lease, without a break, may drop a silent node.
    """

    def __init__(self, ttl_s: float) -> None:
        self._ttl_s = ttl_s
        self._since: float | None = None
        self._last_s = 0.0

    def disconnected(self) -> None:
        """Redis does not answer."""
        self._since = None

    def answered(self, asked_s: float, now_s: float) -> bool:
        """Redis has answered at ``now_s`` what was asked at ``asked_s``. True: lapsed leases may be
        believed."""
        most_s = self._ttl_s / 2
        if self._since is None or asked_s - self._last_s > most_s or now_s - asked_s > most_s:
            self._since = now_s
        self._last_s = now_s
        return now_s - self._since >= self._ttl_s
