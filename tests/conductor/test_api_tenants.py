"""API keys at the door."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.conductor.admission.tenants import Tenants
from moonpool.conductor.errors import RequestRejected
from tests.conductor.conftest import Api

PROMPT = {"model": "tiny", "prompt": "In the", "max_tokens": 2}


@pytest.fixture
def keyed(api: Api, tmp_path: Path) -> Api:
    file = tmp_path / "tenants.toml"
    file.write_text('[acme]\nkeys = ["sk-1"]\n[nightly]\nkeys = ["sk-2"]\nclass = "batch"\n')
    api.context.tenants = Tenants.load(str(file))
    return api


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer sk-9"}, {"Authorization": "sk-1"}])
async def test_without_a_key_nothing_is_asked_of_the_core(keyed: Api, headers: dict[str, str]) -> None:
    status, answer = await keyed.post("/v1/completions", PROMPT, headers=headers)
    assert status == 401
    assert answer["error"]["code"] == "invalid_api_key"
    assert "Authorization: Bearer" in answer["error"]["message"]
    assert not keyed.core.requests


async def test_a_key_decides_the_tenant_its_salt_and_its_class(keyed: Api) -> None:
    for key, body in (
        ("sk-1", {}),
        ("sk-1", {"cache_salt": "x", "service_tier": "flex"}),
        ("sk-2", {}),
        ("sk-2", {"service_tier": "default"}),
    ):
        status, _ = await keyed.post(
            "/v1/completions", PROMPT | body, headers={"Authorization": f"Bearer {key}"}
        )
        assert status == 200
    asked = [(r.client.name, r.tenant, r.batch) for r in keyed.core.requests]
    assert asked == [
        ("acme", "4:acme/", False),
        ("acme", "4:acme/x", True),
        ("nightly", "7:nightly/", True),
        ("nightly", "7:nightly/", False),
    ]
    tokens = keyed.registry.get_sample_value(
        "moonpool_tenant_requests_total", {"tenant": "acme", "status": "done"}
    )
    assert tokens == 2


async def test_a_rejected_request_counts_no_tokens(keyed: Api) -> None:
    keyed.core.script = lambda request: [RequestRejected("full", 1.0)]
    status, _ = await keyed.post("/v1/completions", PROMPT, headers={"Authorization": "Bearer sk-1"})
    assert status == 429
    sample = keyed.registry.get_sample_value
    of_tenant = {"tenant": "acme", "status": "RequestRejected"}
    assert sample("moonpool_tenant_requests_total", of_tenant) == 1
    assert not sample("moonpool_tenant_tokens_total", {"tenant": "acme", "kind": "prompt"})


async def test_an_unknown_tier_is_a_wrong_field(api: Api) -> None:
    status, answer = await api.post("/v1/completions", PROMPT | {"service_tier": "gold"})
    assert (status, answer["error"]["param"]) == (400, "service_tier")
