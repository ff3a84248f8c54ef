"""What a conductor hears of a decode node: everything, in order, in few messages, and the end at once."""

from __future__ import annotations

import asyncio
import time

from moonpool.decode_node.node import DecodeNode, _Request
from moonpool.decode_node.outbox import INTERVAL_S, Outbox
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.protos import node_pb2
from moonpool.runtime.config.options import Config
from moonpool.runtime.observing import tracing


def step(index: int, *, finish: bool = False) -> list[node_pb2.TokenOut]:
    reason = node_pb2.FINISH_LENGTH if finish else node_pb2.FINISH_NONE
    return [node_pb2.TokenOut(request_id="r", index=index, has_token=True, finish_reason=reason)]


def new_outbox() -> Outbox:
    def describe_load(message: node_pb2.StepTokens) -> None:
        message.num_running = 7

    return Outbox(time.monotonic, describe_load)


async def test_short_steps_share_messages_and_none_is_lost() -> None:
    outbox = new_outbox()
    for index in range(50):
        outbox.put_step(step(index))
    outbox.put_step(step(50, finish=True))
    messages = []
    async with asyncio.timeout(60):
        async for message in outbox.messages():
            messages.append(message)
            if message.tokens[-1].finish_reason:
                break
    assert [token.index for message in messages for token in message.tokens] == list(range(51))
    assert sum(message.num_steps for message in messages) == 51
    assert messages[-1].num_running == 7
    assert len(messages) < 51


async def test_an_unsent_message_goes_by_itself() -> None:
    outbox = new_outbox()
    outbox.put_step(step(0))
    outbox.put_step(step(1))
    reader = outbox.messages()
    async with asyncio.timeout(60):
        seen = [token.index for _ in range(2) for token in (await anext(reader)).tokens]
    assert seen == [0, 1]
    await reader.aclose()


async def test_steps_that_take_long_have_a_message_each() -> None:
    outbox = new_outbox()
    reader = outbox.messages()
    loop = asyncio.get_running_loop()
    for index in range(3):
        outbox.put_step(step(index))
        async with asyncio.timeout(60):
            assert [token.index for token in (await anext(reader)).tokens] == [index]
        done = asyncio.Event()
        loop.call_later(2 * INTERVAL_S, done.set)
        await done.wait()
    await reader.aclose()


async def test_news_goes_with_the_next_step_in_order_and_does_not_delay_it() -> None:
    outbox = new_outbox()
    outbox.put(node_pb2.TokenOut(request_id="other"))
    outbox.put_step(step(0))
    reader = outbox.messages()
    message = await anext(reader)
    assert [token.request_id for token in message.tokens] == ["other", "r"]
    assert message.num_steps == 1
    await reader.aclose()


async def test_news_goes_by_itself_where_no_step_follows() -> None:
    outbox = new_outbox()
    outbox.put(node_pb2.TokenOut(request_id="r"))
    reader = outbox.messages()
    async with asyncio.timeout(60):
        assert (await anext(reader)).num_steps == 0
    await reader.aclose()


async def test_a_new_reader_ends_the_one_before_and_goes_on_where_it_was() -> None:
    outbox = new_outbox()
    old = outbox.messages()
    outbox.put_step(step(0, finish=True))
    await anext(old)
    waiting = asyncio.ensure_future(anext(old))
    await asyncio.sleep(0)
    new = outbox.messages()
    outbox.put_step(step(1, finish=True))
    assert (await anext(new)).tokens[0].index == 1
    async with asyncio.timeout(60):
        await asyncio.wait((waiting,))
    assert isinstance(waiting.exception(), StopAsyncIteration)
    assert outbox.unread_s == 0
    await new.aclose()
    assert outbox.unread_s >= 0


async def test_what_was_in_the_step_that_ended_the_node_is_told_at_once() -> None:
    node, outbox = DecodeNode(Config()), new_outbox()
    node._outboxes["conductor"] = outbox
    sequence = Sequence("r", 2, [1, 2], 2, sampling=Sampling(), root_key=bytes(16))
    done = asyncio.get_running_loop().create_future()
    node._requests[sequence.key] = _Request("conductor", sequence, done, 0.0, tracing.current_context())
    node._on_step([StepEvent(sequence, 0, error="rank 1 is lost", ended_life=True)])
    (token,) = (await anext(outbox.messages())).tokens
    assert (token.request_id, token.attempt, token.error) == ("r", 2, "rank 1 is lost")
    assert token.ended_life
    assert token.finish_reason == node_pb2.FINISH_ERROR
