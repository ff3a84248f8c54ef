"""The OpenAPI document against the server it describes: whatever is asked is answered as it says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi import checks

from moonpool.conductor.api.openapi import document
from moonpool.local.cluster import LocalCluster

CHECKS = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]
# The answers' own length is not what is tested here, and each token takes a step.
SHORT = {"max_tokens": 2, "max_completion_tokens": None, "min_tokens": 0, "n": 1, "best_of": None}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
async def test_the_server_does_as_documented(cluster: LocalCluster, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{cluster.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) == sum(len(methods) for methods in document()["paths"].values())
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # there is nothing to be wrong
        await asyncio.to_thread(check, operation, mode)


def check(operation: Any, mode: GenerationMode) -> None:
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
        case.validate_response(case.call(), checks=CHECKS)

    answers_as_it_says()
