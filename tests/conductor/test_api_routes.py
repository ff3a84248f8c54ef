"""Routes over HTTP: two scripted models behind one API."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from moonpool.conductor.api.context import ApiContext
from moonpool.conductor.api.models.lanes import Lane, Lanes
from moonpool.runtime.config.options import ConductorOptions
from moonpool.runtime.config.routes import read_route
from tests.conductor.conftest import Api, ScriptedConductor, serving

SIMPLE = "What is the capital of Peru?"
DEMANDING = "Write a Python function that merges intervals, prove that it is correct, and analyse it."


@dataclass
class Tiers:
    """``small`` answers first in a cascade; ``api`` is that of the large model."""

    api: Api
    small: ScriptedConductor
    large: ScriptedConductor


@asynccontextmanager
async def tiers(checkpoint: Path, *given: dict[str, Any]) -> AsyncIterator[Tiers]:
    """The routes of a file of models."""
    made: dict[str, ScriptedConductor] = {}

    def lanes_of(context: ApiContext) -> Lanes:
        large = context.conductor
        small = ScriptedConductor(context.tokenizer)
        large.model, small.model = (replace(large.model, name=name) for name in ("large", "small"))
        made.update(small=small, large=large)
        other = replace(context, conductor=small)
        lanes = [
            Lane("large", large, lambda: context, price=3.0, loaded=context),
            Lane("small", small, lambda: other),
        ]
        return Lanes(lanes, [read_route(one) for one in given])

    options = ConductorOptions(port=0, max_body_nbytes=1 << 16)
    async with serving(checkpoint, options, lanes_of) as api:
        yield Tiers(api, made["small"], made["large"])
    assert not made["small"].running


def counted(name: str, **labels: str) -> Callable[[], float]:
    """What was added to a metric since this call."""

    def value() -> float:
        return REGISTRY.get_sample_value(f"moonpool_route_{name}", labels) or 0.0

    before = value()
    return lambda: value() - before


@pytest.mark.parametrize(("prompt", "model"), [(SIMPLE, "small"), (DEMANDING, "large")])
async def test_a_classifier_chooses_the_model(checkpoint: Path, prompt: str, model: str) -> None:
    route = {"name": "classified", "classifier": {"models": ["small", "large"]}}
    answered = counted("requests_total", route="classified", model_name=model)
    cost = counted("cost_total", route="classified")
    async with tiers(checkpoint, route) as served:
        _, answer = await served.api.post("/v1/completions", {"model": "classified", "prompt": prompt})
        assert (answer["model"], answer["choices"][0]["text"]) == (model, "Hello, world.")
        message = {"role": "user", "content": prompt}
        chunks = await served.api.events(
            "/v1/chat/completions", model="classified", messages=[message], max_tokens=4
        )
        assert {one["model"] for one in chunks[:-1]} == {model}
        assert len(getattr(served, model).requests) == 2
    assert answered() == 2
    assert cost() > 0
