"""Nodes whose experts lie on several ranks: served exactly, planned from what they measured, and a rank that
dies while tokens are on their way to experts costs none."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tokenizers
import torch
from click.testing import CliRunner

from moonpool.cli import cli
from moonpool.client import Client, Reply
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.options import ModelOptions, ParallelOptions
from tests.cluster.conftest import eventually, kill, small_config
from tests.cluster.test_ranks import DEMO, GREEDY, is_back, nodes, rank_pid
from tests.lazily import Lazily

transformers = Lazily("transformers")

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_LAYERS, NUM_EXPERTS = 3, 8


@dataclass(frozen=True)
class Served:
    cluster: LocalCluster
    model: Any  # transformers'

    def text(self, prompt: str, num_tokens: int) -> str:
        """What transformers goes on with."""
        tokenizer = tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        limits = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
        found = self.model.generate(ids, **limits, do_sample=False, eos_token_id=None)
        return str(tokenizer.decode(found[0, ids.shape[1] :].tolist()))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """Random weights behind the shipped model's tokenizer; every step of decode nodes takes tokens to their
    experts."""
    path: Path = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    words = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    mixture = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    shape = {"vocab_size": 2048, "num_hidden_layers": NUM_LAYERS, "max_position_embeddings": 1024}
    config = transformers.Qwen3MoeConfig(**words, **mixture, **shape, initializer_range=0.2)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, path)
    options = small_config()
    decode = ("engine.parallel.tp=2", "engine.parallel.ep=2", "engine.parallel.all_to_all_tokens=1")
    options = replace(
        options,
        model=ModelOptions(path=str(path)),
        engine=replace(options.engine, parallel=ParallelOptions(timeout_s=5.0)),
        cluster=replace(options.cluster, prefill=1, decode=2, decode_options=decode),
    )
    async with LocalCluster(options, directory=tmp_path_factory.mktemp("experts")) as running:
        yield Served(running, model)


@pytest.mark.slow
async def test_a_rank_killed_among_exchanges_costs_no_token(served: Served) -> None:
    prompt, before = "In the beginning " * 6, dict[str, Any]()
    reply = Reply()
    async with Client(served.cluster.url) as client:
        assert (await nodes(client))["decode-0"]["ranks"] == "tp 2 × pp 1, ep 2"
        words = {**GREEDY, "max_tokens": 96}
        async for _ in client.complete(prompt, reply, **words):
            if not before and len(reply.pieces_s) >= 20:
                name = (await client.timeline(reply.id))["summary"]["decode_node"]
                before = (await nodes(client))[name]
                os.kill(rank_pid(served.cluster, name), signal.SIGKILL)
        assert before, "it was over too soon"
        assert reply.text == served.text(prompt, 96)
        await eventually(lambda: is_back(client, before))


async def test_a_live_nodes_load_makes_a_plan(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    async with Client(served.cluster.url) as client:
        async for _ in client.complete("And the LORD spake " * 8, Reply(), **GREEDY | {"max_tokens": 8}):
            pass

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["experts", *arguments, "--url", served.cluster.url])

    def all_three() -> tuple[Any, ...]:
        made = run("prefill-0", "--copies", "2", "--ranks", "2", "-o", str(path))
        return made, run("prefill-7"), run("prefill-0", "-o", str(path))

    made, unknown, alone = await asyncio.to_thread(all_three)
    assert made.exit_code == 0, made.output
    assert "by this plan, 2 copies a layer" in made.output
    assert "engine.parallel.expert_plan_path=" in made.output
    plan = ExpertPlacement.read(path)
    plan.check(NUM_LAYERS, NUM_EXPERTS, 2)
    assert unknown.exit_code == 1
    assert (
        "there is no node prefill-7 in the cluster; there are: decode-0, decode-1, prefill-0"
        in unknown.output
    )
    assert alone.exit_code == 1
    assert "prefill-0 has its experts on one rank: set the ranks to plan for with --ranks N" in alone.output


async def test_a_live_nodes_experts_move_and_no_text_changes(served: Served) -> None:
    prompt = "And the LORD spake " * 8

    async def texts() -> set[str]:
        replies = [Reply() for _ in range(4)]  # on both decode nodes

        async def ask(reply: Reply) -> None:
            async for _ in client.complete(prompt, reply, **GREEDY | {"max_tokens": 40}):
                pass

        await asyncio.gather(*map(ask, replies))
        return {reply.text for reply in replies}

    def run(*arguments: str) -> Any:
        return CliRunner().invoke(cli, ["experts", *arguments, "--url", served.cluster.url])

    async with Client(served.cluster.url) as client:
        expected = {served.text(prompt, 40)}
        assert await texts() == expected
        running = asyncio.create_task(texts())
        moved = await asyncio.to_thread(run, "decode-0", "--copies", "2", "--apply")
        assert moved.exit_code == 0, moved.output
        said = f"decode-0: the experts of {NUM_LAYERS} layers were moved: plan "
        assert said in moved.output
        plan = f"tp 2 × pp 1, ep 2 by plan {moved.output.partition(said)[2].split()[0]}"
        assert await running == expected
        assert await texts() == expected
        other = await asyncio.to_thread(run, "decode-0", "--ranks", "3", "--apply")
        assert "decode-0 has 2 ranks: leave out --ranks, or --apply" in other.output

        async def is_told() -> bool:
            # A heartbeat during the move tells of the layers that were moved by then.
            return (await nodes(client))["decode-0"]["ranks"] == plan

        await eventually(is_told)
        kill(served.cluster, "decode-0")
        await served.cluster.children["decode-0"].wait()
        await served.cluster.restart("decode-0")
        assert served.cluster.children["decode-0"].ready["ranks"] == plan, "another process begins with it"

        async def is_ready() -> bool:
            return (await nodes(client)).get("decode-0", {}).get("state") == "ready"

        await eventually(is_ready)
        assert await texts() == expected
        rank = rank_pid(served.cluster, "decode-0")
        before = (await nodes(client))["decode-0"]
        os.kill(rank, signal.SIGKILL)
        await eventually(lambda: is_back(client, before))
        assert (await nodes(client))["decode-0"]["ranks"] == plan, "and so does another life of the process"
    alone = await asyncio.to_thread(run, "prefill-0", "--apply")
    assert alone.exit_code == 1
    assert "all experts are on each rank and cannot be moved" in str(alone.exception)
