"""Every shape in which engines publish KV events is read; what is none is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.kvstore.events.messages import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    EventCorrupt,
    decode,
    encode,
)

SAMPLES = Path(__file__).parent / "samples"


def frames(name: str) -> list[list[bytes]]:
    """Messages as they came over the socket: topic, number, payload."""
    sample = json.loads((SAMPLES / name).read_text())
    return [[bytes.fromhex(frame) for frame in message] for message in sample["frames"]]


def name(number: int) -> bytes:
    return bytes([number]) * 32


EXPECTED = [
    [
        BlockStored([name(1), name(2)], None, list(range(100, 132)), 16, medium="GPU"),
        BlockStored([name(3)], name(2), list(range(200, 216)), 16, medium="GPU"),
    ],
    [BlockRemoved([name(3)], "GPU", 0)],
    [AllBlocksCleared()],
]


def plain(event: Any) -> Any:
    """Without what only some engines say."""
    return (
        BlockStored(
            event.block_hashes,
            event.parent_block_hash,
            event.token_ids,
            event.block_size,
            medium=event.medium,
        )
        if isinstance(event, BlockStored)
        else event
    )


@pytest.mark.parametrize("shape", ["arrays.json", "array_of_maps.json", "maps.json"])
def test_a_captured_sample_of_each_shape_says_the_same(shape: str) -> None:
    messages = frames(shape)
    assert [int.from_bytes(seq, "big") for _, seq, _ in messages] == [0, 1, 2]
    batches = [decode(payload) for _, _, payload in messages]
    assert [list(map(plain, batch.events)) for batch in batches] == EXPECTED
    assert [batch.ts for batch in batches] == [1700000000.5, 1700000001.5, 1700000002.5]


def test_integer_hashes_and_a_kind_not_known_here() -> None:
    payload = msgspec.msgpack.encode([1.0, [["BlockRemoved", [1 << 63, 7]], ["BlockMoved", 1]]])
    assert decode(payload) == EventBatch(1.0, [BlockRemoved([1 << 63, 7])])


@pytest.mark.parametrize("locality", [None, "LOCAL", "REMOTE"])
def test_locality_in_each_shape(locality: str | None) -> None:
    """As vLLM 0.26 and later send it, behind fields of before."""
    stored = [
        "BlockStored",
        [1],
        None,
        [5],
        1,
        None,
        "STORAGE",
        None,
        None,
        0,
        "full_attention",
        None,
        locality,
    ]
    removed = ["BlockRemoved", [1], "STORAGE", 0, locality]
    named = {"type": "BlockRemoved", "block_hashes": [1], "medium": "STORAGE", "locality": locality}
    batch = decode(msgspec.msgpack.encode([1.0, [stored, removed, named]]))
    assert [event.locality for event in batch.events] == [locality] * 3  # type: ignore[union-attr]


@given(
    st.lists(
        st.one_of(
            st.builds(
                BlockStored,
                st.lists(st.binary(min_size=1, max_size=32) | st.integers(0, 1 << 63), max_size=3),
                st.none() | st.binary(min_size=1),
                st.lists(st.integers(0, 2**31 - 1), max_size=8),
                st.integers(1, 64),
                medium=st.none() | st.sampled_from(["GPU", "CPU"]),
            ),
            st.builds(BlockRemoved, st.lists(st.binary(), max_size=3), st.none() | st.just("GPU")),
            st.just(AllBlocksCleared()),
        ),
        max_size=5,
    )
)
def test_what_is_encoded_is_read_back(events: list[Any]) -> None:
    batch = EventBatch(12.5, events, 3)
    assert decode(encode(batch)) == batch


@pytest.mark.parametrize(
    "body",
    [
        7,
        [1.0],
        {"events": []},
        [1.0, [7]],
        [1.0, [["BlockStored", ["a"], None, [], 16]]],
        [1.0, [["BlockStored", [1], None, [], 0]]],
        [1.0, [["BlockStored", [1], None, [-1], 1]]],
        [1.0, [["BlockStored", [1]]]],
        [1.0, [{"type": "BlockRemoved"}]],
        [float("nan"), []],
        [float("inf"), []],
        [-1.0, []],
        [1e300, []],
        [True, []],
        [1.0, [["BlockStored", [1], [], [], 1]]],
        [1.0, [["BlockStored", [1], None, [], 1 << 40]]],
        [1.0, [["BlockStored", [1], None, [2**31], 1]]],
        [1.0, [["BlockStored", [1], None, [1], 1, None, ["GPU"]]]],
        [1.0, [["BlockStored", [1], None, [1], 1, None, "GPU", None, [7]]]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": []}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": [1], "locality": 1}]],
    ],
)
def test_what_is_no_batch_is_refused(body: Any) -> None:
    with pytest.raises(EventCorrupt):
        decode(msgspec.msgpack.encode(body))


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\xc1", id="an unused byte"),
        pytest.param(b"\x92\x01\x91\x91\xa2\xff\xff", id="text that is not UTF-8"),
        pytest.param(b"\x91" * 100_000 + b"\x01", id="arrays in arrays"),
    ],
)
def test_what_is_not_messagepack_is_refused(payload: bytes) -> None:
    with pytest.raises(EventCorrupt, match="not MessagePack"):
        decode(payload)
