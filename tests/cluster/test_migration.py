"""Running requests move between decode nodes, and their streams do not notice."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.client import Client, Reply
from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from tests.cluster.conftest import complete_and_move, eventually, nodes

pytestmark = pytest.mark.asyncio(loop_scope="module")

# So many that a request does not end while its move is asked for, and arrives in enough pieces.
NUM_TOKENS = 1200
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "seed": 11},
    "penalties": {"temperature": 0.8, "seed": 3, "top_p": 0.9, **PENALTIES},
    "logprobs": {"logprobs": 3},
}


async def events_of(client: Client, request_id: str, name: str) -> list[dict[str, Any]]:
    return [event for event in (await client.timeline(request_id))["events"] if event["event"] == name]


async def moved(client: Client, prompt: str, num_moves: int = 3, **parameters: Any) -> Reply:
    """A whole answer whose request moved ``num_moves`` times, to and fro."""
    reply, moves = await complete_and_move(client, prompt, num_moves, **{**GREEDY, **parameters})
    assert all(one["source"] == other["target"] for one, other in zip(moves[1:], moves, strict=False))
    return reply


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(sampling, id=name, marks=[pytest.mark.slow] if name != "penalties" else [])
        for name, sampling in SAMPLINGS.items()
    ],
)
async def test_a_request_that_moves_has_the_same_tokens(
    cluster: LocalCluster, client: Client, sampling: dict[str, Any]
) -> None:
    prompt = "In the beginning was the Word, and the Word was with God. " * 4
    reply, expected = Reply(), Reply()
    async for _ in client.complete(prompt, expected, **{**GREEDY, **sampling}):
        pass
    reply = await moved(client, prompt, **sampling)
    assert reply.text == expected.text
    assert reply.usage["completion_tokens"] == NUM_TOKENS
    assert not await events_of(client, reply.id, "retry")
    for event in await events_of(client, reply.id, "migrated"):
        assert 0 <= event["downtime_s"] < 20  # milliseconds, where the machine is not busy


@pytest.mark.slow
async def test_nothing_is_left_after_moves(cluster: LocalCluster, client: Client) -> None:
    async def idle() -> bool:
        loads = [node["load"] for node in (await nodes(client)).values() if node["role"] == "decode"]
        return all(not load["num_running"] and not load["own_decodes"] for load in loads) and all(
            node["tiers"][0]["num_used_blocks"] == 0 for node in (await nodes(client)).values()
        )

    await eventually(idle)
    replies = await asyncio.gather(*(moved(client, f"{number}. And it came to pass ") for number in range(4)))
    assert all(reply.usage["completion_tokens"] == NUM_TOKENS for reply in replies)
    await eventually(idle)


@pytest.mark.slow
async def test_a_client_that_goes_away_in_a_move_leaves_nothing(
    cluster: LocalCluster, client: Client
) -> None:
    async def idle() -> bool:
        return all(node["tiers"][0]["num_used_blocks"] == 0 for node in (await nodes(client)).values())

    for number in range(3):
        reply = Reply()
        stream = client.complete(f"{number}. The sons of Noah ", reply, **GREEDY | {"max_tokens": 1500})
        move: asyncio.Task[Any] | None = None
        async for _ in stream:
            if len(reply.pieces_s) == 10:
                move = asyncio.create_task(client.migrate(reply.id))
                await asyncio.sleep(0.003 * number)
                break
        await stream.aclose()
        assert move is not None
        await asyncio.gather(move, return_exceptions=True)
    await eventually(idle)


async def test_what_cannot_move_says_why(cluster: LocalCluster, client: Client) -> None:
    with pytest.raises(ApiError, match="no request of this id runs here"):
        await client.migrate("unheard-of")
    reply = Reply()
    async for _ in client.complete("The words of Amos ", reply, **GREEDY):
        if len(reply.pieces_s) == 10:
            here = (await client.timeline(reply.id))["summary"]["decode_node"]
            with pytest.raises(ApiError, match="it decodes there"):
                await client.migrate(reply.id, here)
            with pytest.raises(ApiError, match="no decode node has this name"):
                await client.migrate(reply.id, "prefill-0")
    assert reply.usage["completion_tokens"] == NUM_TOKENS
