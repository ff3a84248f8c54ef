"""The OpenAPI document against the server it describes: whatever is asked is answered as it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from moonpool.conductor.api.openapi import document
from moonpool.local.cluster import LocalCluster
from tests.lazily import Lazily

schemathesis, generation = Lazily("schemathesis"), Lazily("schemathesis.generation")
checks = Lazily("schemathesis.specs.openapi.checks")

# The answers' own length is not what is tested here, and each token takes a step.
# A deadline that passes would be an error of the server.
SHORT = {
    "max_tokens": 2, "max_completion_tokens": None, "min_tokens": 0, "n": 1, "best_of": None, "timeout": 60,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("kind", ["positive", "negative"])
async def test_the_server_does_as_documented(cluster: LocalCluster, kind: str) -> None:
    mode = generation.GenerationMode(kind)
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == sum(len(methods) for methods in document()["paths"].values())
    for operation in operations:
        if kind == "negative" and not (operation.body or operation.query):
            continue  # there is nothing to be wrong
        await asyncio.to_thread(check, operation, mode)


def check(operation: Any, mode: Any) -> None:
    @settings(
        max_examples=20,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers_as_it_says(case: Any) -> None:
        if isinstance(case.body, dict):
            case.body = {**case.body, **SHORT}
        case.validate_response(
            case.call(),
            checks=[
                schemathesis.checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
        )

    answers_as_it_says()
