"""The models behind one API by name, each with a conductor, a tokenizer and metrics of its own."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.errors import ApiError
from moonpool.conductor.api.models.classifier import Classifier
from moonpool.conductor.canary.canaries import Canaries
from moonpool.conductor.core import Conductor
from moonpool.conductor.observing.request_metrics import ClusterCounts
from moonpool.conductor.observing.timelines.timeline import RequestTimeline
from moonpool.conductor.planning.arbiter import Arbiter
from moonpool.protos import node_pb2
from moonpool.runtime.config.routes import Route

_NEAR = 3


@dataclass
class Lane:
    """One model. ``load``: reads its tokenizer, some 100 ms of a thread's time, at the first request."""

    name: str
    conductor: Conductor
    load: Callable[[], ApiContext]
    aliases: Sequence[str] = ()
    loaded: ApiContext | None = None
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def context(self) -> ApiContext:
        """Raises ConfigError: the checkpoint lacks a file."""
        async with self._turn:
            if self.loaded is None:
                self.loaded = await asyncio.to_thread(self.load)
            return self.loaded


class Lanes:
    """The first lane answers requests that name no model, and its context is that of all handlers."""

    def __init__(
        self,
        lanes: Sequence[Lane],
        routes: Sequence[Route] = (),
        canaries: Canaries | None = None,
        arbiter: Arbiter | None = None,
    ) -> None:
        """Raises ConfigError: a route's classifier cannot be used."""
        assert lanes and lanes[0].loaded is not None
        self.canaries = canaries
        self._arbiter = arbiter
        self.routes = {route.name: route for route in routes}
        self.classifiers = {
            route.name: Classifier.load(route.classifier.path)
            for route in routes
            if route.classifier is not None
        }
        self.first: ApiContext = lanes[0].loaded
        self._lanes = {lane.name: lane for lane in lanes}
        self._names = self._lanes | {alias: lane for lane in lanes for alias in lane.aliases}

    @classmethod
    def alone(cls, context: ApiContext) -> Lanes:
        """One model."""
        name = context.conductor.model.name
        return cls([Lane(name, context.conductor, lambda: context, loaded=context)])

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes.values())

    def __len__(self) -> int:
        return len(self._lanes)

    def __getitem__(self, name: str) -> Lane:
        return self._lanes[name]

    def find(self, name: str | None) -> Lane | None:
        """The lane of a model or an alias; None: the name is unknown, or an adapter's."""
        return self._lanes[self.first.conductor.model.name] if name is None else self._names.get(name)

    def named(self, name: str | None) -> Lane:
        """As ``find``. Raises ``ApiError`` 404: there is none."""
        if (lane := self.find(name)) is None:
            raise self.unknown(str(name))
        return lane

    def answering(self, lane: Lane) -> Lane:
        """The lane that answers for this one: another one after a canary was promoted."""
        if self.canaries is None:
            return lane
        # A candidate that was taken out of the configuration leaves its name to the model before it.
        return self._lanes.get(self.canaries.meaning(lane.name), lane)

    async def adapter(self, name: str) -> tuple[Lane, node_pb2.Adapter]:
        """The adapter of this name, and its base model. Raises ``ApiError`` 404."""
        for lane in self:
            if (found := lane.conductor.adapters.find(name)) is not None:
                return lane, found
        answers = await asyncio.gather(*(lane.conductor.adapters.awaited(name) for lane in self))
        for lane, answer in zip(self, answers, strict=True):
            if answer is not None:
                return lane, answer
        raise self.unknown(name)

    def known(self, name: str) -> tuple[Lane, node_pb2.Adapter | None]:
        """The lane of a model, an alias, a route (its last model) or an adapter. Raises ``ApiError`` 404."""
        if (lane := self.find(name)) is not None:
            return self.answering(lane), None
        if (route := self.routes.get(name)) is not None:
            return self.answering(self._lanes[route.models[-1]]), None
        for lane in self:
            if (adapter := lane.conductor.adapters.find(name)) is not None:
                return lane, adapter
        raise self.unknown(name)

    def unknown(self, name: str) -> ApiError:
        """404. Costs one comparison with each name of a model."""
        near = difflib.get_close_matches(name[:128], [*self._names, *self.routes], n=_NEAR)
        served = ", ".join(map(repr, near or self._lanes))
        said = "the nearest is" if near else "this cluster serves"
        message = f"the model {name[:128]!r} does not exist; {said} {served}"
        return ApiError(404, message, param="model", code="model_not_found")

    def of_request(self, request_id: str) -> Conductor:
        """The conductor that has a sequence; the first one, if none has it."""
        found = (lane.conductor for lane in self if lane.conductor.timeline(request_id) is not None)
        return next(found, self.first.conductor)

    def timeline(self, request_id: str) -> RequestTimeline | None:
        """Of a sequence, whichever conductor has it."""
        return self.of_request(request_id).timeline(request_id)

    def of_node(self, node_id: str) -> Conductor:
        """The conductor that has a node, or a replica of it; the first one, if none has it."""
        for lane in self:
            if any(node_id in (one.node_id, one.owner) for one in lane.conductor.nodes.values()):
                return lane.conductor
        return self.first.conductor

    def cluster(self) -> dict[str, Any]:
        """That of the first model, with the nodes of all, and a few figures of each model."""
        if len(self) == 1:
            return self.first.conductor.cluster()
        each = {lane.name: lane.conductor.cluster() for lane in self}
        whole = dict(each[self.first.conductor.model.name])
        whole["nodes"] = [node | {"served": name} for name, one in each.items() for node in one["nodes"]]
        whole["degraded"] = self.ready()[1]
        whole["num_requests"] = sum(one["num_requests"] for one in each.values())
        whole["models"] = [
            {
                "name": lane.name,
                "aliases": list(lane.aliases),
                "price": lane.conductor.price,
                "ready": lane.conductor.ready()[0],
                "num_nodes": len(each[lane.name]["nodes"]),
                "num_requests": each[lane.name]["num_requests"],
                "num_index_blocks": each[lane.name]["index"]["num_blocks"],
                **(self._arbiter.status[lane.name] if self._arbiter is not None else {}),
            }
            for lane in self
        ]
        whole["canaries"] = [] if self.canaries is None else self.canaries.status()
        return whole

    def counts(self) -> ClusterCounts:
        """Of all models together; sets each loaded model's own gauges."""
        total = ClusterCounts()
        for lane in self:
            counts = lane.conductor.counts()
            total.add(counts)
            if lane.loaded is not None:
                lane.loaded.metrics.see_pool(counts)
        return total

    def ready(self) -> tuple[bool, list[str]]:
        """Whether requests of any model can be served now, and what is degraded."""
        each = {lane.name: lane.conductor.ready() for lane in self}
        if len(each) == 1:
            return next(iter(each.values()))
        degraded = [f"{name}: {sentence}" for name, (_, found) in each.items() for sentence in found]
        return any(ready for ready, _ in each.values()), degraded

    def hand_over(self) -> None:
        """See ``ApiContext.hand_over``."""
        for lane in self:
            if lane.loaded is not None:
                lane.loaded.hand_over()


LANES = web.AppKey("lanes", Lanes)
