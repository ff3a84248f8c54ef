"""One tenant never meets another's blocks: their keys begin elsewhere."""

from __future__ import annotations

import random

import openai
import pytest

from moonpool.client import Client
from moonpool.local_cluster import LocalCluster
from runtime.options import Config
from tests.cluster.conftest import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_same_prompt_hits_for_its_own_tenant_and_for_nobody_else(
    cluster: LocalCluster, client: Client
) -> None:
    tokens = [random.Random(7).randrange(10, 1000) for _ in range(200)]
    api = openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)

    async def cached(salt: str) -> int:
        answer = await api.completions.create(
            model=Config().model.served_name,
            prompt=tokens,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt} if salt else {},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return int(answer.usage.prompt_tokens_details.cached_tokens or 0)

    assert await cached("ours") == 0

    async def ours_hits() -> bool:
        return await cached("ours") > 0

    await eventually(ours_hits)
    # Neither another salt, nor none, nor one that looks like it finds anything: not by a hit, not by a fetch.
    for other in ("theirs", "", "our", "ours "):
        assert await cached(other) == 0
    assert await cached("ours") > 0
    await api.close()
