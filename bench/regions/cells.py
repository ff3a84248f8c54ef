"""Cells in virtual time, by sampling: which requests find their prefix, and what the loss of a cell costs.

One conversation in ``sample`` is simulated, with caches that are smaller by the same factor. A prompt that
many conversations share takes only its sampled part of a cache, so that it competes as among all of them.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from moonpool.bench.harness.command import Run
from moonpool.conductor.cells.choice import Cell, RegionCells
from moonpool.conductor.cells.prefixes import HotPrefixes
from moonpool.runtime.reports.report import Row

AFFINITY, GLOBAL, RANDOM = "affinity", "one global index", "random"
# What others have of a cell that goes: nothing; its hot prefixes, copied while it served; and, of one that
# drains, the latest conversations of its conductors as well.
ALONE, RESERVE, DRAINED = "no copies", "hot prefixes copied", "drained, with all that its conductors know"
_HOT: Final = 64  # prefixes of a summary
_TURN_TOKENS, _MEAN_TURNS, _THINK_S, _SERVICE_S = 500, 5.0, 60.0, 6.0
_APPS, _APP_TOKENS = 20_000, (200, 4000)  # prompts that conversations begin with, chosen by Zipf's law
_WINDOW_S: Final = 10.0
# As ``conductor.cells.spreading`` and ``conductor.replication`` do: a conductor knows 1,024 prefixes.
_COPY_EVERY_S, _OFFERED = 10.0, 256
_CONDUCTOR_PREFIXES, _CONDUCTOR_PER_S = 1024, 135.0


@dataclass(frozen=True, slots=True)
class CellSettings:
    num_cells: int = 100
    num_nodes: int = 1000  # of a cell
    node_tokens: int = 1_000_000  # of KV on a node, in all tiers
    rate: float = 1e6  # requests a second of all cells
    sample: int = 1000
    warm_s: float = 200.0
    measured_s: float = 100.0
    after_s: float = 120.0  # the loss of a cell
    seed: int = 1


@dataclass(slots=True)
class _Conversation:
    app: int
    digest: int
    turns_left: int
    turn: int = 0
    cell: int = -1  # of its last turn

    @property
    def tokens(self) -> int:
        """Of all its turns so far, beside the prompt that it began with."""
        return self.turn * _TURN_TOKENS


@dataclass(slots=True)
class _Window:
    """Sums over some seconds. ``busiest``: of the averages over the cells' loads, the largest."""

    hit: float = 0.0
    asked: float = 0.0
    displaced_hit: float = 0.0  # of conversations that the lost cell had
    displaced_asked: float = 0.0
    num_requests: int = 0
    num_moved: int = 0  # to another cell than that of their last turn
    loads: list[float] = field(default_factory=list)  # of the busiest cell over the average, once a second


class _Cache:
    """LRU, in tokens."""

    def __init__(self, capacity: float) -> None:
        self._capacity = capacity
        self._used = 0.0
        self._held: OrderedDict[tuple[str, int], float] = OrderedDict()

    def use(self, key: tuple[str, int], size: float) -> float:
        """The tokens that were there; ``size`` are now."""
        before = self._held.pop(key, None)
        self._held[key] = size
        self._used += size - (before or 0.0)
        while self._used > self._capacity:
            self._used -= self._held.popitem(last=False)[1]
        return before or 0.0

    def add(self, key: tuple[str, int], size: float) -> None:
        """It is there now, as old as it was if it had been."""
        if key not in self._held:
            self.use(key, size)


class CellsInTime:
    """One run with one routing. ``windows``: from the start of measuring on."""

    def __init__(self, routing: str, settings: CellSettings, copies: str = ALONE) -> None:
        self._routing, self._settings, self._copies = routing, settings, copies
        self._rng = random.Random(settings.seed)
        size = settings.num_nodes * settings.node_tokens / settings.sample
        number = 1 if routing == GLOBAL else settings.num_cells
        self._caches = [_Cache(size * settings.num_cells / number) for _ in range(number)]
        self._now_s = 0.0
        self._cells = [
            Cell(f"cell-{one}", usable=True, num_nodes=settings.num_nodes) for one in range(number)
        ]
        self._region = RegionCells("", self._cells)
        self._hot = [HotPrefixes(lambda: self._now_s) for _ in range(number)]
        self._in_flight = [0] * number
        self._ends: list[tuple[float, int]] = []
        self._apps = [self._rng.getrandbits(64) for _ in range(_APPS)]
        self._app_of = {digest: app for app, digest in enumerate(self._apps)}
        per_cell = settings.rate / settings.num_cells
        known = _CONDUCTOR_PREFIXES * per_cell / _CONDUCTOR_PER_S / settings.sample
        self._latest: deque[_Conversation] = deque(maxlen=max(round(known), 1))  # of the cell that goes
        self._app_tokens = [self._rng.randint(*_APP_TOKENS) for _ in range(_APPS)]
        self._weights = list(itertools.accumulate(1 / (one + 1) for one in range(_APPS)))
        self._lost = -1
        self.windows: list[_Window] = []

    def run(self) -> None:
        """To the end; with affinity a cell is lost after what is measured."""
        given = self._settings
        loss_s = given.warm_s + given.measured_s
        end_s = loss_s + (given.after_s if self._routing == AFFINITY else 0.0)
        new_per_s = given.rate / given.sample / _MEAN_TURNS
        order = itertools.count()
        turns: list[tuple[float, int, _Conversation]] = []
        next_new_s, next_poll_s, next_copy_s = self._rng.expovariate(new_per_s), 0.0, _COPY_EVERY_S
        while self._now_s < end_s:
            if turns and turns[0][0] < next_new_s:
                self._now_s, _, one = heapq.heappop(turns)
            else:
                self._now_s, one = next_new_s, self._begin()
                next_new_s += self._rng.expovariate(new_per_s)
            if self._now_s >= loss_s and self._lost < 0 and self._routing == AFFINITY:
                self._lose(0)
            while next_poll_s <= self._now_s:
                self._poll(next_poll_s)
                next_poll_s += 1.0
            if self._now_s >= next_copy_s and self._copies != ALONE:
                next_copy_s += _COPY_EVERY_S
                for number in range(len(self._cells)):
                    self._copy_hot(number)
            self._serve(one)
            if one.turns_left:
                turn = self._now_s + self._rng.expovariate(1 / _THINK_S)
                heapq.heappush(turns, (turn, next(order), one))

    def _begin(self) -> _Conversation:
        [app] = self._rng.choices(range(_APPS), cum_weights=self._weights)
        turns = 1
        while self._rng.random() > 1 / _MEAN_TURNS:
            turns += 1
        return _Conversation(app, self._rng.getrandbits(64), turns)

    def _lose(self, number: int) -> None:
        """Connections are refused at once; its requests in flight are not sent again here."""
        if self._copies == DRAINED:
            for one in self._latest:
                # As its conductors know it: what there was when its last turn came.
                known, digests = one.tokens - _TURN_TOKENS, [self._apps[one.app], one.digest]
                self._copy(number, digests, ("conversation", one.digest), known)
        self._lost, cell = number, self._cells[number]
        cell.usable, cell.hot, cell.requests_per_s, cell.num_requests = False, {}, 0.0, 0.0
        self._region.refresh(cell)

    def _copy_hot(self, number: int) -> None:
        """The hottest prompts of a cell, to the cell that their requests go to without it."""
        if number == self._lost:
            return
        for digest, _ in self._hot[number].rates(_OFFERED)[1]:
            if (app := self._app_of.get(digest)) is not None:
                tokens = self._app_tokens[app] / self._settings.sample
                self._copy(number, [digest], ("app", app), tokens)

    def _copy(self, number: int, digests: Sequence[int], key: tuple[str, int], tokens: float) -> None:
        order = self._region.order(digests)
        target = next((one for one in order if one is not self._cells[number]), None)
        if target is not None:
            self._caches[self._number_of(target)].add(key, tokens)

    def _number_of(self, cell: Cell) -> int:
        return int(cell.name.removeprefix("cell-"))

    def _poll(self, at_s: float) -> None:
        """What a router learns once a second: others' requests in between are unknown to it."""
        while self._ends and self._ends[0][0] <= at_s:
            self._in_flight[heapq.heappop(self._ends)[1]] -= 1
        sample = self._settings.sample
        for number, cell in enumerate(self._cells):
            if self._routing == AFFINITY and number != self._lost:
                per_s, hot = self._hot[number].rates(_HOT)
                cell.num_requests = float(self._in_flight[number] * sample)
                cell.requests_per_s = per_s * sample
                cell.hot = {digest: rate * sample for digest, rate in hot}
                self._region.refresh(cell)
        if (window := self._window()) is not None:
            loads = [load for number, load in enumerate(self._in_flight) if number != self._lost]
            window.loads.append(max(loads) * len(loads) / max(sum(loads), 1))

    def _window(self) -> _Window | None:
        """The current one; None: before measuring."""
        number = int((self._now_s - self._settings.warm_s) // _WINDOW_S)
        while len(self.windows) <= number:
            self.windows.append(_Window())
        return self.windows[number] if number >= 0 else None

    def _choose(self, one: _Conversation) -> int:
        if self._routing == GLOBAL:
            return 0
        if self._routing == RANDOM:
            return self._rng.randrange(len(self._cells))
        digests = [self._apps[one.app], one.digest]
        number = self._number_of(self._region.order(digests)[0])
        self._hot[number].count(digests)
        return number

    def _serve(self, one: _Conversation) -> None:
        number = self._choose(one)
        cache, shared = self._caches[number], self._app_tokens[one.app]
        own = one.tokens
        hit: float = shared * (cache.use(("app", one.app), shared / self._settings.sample) > 0)
        hit += min(own, cache.use(("conversation", one.digest), own + _TURN_TOKENS))
        asked = shared + own + _TURN_TOKENS
        self._in_flight[number] += 1
        heapq.heappush(self._ends, (self._now_s + self._rng.expovariate(1 / _SERVICE_S), number))
        if (window := self._window()) is not None:
            window.hit, window.asked = window.hit + hit, window.asked + asked
            if self._lost >= 0 and one.cell == self._lost:
                window.displaced_hit += hit
                window.displaced_asked += asked
            if one.turn:
                window.num_requests += 1
                window.num_moved += number != one.cell
        one.turn, one.turns_left, one.cell = one.turn + 1, one.turns_left - 1, number
        if number == 0 and one.turns_left:
            self._latest.append(one)


def simulated(run: Run, settings: CellSettings) -> Iterator[Row]:
    """Hit ratios by routing, and the loss of a cell under affinity."""
    size = f"{settings.num_cells} cells × {settings.num_nodes:,} nodes, {settings.rate:,.0f} requests/s"
    num_before = round(settings.measured_s / _WINDOW_S)
    for routing in (AFFINITY, GLOBAL, RANDOM):
        run.say(f"{routing}, 1 conversation in {settings.sample}")
        cells = CellsInTime(routing, settings)
        cells.run()
        before = cells.windows[:num_before]
        yield Row(f"{size}: {routing}", "prompt tokens from caches", _hit_ratio(before), "fraction")
        if routing == AFFINITY:
            moved = sum(one.num_moved for one in before) / max(sum(one.num_requests for one in before), 1)
            yield Row(f"{size}: {routing}", "turns in another cell than the last", moved, "fraction")
            yield from _loss(f"{size}: {routing}", before, cells.windows[num_before:])
    for copies in (RESERVE, DRAINED):
        case = f"{size}: {AFFINITY}, {copies}"
        run.say(case)
        cells = CellsInTime(AFFINITY, settings, copies)
        cells.run()
        yield Row(case, "prompt tokens from caches", _hit_ratio(cells.windows[:num_before]), "fraction")
        yield _displaced(case, cells.windows[num_before:])


def _loss(case: str, before: Sequence[_Window], after: Sequence[_Window]) -> Iterator[Row]:
    usual = [load for one in before for load in one.loads]
    yield Row(case, "busiest cell over the average, mean", sum(usual) / len(usual), "×")
    for name, some in (("first 10 s", after[:1]), ("after 60 s", after[6:])):
        loads = [load for one in some for load in one.loads]
        if loads:
            yield Row(
                f"{case}, a cell lost, {name}", "prompt tokens from caches", _hit_ratio(some), "fraction"
            )
            worst = max(loads)
            yield Row(f"{case}, a cell lost, {name}", "busiest cell over the average, most", worst, "×")
    yield _displaced(case, after)
    tolerated = min(_hit_ratio([one]) for one in before)
    back = next((at for at, one in enumerate(after) if _hit_ratio([one]) >= tolerated), len(after))
    yield Row(case, "windows of 10 s until the hit ratio is as before", back, "windows")


def _displaced(case: str, after: Sequence[_Window]) -> Row:
    asked = sum(one.displaced_asked for one in after)
    hit = sum(one.displaced_hit for one in after)
    metric = "the lost cell's conversations: from caches at the next turn"
    return Row(case, metric, hit / max(asked, 1), "fraction")


def _hit_ratio(windows: Sequence[_Window]) -> float:
    return sum(one.hit for one in windows) / max(sum(one.asked for one in windows), 1.0)
