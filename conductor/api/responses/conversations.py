"""The messages behind the latest responses, for requests that go on from one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

MAX_KEPT = 1024
MAX_CHARS = 32 << 20
"""Of all conversations that are kept."""


class Conversations:
    """By response and tenant; the oldest ones are forgotten."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, str], tuple[list[dict[str, Any]], int]] = OrderedDict()
        self._num_chars = 0

    def put(self, tenant: str, response_id: str, messages: list[dict[str, Any]]) -> None:
        size = sum(len(str(message)) for message in messages)
        self._kept[tenant, response_id] = messages, size
        self._num_chars += size
        while len(self._kept) > MAX_KEPT or self._num_chars > MAX_CHARS:
            _, (_, size) = self._kept.popitem(last=False)
            self._num_chars -= size

    def get(self, tenant: str, response_id: str) -> list[dict[str, Any]] | None:
        """The messages, with those of the response itself; None: it is unknown."""
        found = self._kept.get((tenant, response_id))
        return None if found is None else found[0]
