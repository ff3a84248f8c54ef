"""How the nodes of a local cluster share a machine's GPUs."""

from __future__ import annotations

import importlib.metadata
from dataclasses import replace

import pytest

from moonpool.local.gpu_split import gpu_options
from moonpool.local.node_configs import node_configs, pools_nbytes
from moonpool.runtime.config.options import ClusterOptions, Config, EngineOptions, ModelOptions
from moonpool.runtime.machine import gpus


def config(prefill: int, decode: int, device: str = "auto", gpu_memory: float = 0.9) -> Config:
    return replace(
        Config(),
        cluster=ClusterOptions(prefill=prefill, decode=decode),
        engine=EngineOptions(gpu_memory=gpu_memory),
        model=ModelOptions(device=device),
    )


def told_to(config: Config, num_gpus: int) -> list[tuple[str, ...]]:
    return gpu_options(node_configs(config), num_gpus)


def test_all_share_the_one_there_is() -> None:
    told = told_to(config(2, 2), 1)
    assert told == [("model.device=cuda:0", "engine.gpu_memory=0.225")] * 4


def test_they_go_round_several() -> None:
    told = told_to(config(2, 1), 2)
    assert [options[0] for options in told] == [f"model.device=cuda:{i}" for i in (0, 1, 0)]
    assert [options[1] for options in told] == [f"engine.gpu_memory={share}" for share in (0.45, 0.9, 0.45)]


def test_one_that_was_named_is_everybodys() -> None:
    told = told_to(config(1, 1, "cuda:3"), 1)
    assert told == [("model.device=cuda:3", "engine.gpu_memory=0.45")] * 2


def test_a_node_of_replicas_has_a_run_of_them() -> None:
    whole = config(2, 2)
    whole = replace(whole, cluster=replace(whole.cluster, prefill_options=("engine.parallel.dp=3",)))
    told = told_to(whole, 8)
    assert [options[0] for options in told] == [f"model.device=cuda:{i}" for i in (0, 3, 6, 7)]
    assert {options[1] for options in told} == {"engine.gpu_memory=0.9"}
    told = told_to(whole, 4)
    assert [options[0] for options in told] == [f"model.device=cuda:{i}" for i in (0, 0, 3, 0)]
    assert [options[1] for options in told] == [
        f"engine.gpu_memory={share}" for share in (0.3, 0.3, 0.9, 0.3)
    ]
    assert pools_nbytes(whole) == (2 * 3 + 2) * (256 << 20)


@pytest.mark.parametrize("num_nodes", [1, 3, 7])
@pytest.mark.parametrize("num_gpus", [1, 2, 5])
def test_nobody_gets_more_than_there_is(num_nodes: int, num_gpus: int) -> None:
    taken: dict[str, float] = {}
    for device, share in told_to(config(num_nodes, num_nodes, gpu_memory=0.8), num_gpus):
        taken[device] = taken.get(device, 0.0) + float(share.partition("=")[2])
    assert all(0.79 < share <= 0.8 for share in taken.values())


def test_without_a_gpu_nodes_are_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: 4)
    assert gpus.computes_on_gpus(config(1, 1, "cpu")) == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cpu")
    assert gpus.computes_on_gpus(config(1, 1)) == 0
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0")
    assert gpus.computes_on_gpus(config(1, 1)) == 4
    assert told_to(config(1, 2), 0) == [()] * 3
