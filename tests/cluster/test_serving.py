"""The whole path: what comes out of the API is what the model says, and the second turn hits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import Config
from tests.cluster.conftest import eventually
from tests.lazily import Lazily

openai, transformers = Lazily("openai"), Lazily("transformers")

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL: Path = Config().model.directory
BLOCK_SIZE = Config().engine.block_size


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def openai_client(cluster: LocalCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as api:
        yield api


@pytest.fixture(scope="module")
def reference():
    """Greedy continuation by transformers, in float32."""
    torch.set_num_threads(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    def generate(token_ids: list[int], count: int) -> list[int]:
        ids = torch.tensor([token_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            pad_token_id=0,
        )
        return out[0, len(token_ids) :].tolist()

    return generate


def prompt_of(length: int, seed: int) -> list[int]:
    vocab = transformers.AutoTokenizer.from_pretrained(MODEL).vocab_size
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, vocab - 1, (length,), generator=generator).tolist()


async def greedy(api: openai.AsyncOpenAI, prompt: list[int], count: int) -> tuple[list[int], int]:
    answer = await api.completions.create(
        model=Config().model.served_name,
        prompt=prompt,
        max_tokens=count,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    cached = answer.usage.prompt_tokens_details.cached_tokens
    return answer.choices[0].token_ids, cached


@pytest.mark.parametrize(
    "length",
    [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 700],
    ids=lambda n: f"{n} tokens",
)
async def test_greedy_tokens_are_transformers_own(openai_client, reference, length: int) -> None:
    prompt = prompt_of(length, seed=length)
    expected = reference(prompt, 24)
    first, cached = await greedy(openai_client, prompt, 24)
    assert first == expected
    assert cached == 0

    async def whole_hit() -> bool:
        again, cached = await greedy(openai_client, prompt, 24)
        assert again == expected
        # All full blocks but the one that holds the last prompt token: it gives the logits.
        return cached == (length - 1) // BLOCK_SIZE * BLOCK_SIZE

    # As soon as the conductor knows of the blocks, which are published some milliseconds after they are full.
    await eventually(whole_hit)


async def test_many_at_once_are_each_as_alone(openai_client, reference) -> None:
    prompts = [prompt_of(length, seed=100 + length) for length in (3, 40, 64, 129, 200, 17, 33, 80)]
    answers = await asyncio.gather(*(greedy(openai_client, prompt, 16) for prompt in prompts))
    for prompt, (tokens, _) in zip(prompts, answers, strict=True):
        assert tokens == reference(prompt, 16)


async def test_a_seeded_sample_repeats_and_differs_by_seed(openai_client) -> None:
    async def sample(seed: int) -> str:
        answer = await openai_client.completions.create(
            model=Config().model.served_name,
            prompt="In the beginning",
            max_tokens=24,
            temperature=1.0,
            seed=seed,
        )
        return answer.choices[0].text

    one, again, other = await asyncio.gather(sample(1), sample(1), sample(2))
    assert one == again
    assert one != other


async def test_the_timeline_tells_the_whole_way(client: Client) -> None:
    reply = Reply()
    async for _ in client.complete("The whole way. " * 20, reply, max_tokens=8, temperature=0):
        pass
    timeline = await client.timeline(reply.id)
    names = [event["event"] for event in timeline["events"]]
    assert names[0] == "queued"
    assert names[-1] == "done"
    assert {"placed", "prefilled", "first_token", "transferred"} <= set(names)
    summary = timeline["summary"]
    assert summary["reason"]
    assert summary["transferred_nbytes"] > 0
    assert summary["transport"]


async def test_a_closed_connection_frees_every_block(cluster: LocalCluster, client: Client) -> None:
    for num_pieces in (1, 2, 40):
        stream = client.complete("In the beginning", Reply(), max_tokens=4000, ignore_eos=True)
        for _ in range(num_pieces):
            await anext(stream)
        await stream.aclose()

    async def idle() -> bool:
        loads = [node["load"] for node in (await client.cluster())["nodes"]]
        return all(
            load["num_running"] == load["num_waiting"] == 0
            and load["num_free_blocks"] == load["num_blocks"]
            and load["own_prefills"] == load["own_decodes"] == 0
            for load in loads
        )

    # Sooner than a lease that nobody gives back would end.
    await eventually(idle, timeout_s=0.9 * cluster.config.store.lease_ttl_s)


async def test_too_long_a_prompt_is_refused_with_the_numbers(openai_client) -> None:
    with pytest.raises(openai.BadRequestError, match="tokens"):
        await greedy(openai_client, prompt_of(100_000, seed=1), 4)


async def test_an_unknown_model_is_not_found(openai_client) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await openai_client.completions.create(model="gpt-9", prompt="x")


async def test_answers_match_what_is_asked_for(
    cluster: LocalCluster, openai_client: openai.AsyncOpenAI
) -> None:
    """Over a hand-over: the first token is the prefill node's."""
    schema = {"type": "object", "properties": {"a": {"enum": ["ja", "größer"]}}, "required": ["a"]}
    form = {"name": "x", "schema": {**schema, "additionalProperties": False}}
    answers = await asyncio.gather(
        *(
            openai_client.chat.completions.create(
                model=Config().model.served_name,
                messages=[{"role": "user", "content": f"{seed}. Say."}],
                response_format={"type": "json_schema", "json_schema": form},
                temperature=1.0,
                seed=seed,
                max_tokens=100,
            )
            for seed in range(4)
        )
    )
    for answer in answers:
        assert answer.choices[0].finish_reason == "stop"
        assert json.loads(str(answer.choices[0].message.content))["a"] in ("ja", "größer")
