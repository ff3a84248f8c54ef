"""LoRA adapters in a cluster: exact over the hand-over, loaded and replaced while it serves."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import tokenizers
import torch

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import eventually, migrate, nodes, small_config
from tests.engine.adapters import make_adapter
from tests.engine.conftest import Reference
from tests.lazily import Lazily

transformers = Lazily("transformers")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

DEMO = Path(__file__).parents[2] / "moonpool" / "demo" / "model"
PROMPT = "In the beginning " * 20
NUM_TOKENS = 32
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def base() -> Reference:
    return Reference(
        DEMO, transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    )


@pytest.fixture(scope="module")
def voices(base: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    """Three adapters that change every answer; the third is loaded by the tests."""
    folder = tmp_path_factory.mktemp("voices")
    kinds: dict[str, dict[str, Any]] = {
        "wide": {"r": 16},
        "thin": {"r": 3, "target_modules": ["q_proj", "down_proj"]},
        "late": {"r": 8, "use_rslora": True},
    }
    return {
        name: make_adapter(base, folder / name, seed=seed, std=0.08, **words)
        for seed, (name, words) in enumerate(kinds.items())
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(
    voices: dict[str, Reference], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LocalCluster]:
    config = small_config().with_adapters([f"{name}={voices[name].path}" for name in ("wide", "thin")])
    listed = tmp_path_factory.mktemp("listed")
    for name in ("broken", "listed"):
        shutil.copytree(voices["late"].path, listed / name)
    (listed / "broken" / "adapter_model.safetensors").write_bytes(b"no weights")
    config = replace(config, lora=replace(config.lora, directory=str(listed)))
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("adapters")) as running:
        yield running


def expected(model: Reference, prompt: str = PROMPT) -> str:
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    text: str = tokenizer.decode(model.greedy(tokenizer.encode(prompt).ids, NUM_TOKENS))
    return text


async def answer(client: Client, model: str | None, prompt: str = PROMPT, **parameters: Any) -> str:
    reply = Reply()
    words = {**GREEDY, **parameters} | ({} if model is None else {"model": model})
    async for _ in client.complete(prompt, reply, **words):
        pass
    return reply.text


async def listed_on_all(client: Client, name: str) -> bool:
    return name in await names(client)


async def all_listed(client: Client, wanted: Iterable[str]) -> None:
    """Wait until the conductor has asked the nodes."""

    async def listed() -> bool:
        return set(wanted) <= set(await names(client))

    await eventually(listed)


async def names(client: Client) -> list[str]:
    return [one["id"] for one in (await client._get("/v1/models"))["data"]]


async def test_requests_name_an_adapter_by_model(
    client: Client, base: Reference, voices: dict[str, Reference]
) -> None:
    models: dict[str | None, Reference] = {None: base, "wide": voices["wide"], "thin": voices["thin"]}
    texts = {name: expected(model) for name, model in models.items()}
    assert len(set(texts.values())) == 3
    for _ in range(2):  # the second time from the blocks of each, which the others never get
        found = await asyncio.gather(*(answer(client, name) for name in [*models, *models]))
        assert found == [*texts.values(), *texts.values()]


async def test_adapters_are_listed_with_their_parent(client: Client, voices: dict[str, Reference]) -> None:
    # Those of lora.directory are read while the node serves; one of them is corrupt and left out.
    await eventually(lambda: listed_on_all(client, "listed"))
    listed = (await client._get("/v1/models"))["data"]
    assert [one["id"] for one in listed] == [listed[0]["id"], "listed", "thin", "wide"]
    assert listed[0]["parent"] is None
    assert listed[2]["parent"] == listed[0]["id"]
    assert listed[2]["root"] == str(voices["thin"].path)
    assert await answer(client, "listed") == expected(voices["late"])
    with pytest.raises(ApiError, match="does not exist") as unknown:
        await answer(client, "nobody")
    assert unknown.value.status == 404


async def test_an_adapter_is_loaded_replaced_and_unloaded(
    client: Client, voices: dict[str, Reference]
) -> None:
    late, thin = voices["late"], voices["thin"]
    await client.load_adapter("more/late", str(late.path))
    assert "more/late" in await names(client)
    assert await answer(client, "more/late") == expected(late)
    with pytest.raises(ApiError, match="another content") as taken:
        await client.load_adapter("more/late", str(thin.path))
    assert taken.value.status == 400
    assert await answer(client, "more/late") == expected(late)
    await client.load_adapter("more/late", str(thin.path), replace=True)
    # The blocks of the former content have other keys.
    assert await answer(client, "more/late") == expected(thin)
    await client.unload_adapter("more/late")
    assert "more/late" not in await names(client)
    with pytest.raises(ApiError) as gone:
        await answer(client, "more/late")
    assert gone.value.status == 404
    with pytest.raises(ApiError) as missing:
        await client.unload_adapter("more/late")
    assert missing.value.status == 404


async def test_a_running_request_finishes_with_an_adapter_that_is_unloaded(
    client: Client, voices: dict[str, Reference]
) -> None:
    late = voices["late"]
    await client.load_adapter("leaving", str(late.path))
    reply = Reply()
    async for _ in client.complete(PROMPT, reply, model="leaving", **GREEDY):
        if len(reply.pieces_s) == 1:
            await client.unload_adapter("leaving")
    assert reply.text == expected(late)


async def test_answers_under_a_swap_are_of_one_content_each(
    client: Client, voices: dict[str, Reference]
) -> None:
    late, thin = voices["late"], voices["thin"]
    await client.load_adapter("swapped", str(late.path))
    texts = {expected(late), expected(thin)}
    found, swapped = list[str](), False

    async def ask() -> None:
        # For as long as it takes: a node may read an adapter for longer than a few answers take.
        while not swapped:
            found.append(await answer(client, "swapped"))

    async def swap() -> None:
        nonlocal swapped
        try:
            for path in (thin.path, late.path, thin.path):
                await answered()
                await client.load_adapter("swapped", str(path), replace=True)
            await answered()
        finally:
            swapped = True

    async def answered() -> None:
        """Six more: three may have begun before the content changed."""
        until = len(found) + 6

        async def more() -> bool:
            return len(found) >= until

        await eventually(more)

    await asyncio.gather(swap(), *(ask() for _ in range(3)))
    assert set(found) == texts
    assert await answer(client, "swapped") == expected(thin)
    # Nothing else was touched.
    assert await answer(client, "wide") == expected(voices["wide"])


async def test_a_deadline_that_passes_while_an_adapter_loads_harms_no_other(
    client: Client, voices: dict[str, Reference]
) -> None:
    await client.load_adapter("slow", str(voices["late"].path))
    with pytest.raises(ApiError) as late:
        await answer(client, "slow", timeout=0.0001)
    assert late.value.status in (429, 504)
    assert await answer(client, "slow") == expected(voices["late"])


@pytest.mark.parametrize(
    ("name", "path", "why"),
    [
        ("x", "/does/not/exist", "cannot be read"),
        ("x", "relative/path", "absolute"),
        ("not a name", "/tmp", "cannot be the name"),
    ],
)
async def test_what_cannot_be_loaded_is_refused(client: Client, name: str, path: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as refused:
        await client.load_adapter(name, path)
    assert refused.value.status == 400
    assert name not in await names(client)


async def test_a_running_request_moves_with_its_adapter(client: Client, voices: dict[str, Reference]) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    reply, moved = Reply(), list[dict[str, Any]]()
    # Long enough that a busy machine moves it before it ends.
    stream = client.complete(PROMPT, reply, model="wide", **GREEDY | {"max_tokens": 1500})
    async with aclosing(stream):
        async for _ in stream:
            if len(reply.pieces_s) == 4:
                moved = await migrate(client, reply.id)
            if len(reply.pieces_s) >= 220:
                break
    assert moved and moved[0]["source"] != moved[0]["target"]
    text = tokenizer.decode(voices["wide"].greedy(tokenizer.encode(PROMPT).ids, 200))
    assert reply.text.startswith(text[:-8])  # the last token may be a part of a character


async def test_the_shipped_model_has_two_voices(client: Client) -> None:
    spoken = {}
    for voice in ("prophet", "cynic"):
        await client.load_adapter(voice, str(DEMO.parent / "adapters" / voice))
        command = [sys.executable, "-m", "moonpool", "chat", "--url", client.url, "--model", voice]
        options = ["--temperature", "0", "--max-tokens", "12", "Who", "was", "Solomon?"]
        process = await asyncio.create_subprocess_exec(*command, *options, stdout=asyncio.subprocess.PIPE)
        spoken[voice] = (await process.communicate())[0].decode()
    assert spoken["prophet"].startswith("It is written:")
    assert ", n. " in spoken["cynic"]


async def test_nodes_tell_what_they_have(client: Client) -> None:
    async def told() -> bool:
        await answer(client, "wide", max_tokens=2)
        return any(node.get("resident_adapters") for node in (await nodes(client)).values())

    await eventually(told)


async def test_adapters_and_prefixes_fight_for_small_pools(
    base: Reference, voices: dict[str, Reference], tmp_path: Path
) -> None:
    """Each node has room for three of the wide ones, or a few prompts: all are answered, exactly."""
    models: dict[str | None, Reference] = {None: base, **voices}
    config = small_config().with_adapters([f"{name}={one.path}" for name, one in voices.items()])
    config = replace(config, engine=replace(config.engine, pool_nbytes=60 * 98_304))
    texts = {
        (name, prompt): expected(models[name], prompt)
        for name in models
        for prompt in ("1 " + PROMPT, PROMPT)
    }
    async with LocalCluster(config, directory=tmp_path) as running, Client(running.url) as client:
        questions = [*texts] * 3
        found = await asyncio.gather(*(answer(client, *question) for question in questions))
        assert found == [texts[question] for question in questions]
        pages = [node["metrics_url"] for node in (await client.cluster())["nodes"]]
        evictions = 0.0
        for url in pages:
            async with aiohttp.ClientSession() as session, session.get(url) as page:
                line = re.search(r"^moonpool_adapter_evictions_total (\S+)", await page.text(), re.MULTILINE)
                evictions += float(line[1]) if line else 0.0
        assert evictions


async def loads_of(client: Client) -> Counter[str]:
    """Of all nodes, by source."""
    loads = Counter[str]()
    for node in (await client.cluster())["nodes"]:
        async with aiohttp.ClientSession() as session, session.get(node["metrics_url"]) as page:
            text = await page.text()
        for source, count in re.findall(r'^moonpool_adapter_loads_total{source="(\w+)"} (\S+)', text, re.M):
            loads[source] += round(float(count))
    return loads


async def test_adapters_return_from_host_memory_and_after_a_restart_from_disk(
    voices: dict[str, Reference], tmp_path: Path
) -> None:
    """The pool has room for the widest one, or for the other two, beside a prompt. What the disk has
    corrupted is read from the files."""
    config = small_config().with_adapters([f"{name}={one.path}" for name, one in voices.items()])
    ssd = replace(config.store.ssd, path=str(tmp_path / "disk"), deadline_s=30.0)
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=0, decode=0, both=1),
        engine=replace(config.engine, pool_nbytes=40 * 98_304),
        store=replace(config.store, ssd=ssd, flush_s=30.0),
    )
    texts = {name: expected(model) for name, model in voices.items()}

    async def answers(directory: Path, times: int) -> Counter[str]:
        directory.mkdir()
        async with LocalCluster(config, directory=directory) as running, Client(running.url) as client:
            await all_listed(client, texts)
            for _ in range(times):
                assert {name: await answer(client, name) for name in texts} == texts
            return await loads_of(client)

    first = await answers(tmp_path / "first", 3)
    assert first["file"] == 3 and first["host"] >= 2 and set(first) == {"file", "host"}
    assert await answers(tmp_path / "second", 1) == {"ssd": 3}
    for path in (tmp_path / "disk").glob("*/segment-*.kv"):
        data = bytearray(path.read_bytes())
        data[::4096] = bytes(each ^ 4 for each in data[::4096])
        path.write_bytes(data)
    assert await answers(tmp_path / "third", 1) == {"file": 3}


async def test_a_node_reads_an_adapter_from_the_node_that_has_it(
    voices: dict[str, Reference], tmp_path: Path
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    config = small_config().with_adapters([f"wide={voices['wide'].path}"])
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=0, decode=0, both=2),
        index=replace(config.index, lease_ttl_s=30.0),  # a node that a busy machine stops for long stays
    )
    async with LocalCluster(config, directory=tmp_path) as running, Client(running.url) as client:
        await all_listed(client, ["wide"])
        reply, moved = Reply(), list[dict[str, Any]]()
        stream = client.complete(PROMPT, reply, model="wide", **GREEDY | {"max_tokens": 1500})
        async with aclosing(stream):
            async for _ in stream:
                if len(reply.pieces_s) == 4:
                    moved = await migrate(client, reply.id)
                if len(reply.pieces_s) >= 100:
                    break
        assert moved
        text = tokenizer.decode(voices["wide"].greedy(tokenizer.encode(PROMPT).ids, 80))
        assert reply.text.startswith(text[:-8])
        assert await loads_of(client) == {"file": 1, "peer": 1}
