"""Every number that another process sends has a range, and is refused outside of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from moonpool.protos import conductor_pb2, fleet_pb2, node_pb2, node_pb2_grpc, store_pb2
from moonpool.runtime import rpc
from moonpool.runtime.errors import RemoteError
from moonpool.runtime.message_checks import MOST, MOST_EACH, TEXT_CHARS, check_message
from moonpool.runtime.number_checks import (
    BY_FIELD,
    DURATION_S,
    NumberOutOfRange,
    Range,
    integer,
    number,
)

Path = tuple[FieldDescriptor, ...]  # from a message to a number in it


def methods() -> Iterator[tuple[Any, Any]]:
    """(request, reply) of every method of every service."""
    for file in (one.DESCRIPTOR for one in (conductor_pb2, fleet_pb2, node_pb2, store_pb2)):
        for service in file.services_by_name.values():
            for method in service.methods:
                yield method.input_type, method.output_type


def numbers(descriptor: Any, path: Path = ()) -> Iterator[Path]:
    for field in descriptor.fields:
        here = (*path, field)
        entry = field.message_type
        if entry is None:
            if field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_BOOL, field.CPPTYPE_ENUM):
                yield here
        elif entry.GetOptions().map_entry:
            assert entry.fields_by_name["value"].message_type is None, f"{field.full_name}: a map of messages"
            yield here
        else:
            yield from numbers(entry, here)


def is_float(field: FieldDescriptor) -> bool:
    value = field.message_type.fields_by_name["value"] if field.message_type else field
    return value.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def place(message: Any, path: Path, value: float) -> None:
    """Set the number at ``path``; in repeated fields after a good one."""
    field, *rest = path
    if rest:
        inner = getattr(message, field.name)
        place((inner.add(), inner.add())[1] if field.is_repeated else inner, tuple(rest), value)
    elif field.message_type is not None:
        getattr(message, field.name).update({1: 0, 2: value})
    elif field.is_repeated:
        getattr(message, field.name).extend([0, value])
    else:
        setattr(message, field.name, value)


def name_of(path: Path) -> str:
    return ".".join([path[0].containing_type.name, *(field.name for field in path)])


REQUESTS = [path for request, _ in methods() for path in numbers(request)]
REPLIES = [path for _, reply in methods() for path in numbers(reply)]


def made(path: Path, value: float) -> Message:
    message = GetMessageClass(path[0].containing_type)()
    place(message, path, value)
    return message


def outside(allowed: Range) -> list[float]:
    low = -math.inf if allowed.low == -math.inf else allowed.low - max(1.0, abs(allowed.low) / 2)
    return [math.nan, math.inf, low, allowed.high + max(1.0, abs(allowed.high) / 2)]


@pytest.mark.parametrize("path", [p for p in REQUESTS if is_float(p[-1])], ids=name_of)
def test_a_request_with_a_number_out_of_range_is_refused(path: Path) -> None:
    allowed = BY_FIELD.get(path[-1].full_name)
    assert allowed is not None, f"{path[-1].full_name} has no range: add it to number_checks.BY_FIELD"
    assert math.isfinite(allowed.low)
    assert math.isfinite(allowed.high)
    for value in (*outside(allowed), -math.inf, 3e38):
        with pytest.raises(NumberOutOfRange, match=f"{path[-1].full_name} must be a number from .* got"):
            check_message(made(path, value))
    check_message(made(path, allowed.low))
    check_message(made(path, allowed.high))


@pytest.mark.parametrize("path", [p for p in REPLIES if is_float(p[-1])], ids=name_of)
def test_a_reply_with_a_number_out_of_range_is_refused(path: Path) -> None:
    allowed = BY_FIELD.get(path[-1].full_name)
    assert allowed is not None, f"{path[-1].full_name} has no range: add it to number_checks.BY_FIELD"
    for value in outside(allowed):
        if value not in allowed:
            with pytest.raises(NumberOutOfRange, match=path[-1].full_name):
                check_message(made(path, value))


def test_integers_with_a_range_are_held_to_it() -> None:
    ranged = [
        path for path in REQUESTS + REPLIES if not is_float(path[-1]) and path[-1].full_name in BY_FIELD
    ]
    assert {path[-1].name for path in ranged} >= {"top_k", "offset", "shape", "nbytes"}
    for path in ranged:
        allowed = BY_FIELD[path[-1].full_name]
        for value in (int(allowed.low) - 1, int(allowed.high) + 1):
            try:
                message = made(path, value)
            except ValueError:
                continue  # its type cannot hold it
            with pytest.raises(NumberOutOfRange, match=path[-1].full_name):
                check_message(message)


def test_every_range_is_of_a_field() -> None:
    known = {path[-1].full_name for path in REQUESTS + REPLIES}
    assert set(BY_FIELD) <= known


def long_fields(descriptor: Any, path: Path = ()) -> Iterator[Path]:
    """Paths to all that repeats, and to bytes."""
    for field in descriptor.fields:
        here = (*path, field)
        if field.is_repeated or field.type == field.TYPE_BYTES:
            yield here
        if field.message_type is not None and not field.message_type.GetOptions().map_entry:
            yield from long_fields(field.message_type, here)


LONG = list({p[-1].full_name: p for m in methods() for one in m for p in long_fields(one)}.values())


def lengthen(message: Any, path: Path, length: int) -> None:
    """Give the field at ``path`` a length."""
    field, *rest = path
    if rest:
        inner = getattr(message, field.name)
        lengthen(inner.add() if field.is_repeated else inner, tuple(rest), length)
    elif not field.is_repeated:
        setattr(message, field.name, bytes(length))
    elif field.message_type is None:
        text: Any = b"" if field.type == field.TYPE_BYTES else ""
        value = text if field.cpp_type == field.CPPTYPE_STRING else 0
        getattr(message, field.name).extend([value] * length)
    elif field.message_type.GetOptions().map_entry:
        getattr(message, field.name).update(dict.fromkeys(range(length), 0.0))
    else:
        # Equal messages one after another are their repetition.
        empty = type(message)()
        getattr(empty, field.name).add()
        message.MergeFromString(empty.SerializeToString() * length)


@pytest.mark.parametrize("path", LONG, ids=name_of)
def test_what_repeats_has_a_greatest_length(path: Path) -> None:
    name = path[-1].full_name
    assert name in MOST, f"{name} has no greatest length: add it to message_checks.MOST"
    message = GetMessageClass(path[0].containing_type)()
    lengthen(message, path, MOST[name] + 1)
    with pytest.raises(NumberOutOfRange, match=rf"length of {name} must be a number from 0 to .* got"):
        check_message(message)


def test_texts_and_elements_have_a_greatest_length() -> None:
    assert (
        set(MOST_EACH)
        <= set(MOST)
        <= {path[-1].full_name for path in LONG}
        | {
            "moonpool.PrefillReply.fetch_error",
            "moonpool.TokenOut.error",
            "moonpool.PutStep.error",
            "moonpool.PlaceExpertsRequest.placement",
            "moonpool.PlaceExpertsReply.not_kept",
            *(
                name for name in MOST if name.startswith("moonpool.StoredObject.")
            ),  # of the disk, not of a call
        }
    )
    for message in (
        node_pb2.CancelRequest(request_id="r" * (TEXT_CHARS + 1)),
        store_pb2.PublishObject(places=["n" * (TEXT_CHARS + 1)]),
        store_pb2.BeginRequest(data=[bytes(1 + (64 << 10))]),
    ):
        with pytest.raises(NumberOutOfRange, match="length of"):
            check_message(message)


def test_numbers_of_other_formats() -> None:
    assert number("x", 3, DURATION_S) == 3.0
    for value in (math.nan, math.inf, -1, 1e12, True, "3", None):
        with pytest.raises(NumberOutOfRange, match=r"x must be a number from 0 to 2592000, got"):
            number("x", value, DURATION_S)
    assert integer("x", 3, DURATION_S) == 3
    with pytest.raises(NumberOutOfRange, match="x must be an integer"):
        integer("x", 3.0, DURATION_S)


class Node(node_pb2_grpc.NodeServicer):
    def __init__(self) -> None:
        self.leased: list[float] = []

    async def Lease(self, request: Any, context: Any) -> Any:
        self.leased.append(request.ttl_s)
        return node_pb2.LeaseReply(lease_id=1)

    async def Status(self, request: Any, context: Any) -> Any:
        return node_pb2.NodeStatus(profile=node_pb2.Profile(prefill_base_s=math.nan))

    async def ListBlocks(self, request: Any, context: Any) -> Any:
        raise AssertionError
        yield


async def test_the_boundary_refuses_them_in_requests_and_replies() -> None:
    node = Node()
    server, port = await rpc.serve([(node_pb2_grpc.add_NodeServicer_to_server, node)], "127.0.0.1", 0)
    async with rpc.channel(f"127.0.0.1:{port}") as channel:
        stub: Any = node_pb2_grpc.NodeStub(channel)
        with (
            pytest.raises(RemoteError, match=r"LeaseRequest\.ttl_s .*got nan") as caught,
            rpc.node_errors("n"),
        ):
            await stub.Lease(node_pb2.LeaseRequest(ttl_s=math.nan))
        assert caught.value.status == "INVALID_ARGUMENT"
        with rpc.node_errors("n"):
            await stub.Lease(node_pb2.LeaseRequest(ttl_s=5.0))
        assert node.leased == [5.0]
        with (
            pytest.raises(RemoteError, match=r"its reply: moonpool\.Profile\.prefill_base_s"),
            rpc.node_errors("n"),
        ):
            await stub.Status(node_pb2.StatusRequest())
    await server.stop(None)
