"""The Triton forms against float64, on a GPU or in Triton's interpreter.

test_interpreted.py runs these files in processes of their own, interpreted; on a machine with a GPU, ``pytest
tests/kernels/interpreted`` runs them there. bfloat16 is left out of the interpreter, whose arithmetic in it
is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton_device import DEVICE, INTERPRETED

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["test_*"]


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield
