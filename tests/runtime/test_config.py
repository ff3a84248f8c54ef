"""Configuration from files and --set, and the errors of wrong ones."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from moonpool.runtime.config.loading import explain, load_config, shown_options, to_toml
from moonpool.runtime.config.options import Config, EngineOptions, ParallelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.processor import usable_cores
from moonpool.runtime.redaction import HIDDEN


def test_nothing_given_is_the_default() -> None:
    assert load_config() == Config()


def test_file_then_sets_win(tmp_path: Path) -> None:
    file = tmp_path / "m.toml"
    file.write_text('[engine]\nblock_size = 32\npool_nbytes = "1GiB"\n[transfer.tcp]\nstreams = 8\n')
    config = load_config(file, ["transfer.tcp.streams=4", "transfer.transports=local, tcp", "node.id=7"])
    assert config.engine.block_size == 32
    assert config.engine.pool_nbytes == 1 << 30
    assert config.transfer.tcp.streams == 4
    assert config.transfer.transports == ("local", "tcp")
    assert config.node.id == "7"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[engine]\nblock_sise = 16", ["m.toml:2", "engine.block_sise", "engine.block_size"]),
        ("[tcp]\nstreams = 4", ["m.toml:2", "tcp.streams", "transfer.tcp.streams"]),
        ("engine = 4", ["m.toml:1", "engine is a section", "engine.block_size"]),
        ('[engine]\n\nthreads = "many"', ["m.toml:3", "engine.threads", "whole number", "many"]),
        ("[node]\ndrain_s = inf", ["m.toml:2", "node.drain_s", "finite number"]),
        ("[engine]\nthreads = true", ["m.toml:2", "engine.threads", "whole number"]),
        ("[engine]\nthreads = -1", ["m.toml:2", "engine.threads", "at least 0", "-1"]),
        ('[engine]\npool_nbytes = "1 cow"', ["m.toml:2", "engine.pool_nbytes", "4MiB"]),
        ("[transfer]\ntransports = [1]", ["m.toml:2", "transfer.transports", "list of texts"]),
        ('[transfer]\ntransports = ["pigeon"]', ["m.toml:2", "transfer.transports", "pigeon"]),
        ("[engine", ["m.toml", "not valid TOML"]),
    ],
)
def test_wrong_file_is_explained(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "m.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("engine.threads", ["section.key=value"]),
        ("engine.threads=two", ["--set engine.threads=two", "whole number"]),
        ("conductor.polcy=random", ["conductor.policy"]),
        ("streams=2", ["transfer.tcp.streams"]),
        ("node.drain_s=inf", ["--set node.drain_s=inf", "node.drain_s must be a finite number"]),
        ("node.drain_s=nan", ["--set node.drain_s=nan", "node.drain_s must be a finite number"]),
        ("conductor.port=70000", ["--set conductor.port=70000", "from 0 to 65535"]),
    ],
)
def test_wrong_set_is_explained(item: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [item])
    for word in words:
        assert word in str(caught.value)


def test_missing_file_is_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


def test_toml_round_trip(tmp_path: Path) -> None:
    config = load_config(None, ['model.path=/a "b"/ü\x7f\n', "transfer.transports=tcp", "node.drain_s=1.5"])
    file = tmp_path / "m.toml"
    file.write_text(to_toml(config))
    assert load_config(file) == config
    assert to_toml(Config()) == ""


def test_every_option_is_explained() -> None:
    rows = {row.key: row for row in explain()}
    assert rows["transfer.tcp.streams"].default == 2
    assert rows["transfer.tcp.streams"].meaning.endswith("(from 1 to 64)")
    assert rows["log.format"].meaning.endswith("(one of text, json)")
    assert all(row.unit and row.meaning for row in rows.values())


def test_sections_have_the_names_of_their_keys() -> None:
    """Errors name an option by its section's name, which must be the key in a file."""
    for key in (row.key for row in explain()):
        section: Any = Config()
        *parents, _ = key.split(".")
        for name in parents:
            section = getattr(section, name)
        assert ".".join(parents) == section.NAME


def test_value_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s3cret\n")
    assert load_config(None, [f"security.cluster_key=@{tmp_path}/secret"]).security.cluster_key == "s3cret"
    with pytest.raises(ConfigError, match=r"--set security\.cluster_key=@.*nothing.*No such file"):
        load_config(None, [f"security.cluster_key=@{tmp_path}/nothing"])


def test_options_are_shown_without_secrets() -> None:
    given = {
        "security.cluster_key": "s3cret",
        "index.redis_url": "redis://user:s3cret@host:1/0?password=s3cret&db=2",
        "tracing.otlp_endpoint": "http://s3cret@host:4317",
        "cluster.prefill_options": "security.cluster_key=s3cret,engine.threads=2",
    }
    shown = {
        row["key"]: row for row in shown_options(load_config(None, [f"{k}={v}" for k, v in given.items()]))
    }
    assert "s3cret" not in str(shown)
    assert shown["security.cluster_key"]["value"] == HIDDEN
    assert shown["index.redis_url"]["value"] == f"redis://{HIDDEN}@host:1/0?password={HIDDEN}&db=2"
    assert shown["cluster.prefill_options"]["value"] == (f"security.cluster_key={HIDDEN}", "engine.threads=2")
    assert shown["security.cluster_key"]["changed"] and not shown["engine.threads"]["changed"]
    assert shown_options(Config())[0]["changed"] is False


def test_threads_divide_the_cores_of_a_host() -> None:
    def threads(nodes: int, cores: int = 16, **parallel: Any) -> int:
        return EngineOptions(parallel=ParallelOptions(**parallel)).compute_threads(cores, nodes)

    assert (threads(1), threads(2), threads(3), threads(40)) == (16, 8, 5, 1)
    assert threads(4, cores=2) == 1
    assert threads(2, tp=2, pp=2) == 2
    assert threads(1, tp=2, dp=2) == 4
    assert threads(1, pp=4, hosts=2, listen="10.0.0.1:1") == 8
    assert EngineOptions(threads=3).compute_threads(2, 2) == 3


def test_cores_are_bounded_by_the_containers_quota(tmp_path: Path) -> None:
    cores, quota = len(os.sched_getaffinity(0)), tmp_path / "cpu.max"
    assert usable_cores(quota) == cores
    quota.write_text("max 100000\n")
    assert usable_cores(quota) == cores
    quota.write_text("50000 100000\n")
    assert usable_cores(quota) == 1


def test_options_that_have_moved_are_named() -> None:
    for former, now in (
        ("transfer.secret", "security.cluster_key"),
        ("transfer.tls.cert", "security.cert"),
    ):
        with pytest.raises(ConfigError, match=f"{former} is now {now}$"):
            load_config(None, [f"{former}=x"])
    assert "0123456789abcdef" not in repr(load_config(None, ["security.cluster_key=0123456789abcdef"]))
