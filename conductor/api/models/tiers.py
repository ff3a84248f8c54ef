"""The models that shall answer one request, in turn."""

from __future__ import annotations

from moonpool.conductor.api.models.facts import facts_of
from moonpool.conductor.api.models.lanes import Lane, Lanes
from moonpool.conductor.api.models.routing import choose
from moonpool.conductor.api.schemas import GenerationBody
from moonpool.conductor.observing import route_metrics as metrics
from moonpool.runtime.config.routes import Route


class Tiers:
    """``now``: the model whose turn it is. Times and costs are counted where ``route`` chose the models."""

    def __init__(self, lanes: list[Lane], route: Route | None = None) -> None:
        self.route = route
        self._lanes = lanes

    @classmethod
    def of(cls, lanes: Lanes, route: Route, body: GenerationBody, tenant: str) -> Tiers:
        names = choose(route, facts_of(body, tenant), lanes.classifiers.get(route.name))
        # A stream that goes on elsewhere has one model: a draft cannot be gone on with.
        return cls([lanes[name] for name in (names[-1:] if body.resumable else names)], route)

    @property
    def now(self) -> Lane:
        return self._lanes[0]

    @property
    def is_last(self) -> bool:
        return len(self._lanes) == 1

    def escalate(self, cause: str, seconds: float) -> None:
        """The next model's turn: this one's answer, after ``seconds``, does not count."""
        assert self.route is not None
        metrics.escalations.labels(self.route.name, self.now.name, cause).inc()
        metrics.added.labels(self.route.name).observe(seconds)
        self._lanes = self._lanes[1:]

    def held(self, seconds: float) -> None:
        """A stream's first token was held for so long, and then sent."""
        assert self.route is not None
        metrics.held.labels(self.route.name).observe(seconds)

    def spent(self, cost: float) -> None:
        """Sequences cost so much on nodes of this model."""
        if self.route is not None:
            metrics.cost.labels(self.route.name).inc(cost)

    def answered(self) -> None:
        if self.route is not None:
            metrics.answered.labels(self.route.name, self.now.name).inc()
