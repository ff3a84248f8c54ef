"""Replays of a workload on a real cluster, and its hardware as it measured itself."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from moonpool.bench.serve.client.answer import Answer, read_answer, read_json
from moonpool.bench.serve.client.http_client import Exchange, HttpClient
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import FIRST_ID, LAST_ID, Prompts
from moonpool.conductor.costs.model import Profile
from moonpool.conductor.observing.replica_groups import holders
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.trace import TraceRequest

# Sequential requests that measure the overhead of a request.
_SINGLES = 12
_SINGLE_TOKENS, _SINGLE_OUTPUT = 256, 16


@dataclass(frozen=True, slots=True)
class Replayed:
    """``answers[i]`` belongs to ``requests[i]``, with the actual time of sending as arrival."""

    requests: Sequence[TraceRequest]
    answers: Sequence[Answer]


def prompt_of(request: TraceRequest, block_tokens: int, seed: int) -> list[int]:
    """Return token ids; equal blocks have equal tokens for the same seed."""
    tokens: list[int] = []
    for block_id in request.block_ids:
        tokens += random.Random(f"{seed} {block_id}").choices(range(FIRST_ID, LAST_ID + 1), k=block_tokens)
    return tokens[: request.input_tokens]


async def replay(
    server: Server, requests: Sequence[TraceRequest], *, block_tokens: int, seed: int
) -> Replayed:
    """Send every request at its time, independent of other answers.

    Raises:
        RequestFailed: the server answered one with an error.
    """
    loop = asyncio.get_running_loop()
    prompts = [prompt_of(request, block_tokens, seed) for request in requests]
    await server.http.warm(16)
    began_s = loop.time()

    async def send(i: int) -> Exchange:
        await asyncio.sleep(began_s + requests[i].arrival_s - loop.time())
        return await server.send(prompts[i], requests[i].output_tokens)

    exchanges = await asyncio.gather(*(send(i) for i in range(len(requests))))
    answers = [read_answer(exchange) for exchange in exchanges]
    for answer in answers:
        if answer.error:
            raise RequestFailed(f"{server.name}: {answer.error}")
    first_s = min(answer.sent_s for answer in answers)
    sent = [
        TraceRequest(answer.sent_s - first_s, request.input_tokens, request.output_tokens, request.block_ids)
        for request, answer in zip(requests, answers, strict=True)
    ]
    return Replayed(sent, answers)


async def measured_hardware(
    server: Server, *, block_tokens: int, chunk_tokens: int, max_batch_size: int, seed: int
) -> tuple[Hardware, Hardware]:
    """Return prefill and decode hardware from the nodes' own profiles.

    The overhead of a request and of a hand-over comes from a few sequential requests.

    Raises:
        RequestFailed: the server is no Moonpool cluster, or failed a request.
    """
    prompts = Prompts(seed, "single")
    singles = [await server.ask(prompts.draw(_SINGLE_TOKENS), _SINGLE_OUTPUT) for _ in range(_SINGLES)]
    nodes = await _nodes(server.http)
    prefill, decode = (
        Hardware(
            name=f"measured {role} node",
            profile=Profile.from_record(nodes[role]["profile"]),
            # The latency of a hand-over includes its bytes; here bytes only count.
            kv_token_nbytes=1,
            pool_tokens=nodes[role]["load"]["num_blocks"] * block_tokens,
            network_nbytes_per_s=1e12,
            chunk_tokens=chunk_tokens,
            max_batch_size=max_batch_size,
        ).scaled(prefill=nodes[role]["prefill_correction"], decode=nodes[role]["decode_correction"])
        for role in ("prefill", "decode")
    )
    request_s = median(answer.ttft_s for answer in singles) - prefill.profile.prefill_s(_SINGLE_TOKENS, 0)
    # Of whole answers: a message may carry several tokens, so single gaps are no measure.
    decode_s = median(answer.token_s[-1] - answer.token_s[0] for answer in singles)
    hand_over_s = decode_s - (_SINGLE_OUTPUT - 1) * decode.profile.step_s(1, _SINGLE_TOKENS)
    request_s, hand_over_s = max(request_s, 0.0), max(hand_over_s, 0.0)
    return (
        replace(prefill, request_s=request_s, network_latency_s=hand_over_s),
        replace(decode, request_s=request_s, network_latency_s=hand_over_s),
    )


async def _nodes(http: HttpClient) -> dict[str, Any]:
    """Return one node (or one of its replicas) of each role."""
    status, content = read_json(await http.get("/v1/cluster"))
    nodes = content.get("nodes", []) if status == 200 else []
    found: dict[str, Any] = {node["role"]: holders(node)[0] for node in nodes}
    if not {"prefill", "decode"} <= found.keys():
        raise RequestFailed("the server's /v1/cluster shows no prefill and decode nodes")
    return found
