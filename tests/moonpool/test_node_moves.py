"""A node of one model as a node of another one: what it is started with, and what is refused."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from moonpool.errors import TooLittleMemory
from moonpool.local import children as children_module
from moonpool.local.children import Children, NoRoom, first_nodes
from moonpool.local.node_configs import TakenGpus
from moonpool.runtime.config.engine_options import shipped
from moonpool.runtime.config.models_file import served_models
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine import gpus
from moonpool.runtime.service.child import Child

MIB = 1 << 20


def two(directory: Path, *settings: str, first: tuple[str, ...] = ()) -> tuple[Children, Children]:
    """The children of two models, one node of both roles of each. ``settings``: of the second one."""
    small = directory / "small"
    shutil.copytree(shipped("small"), small)
    given = "".join(
        f'[[model]]\nname = "{name}"\npath = "{path}"\nset = {list(own)}\n'
        for name, path, own in (("a", "", first), ("b", small, settings))
    )
    (directory / "models.toml").write_text(given.replace("'", '"'))
    config = Config()
    config = replace(
        config,
        cluster=replace(config.cluster, prefill=0, decode=0, both=1),
        models=replace(config.models, path=str(directory / "models.toml")),
    )
    taken = TakenGpus()
    a, b = (
        Children(one.config, directory, lambda name, done, total: None, one.name, taken=taken)
        for one in served_models(config).models
    )
    return a, b


def options(child: Child) -> list[str]:
    """What it is started with beyond its file."""
    words = child._command
    return [value for word, value in pairwise(words) if word == "--set"]


def test_it_keeps_its_name_and_its_gpus_and_has_the_other_models_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children_module, "computes_on_gpus", lambda config: 4)
    a, b = two(tmp_path, "engine.parallel.tp=2", first=("engine.parallel.tp=2", "cluster.both=2"))
    found = first_nodes({"a": a, "b": b})
    nodes, (other,) = found["a"], found["b"]
    b.settle(["engine.max_batch_tokens=99"])
    moved = b.moved("both-a-1", "decode", a)
    assert moved.name == nodes[1].name == "both-a-1"
    assert moved._command[:5] == [*nodes[1]._command[:4], "decode"]
    assert moved._command[moved._command.index("--config") + 1] == str(tmp_path / "cluster-b.toml")
    (gpu,) = [one for one in options(moved) if one.startswith("model.device")]
    assert gpu in options(nodes[1]) and gpu == "model.device=cuda:2"
    assert "engine.max_batch_tokens=99" in options(moved)
    # And back again.
    assert options(a.moved("both-a-1", "both", b)) == options(nodes[1])
    assert gpu not in options(other)


def test_the_nodes_of_all_models_divide_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "computes_on_gpus", lambda config: 3)
    a, b = two(tmp_path)
    first = [child for nodes in first_nodes({"a": a, "b": b}).values() for child in nodes]
    names = {child.name for child in first}
    devices = [
        one for child in (*first, b.another("both", names)) for one in options(child) if "device" in one
    ]
    assert devices == ["model.device=cuda:0", "model.device=cuda:1", "model.device=cuda:2"]
    with pytest.raises(NoRoom):
        a.another("both", {*names, "both-b-1"})


def gpus_of(child: Child) -> tuple[str, str]:
    """Its first GPU, and its fraction of GPU memory."""
    device, memory = (
        next(one for one in options(child) if one.startswith(key))
        for key in ("model.device=", "engine.gpu_memory=")
    )
    return device.partition("=")[2], memory.partition("=")[2]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "num_gpus", lambda: 4)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.13.0+cu128")


@pytest.mark.usefixtures("four_gpus")
def test_models_on_gpus_of_their_own_have_all_of_their_memory(tmp_path: Path) -> None:
    a, b = two(tmp_path / "first", "model.device=cuda:1", first=("model.device=cuda:0",))
    (one,), (other,) = first_nodes({"a": a, "b": b}).values()
    assert [gpus_of(one), gpus_of(other)] == [("cuda:0", "0.9"), ("cuda:1", "0.9")]


@pytest.mark.usefixtures("four_gpus")
def test_a_later_node_needs_only_its_models_own_gpu(tmp_path: Path) -> None:
    a, b = two(tmp_path, "model.device=cuda:1", first=("model.device=cuda:0",))
    a.another("both", [])
    assert gpus_of(b.another("both", ["both-a-0"])) == ("cuda:1", "0.9")
    with pytest.raises(NoRoom, match="the GPUs from cuda:1 on have nodes"):
        b.another("both", ["both-a-0", "both-b-0"])


@pytest.mark.usefixtures("four_gpus")
def test_later_nodes_take_the_gpu_that_another_model_names_last(tmp_path: Path) -> None:
    """Also while that one sleeps."""
    a, b = two(tmp_path, first=("model.device=cuda:0", "planner.min_warm=0"))
    assert gpus_of(first_nodes({"a": a, "b": b}, on_demand=True)["b"][0]) == ("cuda:1", "0.9")
    names = ["both-b-0"]
    for gpu in ("cuda:2", "cuda:3", "cuda:0"):
        later = b.another("both", names)
        assert gpus_of(later) == (gpu, "0.9")
        names.append(later.name)


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("own", "count", "expected"),
    [
        (3, 3, [("cuda:0", "0.9"), ("cuda:1", "0.9"), ("cuda:2", "0.9")]),
        # A node that has to share a GPU shares one with its own model.
        (1, 4, [("cuda:0", "0.45"), ("cuda:2", "0.9"), ("cuda:3", "0.9"), ("cuda:0", "0.45")]),
    ],
)
def test_the_gpu_of_one_model_is_left_to_it_while_there_are_others(
    tmp_path: Path, own: int, count: int, expected: list[tuple[str, str]]
) -> None:
    a, b = two(tmp_path, f"cluster.both={count}", first=(f"model.device=cuda:{own}",))
    (one,), others = first_nodes({"a": a, "b": b}).values()
    assert gpus_of(one) == (f"cuda:{own}", "0.9")
    assert [gpus_of(child) for child in others] == expected


@pytest.mark.usefixtures("four_gpus")
def test_nodes_that_find_no_other_gpus_share_those_of_another_model(tmp_path: Path) -> None:
    ranks = "engine.parallel.tp=2"
    a, b = two(tmp_path, ranks, "cluster.both=2", first=(ranks, "model.device=cuda:1"))
    (one,), others = first_nodes({"a": a, "b": b}).values()
    assert gpus_of(one) == ("cuda:1", "0.45")
    assert [gpus_of(child) for child in others] == [("cuda:0", "0.45"), ("cuda:2", "0.45")]


def test_one_that_needs_other_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children_module, "computes_on_gpus", lambda config: 4)
    a, b = two(tmp_path, "engine.parallel.tp=2")
    first_nodes({"a": a})
    with pytest.raises(NoRoom, match="both-a-0 has 1 GPUs, and this model takes 2"):
        b.moved("both-a-0", "both", a)


def test_the_memory_that_it_gives_up_counts_as_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two(tmp_path, "engine.pool_nbytes=300MiB", first=("engine.pool_nbytes=200MiB",))
    first_nodes({"a": a})
    monkeypatch.setattr(children_module, "available_nbytes", lambda: 100 * MIB)
    b.moved("both-a-0", "both", a)  # the small model's weights are the smaller ones
    monkeypatch.setattr(children_module, "available_nbytes", lambda: 50 * MIB)
    with pytest.raises(TooLittleMemory):
        b.moved("both-a-0", "both", a)


def test_blocks_on_disk_are_those_of_one_model(tmp_path: Path) -> None:
    a, b = two(tmp_path, "store.ssd.path=/kv", "engine.pool_nbytes=1MiB", first=("store.ssd.path=/kv",))
    (node,), _ = first_nodes({"a": a, "b": b}).values()
    assert "store.ssd.path=/kv/b" in options(b.moved("both-a-0", "both", a))
    assert options(a.moved("both-a-0", "both", b)) == options(node), "its own folder, again"
    assert "store.ssd.path=/kv/a" in options(a.moved("both-b-0", "both", b))


def test_a_checkpoint_that_is_gone_and_another_engine_are_refused(tmp_path: Path) -> None:
    a, b = two(tmp_path)
    first_nodes({"a": a})
    shutil.rmtree(tmp_path / "small")
    with pytest.raises(ConfigError, match="is not a directory"):
        b.moved("both-a-0", "both", a)
    a._config = replace(a._config, cluster=replace(a._config.cluster, engine="vllm"))
    with pytest.raises(ConfigError, match="vLLM engines do not change their model"):
        b.moved("both-a-0", "both", a)
