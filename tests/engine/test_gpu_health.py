"""On a GPU: what the driver tells of it is what a node will be judged by."""

from __future__ import annotations

import time

import pytest
import torch

from moonpool.engine.device.cuda import gpu_uuids


@pytest.mark.gpu
def test_nvml_tells_of_the_gpu_that_torch_computes_on() -> None:
    # `make gpu` installs nothing, and runs where this may be missing.
    pytest.importorskip("pynvml", reason="needs nvidia-ml-py: `make env` installs it")
    from moonpool.runtime.health.gpu import GpuWatch

    watch = GpuWatch(gpu_uuids(torch.device("cuda", 0)))
    assert watch.missing == ""
    began_s = time.process_time()
    (gpu,) = watch.read()
    print(f"a reading of a GPU takes {1e3 * (time.process_time() - began_s):.2f} ms of CPU: {gpu}")
    assert not gpu.lost
    assert gpu.memory_nbytes is not None
    assert gpu.memory_nbytes >= torch.cuda.get_device_properties(0).total_memory
    assert gpu.temperature_celsius is not None
    if gpu.slowdown_celsius is not None:
        assert 0 < gpu.temperature_celsius < gpu.slowdown_celsius
    assert gpu.clock_hertz is None or gpu.clock_hertz > 1e8


def test_a_cpu_has_no_uuid() -> None:
    assert gpu_uuids(torch.device("cpu")) == ()
