"""The cells of a router: their addresses as configured, and what each tells about once a second."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson

from moonpool.conductor.cells import metrics
from moonpool.conductor.cells.choice import Cell, RegionCells
from moonpool.conductor.costs.regions import RegionLinks
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.service.vital import cancel_and_wait, restarted

log = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 1.0
_ANSWER_S: Final = 2.0
_LOST_AFTER: Final = 2
"""Late answers in a row. What waits there for its first byte goes elsewhere then."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


@dataclass(frozen=True, slots=True)
class CellEntry:
    name: str
    urls: tuple[str, ...]  # of its conductors, or of a load balancer in front of them
    region: str = ""

    @classmethod
    def parse(cls, text: str) -> CellEntry:
        """Read ``NAME=URL [URL …] [region=REGION]``, with spaces or commas. Raises ``ConfigError``."""
        name, _, rest = text.strip().partition("=")
        words = [word for word in re.split(r"[,\s]+", rest) if word]
        urls = [word.rstrip("/").removesuffix("/v1") for word in words if not word.startswith("region=")]
        regions = [word.removeprefix("region=") for word in words if word.startswith("region=")]
        parts = [urlsplit(url) for url in urls]
        valid = all(one.scheme in ("http", "https") and one.netloc and not one.path for one in parts)
        if not _NAME.fullmatch(name) or not urls or not valid or len(regions) > 1 or not all(regions):
            raise ConfigError(
                f"router.cells: {text!r} is not NAME=URL [URL …] [region=REGION], with a name of letters, "
                "digits, - and _",
                "router.cells",
            )
        return cls(name, tuple(urls), regions[0] if regions else "")


@dataclass(eq=False, slots=True)
class Door:
    """A conductor of a cell."""

    url: str
    answers: bool = False
    said: dict[str, Any] = field(default_factory=dict)
    num_open: int = 0  # requests of this router
    trouble: str = ""
    _waiting: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        return self.answers and bool(self.said["ready"])

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """While nothing has come of an answer. Raises ``TimeoutError`` when the conductor is lost."""
        async with asyncio.timeout(None) as limit:
            self._waiting.add(limit)
            try:
                yield
            finally:
                self._waiting.discard(limit)

    def give_up(self) -> None:
        """End what waits."""
        for limit in list(self._waiting):
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time())


class Cells:
    """Asks all conductors of all cells, from ``start`` to ``close``. ``regions``: by name."""

    def __init__(self, entries: Sequence[CellEntry], key: str, links: RegionLinks) -> None:
        """``key``: an API key that may read the cells' pages; empty: they need none."""
        names = [entry.name for entry in entries]
        if not names or len(set(names)) < len(names):
            raise ConfigError("router.cells: name at least one cell, and each once", "router.cells")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._links = links
        self.cells = {entry.name: Cell(entry.name, entry.region) for entry in entries}
        self.doors = {self.cells[entry.name]: [Door(url) for url in entry.urls] for entry in entries}
        by_region: dict[str, list[Cell]] = {}
        for cell in self.cells.values():
            by_region.setdefault(cell.region, []).append(cell)
        self.regions = {name: RegionCells(name, cells) for name, cells in by_region.items()}
        self._tasks: list[asyncio.Task[None]] = []
        self._session: aiohttp.ClientSession | None = None

    def start(self, session: aiohttp.ClientSession) -> None:
        """``session``: used, not closed."""
        self._session = session
        for cell, doors in self.doors.items():
            self._tasks += [
                restarted(
                    partial(self._follow, cell, door), f"ask cell {cell.name} at {door.url}", "ask a cell"
                )
                for door in doors
            ]

    async def close(self) -> None:
        """Idempotent."""
        await cancel_and_wait(*self._tasks)

    def nearest(self, home: str) -> list[RegionCells]:
        """All regions: ``home``, then by the round trip from there (``conductor.region_links``), by name."""
        return sorted(
            self.regions.values(),
            key=lambda one: (one.name != home, self._links.between(home, one.name).rtt_s, one.name),
        )

    def open_doors(self, cell: Cell) -> Iterator[Door]:
        """Its conductors that take requests, those with the fewest of this router first."""
        return iter(sorted((one for one in self.doors[cell] if one.is_open), key=lambda one: one.num_open))

    @asynccontextmanager
    async def counted(self, cell: Cell, door: Door) -> AsyncIterator[None]:
        """A request is there meanwhile."""
        region = self.regions[cell.region]
        region.add(cell, 1)
        door.num_open += 1
        try:
            yield
        finally:
            door.num_open -= 1
            region.add(cell, -1)

    def lost(self, cell: Cell, door: Door, why: str) -> None:
        """A conductor cannot be reached: it gets nothing until it answers again."""
        if door.answers or why != door.trouble:
            log.warning("cell %s: %s does not answer: %s", cell.name, door.url, why)
        door.answers, door.trouble = False, why
        door.give_up()
        self._see(cell)

    async def _follow(self, cell: Cell, door: Door) -> None:
        num_late = 0
        while True:
            try:
                said = await self._ask(door)
                if not door.answers:
                    log.info("cell %s: %s answers", cell.name, door.url)
                door.answers, door.said, door.trouble, num_late = True, said, "", 0
                self._see(cell)
            except TimeoutError:
                num_late += 1
                if num_late >= _LOST_AFTER:
                    self.lost(cell, door, f"no answer within {_ANSWER_S:g} s, {num_late} times")
            except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
                self.lost(cell, door, str(error) or type(error).__name__)
            await asyncio.sleep(_ASK_EVERY_S)

    async def call(
        self, door: Door, method: str, path: str, body: object = None, *, limit_s: float = _ANSWER_S
    ) -> dict[str, Any]:
        """Ask a conductor for JSON. Raises ``TimeoutError``, ``aiohttp.ClientError``, ``ValueError``."""
        assert self._session is not None
        data = None if body is None else orjson.dumps(body)
        limit = aiohttp.ClientTimeout(total=limit_s)
        url, headers = door.url + path, self._headers
        async with self._session.request(method, url, data=data, headers=headers, timeout=limit) as answer:
            answer.raise_for_status()
            said: dict[str, Any] = orjson.loads(await answer.read())
            return said

    async def _ask(self, door: Door) -> dict[str, Any]:
        said = await self.call(door, "GET", "/v1/cell")
        for name in ("num_conductors", "num_nodes", "num_requests", "requests_per_s"):
            said[name] = float(said[name])
        said["hot"] = {int(digest): float(per_s) for digest, per_s in said["hot"]}
        said["models"] = frozenset(map(str, said["models"]))
        said["ready"] = bool(said["ready"])
        return said

    def _see(self, cell: Cell) -> None:
        """Sum up what its conductors tell, those that are not asked by those that are."""
        told = [door.said for door in self.doors[cell] if door.is_open]
        cell.usable = any(one["num_nodes"] for one in told)
        if told:
            # Each counts its own requests, and all see the same nodes.
            times = max(max(one["num_conductors"] for one in told) / len(told), 1.0)
            cell.num_nodes = max(one["num_nodes"] for one in told)
            cell.num_requests = times * sum(one["num_requests"] for one in told)
            cell.requests_per_s = times * sum(one["requests_per_s"] for one in told)
            cell.models = frozenset().union(*(one["models"] for one in told))
            hot: dict[int, float] = {}
            for one in told:
                for digest, per_s in one["hot"].items():
                    hot[digest] = hot.get(digest, 0.0) + times * per_s
            cell.hot = hot  # a new one: ``RegionCells`` keeps the last
        else:
            cell.num_requests, cell.requests_per_s, cell.hot = 0.0, 0.0, {}
        metrics.usable.labels(cell.name).set(cell.usable)
        metrics.in_flight.labels(cell.name).set(cell.num_requests)
        self.regions[cell.region].refresh(cell)
