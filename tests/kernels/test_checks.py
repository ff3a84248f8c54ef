"""The argument checks reject wrong calls with a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moonpool.kernels import reference
from moonpool.kernels.checks import KernelMisuse, checked
from tests.kernels.paged import PagedBatch, Shape


def decode_arguments(**changes: Any) -> dict[str, Any]:
    batch = PagedBatch(Shape(((1, 20), (1, 5))))
    arguments = {
        "q": batch.q,
        "pool": batch.pool,
        "layer": 1,
        "block_table": batch.block_table,
        "context_lens": batch.context_lens,
        "scale": 1.0,
    }
    return arguments | changes


def test_right_calls_pass() -> None:
    checked(reference.paged_decode_attention)(**decode_arguments())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"layer": 2}, "layer 2 is not one of"),
        ({"q": torch.zeros(2, 4, 16)}, "head_dim"),
        ({"q": torch.zeros(3, 4, 32)}, "batch = 2"),
        ({"q": torch.zeros(2, 3, 32)}, "3 heads are no multiple of 2"),
        ({"q": torch.zeros(2, 4, 32).half()}, "must be torch.float32"),
        ({"q": torch.zeros(2, 4, 64)[..., ::2]}, "contiguous"),
        ({"context_lens": torch.tensor([20, 17], dtype=torch.int32)}, "outside of the pool"),
        ({"context_lens": torch.tensor([20, 5])}, "must be torch.int32"),
        ({"context_lens": torch.tensor([2000, 5], dtype=torch.int32)}, "too few blocks"),
        ({"block_table": torch.full((2, 2), 99, dtype=torch.int32)}, "outside of the pool"),
        ({"out": torch.zeros(2, 4, 33)}, "out must have the shape"),
    ],
)
def test_wrong_decodes(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(KernelMisuse, match=sentence):
        checked(reference.paged_decode_attention)(**decode_arguments(**changes))


def test_wrong_masks() -> None:
    forbid = checked(reference.forbid_tokens)
    forbid(torch.zeros(2, 33), torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(KernelMisuse, match="33 tokens need masks of 2 words, got 1"):
        forbid(torch.zeros(2, 33), torch.zeros(2, 1, dtype=torch.int32))


def test_wrong_slots() -> None:
    pool = torch.zeros(2, 1, 2, 1, 8, 4)
    k = torch.zeros(2, 1, 4)
    write = checked(reference.write_kv)
    write(k, k, pool, 0, torch.tensor([0, -1]))
    with pytest.raises(KernelMisuse, match="beyond the pool"):
        write(k, k, pool, 0, torch.tensor([0, 16]))
    with pytest.raises(KernelMisuse, match="share a slot"):
        write(k, k, pool, 0, torch.tensor([3, 3]))


def test_a_position_beyond_the_tables() -> None:
    pool = torch.zeros(2, 1, 2, 1, 8, 4)
    with pytest.raises(KernelMisuse, match="beyond the 9 of cos"):
        checked(reference.rotate_and_write)(
            torch.zeros(1, 12),
            torch.tensor([9]),
            torch.ones(9, 2),
            torch.ones(9, 2),
            pool,
            0,
            torch.tensor([0]),
            num_heads=1,
            num_kv_heads=1,
            head_dim=4,
        )


def test_codes_that_do_not_fit_are_rejected() -> None:
    x, scales = torch.zeros(2, 40), torch.ones(3, 5)
    multiply = checked(reference.quantised_matmul)
    multiply(x, torch.zeros(3, 40, dtype=torch.uint8), scales, None, kind="int8", group=8)
    multiply(x, torch.zeros(3, 32, dtype=torch.uint8), scales, None, kind="int4", group=8)
    with pytest.raises(KernelMisuse, match="need 32 bytes and 5 scales an output, there are 40 and 5"):
        multiply(x, torch.zeros(3, 40, dtype=torch.uint8), scales, None, kind="int4", group=8)
    with pytest.raises(KernelMisuse, match=r"zeros must be torch\.int16"):
        multiply(x, torch.zeros(3, 40, dtype=torch.uint8), scales, scales, kind="int8", group=8)
