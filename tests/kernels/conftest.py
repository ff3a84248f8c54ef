"""Fixtures that run the suite for every form: torch, and compiled if there is a compiler."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from moonpool.kernels import reference
from moonpool.kernels.cpu.library import load

# As a node computes; and two threads on two busy cores wait for each other.
torch.set_num_threads(1)


@pytest.fixture(params=["reference", "compiled"], scope="session")
def form(request: pytest.FixtureRequest) -> ModuleType:
    """A module with every operation."""
    if request.param == "reference":
        return reference
    if load() is None:
        pytest.skip("no compiler here")
    from moonpool.kernels.cpu import operations as ops

    return ops


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16], ids=str, scope="session")
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found
