"""The distribution of a machine's GPUs over the nodes of a local cluster."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.local.node_configs import gpu_options, models_to_start, node_configs, pools_nbytes
from moonpool.runtime.config.loading import load_config
from moonpool.runtime.config.options import (
    ClusterOptions,
    Config,
    EngineOptions,
    ModelOptions,
    ParallelOptions,
)
from moonpool.runtime.machine import gpus


def config(prefill: int, decode: int, device: str = "auto", gpu_memory: float = 0.9) -> Config:
    return replace(
        Config(),
        cluster=ClusterOptions(prefill=prefill, decode=decode),
        engine=EngineOptions(gpu_memory=gpu_memory),
        model=ModelOptions(device=device),
    )


def options_of(config: Config, num_gpus: int) -> list[tuple[str, ...]]:
    return gpu_options(node_configs(config), num_gpus)


def test_all_nodes_share_a_single_gpu() -> None:
    options = options_of(config(2, 2), 1)
    assert options == [("model.device=cuda:0", "engine.gpu_memory=0.225")] * 4


def test_nodes_are_distributed_over_several_gpus() -> None:
    options = options_of(config(2, 1), 2)
    assert [each[0] for each in options] == [f"model.device=cuda:{i}" for i in (0, 1, 0)]
    assert [each[1] for each in options] == [
        f"engine.gpu_memory={fraction}" for fraction in (0.45, 0.9, 0.45)
    ]


def test_a_configured_gpu_is_used_by_all_nodes() -> None:
    options = options_of(config(1, 1, "cuda:3"), 1)
    assert options == [("model.device=cuda:3", "engine.gpu_memory=0.45")] * 2


def test_a_node_of_replicas_has_consecutive_gpus() -> None:
    whole = config(2, 2)
    whole = replace(whole, cluster=replace(whole.cluster, prefill_options=("engine.parallel.dp=3",)))
    options = options_of(whole, 8)
    assert [each[0] for each in options] == [f"model.device=cuda:{i}" for i in (0, 3, 6, 7)]
    assert {each[1] for each in options} == {"engine.gpu_memory=0.9"}
    options = options_of(whole, 4)
    assert [each[0] for each in options] == [f"model.device=cuda:{i}" for i in (0, 0, 3, 0)]
    assert [each[1] for each in options] == [
        f"engine.gpu_memory={fraction}" for fraction in (0.3, 0.3, 0.9, 0.3)
    ]
    assert pools_nbytes(whole) == (2 * 3 + 2) * (256 << 20)


COUNTS = [
    # given, number of GPUs (0: CPUs), ranks of a node: prefill, decode, both
    ({}, 0, 1, (2, 2, 0)),
    ({}, 1, 1, (0, 0, 1)),
    ({}, 2, 1, (1, 1, 0)),
    ({}, 3, 1, (1, 1, 0)),
    ({}, 8, 1, (2, 2, 0)),
    ({}, 4, 2, (1, 1, 0)),
    ({}, 4, 8, (0, 0, 1)),  # too few: the node says so
    ({"prefill": 1}, 1, 1, (1, 2, 0)),
    ({"decode": 3}, 8, 1, (2, 3, 0)),
    ({"prefill": 2, "decode": 2}, 1, 1, (2, 2, 0)),
    ({"both": 2}, 0, 1, (0, 0, 2)),
    ({"both": 1, "decode": 1}, 1, 1, (0, 1, 1)),
]


@pytest.mark.parametrize(("given", "num_gpus", "ranks", "counts"), COUNTS)
def test_as_many_nodes_as_have_gpus_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, int],
    num_gpus: int,
    ranks: int,
    counts: tuple[int, int, int],
) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: num_gpus)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    whole = replace(
        Config(),
        cluster=ClusterOptions(**given),
        engine=EngineOptions(parallel=ParallelOptions(tp=ranks)),
        model=ModelOptions(device="auto" if num_gpus else "cpu"),
    )
    ((one, *others), again) = (models_to_start(whole), models_to_start(models_to_start(whole)[0].config))
    assert not others
    assert (one.config.cluster.prefill, one.config.cluster.decode, one.config.cluster.both) == counts
    assert again[0].config == one.config


def test_several_models_divide_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: 2)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    config = load_config(None, ["models.served=a=/a,b=/b"])
    assert [one.config.cluster.num_compute for one in models_to_start(config)] == [1, 1]


@pytest.mark.parametrize("num_nodes", [1, 3, 7])
@pytest.mark.parametrize("num_gpus", [1, 2, 5])
def test_no_gpu_is_assigned_more_memory_than_allowed(num_nodes: int, num_gpus: int) -> None:
    taken: dict[str, float] = {}
    for device, memory in options_of(config(num_nodes, num_nodes, gpu_memory=0.8), num_gpus):
        taken[device] = taken.get(device, 0.0) + float(memory.partition("=")[2])
    assert all(0.79 < fraction <= 0.8 for fraction in taken.values())


def test_without_a_gpu_nodes_get_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: 4)
    assert gpus.computes_on_gpus(config(1, 1, "cpu")) == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert gpus.computes_on_gpus(config(1, 1)) == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    assert gpus.computes_on_gpus(config(1, 1)) == 4
    assert options_of(config(1, 2), 0) == [()] * 3


_CUDA = r"""
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { return *count = 2, 0; }
int cuDeviceGet(int *device, int number) { return *device = 70 + number, 0; }
int cuDeviceGetName(char *name, int nbytes, int device) {
    return device == 71 ? 999 : (strncpy(name, "NVIDIA H200", nbytes), 0);
}
"""


def test_the_driver_names_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "cuda.c").write_text(_CUDA)
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "cuda.c"], check=True)
    code = (
        "from moonpool.runtime.machine.gpus import gpu_names, num_gpus\n"
        "from moonpool.runtime.reports.report import measure_environment\n"
        "print(num_gpus(), *gpu_names(), measure_environment(()).machine, sep='|')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    number, first, second, machine = done.stdout.split("|")
    assert (number, first, second) == ("2", "NVIDIA H200", "unknown GPU")
    assert machine.startswith("NVIDIA H200, unknown GPU, ")
