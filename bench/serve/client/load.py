"""Runs a workload against one server and keeps every answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from moonpool.bench.serve.client.answer import Answer, AnswerInvalid, read_answer
from moonpool.bench.serve.client.http_client import Exchange, ServerUnreachable
from moonpool.bench.serve.client.server import Outcome, Server
from moonpool.bench.serve.client.workload import Conversation, Workload

# What came of one request: the raw answer, or (when it was sent, when it failed, why).
_Kept = Exchange | tuple[float, float, str]


async def run(server: Server, workload: Workload) -> Outcome:
    """Run the whole workload. A failed request is an answer with ``error``; its conversation ends there."""
    kept: list[_Kept] = []
    conversations = workload.conversations()
    started = time.perf_counter()
    if workload.rate > 0:
        gaps = random.Random(workload.seed)
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                group.create_task(_converse(server, conversation, kept))
                await asyncio.sleep(gaps.expovariate(workload.rate))
    else:
        await server.http.warm(min(workload.concurrency, workload.requests))
        started = time.perf_counter()
        waiting = iter(conversations)

        async def work() -> None:
            for conversation in waiting:
                await _converse(server, conversation, kept)

        async with asyncio.TaskGroup() as group:
            for _ in range(workload.concurrency):
                group.create_task(work())
    return Outcome([_read(item) for item in kept], time.perf_counter() - started)


async def _converse(server: Server, conversation: Conversation, kept: list[_Kept]) -> None:
    prompt = conversation.first
    for turn in (*conversation.later, None):
        sent_s = time.perf_counter()
        try:
            exchange = await server.send(prompt, conversation.output_tokens)
        except ServerUnreachable as error:
            kept.append((sent_s, time.perf_counter(), str(error)))
            return
        kept.append(exchange)
        if turn is None:
            return
        # Between turns somebody would read and type, so parsing here delays nothing that is measured.
        answer = _read(exchange)
        if answer.error:
            return
        prompt = conversation.next_prompt(prompt, answer.token_ids, turn)


def _read(kept: _Kept) -> Answer:
    if isinstance(kept, tuple):
        sent_s, failed_s, why = kept
        return Answer(sent_s, failed_s, error=why)
    try:
        return read_answer(kept)
    except AnswerInvalid as error:
        return Answer(kept.sent_s, kept.done_s, error=str(error))


def failures(answers: Sequence[Answer]) -> dict[str, int]:
    """How often each error was answered."""
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return counts
