"""What an agent tells of itself: packed, changed and garbled."""

from __future__ import annotations

import json
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from moonpool.transfer import (
    AgentDescriptor,
    DescriptorError,
)
from tests.transfer.safety.served import Served


async def test_a_descriptor_survives_packing(served: Served) -> None:
    descriptor = served.server.describe()
    assert AgentDescriptor.unpack(descriptor.pack()) == descriptor
    assert len(descriptor.pack()) < 600


def changed(**fields: Any) -> bytes:
    whole = {
        "version": 1, "agent_id": "a", "epoch": 1, "incarnation": "00" * 16, "transports": ["tcp"],
        "boot_id": "", "unix_name": "", "tcp_host": "127.0.0.1", "tcp_port": 1,
    } | fields  # fmt: skip
    return json.dumps({name: value for name, value in whole.items() if value is not None}).encode()


@pytest.mark.parametrize(
    "packed",
    [
        b"", b"\xff", b"[]", b"null", b"{}", b"[" * 3000, bytes(5000),
        *(changed(**{name: None}) for name in json.loads(changed())),
        changed(version=2), changed(agent_id=""), changed(agent_id="a" * 129), changed(agent_id="a\nb"),
        changed(agent_id=3), changed(epoch=-1), changed(epoch=1 << 64), changed(epoch=True),
        changed(epoch="1"),
        changed(incarnation="00" * 15), changed(incarnation="zz" * 16), changed(transports="tcp"),
        changed(transports=[1]), changed(transports=["x"] * 17), changed(tcp_port=65536),
        changed(unix_name="a\0b"), changed(tcp_host="h" * 256),
    ],
)  # fmt: skip
def test_invalid_descriptors_are_refused(packed: bytes) -> None:
    AgentDescriptor.unpack(changed())
    with pytest.raises(DescriptorError):
        AgentDescriptor.unpack(packed)


@hypothesis.given(st.binary(max_size=200))
def test_any_bytes_are_a_descriptor_or_refused(packed: bytes) -> None:
    with pytest.raises(DescriptorError):
        AgentDescriptor.unpack(packed)
