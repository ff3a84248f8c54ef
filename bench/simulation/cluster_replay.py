"""Replays of a workload on a real cluster, and its paced nodes as hardware."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from moonpool.bench.serve.client.answer import Answer, read_json
from moonpool.bench.serve.client.http_client import Exchange
from moonpool.bench.serve.client.server import RequestFailed, Server
from moonpool.bench.serve.client.workload import FIRST_ID, LAST_ID
from moonpool.bench.simulation.paced_costs import PACED_COSTS
from moonpool.conductor.costs.model import Profile
from moonpool.conductor.observing.replica_groups import holders
from moonpool.runtime.config.store_options import HostTierOptions
from moonpool.simulator.inputs.hardware import Hardware
from moonpool.simulator.inputs.trace import TraceRequest

# Shared memory on one host, as conductors assume before they have measured it (``conductor.costs.links``).
LOCAL_NBYTES_PER_S = 2e9


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
    answers = [server.answered(exchange) for exchange in exchanges]
    first_s = min(answer.sent_s for answer in answers)
    sent = [
        TraceRequest(answer.sent_s - first_s, request.input_tokens, request.output_tokens, request.block_ids)
        for request, answer in zip(requests, answers, strict=True)
    ]
    return Replayed(sent, answers)


async def paced_hardware(
    server: Server, *, pool_nbytes: int, block_tokens: int, chunk_tokens: int, max_batch_size: int
) -> Hardware:
    """Return the paced nodes of a cluster as hardware: their costs, and the sizes that their records have.

    Raises:
        RequestFailed: the server is no Moonpool cluster, or has no nodes.
    """
    status, content = read_json(await server.http.get("/v1/cluster"))
    nodes = content.get("nodes", []) if status == 200 else []
    if not nodes:
        raise RequestFailed("the server's /v1/cluster shows no nodes")
    node = holders(nodes[0])[0]
    num_blocks, host_rate = node["load"]["num_blocks"], node["profile"]["host_load_nbytes_per_s"]
    token_nbytes = pool_nbytes // num_blocks // block_tokens
    return Hardware(
        name="paced node",
        profile=replace(Profile(**asdict(PACED_COSTS)), host_load_nbytes_per_s=host_rate),
        kv_token_nbytes=token_nbytes,
        pool_tokens=num_blocks * block_tokens,
        host_tokens=HostTierOptions().capacity_nbytes // token_nbytes,
        host_load_nbytes_per_s=host_rate,
        network_nbytes_per_s=LOCAL_NBYTES_PER_S,
        chunk_tokens=chunk_tokens,
        max_batch_size=max_batch_size,
    )
