"""Copies of hot prefixes between the cells of a router: a cell's requests find them in another one."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from functools import partial
from typing import Any, Final

import aiohttp

from moonpool.conductor.cells import metrics
from moonpool.conductor.cells.choice import Cell, candidates
from moonpool.conductor.cells.watch import Cells
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

_LOOK_S: Final = 1.0
_EVERY_S: Final = 10.0
"""Between two rounds of a cell. One that begins to drain has one at once."""
_AT_ONCE: Final = 16  # prefixes in a call: up to 3 MB with 128,000 tokens each
_CALL_S: Final = 10.0
_KNOWN_S: Final = 120.0
"""So long a cell is taken to have what it had: it may have evicted it since."""


class Spreading:
    """Offers what is hot in a cell to the cell that its requests go to without it.

    So they find it when the cell is lost, is drained, or gives prefixes away because it is loaded. Of a cell
    that serves, the copy stays in its region; of one that drains, it goes wherever its requests go. Other
    routers may do the same: a cell does not read what it has.
    """

    def __init__(self, cells: Cells) -> None:
        self._cells = cells
        self._known: dict[tuple[Cell, str], float] = {}  # until when: cell and prefix
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """After ``Cells.start``."""
        self._tasks = [
            restarted(partial(self._follow, cell), f"copy hot prefixes of cell {cell.name}", "copy prefixes")
            for cell in self._cells.doors
        ]

    async def close(self) -> None:
        """Idempotent. Before ``Cells.close``."""
        await cancel_and_wait(*self._tasks)

    async def _follow(self, cell: Cell) -> None:
        now_s, served = asyncio.get_running_loop().time, cell.usable
        next_s = now_s() + _EVERY_S
        while True:
            await asyncio.sleep(_LOOK_S)
            if cell.usable == served and now_s() < next_s:
                continue
            next_s, served = now_s() + _EVERY_S, cell.usable
            try:
                await self.round(cell)
            except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                log.info("hot prefixes of cell %s: %s", cell.name, error or type(error).__name__)

    async def round(self, cell: Cell) -> int:
        """Copy what is hot in ``cell``. Returns the number of prefixes that other cells have read.

        Raises what ``Cells.call`` does; ``KeyError``, ``TypeError``: a conductor answers something else.
        """
        door = next((one for one in self._cells.doors[cell] if one.answers), None)
        if door is None or len(self._cells.doors) < 2:
            return 0
        moves, num_read = not cell.usable, 0
        now_s = asyncio.get_running_loop().time()
        self._known = {one: until_s for one, until_s in self._known.items() if until_s > now_s}
        wanted: dict[tuple[Cell, str], list[dict[str, Any]]] = defaultdict(list)
        path = f"/v1/cell/prefixes?moves={moves:d}"
        for offer in (await self._cells.call(door, "GET", path, limit_s=_CALL_S))["prefixes"]:
            target = self._successor(cell, offer, moves)
            if target is not None and (target, offer["id"]) not in self._known:
                wanted[target, offer["model"]].append(offer)
        for (target, model), offers in wanted.items():
            for first in range(0, len(offers), _AT_ONCE):
                num_read += await self._hand(target, model, offers[first : first + _AT_ONCE])
        return num_read

    def _successor(self, cell: Cell, offer: dict[str, Any], moves: bool) -> Cell | None:
        """The cell that requests with this prefix go to without ``cell``; None: there is none."""
        cells = self._cells
        regions = cells.nearest(cell.region) if moves else [cells.regions[cell.region]]
        confined = frozenset(offer["regions"])
        order = candidates(regions, offer["digests"], model=offer["model"], confined=confined)
        return next((one for one in order if one is not cell), None)

    async def _hand(self, target: Cell, model: str, offers: list[dict[str, Any]]) -> int:
        door = next(self._cells.open_doors(target), None)
        if door is None:
            return 0
        body = {"model": model, "prefixes": [offer["sealed"] for offer in offers]}
        done = await self._cells.call(door, "POST", "/v1/cell/prefixes", body, limit_s=_CALL_S)
        until_s = asyncio.get_running_loop().time() + _KNOWN_S
        self._known |= {(target, offers[position]["id"]): until_s for position in done["held"]}
        metrics.prefixes.labels(target.name).inc(done["copied"])
        return int(done["copied"])
