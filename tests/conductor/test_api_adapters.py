"""LoRA adapters in the API: requests name them as models, operators load and unload them as with vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from moonpool.conductor.fleet.errors import AdapterFailed, AdapterInvalid, AdapterMissing
from moonpool.runtime.config.options import SecurityOptions
from moonpool.runtime.security import process
from moonpool.runtime.security.process import Security
from moonpool.runtime.security.roles import CONDUCTOR, OPERATOR, Caller

KEY = "the key of this cluster, long enough"


@pytest.fixture(autouse=True)
def secured() -> None:
    """This process, and so the API, is a conductor of a cluster that has a key."""
    process.use(Security(SecurityOptions(cluster_key=KEY), Caller(CONDUCTOR, "c")))


def signed(path: str) -> dict[str, str]:
    operator = Security(SecurityOptions(cluster_key=KEY), Caller(OPERATOR, "x"), serves=False)
    return {"Authorization": f"Moonpool {operator.token(f'POST {path}')}"}


async def load(api: Any, **body: Any) -> tuple[int, str]:
    return await ask(api, "load", lora_name="voice", lora_path="/adapters/voice", **body)


async def ask(api: Any, what: str, **body: Any) -> tuple[int, str]:
    path = f"/v1/{what}_lora_adapter"
    async with api.client.post(api.url + path, json=body, headers=signed(path)) as response:
        return response.status, await response.text()


async def test_a_request_names_its_adapter_as_the_model(api: Any) -> None:
    assert await load(api) == (200, "Success: LoRA adapter 'voice' added successfully.")
    answer = await api.complete(model="voice")
    assert answer["model"] == "voice"
    assert api.core.requests[-1].adapter.path == "/adapters/voice"
    assert api.core.requests[-1].adapter_key == f"voice@{'d' * 32}"
    await api.complete(model="tiny")
    assert api.core.requests[-1].adapter is None
    assert api.core.requests[-1].adapter_key == ""
    assert await ask(api, "unload", lora_name="voice") == (
        200,
        "Success: LoRA adapter 'voice' removed successfully.",
    )
    status, _ = await api.post("/v1/completions", {"model": "voice", "prompt": "In the"})
    assert status == 404


async def test_only_operators_change_adapters(api: Any) -> None:
    for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
        status, _ = await api.post(path, {"lora_name": "a", "lora_path": "/a"})
        assert status == 401
    assert not api.core.adapters.known


async def test_adapters_are_listed_after_their_model(api: Any) -> None:
    await load(api)
    async with api.client.get(f"{api.url}/v1/models") as response:
        models = (await response.json())["data"]
    assert [(one["id"], one["parent"]) for one in models] == [("tiny", None), ("voice", "tiny")]
    assert models[1]["root"] == "/adapters/voice"
    async with api.client.get(f"{api.url}/v1/models/voice") as response:
        assert await response.json() == models[1]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"lora_path": "/a"}, "lora_name"),
        ({"lora_name": "", "lora_path": "/a"}, "lora_name"),
        ({"lora_name": "a"}, "lora_path"),
        ({"lora_name": "a", "lora_path": 3}, "lora_path"),
        ({"lora_name": "a", "lora_path": "/a", "load_inplace": "yes"}, "load_inplace"),
    ],
)
async def test_wrong_bodies(api: Any, body: dict[str, Any], field: str) -> None:
    path = "/v1/load_lora_adapter"
    status, answer = await api.post(path, body, headers=signed(path))
    assert (status, answer["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("error", "expected"),
    [(AdapterInvalid("bad"), 400), (AdapterMissing("none"), 404), (AdapterFailed("no answer"), 503)],
)
async def test_errors(api: Any, error: Exception, expected: int) -> None:
    api.core.adapters.error = error
    for what in ("load", "unload"):
        status, answer = await ask(api, what, lora_name="a", lora_path="/a")
        assert status == expected
        assert str(error) in answer
