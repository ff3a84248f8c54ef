"""Weights go to a GPU through pinned slots, over copies that come late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moonpool.engine.device import weight_copies
from moonpool.engine.device.weight_copies import WeightCopies
from moonpool.engine.model import transformer
from tests.engine.cuda_stand_in import TorchStandIn

GPU = torch.device("cuda", 1)


class LateEvent:
    """Recorded behind the copies so far."""

    def __init__(self, queue: ThreadPoolExecutor) -> None:
        self._queue = queue
        self._reached: Future[None] | None = None

    def record(self) -> None:
        self._reached = self._queue.submit(lambda: None)

    def synchronize(self) -> None:
        if self._reached is not None:
            self._reached.result(timeout=30)


class LateCopies(WeightCopies):
    """Uploads when the test lets them; counts those under way at once."""

    def __init__(self) -> None:
        super().__init__(GPU)
        self.queue = ThreadPoolExecutor(1)
        self.goes = threading.Event()
        self.num_slots = self.num_given = 0

    def _new_slot(self, nbytes: int) -> tuple[torch.Tensor, LateEvent]:
        self.num_slots += 1
        return torch.empty(nbytes, dtype=torch.uint8), LateEvent(self.queue)

    def _upload(self, target: torch.Tensor, slot: torch.Tensor) -> None:
        def later() -> None:
            assert self.goes.wait(30)
            target.copy_(slot)

        self.num_given += 1
        self.queue.submit(later)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> TorchStandIn:
    stand_in = TorchStandIn()
    monkeypatch.setattr(weight_copies, "torch", stand_in)
    return stand_in


@pytest.fixture
def small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_copies, "_SLOT_NBYTES", 4096)


CASES: dict[str, Callable[[], torch.Tensor]] = {
    "matrix": lambda: torch.randn(200, 33),
    "columns of a matrix": lambda: torch.randn(200, 66)[:, 20:53],
    "long rows": lambda: torch.randn(5, 3000),
    "experts": lambda: torch.randn(4, 30, 20),
    "vector": lambda: torch.randn(5000),
    "number": lambda: torch.tensor(3.5),
    "nothing": lambda: torch.randn(0, 7),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_arrives_converted(small_slots: None, name: str, dtype: torch.dtype) -> None:
    copies, source = LateCopies(), CASES[name]().to(torch.bfloat16)
    copies.goes.set()
    target = torch.full(source.shape, 9.0, dtype=dtype)
    copies.copy(target, source)
    copies.queue.shutdown()
    assert torch.equal(target, source.to(dtype))


def test_a_slot_is_filled_while_others_are_uploaded_and_never_too_early(small_slots: None) -> None:
    copies, source = LateCopies(), torch.randn(64, 256)
    target = torch.zeros_like(source)
    loading = threading.Thread(target=copies.copy, args=(target, source))
    loading.start()
    while copies.num_given < 3:
        pass
    # The fourth part must wait for the first slot.
    loading.join(0.2)
    assert loading.is_alive()
    assert copies.num_given == 3
    copies.goes.set()
    loading.join()
    copies.queue.shutdown()
    assert copies.num_slots == 3
    assert torch.equal(target, source)


def test_another_thread_copies_with_the_device_as_its_current_one(
    small_slots: None, cuda: TorchStandIn
) -> None:
    """As experts that move are read: an event on another device's stream would not wait for the copies."""
    copies, source = WeightCopies(GPU), torch.randn(64, 256)
    target = torch.zeros_like(source)
    thread = threading.Thread(target=copies.copy, args=(target, source))
    thread.start()
    thread.join()
    assert torch.equal(target, source)
    assert {name for name, _ in cuda.used} == {"pin_memory", "wait", "record"}
    assert {index for _, index in cuda.used} == {1}, cuda.used


def test_experts_that_were_read_are_there_for_other_streams(
    monkeypatch: pytest.MonkeyPatch, cuda: TorchStandIn
) -> None:
    """Steps run on a stream of their own, which does not wait for that of the thread that reads."""
    mixture = object.__new__(transformer.ExpertParallelMixture)

    class Loader:
        def __init__(self, *_: object) -> None:
            pass

        def mixture(self, layer: int) -> object:
            cuda.used.append((f"layer {layer}", 1))
            return mixture

    for name, stand_in in (("torch", cuda), ("Loader", Loader)):
        monkeypatch.setattr(transformer, name, stand_in)
    for name in ("Checkpoint", "TensorSlices"):
        monkeypatch.setattr(transformer, name, lambda *_, **__: None)
    model: Any = object.__new__(transformer.Model)
    model.config, model.dtype, model._device = SimpleNamespace(path=None), torch.bfloat16, GPU
    model.expert_load = model.link = None
    assert model.read_mixture(2, None) is mixture
    assert cuda.used == [("layer 2", 1), ("stream", 1)]
