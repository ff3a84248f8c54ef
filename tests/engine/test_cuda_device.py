"""What each thread's current device is while it uses a GPU that is not the first, over a stand-in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moonpool.engine.device import cuda
from tests.engine.cuda_stand_in import TorchStandIn

USES: dict[str, Callable[[Any], object]] = {
    "step": lambda device: device.run(lambda: 1).wait(),
    "copy": lambda device: device.copy([torch.zeros(3)], [torch.ones(3)]).wait(),
    "capture": lambda device: device.capture(lambda: 1)(),
    "read": lambda device: device.read(lambda: 1).wait(),
    "download": lambda device: device.download(torch.zeros(3)),
    "memory": lambda device: device.memory(),
    "peak": lambda device: device.peak_nbytes(lambda: 1),
    "check": lambda device: device.check(),
}


@pytest.mark.parametrize("use", USES)
def test_each_thread_has_the_device_as_its_current_one(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    stand_in = TorchStandIn()
    monkeypatch.setattr(cuda, "torch", stand_in)
    device = cuda.CudaDevice(torch.device("cuda", 1))
    thread = threading.Thread(target=USES[use], args=(device,))
    thread.start()
    thread.join()
    assert {index for _, index in stand_in.used} == {1}, stand_in.used
    assert stand_in.current == 0, "the caller's own device was changed"


def test_products_are_summed_in_float32() -> None:
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    cuda.exact_products()
    assert not matmul.allow_bf16_reduced_precision_reduction
    assert not matmul.allow_fp16_reduced_precision_reduction
