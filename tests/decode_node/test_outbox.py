"""What a conductor hears of a decode node: everything, in order, in few messages, and the end at once."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.context import get_current

from moonpool.decode_node import node as node_module
from moonpool.decode_node.node import DecodeNode, _Request
from moonpool.decode_node.outbox import DIRECT_INTERVAL_S, INTERVAL_S, MAX_UNREAD_NBYTES, Outbox
from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc
from moonpool.runtime.config.options import Config, NodeOptions
from moonpool.runtime.service.vital import cancel_and_wait
from tests.processes import stop


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


async def test_a_stream_ends_when_all_is_sent() -> None:
    """Until then its node waits, also for the message that is being sent."""
    outbox = new_outbox()
    outbox.put_step(step(0))
    assert not outbox.is_behind, "there is no stream"
    reader = outbox.messages()
    async with asyncio.timeout(60):
        assert [token.index for token in (await anext(reader)).tokens] == [0]
        assert outbox.is_behind, "it is not sent yet"
        following = asyncio.ensure_future(anext(reader))
        while outbox.is_behind:  # noqa: ASYNC110
            await asyncio.sleep(0)
        outbox.put_step(step(1))
        assert outbox.is_behind, "it waits for more steps"
        outbox.finish()
        assert [token.index for token in (await following).tokens] == [1]
        with pytest.raises(StopAsyncIteration):
            await anext(reader)
    assert not outbox.is_behind


async def test_a_message_that_is_not_sent_is_unread() -> None:
    """A conductor that stands still has its stream ended; the next one is behind in nothing."""
    now_s = 0.0
    outbox = Outbox(lambda: now_s, lambda message: None)
    outbox.put_step(step(0))
    stuck = outbox.messages()
    async with asyncio.timeout(60):
        await anext(stuck)
        now_s = 7.0
        assert outbox.unread_s == 7.0
        reader = outbox.messages()
        following = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        await stuck.aclose()
        assert not outbox.is_behind and outbox.unread_s == 0.0
        outbox.put_step(step(1))
        outbox.finish()
        await following
        assert outbox.is_behind
        await reader.aclose()
    assert not outbox.is_behind


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


@pytest.mark.parametrize(("direct", "interval_s"), [(True, DIRECT_INTERVAL_S), (False, INTERVAL_S)])
async def test_a_conductor_of_this_host_waits_less_for_its_tokens(direct: bool, interval_s: float) -> None:
    node, outbox = DecodeNode(Config()), new_outbox()
    node._outboxes["conductor"] = outbox
    add = node_pb2_grpc.add_DecodeNodeServicer_to_server
    server, port = await rpc.serve([(add, node)], "127.0.0.1", 0, direct=direct)
    async with rpc.channel(f"127.0.0.1:{port}", direct=True) as channel:
        stub: Any = node_pb2_grpc.DecodeNodeStub(channel)
        outbox.put_step(step(0, finish=True))
        stream = stub.Tokens(node_pb2.TokensRequest(conductor_id="conductor"))
        assert [token.index for token in (await anext(stream)).tokens] == [0]
        assert outbox.interval_s == interval_s
        stream.cancel()
    await server.stop(None)


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
    following = asyncio.ensure_future(anext(new))
    await asyncio.sleep(0)
    assert outbox.unread_s == 0
    await cancel_and_wait(following)
    assert outbox.unread_s >= 0


async def test_what_was_in_the_step_that_ended_the_node_is_told_at_once() -> None:
    node, outbox = DecodeNode(Config()), new_outbox()
    node._outboxes["conductor"] = outbox
    sequence = Sequence("r", 2, [1, 2], 2, sampling=Sampling(), root_key=bytes(16))
    done = asyncio.get_running_loop().create_future()
    node._requests[sequence.key] = _Request("conductor", sequence, done, 0.0, get_current())
    node.on_decodes([StepEvent(sequence, 0, error="rank 1 is lost", ended_life=True)])
    (token,) = (await anext(outbox.messages())).tokens
    assert (token.request_id, token.attempt, token.error) == ("r", 2, "rank 1 is lost")
    assert token.ended_life
    assert token.finish_reason == node_pb2.FINISH_ERROR


READER = """
import asyncio, sys
from moonpool.protos import node_pb2, node_pb2_grpc
from moonpool.runtime import rpc

async def main() -> None:
    async with rpc.channel(sys.argv[1]) as channel:
        stub = node_pb2_grpc.DecodeNodeStub(channel)
        stream = stub.Tokens(node_pb2.TokensRequest(conductor_id="conductor"))
        with rpc.node_errors("decode-0"):
            async for message in stream:
                print("read", flush=True)

try:
    asyncio.run(main())
except Exception as error:
    print(error, flush=True)
"""


def add_request(node: DecodeNode) -> list[tuple[str, int]]:
    """Give the conductor a running request. Returns the cancelled ones."""
    sequence = Sequence("r", 0, [1, 2], 2, sampling=Sampling(), root_key=bytes(16))
    done = asyncio.get_running_loop().create_future()
    cancelled: list[tuple[str, int]] = []
    node.engine = SimpleNamespace(cancel=lambda *key: cancelled.append(key))  # type: ignore[assignment]
    node._requests[sequence.key] = _Request("conductor", sequence, done, 0.0, get_current())
    node._outboxes["conductor"] = new_outbox()
    return cancelled


@pytest.mark.parametrize("too_much", ["time", "bytes"])
async def test_a_connected_conductor_that_is_stopped_is_left(too_much: str) -> None:
    orphan_s = 0.3 if too_much == "time" else 3600.0
    node = DecodeNode(Config(node=NodeOptions(orphan_s=orphan_s)))
    cancelled = add_request(node)
    server, port = await rpc.serve([(node_pb2_grpc.add_DecodeNodeServicer_to_server, node)], "127.0.0.1", 0)
    reader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", READER, f"127.0.0.1:{port}", stdout=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(60):
            outbox = node._outboxes["conductor"]
            outbox.put_step(step(0, finish=True))
            assert reader.stdout is not None
            assert await reader.stdout.readline() == b"read\n"
            node.leave_conductors()
            assert node._outboxes  # it reads
            stop(reader.pid)
            # More than gRPC and the sockets keep, then more than may wait.
            large = [
                node_pb2.TokenOut(request_id="r", error="e" * 60_000, finish_reason=node_pb2.FINISH_ERROR)
            ] * 16
            while node._outboxes:
                if outbox.unread_nbytes <= MAX_UNREAD_NBYTES and (too_much == "bytes" or not outbox.unread_s):
                    outbox.put_step(large)
                await asyncio.sleep(0)
                node.leave_conductors()
            assert not node._requests
            assert cancelled == [("r", 0)]
            reader.send_signal(signal.SIGCONT)
            *_, said = (await reader.stdout.read()).splitlines()
            assert b"no message was read for" in said
    finally:
        if reader.returncode is None:
            reader.kill()
        await reader.wait()
        await server.stop(None)


async def test_a_clock_that_is_set_leaves_no_conductor() -> None:
    node, ahead_s = DecodeNode(Config()), 0.0
    node.clock = lambda: time.time() + ahead_s
    node._outbox("conductor")
    ahead_s = 3600.0
    node.leave_conductors()
    assert "conductor" in node._outboxes


async def test_outboxes_are_for_so_many_conductors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_module, "MAX_CONDUCTORS", 2)
    node = DecodeNode(Config())
    for name in ("one", "two"):
        node._outbox(name)
    node._check_owner("two")
    with pytest.raises(node_module.TooManyConductors, match="2 conductors read tokens here, the most"):
        node._check_owner("three")
