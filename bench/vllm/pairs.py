"""Long prompts beside streams: two engines that do both, and one that computes prompts for the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from itertools import cycle
from statistics import median

import orjson

from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import gaps, quantile, spread
from moonpool.bench.serve.client.answer import Answer, read_json
from moonpool.bench.serve.client.server import COMPLETIONS, RequestFailed, Server
from moonpool.bench.serve.client.workload import Prompts
from moonpool.bench.vllm.engines import Settings, running
from moonpool.runtime.reports.report import Row, versus

STREAMS, STREAM_PROMPT_TOKENS, STREAM_TOKENS = 4, 64, 192
LONG_PROMPTS, LONG_PROMPT_TOKENS, LONG_TOKENS = 4, 2048, 8
COLOCATED, SPLIT = "both stages on each engine", "prefill and decode engine"

Ask = Callable[[Sequence[int], int], Awaitable[Answer]]


async def pair_rows(run: Run, settings: Settings) -> AsyncIterator[Row]:
    """The same two engines, half of the cores each, used in both ways in turn."""
    case = (
        f"{settings.model}, 2 engines, {STREAMS} streams of {STREAM_TOKENS} tokens, "
        f"{LONG_PROMPTS} prompts of {LONG_PROMPT_TOKENS} tokens"
    )
    samples: dict[str, dict[str, list[float]]] = {}
    prompts = Prompts(settings.seed, "pairs")
    async with AsyncExitStack() as stack:
        servers = []
        for half in (0, 1):
            store = await settings.connected(run, f"pair-{half}")
            server = settings.server(run, f"engine {half}", store, half=half)
            servers.append(await stack.enter_async_context(server))
        first, second = (one.server for one in servers)
        ways: dict[str, Ask] = {COLOCATED: alternating(first, second), SPLIT: handing_over(first, second)}
        for number in range(-1, run.rounds):
            for name, ask in ways.items():
                async with running(*servers):
                    found = await _load(ask, prompts)
                run.say(f"{name}: {found}")
                for metric, value in found.items() if number >= 0 else ():
                    samples.setdefault(metric, {}).setdefault(name, []).append(value)
    for metric, each in samples.items():
        base = spread(f"{case}, {COLOCATED}", metric, each[COLOCATED], "ms", 1e3)
        yield base
        row = spread(f"{case}, {SPLIT}", metric, each[SPLIT], "ms", 1e3)
        yield versus(row, COLOCATED, 1e3 * median(each[COLOCATED]))


def alternating(*servers: Server) -> Ask:
    """Each request goes to the next engine."""
    turn = cycle(servers)

    async def ask(prompt: Sequence[int], output_tokens: int) -> Answer:
        return await next(turn).ask(prompt, output_tokens)

    return ask


def handing_over(prefill: Server, decode: Server) -> Ask:
    """``prefill`` computes every prompt, ``decode`` gives every token."""

    async def ask(prompt: Sequence[int], output_tokens: int) -> Answer:
        fields = {
            "model": prefill.dialect.model,
            "prompt": list(prompt),
            "max_tokens": 1,
            "kv_transfer_params": {"do_remote_decode": True},
        }
        asked = await prefill.http.post(COMPLETIONS, orjson.dumps(fields))
        status, content = read_json(asked)
        given = content.get("kv_transfer_params") if status == 200 else None
        if not given:
            raise RequestFailed(f"{prefill.name} handed nothing over: {content}")
        body = decode.dialect.body(prompt, output_tokens, kv_transfer_params=given)
        exchange = await decode.http.post(COMPLETIONS, body)
        exchange.sent_s = asked.sent_s  # the first token is waited for since then
        return decode.answered(exchange)

    return ask


async def _load(ask: Ask, prompts: Prompts) -> dict[str, float]:
    """Streams, and beside them long prompts one after the other: seconds by metric."""
    streams = [
        asyncio.ensure_future(ask(prompts.tokens(STREAM_PROMPT_TOKENS), STREAM_TOKENS))
        for _ in range(STREAMS)
    ]
    try:
        long = [await ask(prompts.tokens(LONG_PROMPT_TOKENS), LONG_TOKENS) for _ in range(LONG_PROMPTS)]
        answers = await asyncio.gather(*streams)
    finally:
        for stream in streams:
            stream.cancel()
    waits = [gap for answer in answers for gap in gaps(answer.token_s)]
    return {
        "TTFT of a long prompt": median(answer.ttft_s for answer in long),
        **{f"ITL of the streams, p{share}": quantile(waits, share / 100) for share in (50, 90, 95, 99)},
        "longest gap of the streams": max(waits),
    }
