"""The engine's memory as pages: bytes go out and come back, whatever the strides."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moonpool.connectors.errors import Unsupported
from moonpool.connectors.vllm.pages import Pages


def caches(num_blocks: int = 6) -> dict[str, torch.Tensor]:
    """Three layers interleaved in one storage, one layer of its own, one that shares."""
    together = torch.randint(0, 255, (num_blocks, 3, 2, 4, 8), dtype=torch.uint8).view(torch.bfloat16)
    layers = {f"layer{i}": together[:, i] for i in range(3)}
    return {**layers, "own": torch.randn(num_blocks, 2, 4), "shares": layers["layer0"]}


def test_there_and_back() -> None:
    before = caches()
    pages = Pages(before)
    expected = {name: tensor.clone() for name, tensor in before.items()}
    assert (pages.num_blocks, pages.block_nbytes) == (6, 3 * 2 * 4 * 8 + 2 * 4 * 4)
    spans = [np.zeros(pages.block_nbytes, np.uint8) for _ in range(2)]
    pages.copy_out([4, 1], spans)
    for tensor in before.values():
        tensor.zero_()
    pages.copy_in(spans, [4, 1])
    for name, tensor in before.items():
        for block in range(6):
            same = expected[name][block] if block in (1, 4) else torch.zeros_like(expected[name][block])
            assert torch.equal(tensor[block].view(torch.uint8), same.view(torch.uint8)), name


def test_a_block_is_the_same_bytes_in_another_pool() -> None:
    one, other = caches(), caches(9)
    span = np.zeros(Pages(one).block_nbytes, np.uint8)
    Pages(one).copy_out([2], [span])
    Pages(other).copy_in([span], [8])
    for name in one:
        assert torch.equal(one[name][2].view(torch.uint8), other[name][8].view(torch.uint8))


def test_what_cannot_be_copied_is_refused() -> None:
    with pytest.raises(Unsupported, match="numbers of blocks"):
        Pages({"a": torch.zeros(2, 4), "b": torch.zeros(3, 4)})
    with pytest.raises(Unsupported, match="strides"):
        Pages({"a": torch.zeros(4, 8, 6).transpose(1, 2)})
