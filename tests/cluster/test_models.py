"""Two models behind one URL: one conductor, and nodes of each."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from moonpool.client import Client
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually, nodes, with_models

Ask = Callable[..., Awaitable[str]]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MODELS = """
[[model]]
name = "large"
aliases = ["gpt"]
price = 6.0

[[model]]
name = "second"
set = ["model.max_model_len=512"]

[[model]]
name = "rare"
set = ["planner.min_warm=0", "planner.hold_s=4"]

[[route]]
name = "auto"
model = "second"
rule = [{ model = "large", min_chars = 100 }]

[[route]]
name = "sure"
cascade = { models = ["second", "large"], least_logprob = -100.0 }

[[route]]
name = "unsure"
cascade = { models = ["second", "large"], least_logprob = 0.0 }

[[route]]
name = "sure-early"
cascade = { models = ["second", "large"], least_logprob = -100.0, after_tokens = 3 }

[[route]]
name = "unsure-early"
cascade = { models = ["second", "large"], least_logprob = 0.0, after_tokens = 3 }

[[route]]
name = "classified"
classifier = { models = ["second", "large"], threshold = 0.5 }

[[route]]
name = "canary"
weights = { large = 9, second = 1 }
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("models")
    config = with_models(directory, MODELS)
    async with LocalCluster(config, directory=directory, supervises=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(cluster: LocalCluster) -> AsyncIterator[Ask]:
    """Asks a model for four tokens; returns the name in the answer."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0) as client:

        async def answered(model: str, **more: Any) -> str:
            body: Any = {"prompt": "In the beginning", "max_tokens": 4, "temperature": 0} | more
            answer = await client.completions.create(model=model, **body)
            assert answer.usage is not None and answer.usage.completion_tokens == 4
            return answer.model

        yield answered


async def test_each_model_answers_under_its_name(cluster: LocalCluster, client: Client, ask: Ask) -> None:
    assert {name: child.ready is not None for name, child in cluster.children.items() if "both" in name} == {
        "both-large-0": True,
        "both-second-0": True,
    }
    for name in ("large", "gpt", "second"):
        assert await ask(name) == name
    found = await nodes(client)
    assert {name: node["served"] for name, node in found.items()} == {
        "both-large-0": "large",
        "both-second-0": "second",
    }


async def test_commands_name_the_model(cluster: LocalCluster) -> None:
    async def run(*words: str) -> str:
        command = [sys.executable, "-m", "moonpool", "fleet", *words, "--url", cluster.url]
        child = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        output, _ = await child.communicate()
        assert child.returncode == 0
        return output.decode()

    for model, node in (("", "both-large-0"), ("second", "both-second-0")):
        listed = json.loads(await run("ls", "--json", "--model", model))
        assert [one["node_id"] for one in listed["nodes"]] == [node]
    assert "there are 1 both nodes already" in await run("scale", "both", "1", "--model", "second")


async def test_the_list_has_every_model_with_its_own_limits(cluster: LocalCluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="-") as client:
        listed = (await client.models.list()).data
    assert {one.id: one.model_extra["max_model_len"] for one in listed if one.model_extra} == {
        "large": 8192,
        "gpt": 8192,
        "second": 512,
        "rare": 8192,
        "auto": 512,
        "canary": 512,
        "sure": 8192,
        "unsure": 8192,
        "sure-early": 8192,
        "unsure-early": 8192,
        "classified": 8192,
    }


async def test_an_unknown_name_is_answered_with_the_near_ones(ask: Ask) -> None:
    with pytest.raises(openai.NotFoundError, match="'secnd' does not exist; the nearest is 'second'"):
        await ask("secnd")


async def test_metrics_tell_the_models_apart(client: Client, ask: Ask) -> None:
    await ask("second")
    page = await client.metrics()
    for name in ("large", "second"):
        assert f'moonpool_output_tokens_total{{model_name="{name}"}}' in page


async def test_a_rule_chooses_by_the_length_of_the_prompt(ask: Ask) -> None:
    assert await ask("auto") == "second"
    assert await ask("auto", prompt="In the beginning " * 10) == "large"


async def test_a_classifier_chooses_by_the_words_of_the_prompt(ask: Ask) -> None:
    whole: Any = {"extra_body": {"ignore_eos": True}}
    assert await ask("classified", prompt="What is the capital of Peru?", **whole) == "second"
    assert await ask("classified", prompt="Prove that there are infinitely many primes.", **whole) == "large"


@pytest.mark.parametrize(
    ("route", "model"),
    [("sure", "second"), ("unsure", "large"), ("sure-early", "second"), ("unsure-early", "large")],
)
async def test_a_cascade_answers_as_the_model_that_it_chose(
    cluster: LocalCluster, ask: Ask, route: str, model: str
) -> None:
    assert await ask(route) == model
    body: Any = {"prompt": "Tell me of Solomon", "max_tokens": 8, "temperature": 0}
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="-") as client:
        alone = await client.completions.create(model=model, **body)
        routed = await client.completions.create(model=route, **body)
        assert (routed.model, routed.choices) == (model, alone.choices)
        stream = await client.completions.create(model=route, stream=True, **body)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == alone.choices[0].text


async def test_a_prompt_that_is_too_long_for_the_first_model_goes_to_the_next(ask: Ask) -> None:
    assert await ask("sure", prompt=[7] * 600) == "large"


async def test_routes_are_listed_and_counted(client: Client, ask: Ask) -> None:
    await ask("unsure")
    page = await client.metrics()
    assert 'moonpool_route_requests_total{model_name="large",route="unsure"}' in page
    assert 'escalations_total{cause="unsure",model_name="second",route="unsure"}' in page
    assert 'moonpool_route_cost_total{route="unsure"}' in page
    assert {await ask("canary", prompt=f"{number} is") for number in range(40)} == {"large", "second"}


async def test_a_node_of_one_model_that_dies_leaves_the_other_alone(
    cluster: LocalCluster, client: Client, ask: Ask
) -> None:
    cluster.children["both-second-0"].kill()

    async def gone() -> bool:
        models = (await client.cluster())["models"]
        return [one["name"] for one in models if not one["ready"]] == ["second"]

    await eventually(gone)
    assert await ask("large") == "large"
    with pytest.raises(openai.InternalServerError) as caught:
        await ask("second", extra_body={"timeout": 1.0})
    assert caught.value.status_code in (503, 504)
    await cluster.restart("both-second-0")

    async def back() -> bool:
        return all(one["ready"] for one in (await client.cluster())["models"])

    await eventually(back)
    assert await ask("second") == "second"


async def test_a_model_without_a_node_is_started_by_a_request_and_ends_when_idle(
    cluster: LocalCluster, client: Client, ask: Ask
) -> None:
    def children() -> list[str]:
        return [name for name in cluster.children if "rare" in name]

    assert not children(), "nothing has asked for it"
    with pytest.raises(openai.InternalServerError, match="starts, and may serve in") as caught:
        await ask("rare", extra_body={"timeout": 0.3})
    assert (caught.value.status_code, caught.value.code) == (503, "no_nodes")
    assert int(caught.value.response.headers["Retry-After"]) >= 1
    assert await ask("rare") == "rare"
    assert children() == ["both-rare-0"], "both requests had one node started"

    async def ended() -> bool:
        return not children()

    await eventually(ended)
    assert await ask("rare") == "rare"
    assert children() == ["both-rare-1"]
    assert await ask("large") == "large"
