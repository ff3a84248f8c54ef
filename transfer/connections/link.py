"""What a ``Peer`` needs of its control connection; in one process there is an object instead of a
connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moonpool.transfer.connections.wire import RegionInfo


class Link(Protocol):
    """See ``transfer.control.Control`` for what each does."""

    @property
    def open(self) -> bool: ...

    async def region(self, region_id: int) -> RegionInfo: ...

    def note(self, payload: bytes) -> None: ...

    def on_region_closed(self, callback: Callable[[int], None]) -> None: ...

    def let_go(self, region_id: int) -> None: ...

    def close(self) -> None: ...
