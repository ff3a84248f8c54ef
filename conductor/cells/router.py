"""The router: an OpenAI-compatible front that passes each request to the cell that suits it best."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from moonpool.conductor.access.gate import PRINCIPAL, Gate
from moonpool.conductor.admission.confinement import is_in, refused
from moonpool.conductor.admission.tenants import Tenant, may_hold
from moonpool.conductor.api.errors import ApiError, draining, unavailable
from moonpool.conductor.api.request_body import read_object
from moonpool.conductor.api.streams.carried import PAST_HEADER
from moonpool.conductor.api.streams.resume import LAST_EVENT_ID
from moonpool.conductor.cells import metrics
from moonpool.conductor.cells.choice import Cell, candidates
from moonpool.conductor.cells.client_stream import ClientStream
from moonpool.conductor.cells.prefixes import prefix_digests
from moonpool.conductor.cells.shares import SHARE_HEADER, TenantShares
from moonpool.conductor.cells.watch import Cells, Door
from moonpool.conductor.errors import OutsideRegions
from moonpool.runtime.config.options import ConductorOptions

log = logging.getLogger(__name__)

CELL_HEADER: Final = "x-moonpool-cell"  # of an answer: the cell that gave it
REGION_HEADER: Final = "x-moonpool-region"
REQUEST_ID_HEADER: Final = "x-request-id"
_MOST_ID: Final = 128
_CLIENT_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # those that conductors take
_EVENTS: Final = "text/event-stream"
_FULL: Final = (429, 503)
_BROKEN: Final = "lost in the middle of a stream"
_UNKNOWN: Final = "unknown"
# Of a cell that does not have what is asked about, or the stream of Last-Event-ID.
_NOT_FOUND: Final = (403, 404, 410)
_NOT_PASSED: Final = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"}
    | {"transfer-encoding", "upgrade", "host", "content-length", "cookie", "expect", REQUEST_ID_HEADER}
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request as all cells get it."""

    http: web.Request
    body: Mapping[str, Any]  # empty: it has none
    raw: bytes
    client: Tenant
    home: str  # region
    request_id: str
    stream: ClientStream

    @property
    def resumes(self) -> bool:
        """Whether it continues a stream, of which only one cell knows."""
        return LAST_EVENT_ID in self.http.headers

    @property
    def made_by(self) -> str:
        """The name in the id that it asks about: cmpl-CELL:…, chatcmpl-CELL:… or resp_CELL:…"""
        return re.split("[-_]", self.about.partition(":")[0], maxsplit=1)[-1]

    @property
    def about(self) -> str:
        """The id that it continues or asks about; empty: none."""
        return str(self.http.match_info.get("id") or self.body.get("previous_response_id") or "")

    @property
    def model(self) -> str | None:
        named = self.http.match_info.get("name") or self.body.get("model")
        return named if isinstance(named, str) else None

    def digests(self) -> list[int]:
        return prefix_digests(self.body, self.client.salt(str(self.body.get("cache_salt") or "")))

    def headers(self, cell: Cell, share: float) -> CIMultiDict[str]:
        """``cell`` is in the id, and so in the ids of answers and conversations: see ``about``. ``share``: of
        its tenant's requests that go there."""
        passed = _passed(self.http.headers)
        passed[REQUEST_ID_HEADER] = f"{cell.name}:{self.request_id}"[:_MOST_ID]
        if self.home:
            passed[REGION_HEADER] = self.home
        for name in (PAST_HEADER, SHARE_HEADER):
            passed.pop(name, None)
        if self.stream.can_carry:
            passed[PAST_HEADER] = "1"
        if share < 1:
            passed[SHARE_HEADER] = f"{share:.6f}"
        return passed


class Router:
    """Passes requests on. ``leaving``: /readyz says so; ``is_draining``: requests are refused."""

    def __init__(
        self,
        cells: Cells,
        session: aiohttp.ClientSession,
        options: ConductorOptions,
        gate: Gate,
        region: str = "",
    ) -> None:
        """``region``: where this router is."""
        self.cells = cells
        self.gate = gate
        self.leaving = self.is_draining = False
        self._session = session
        self._options = options
        self._region = region
        self._shares = TenantShares(time.monotonic)

    async def forward(self, http: web.Request) -> web.StreamResponse:
        """Pass a request on, to another cell if one is lost or full before the first byte of its answer."""
        if self.is_draining:
            raise draining()
        client = http[PRINCIPAL].client
        if not may_hold(client.regions, self._region):
            raise OutsideRegions(refused(client, "conductor", f"this router {is_in(self._region)}"))
        body = await read_object(http, self._options.max_body_nbytes) if http.method == "POST" else {}
        home = http.headers.get(REGION_HEADER) or client.home_region or self._region
        given = http.headers.get(REQUEST_ID_HEADER, "")
        request_id = given if _CLIENT_ID.fullmatch(given) else secrets.token_hex(12)
        stream = ClientStream(http, body, self._options.write_timeout_s)
        asked = _Asked(http, body, await http.read(), client, home, request_id, stream)
        first: web.StreamResponse | None = None
        lost: Cell | None = None  # in the middle of the stream
        reasons: set[str] = set()
        for cell, door in self._attempts(asked, reasons):
            answer, reason = await self._attempt(asked, cell, door)
            reasons.add(reason)
            if answer is not None and not reason:
                if lost is not None:
                    metrics.continued.labels(lost.name).inc()
                return answer
            if reason != _UNKNOWN or not self._is_of_another(asked, cell):
                first = first or answer
            if reason == _BROKEN:
                metrics.broken.labels(cell.name).inc()
                lost = lost or cell
                if not asked.stream.can_go_on:
                    break
            else:
                metrics.moved.labels(cell.name, reason).inc()
            log.info("request %s: cell %s is %s, trying the next one", asked.request_id, cell.name, reason)
        if lost is not None:
            return await asked.stream.close(asked.stream.break_off(_cell_lost(lost).body()))
        if first is None:
            raise _no_cells(asked)
        metrics.requests.labels(first.headers[CELL_HEADER], str(first.status)).inc()
        return first

    def _attempts(self, asked: _Asked, reasons: Set[str]) -> Iterator[tuple[Cell, Door]]:
        """Conductors to ask in turn, each of them open when it is its turn. ``reasons``: of those that could
        not answer so far."""
        known = self.cells.cells.get(asked.made_by)
        confined = asked.client.regions
        if known is not None and known.usable and may_hold(confined, known.region):
            for door in self.cells.open_doors(known):
                if door.is_open and _UNKNOWN not in reasons:
                    yield known, door
            if reasons == {"full"}:
                return  # no other cell has it
        # What ``known`` made may have come to its end in any other cell, unless it was lost just now.
        began_s = time.perf_counter()
        regions = self.cells.nearest(asked.home)
        all_may_have_it = asked.resumes or (known is not None and asked.stream.response is None)
        most = None if all_may_have_it else self._options.max_attempts
        chosen = candidates(regions, asked.digests(), model=asked.model, confined=confined, most=most)
        metrics.decision.observe(time.perf_counter() - began_s)
        for cell in chosen:
            for door in self.cells.open_doors(cell):
                if door.is_open and cell is not known:
                    yield cell, door

    def _is_of_another(self, asked: _Asked, cell: Cell) -> bool:
        """Whether it asks about an id that another cell than ``cell`` made."""
        return asked.made_by in self.cells.cells and asked.made_by != cell.name

    async def _attempt(self, asked: _Asked, cell: Cell, door: Door) -> tuple[web.StreamResponse | None, str]:
        """The answer, and why the next cell is to be asked instead; empty: the answer counts."""
        url = URL(door.url + asked.http.raw_path, encoded=True)
        usable = [name for name, one in self.cells.cells.items() if one.usable]
        share = self._shares.count(asked.client, cell.name, usable)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self.cells.counted(cell, door))
            try:
                async with door.waiting():
                    answer = await stack.enter_async_context(
                        self._session.request(
                            asked.http.method,
                            url,
                            data=asked.stream.body(asked.raw) or None,
                            headers=asked.headers(cell, share),
                        )
                    )
                    streams = answer.content_type == _EVENTS
                    first = await (answer.content.readany() if streams else answer.read())
            except aiohttp.ClientConnectorError as error:
                self.cells.lost(cell, door, str(error))
                return None, "lost"
            except (TimeoutError, aiohttp.ClientError, OSError) as error:
                log.warning("cell %s: %s: %s", cell.name, door.url, error or type(error).__name__)
                return None, "lost"
            reason = "full" if answer.status in _FULL else ""
            if (asked.resumes or asked.made_by in self.cells.cells) and answer.status in _NOT_FOUND:
                reason = _UNKNOWN
                self._shares.take_back(asked.client, cell.name)
            if asked.stream.response is not None and not (streams and answer.status == 200):
                log.warning(
                    "request %s: cell %s does not go on: %s", asked.request_id, cell.name, first[:256]
                )
                return None, reason or _UNKNOWN
            headers = _passed(answer.headers)
            headers.update({REQUEST_ID_HEADER: asked.request_id, CELL_HEADER: cell.name})
            if not reason:
                metrics.requests.labels(cell.name, str(answer.status)).inc()
            if not streams:
                return web.Response(status=answer.status, headers=headers, body=first), reason
            if why := await asked.stream.pass_on(answer, first, headers):
                log.warning(
                    "request %s: cell %s was lost in its stream: %s", asked.request_id, cell.name, why
                )
                return None, _BROKEN
            return await asked.stream.close(), ""


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    """Headers without those of one connection."""
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _NOT_PASSED)


def _no_cells(asked: _Asked) -> ApiError:
    why = f": {asked.client.confinement}" if asked.client.regions else ""
    kept = f" that has {asked.about[:128]}" if asked.about else ""
    return unavailable(f"no cell{kept} takes requests now{why}", "no_cells")


def _cell_lost(cell: Cell) -> ApiError:
    return unavailable(
        f"cell {cell.name} was lost in the middle of this stream: what came is valid, and no other cell "
        "could go on with it; send the request anew",
        "cell_lost",
    )
