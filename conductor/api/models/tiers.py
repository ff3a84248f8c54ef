"""The models that shall answer one request, in turn."""

from __future__ import annotations

import math
from typing import Final

from moonpool.conductor.api.models.facts import facts_of
from moonpool.conductor.api.models.lanes import Lane, Lanes
from moonpool.conductor.api.models.routing import choose
from moonpool.conductor.api.schemas import GenerationBody
from moonpool.conductor.canary.canaries import Trial
from moonpool.conductor.canary.record import CANDIDATE
from moonpool.conductor.observing import route_metrics as metrics
from moonpool.runtime.config.routes import Cascade, Route

# Whatever a candidate answers counts; it fails before its first token or not at all, in a stream, else before
# its last one.
_ANY_STREAM: Final = Cascade((), -math.inf, min_tokens=0, after_tokens=1)
_ANY_ANSWER: Final = Cascade((), -math.inf, min_tokens=0)


class Tiers:
    """``now``: the model that is asked. Times and costs are counted where ``route`` chose the models.

    ``cascade``: whether the answer of a model that is not the last one counts. ``trial``: the request's part
    in a canary.
    """

    def __init__(
        self,
        lanes: list[Lane],
        asked: str = "",
        *,
        route: Route | None = None,
        cascade: Cascade = _ANY_ANSWER,
        trial: Trial | None = None,
    ) -> None:
        """``asked``: the name in the answer; empty: that of the model which gave it."""
        self.route, self.cascade, self.trial = route, cascade, trial
        self._asked = asked
        self._lanes = lanes

    @classmethod
    def of(cls, lanes: Lanes, body: GenerationBody, tenant: str) -> Tiers | None:
        """None: the name is unknown, or that of an adapter."""
        route = lanes.routes.get(body.model or "")
        if route is not None:
            names = choose(route, facts_of(body, tenant), lanes.classifiers.get(route.name))
            # A stream that goes on elsewhere has one model: a draft cannot be gone on with.
            found = [lanes[name] for name in (names[-1:] if body.resumable else names)]
        elif (lane := lanes.find(body.model)) is not None:
            found = [lane]
        else:
            return None
        answering = [lanes.answering(lane) for lane in found]
        if len(found) == 1 and not body.resumable and (trial := _trial(lanes, found[0], body, tenant)):
            cascade = _ANY_STREAM if body.stream else _ANY_ANSWER
            if trial.side == CANDIDATE:
                candidate = lanes.find(trial.canary.candidate)
                if candidate is not None and candidate.conductor.serves:
                    answering.insert(0, candidate)
                else:
                    trial.failed = True
            # A stream that goes on is of the model that began it, which may be either.
            counted = trial if body.past is None else None
            return cls(answering, route=route, cascade=cascade, trial=counted)
        if route is None:
            return cls(answering, body.model or "")
        return cls(answering, route=route, cascade=route.cascade or _ANY_ANSWER)

    @property
    def now(self) -> Lane:
        return self._lanes[0]

    @property
    def model(self) -> str:
        """The name that the answer has for the model that is asked."""
        return self._asked or self.now.name

    @property
    def is_last(self) -> bool:
        return len(self._lanes) == 1

    def escalate(self, cause: str, seconds: float) -> None:
        """The next model's turn: this one's answer, after ``seconds``, does not count."""
        if self.trial is not None:
            self.trial.failed = True
        elif self.route is not None:
            metrics.escalations.labels(self.route.name, self.now.name, cause).inc()
            metrics.added.labels(self.route.name).observe(seconds)
        self._lanes = self._lanes[1:]

    def held(self, seconds: float) -> None:
        """A stream's first token was held for so long, and then sent."""
        if self.route is not None:
            metrics.held.labels(self.route.name).observe(seconds)

    def spent(self, cost: float) -> None:
        """Sequences cost so much on nodes of this model."""
        if self.route is not None:
            metrics.cost.labels(self.route.name).inc(cost)

    def answered(self) -> None:
        if self.route is not None:
            metrics.answered.labels(self.route.name, self.now.name).inc()


def _trial(lanes: Lanes, lane: Lane, body: GenerationBody, tenant: str) -> Trial | None:
    if lanes.canaries is None or not lanes.canaries.runs(lane.name):
        return None
    return lanes.canaries.trial(lane.name, tenant, facts_of(body, tenant).head)
