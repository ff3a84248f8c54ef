"""Run a workload against one server and keep every answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

from moonpool.bench.harness.turns import each
from moonpool.bench.serve.client.answer import Answer, AnswerInvalid, read_answer
from moonpool.bench.serve.client.http_client import Exchange, ServerUnreachable
from moonpool.bench.serve.client.server import Outcome, Server
from moonpool.bench.serve.client.workload import Conversation, Workload

# Of one request: the raw answer, or (when it was sent, when it failed, why).
_Result = Exchange | tuple[float, float, str]


async def run(server: Server, workload: Workload) -> Outcome:
    """Run the whole workload. A failed request is an answer with ``error``; its conversation ends there."""
    results: list[_Result] = []
    conversations = workload.conversations()
    started = time.perf_counter()
    if workload.rate > 0:
        gaps, due_s = random.Random(workload.seed), started
        async with asyncio.TaskGroup() as group:
            for conversation in conversations:
                # By the clock: what a late one missed is not added to the next.
                await asyncio.sleep(max(due_s - time.perf_counter(), 0.0))
                group.create_task(_converse(server, conversation, results))
                due_s += gaps.expovariate(workload.rate)
    else:
        await server.http.warm(min(workload.concurrency, workload.requests))
        started = time.perf_counter()
        await each(conversations, workload.concurrency, lambda one: _converse(server, one, results))
    seconds = time.perf_counter() - started
    return Outcome([_read(item) for item in results], seconds)


async def _converse(server: Server, conversation: Conversation, results: list[_Result]) -> None:
    prompt = conversation.first
    for turn in (*conversation.later, None):
        sent_s = time.perf_counter()
        try:
            exchange = await server.send(prompt, conversation.output_tokens)
        except ServerUnreachable as error:
            results.append((sent_s, time.perf_counter(), str(error)))
            return
        results.append(exchange)
        if turn is None:
            return
        # Parsing here delays nothing that is measured: it is between two turns of a conversation.
        answer = _read(exchange)
        if answer.error:
            return
        # A server that sends no token ids gets the conversation without its answers.
        prompt = [*prompt, *answer.token_ids, *turn]


def _read(result: _Result) -> Answer:
    if isinstance(result, tuple):
        sent_s, failed_s, why = result
        return Answer(sent_s, failed_s, error=why)
    try:
        return read_answer(result)
    except AnswerInvalid as error:
        return Answer(result.sent_s, result.done_s, error=str(error))


def failures(answers: Sequence[Answer]) -> dict[str, int]:
    """The number of each error."""
    counts: dict[str, int] = {}
    for answer in answers:
        if answer.error:
            counts[answer.error] = counts.get(answer.error, 0) + 1
    return counts
