"""Structured output and speculation in a cluster whose nodes die and whose requests move: the text is that of
an undisturbed run that decodes plainly."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import jsonschema
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from moonpool.client import Client, Reply
from moonpool.local.cluster import LocalCluster
from moonpool.runtime.config.engine_options import SpeculativeOptions
from tests.cluster.conftest import all_ready, complete_and_move, eventually, kill, small_config

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_TOKENS = 600
# Longer than any answer: a token limit ends it.
ENDLESS = {"structured_outputs": {"regex": "([A-Z][a-z]{2,9}( [a-z]{1,9}){2,7}\\. ){400,}"}}
FEATURES: dict[str, dict[str, Any]] = {"structure": ENDLESS, "speculation": {"ignore_eos": True}}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "kind": {"enum": ["größer", "kleiner", "🦆"]},
        "years": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 5},
    },
    "required": ["name", "kind", "years"],
    "additionalProperties": False,
}
SAMPLINGS = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.9, "seed": 7}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalCluster]:
    config = small_config()
    config = replace(config, engine=replace(config.engine, speculative=SpeculativeOptions(method="ngram")))
    async with LocalCluster(config, directory=tmp_path_factory.mktemp("cluster")) as running:
        yield running


async def whole(client: Client, prompt: str, **parameters: Any) -> Reply:
    reply = Reply()
    async for _ in client.complete(prompt, reply, **{"max_tokens": NUM_TOKENS, **parameters}):
        pass
    return reply


def check_beginning(text: str) -> None:
    """Whole sentences, and the beginning of one more."""
    assert re.fullmatch(r"([A-Z][a-z]{2,9}( [a-z]{1,9}){2,7}\. )*([A-Z][a-z ]*\.?)?", text), text


async def test_answers_match_their_schema(cluster: LocalCluster, client: Client) -> None:
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}
    replies = await asyncio.gather(
        *(whole(client, f"{seed}. And he said ", temperature=1.0, seed=seed, **form) for seed in range(16))
    )
    for reply in replies:
        assert reply.finish_reason == "stop"
        jsonschema.validate(json.loads(reply.text), SCHEMA)
    assert len({reply.text for reply in replies}) > 8


async def num_accepted(cluster: LocalCluster) -> float:
    """Proposed tokens that the nodes have accepted."""
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for child in cluster.nodes:
            async with session.get(str(child.ready["metrics_url"])) as answer:
                for family in text_string_to_metric_families(await answer.text()):
                    total += sum(
                        sample.value
                        for sample in family.samples
                        if sample.name == "moonpool_speculated_tokens_total"
                        and sample.labels["outcome"] == "accepted"
                    )
    return total


async def test_proposed_tokens_are_accepted_unless_a_request_says_no(
    cluster: LocalCluster, client: Client
) -> None:
    plain = await whole(client, "Once upon a time ", temperature=0, ignore_eos=True, speculation=False)
    before = await num_accepted(cluster)
    reply = await whole(client, "Once upon a time ", temperature=0, ignore_eos=True)
    assert reply.text == plain.text
    summary = (await client.timeline(reply.id))["summary"]
    of_plain = (await client.timeline(plain.id))["summary"]
    assert 1 < summary["tokens_per_step"] < NUM_TOKENS
    assert of_plain["tokens_per_step"] == 0
    assert await num_accepted(cluster) > before
    await whole(client, "Once upon a time ", temperature=0, ignore_eos=True, speculation=False)
    after = await num_accepted(cluster)
    await whole(client, "Once upon a time ", temperature=0, ignore_eos=True, speculation=False)
    assert await num_accepted(cluster) == after


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_a_killed_node_does_not_change_the_text(
    cluster: LocalCluster, client: Client, sampling: dict[str, Any], feature: str
) -> None:
    prompt, sampling = "And the decode node said unto him ", sampling | FEATURES[feature]
    expected = await whole(client, prompt, **sampling, speculation=False)
    assert expected.finish_reason == "length"
    if feature == "structure":
        check_beginning(expected.text)
    # On a busy machine the request may have ended before its node was killed: then once more.
    for _ in range(5):
        reply = Reply()
        killed, killed_unix_s = "", 0.0
        async for _ in client.complete(prompt, reply, max_tokens=NUM_TOKENS, **sampling):
            if not killed and len(reply.pieces_s) >= 20:
                killed = str((await client.timeline(reply.id))["summary"]["decode_node"])
                kill(cluster, killed)
                assert await cluster.children[killed].wait() == -signal.SIGKILL
                killed_unix_s = time.time()
        assert killed
        assert reply.text == expected.text
        events = {event["event"]: event for event in (await client.timeline(reply.id))["events"]}
        await cluster.restart(killed)
        await eventually(lambda: all_ready(cluster, client))
        if events["done"]["unix_s"] > killed_unix_s:
            assert "retry" in events
            return
    pytest.fail("five times the request had ended before its node was killed")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
async def test_a_move_does_not_change_the_text(
    cluster: LocalCluster, client: Client, sampling: dict[str, Any], feature: str
) -> None:
    parameters = {"max_tokens": 2 * NUM_TOKENS, **FEATURES[feature], **sampling}
    expected = await whole(client, "In the beginning ", **parameters, speculation=False)
    reply, _ = await complete_and_move(client, "In the beginning ", 2, **parameters)
    assert reply.text == expected.text
