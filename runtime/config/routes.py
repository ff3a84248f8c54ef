"""Routes: names in the API that stand for one of several models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

from moonpool.runtime.config.engine_options import shipped
from moonpool.runtime.errors import ConfigError

SHIPPED = shipped("classifier.json")


@dataclass(frozen=True, slots=True)
class Rule:
    """Requests that have all that is set here go to ``model``."""

    model: str
    tenant: str | None = None
    min_chars: int | None = None  # of the prompt, or of all messages
    max_chars: int | None = None
    tools: bool | None = None  # whether the request offers any
    min_priority: int | None = None
    max_priority: int | None = None


@dataclass(frozen=True, slots=True)
class Classified:
    """Prompts that the classifier in ``path`` scores at ``threshold`` or more go to the second model."""

    models: tuple[str, str]
    threshold: float = 0.5
    path: Path = SHIPPED


@dataclass(frozen=True, slots=True)
class Cascade:
    """The models in turn, until one is sure enough of its answer: the last one's answer always counts."""

    models: tuple[str, ...]
    least_logprob: float  # mean of the answer's tokens, natural logarithm
    min_tokens: int = 1  # answers of fewer tokens are not trusted
    after_tokens: int = 0  # judged by so many first tokens, and then streamed; 0: by the whole answer


@dataclass(frozen=True, slots=True)
class Route:
    """The first rule that fits decides, then the first that is set of ``classifier``, ``cascade``,
    ``weights`` and ``model``."""

    name: str
    rules: tuple[Rule, ...] = ()
    classifier: Classified | None = None
    cascade: Cascade | None = None
    weights: tuple[tuple[str, float], ...] = ()  # shares of the requests, by model
    model: str = ""

    @property
    def models(self) -> tuple[str, ...]:
        """All models that it may choose."""
        others = (*(rule.model for rule in self.rules), *(name for name, _ in self.weights), self.model)
        several = (one.models for one in (self.classifier, self.cascade) if one is not None)
        return tuple(dict.fromkeys(name for name in (*others, *chain.from_iterable(several)) if name))


def read_route(given: Mapping[str, Any]) -> Route:
    """Return the route of one ``[[route]]``. Raises ConfigError."""
    name = given.get("name")
    if not isinstance(name, str) or not name:
        raise _wrong("a route", "needs a name")
    _known(name, given, ("name", "rule", "classifier", "cascade", "weights", "model"))
    rule = given.get("rule", [])
    if not isinstance(rule, list):
        raise _wrong(name, f"rule must be a list of tables, got {rule!r}")
    rules = tuple(_rule(name, each) for each in rule)
    classifier = _classifier(name, given["classifier"]) if "classifier" in given else None
    cascade = _cascade(name, given["cascade"]) if "cascade" in given else None
    weights = given.get("weights", {})
    if not isinstance(weights, dict) or not all(
        type(weight) in (int, float) and 0 <= weight < math.inf for weight in weights.values()
    ):
        raise _wrong(name, f"weights must be numbers from 0 by model, got {weights!r}")
    if weights and not sum(weights.values()):
        raise _wrong(name, "one of the weights must be above 0")
    model = given.get("model", "")
    if not (classifier or cascade or weights or model):
        raise _wrong(name, "needs a classifier, a cascade, weights or a model for requests that no rule fits")
    return Route(name, rules, classifier, cascade, tuple(weights.items()), str(model))


def _rule(name: str, given: Mapping[str, Any]) -> Rule:
    types = {"model": str, "tenant": str, "tools": bool}
    _known(f"{name}, a rule", given, tuple(field.name for field in fields(Rule)))
    if "model" not in given:
        raise _wrong(name, "each rule needs a model")
    for field, value in given.items():
        if type(value) is not types.get(field, int):
            raise _wrong(name, f"{field} of a rule must be {types.get(field, int).__name__}, got {value!r}")
    return Rule(**given)


def _classifier(name: str, given: Mapping[str, Any]) -> Classified:
    _known(f"{name}, its classifier", given, tuple(field.name for field in fields(Classified)))
    models, threshold, path = given.get("models"), given.get("threshold", 0.5), given.get("path", "")
    if not isinstance(models, list) or len(models) != 2 or not all(isinstance(each, str) for each in models):
        raise _wrong(name, f"a classifier needs two models, the smaller first, got {models!r}")
    if type(threshold) not in (int, float) or not 0 <= threshold <= 1:
        raise _wrong(name, f"threshold must be a number from 0 to 1, got {threshold!r}")
    if not isinstance(path, str):
        raise _wrong(name, f"path must be a text, got {path!r}")
    small, large = models
    return Classified((small, large), float(threshold), Path(path).absolute() if path else SHIPPED)


def _cascade(name: str, given: Mapping[str, Any]) -> Cascade:
    _known(f"{name}, its cascade", given, tuple(field.name for field in fields(Cascade)))
    models, least = given.get("models"), given.get("least_logprob")
    if not isinstance(models, list) or len(models) < 2 or not all(isinstance(each, str) for each in models):
        raise _wrong(name, f"a cascade needs two models or more, cheapest first, got {models!r}")
    if not isinstance(least, int | float) or not -math.inf < least <= 0:
        raise _wrong(name, f"least_logprob must be a number up to 0, got {least!r}")
    min_tokens = given.get("min_tokens", 1)
    if type(min_tokens) is not int or min_tokens < 1:
        raise _wrong(name, f"min_tokens must be a number from 1, got {min_tokens!r}")
    after_tokens = given.get("after_tokens", 0)
    if type(after_tokens) is not int or 0 != after_tokens < min_tokens:
        raise _wrong(name, f"after_tokens must be min_tokens ({min_tokens}) or more, got {after_tokens!r}")
    return Cascade(tuple(models), float(least), min_tokens, after_tokens)


def _known(name: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    if not isinstance(given, dict):
        raise _wrong(name, f"must be a table, got {given!r}")
    if unknown := sorted(set(given) - set(known)):
        raise _wrong(name, f"unknown {unknown[0]}; known are {', '.join(known)}")


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"route {name}: {why}", "models.path")
