"""Another model is tried under the name of the one that serves: two models, a node each, two conductors."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.engine_options import shipped
from tests.cluster.conftest import another, eventually, kill, started, with_models

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MODELS = f"""
[[model]]
name = "old"
set = ["conductor.slo_ttft_s=30"]

[[model]]
name = "new"
path = "{shipped("small")}"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("canary")
    config = with_models(directory, MODELS)
    async with LocalCluster(config, directory=directory) as running:
        yield running


async def answered(url: str, numbers: range, turns: int = 1) -> list[str]:
    """The models that answered conversations, streamed ones in turn with others."""
    models = []
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0) as api:
        for number in numbers:
            messages: Any = [{"role": "user", "content": f"{number}. Who was Solomon?"}] * turns
            body: Any = {"model": "old", "messages": messages, "max_tokens": 3, "temperature": 0}
            if number % 2:
                stream = await api.chat.completions.create(stream=True, **body)
                (model,) = {chunk.model async for chunk in stream}
                models.append(model)
            else:
                models.append((await api.chat.completions.create(**body)).model)
    return models


@asynccontextmanager
async def beside(cluster: LocalCluster, name: str) -> AsyncIterator[str]:
    """The URL of one more conductor."""
    conductor = another(cluster, name, "conductor")
    async with started(conductor):
        yield str(conductor.ready["url"])


async def test_a_candidate_is_tried_rolled_back_when_it_dies_and_promoted_when_it_lives(
    cluster: LocalCluster,
) -> None:
    found: dict[str, Any] = {}

    async def counted(client: Client, requests: int) -> bool:
        nonlocal found
        (found,) = await client.canaries()
        return sum(side["requests"] for side in found["sides"].values()) >= requests

    async def ready() -> bool:
        return all(one["ready"] for one in (await client.cluster())["models"])

    async with cluster.client() as client:
        await eventually(ready)
        await client.start_canary("old", "new", 40, auto=True)
        sides = await answered(cluster.url, range(30))
        assert set(sides) == {"old", "new"}
        assert await answered(cluster.url, range(30), turns=2) == sides, "later turns go where the first went"
        async with beside(cluster, "second") as url, Client(url) as other:
            assert await answered(url, range(30)) == sides

            async def all_counted() -> bool:
                return await counted(client, 90) and await counted(other, 90)

            await eventually(all_counted)
        assert found["sides"]["candidate"]["requests"] == 3 * sides.count("new")
        assert all(
            (side["errors"], side["ttft_within"], side["decoded"]) == (0, side["requests"], side["requests"])
            for side in found["sides"].values()
        )

        kill(cluster, "both-new-0")
        number = 100

        async def rolled_back() -> bool:
            nonlocal number
            assert set(await answered(cluster.url, range(number, number + 10))) <= {"old"}, "no request fails"
            number += 10
            return not await counted(client, 10_000) and found["state"] == "rolled back"

        await eventually(rolled_back)
        assert "clearly worse" in found["reason"]
        assert found["sides"]["candidate"]["errors"] < 60

        await cluster.restart("both-new-0")
        await eventually(ready)
        await client.start_canary("old", "new", 40)
        await client.promote_canary("old")
        async with beside(cluster, "third") as url, Client(url) as other:
            # A conductor that was not there.
            assert (await other.canaries())[0]["state"] == "promoted"
            await answered(url, range(4))
            page = await other.metrics()
            assert 'moonpool_requests_total{finish_reason="length",model_name="new"} 4.0' in page
        await client.roll_back_canary("old")
        (found,) = await client.canaries()
        assert (found["state"], found["candidate"]) == ("rolled back", "new")
