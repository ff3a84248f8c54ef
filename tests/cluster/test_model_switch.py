"""A node of one model serves another one: under load, with exact tokens, and where that one does not load."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
from click.testing import CliRunner, Result

from moonpool.cli import cli
from moonpool.client import Client
from moonpool.errors import ApiError
from moonpool.kvstore.index.redis.node_record import JOIN_PHASES
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.engine_options import shipped
from tests.cluster.conftest import eventually, nodes, with_models

Ask = Callable[[str, int], Awaitable[str]]

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

MODELS = """
[[model]]
name = "large"
set = ["cluster.both=2"]

[[model]]
name = "small"
path = "{small}"

[[model]]
name = "rare"
path = "{rare}"
set = ["planner.min_warm=0"]
"""
PROMPTS = ("In the beginning", "And Solomon said", "The king of Egypt", "Now it came to pass")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    directory: Path = tmp_path_factory.mktemp("switch")
    rare = directory / "rare"
    shutil.copytree(shipped("small"), rare)
    config = with_models(directory, MODELS.format(small=shipped("small"), rare=rare))
    config = replace(config, cluster=replace(config.cluster, most=4))
    async with LocalCluster(config, directory=directory, supervises=True, restart=True) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ask(cluster: LocalCluster) -> AsyncIterator[Ask]:
    """The greedy text of a model for a prompt, streamed."""
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="-", max_retries=0) as client:

        async def answered(model: str, prompt: int) -> str:
            body: Any = {"prompt": PROMPTS[prompt], "max_tokens": 48, "temperature": 0, "stream": True}
            body["extra_body"] = {"ignore_eos": True}
            stream = await client.completions.create(model=model, **body)
            return "".join([chunk.choices[0].text async for chunk in stream])

        yield answered


async def command(cluster: LocalCluster, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, ["fleet", *words, "--url", cluster.url])


async def served(client: Client) -> dict[str, str]:
    """The model that each node serves."""
    return {name: node["served"] for name, node in (await nodes(client)).items() if node["state"] == "ready"}


async def test_a_node_changes_its_model_under_load_and_no_token_is_lost_or_wrong(
    cluster: LocalCluster, ask: Ask
) -> None:
    expected = {
        (model, number): await ask(model, number)
        for model in ("large", "small")
        for number in range(len(PROMPTS))
    }
    assert len(set(expected.values())) == len(expected)
    done = asyncio.Event()
    answers: list[tuple[tuple[str, int], str]] = []

    async def keep_asking(model: str, number: int) -> None:
        while not done.is_set():
            answers.append(((model, number), await ask(model, number)))

    async with cluster.client() as client:
        epoch = (await nodes(client))["both-large-1"]["epoch"]
        asking = [asyncio.create_task(keep_asking(*key)) for key in expected]

        async def both_work() -> bool:
            found = await nodes(client)
            return all(found[f"both-large-{number}"]["load"]["num_running"] for number in range(2))

        await eventually(both_work)
        result = await command(cluster, "switch", "both-large-1", "--model", "small")
        assert result.exit_code == 0, result.output
        assert "both-large-1 serves small: drained in" in result.output
        assert all(phase.replace("_", " ") in result.output for phase in ("weights", "warm_up", "services"))
        assert await served(client) == {
            "both-large-0": "large",
            "both-large-1": "small",
            "both-small-0": "small",
        }

        async def works() -> bool:
            return bool((await nodes(client))["both-large-1"]["load"]["num_running"])

        await eventually(works)
        done.set()
        await asyncio.gather(*asking)
        assert all(text == expected[key] for key, text in answers)
        assert {key for key, _ in answers} == set(expected)
        node = (await nodes(client))["both-large-1"]
        assert node["epoch"] > epoch
        assert set(node["join"]) == set(JOIN_PHASES)
        events = (await anext(client.live()))["events"]
        (text,) = [one["text"] for one in events if one["kind"] == "switches"]
        assert "from the model large to small: an operator asked for it" in text
        await _switches_back(cluster, client, ask, expected)


async def _switches_back(
    cluster: LocalCluster, client: Client, ask: Ask, expected: dict[tuple[str, int], str]
) -> None:
    impatient = await command(cluster, "switch", "both-large-1", "--model", "large", "--wait", "0")
    assert impatient.exit_code == 1
    assert "both-large-1 does not serve large after 0 s" in impatient.output.replace("\n", " ")

    async def back() -> bool:
        return list((await served(client)).values()).count("large") == 2

    await eventually(back)
    assert [await ask("large", number) for number in range(4)] == [expected["large", n] for n in range(4)]
    log = (cluster.directory / "both-large-1.log").read_text()
    assert log.count('"ready": true') == 3, "each time it has drained, and none was started again"


async def test_a_model_that_does_not_load_leaves_the_node_with_its_own(
    cluster: LocalCluster, ask: Ask
) -> None:
    expected = await ask("small", 0)
    weights = cluster.directory / "rare" / "model.safetensors"
    kept = weights.read_bytes()
    weights.write_bytes(b"no weights" * 100)
    try:
        async with cluster.client() as client:
            before = {name: child.pid for name, child in cluster.children.items()}
            result = await command(cluster, "switch", "both-small-0", "--model", "rare")
            assert result.exit_code == 1
            text = " ".join(result.output.split())
            assert "both-small-0 does not serve rare; it starts with small again" in text
            assert "before it was ready" in text

            async def again() -> bool:
                return (await served(client)).get("both-small-0") == "small"

            await eventually(again)
            assert await ask("small", 0) == expected
            after = {name: child.pid for name, child in cluster.children.items()}
            assert {name for name in before if before[name] != after[name]} == {"both-small-0"}
            (failed,) = (await client.fleet("rare"))["nodes"]
            assert (failed["node_id"], failed["supplied"]["state"]) == ("both-small-0", "refused")
    finally:
        weights.write_bytes(kept)


async def test_what_cannot_be_is_refused_and_changes_nothing(cluster: LocalCluster, ask: Ask) -> None:
    directory, away = cluster.directory / "rare", cluster.directory / "away"
    async with cluster.client() as client:
        before = {name: child.pid for name, child in cluster.children.items()}
        directory.rename(away)
        try:
            with pytest.raises(ApiError, match="is not a directory"):
                await client.switch_model("both-small-0", "rare")
        finally:
            away.rename(directory)
        for node, name, why in (
            ("both-small-0", "smal", "the nearest is 'small'"),
            ("both-small-9", "large", "there is no node"),
            ("both-small-0", "small", "serves small already"),
        ):
            with pytest.raises(ApiError, match=why):
                await client.switch_model(node, name)
        result = await command(cluster, "switch", "both-small-0")
        assert (result.exit_code, "give a ROLE, or --model NAME" in result.output) == (2, True)
        assert {name: child.pid for name, child in cluster.children.items()} == before
        await ask("small", 0)


async def test_a_machine_has_no_more_nodes_than_it_may(cluster: LocalCluster) -> None:
    async with cluster.client() as client:
        (name,) = (await client.scale("both", 3))["started"]  # of the first model
        with pytest.raises(ApiError, match=r"4 run, the most \(cluster.most\)"):
            await client.scale("both", 4)
        # Drained while it starts or serves, as ever.
        await client.drain(name)

        async def gone() -> bool:
            return name not in cluster.children

        await eventually(gone)


LENT = """
[[model]]
name = "large"
set = ["planner.prefill_least=2"]

[[model]]
name = "small"
path = "{small}"
set = ["cluster.both=2"]
"""


async def test_a_planner_lends_an_idle_node_of_one_model_to_another_one_that_lacks_it(tmp_path: Path) -> None:
    config = with_models(tmp_path, LENT.format(small=shipped("small")))
    config = replace(
        config,
        cluster=replace(config.cluster, most=3),
        planner=replace(config.planner, mode="act", spare=0, hold_s=2.0),
    )
    async with (
        LocalCluster(config, directory=tmp_path, supervises=True) as cluster,
        cluster.client() as client,
    ):

        async def lent() -> bool:
            return list((await served(client)).values()).count("large") == 2

        await eventually(lent)
        found = await served(client)
        (moved,) = (name for name, model in found.items() if model == "large" and "small" in name)
        loans = [one["text"] for one in (await anext(client.live()))["events"] if one["kind"] == "plan"]
        (text,) = [text for text in loans if text.startswith("lend ")]
        assert text.startswith(f"lend {moved} to large: large lacks a prefill node (")
        assert "3 run, the most (cluster.most)" in text
        (large, small) = (await client.cluster())["models"]
        assert (large["loan"], small["num_nodes"]) == (text, 1)
        assert 'steps_total{kind="lend",outcome="made",role="prefill/decode"} 1.0' in await client.metrics()
        with pytest.raises(ApiError, match=r"planner\.mode=act"):
            await client.switch_model(moved, "small")
