"""The pure decision of a route: which models shall answer a request, in turn."""

from __future__ import annotations

from zlib import crc32

from moonpool.conductor.api.models.classifier import Classifier
from moonpool.conductor.api.models.facts import Facts
from moonpool.runtime.config.routes import Route, Rule


def choose(route: Route, facts: Facts, classifier: Classifier | None = None) -> tuple[str, ...]:
    """Return the models that shall answer, in turn: all but the last one only if they are sure enough.

    ``classifier``: that of the route, if it has one.
    """
    for rule in route.rules:
        if _fits(rule, facts):
            return (rule.model,)
    if route.classifier is not None and classifier is not None:
        small, large = route.classifier.models
        return (large if classifier.score(facts) >= route.classifier.threshold else small,)
    if route.cascade is not None:
        return route.cascade.models
    if route.weights:
        return (_weighted(route.weights, facts),)
    return (route.model,)


def _fits(rule: Rule, facts: Facts) -> bool:
    return (
        rule.tenant in (None, facts.tenant)
        and (rule.tools in (None, facts.tools))
        and (rule.min_chars is None or facts.num_chars >= rule.min_chars)
        and (rule.max_chars is None or facts.num_chars <= rule.max_chars)
        and (rule.min_priority is None or facts.priority >= rule.min_priority)
        and (rule.max_priority is None or facts.priority <= rule.max_priority)
    )


def _weighted(weights: tuple[tuple[str, float], ...], facts: Facts) -> str:
    """By a hash of tenant and first message, so that a conversation stays where its blocks are."""
    draw = crc32(f"{facts.tenant}\0{facts.head}".encode()) / 2**32 * sum(weight for _, weight in weights)
    for model, weight in weights:
        draw -= weight
        if draw < 0:
            return model
    return next(model for model, weight in reversed(weights) if weight)
