"""Errors of the command line and of the machine are one sentence."""

from __future__ import annotations

import asyncio
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from moonpool.client import Client
from moonpool.errors import ApiError
from moonpool.runtime.config.options import Config
from tests.forked_command import forked_command

ROOT = Path(__file__).parents[2]


def moonpool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*forked_command("moonpool"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A directory with a checkpoint's files and no content."""
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    return tmp_path


def sentence_of(done: subprocess.CompletedProcess[str], code: int) -> str:
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("moonpool: ")
    return done.stderr


def test_unknown_option() -> None:
    assert "the nearest is conductor.port" in sentence_of(moonpool("up", "--set", "conductor.prot=1"), 2)


def test_a_daemon_checks_its_options_too() -> None:
    done = moonpool("conductor", "--set", "conductor.prot=1")
    assert done.returncode == 2
    assert "the nearest is conductor.port" in done.stderr


def test_impossible_number_of_nodes() -> None:
    assert "cluster.decode must be at least 1 without cluster.both, got 0" in sentence_of(
        moonpool("up", "--decode", "0"), 2
    )


def test_no_checkpoint(tmp_path: Path) -> None:
    stderr = sentence_of(moonpool("up", "--model", str(tmp_path)), 2)
    assert f"{tmp_path} has no config.json" in stderr
    assert "--model" in stderr


def test_port_in_use(checkpoint: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        stderr = sentence_of(moonpool("up", "--model", str(checkpoint), "--port", port), 1)
    assert f"port {port} on 127.0.0.1 is in use" in stderr
    assert "--port" in stderr


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_of_another_machine(checkpoint: Path, host: str) -> None:
    done = moonpool("up", "--model", str(checkpoint), "--port", "0", "--set", f"conductor.host={host}")
    stderr = sentence_of(done, 2)
    assert f"{host} is no address of this machine" in stderr
    assert "set conductor.host" in stderr


def test_several_models_on_ray_are_refused() -> None:
    model = Config().model.directory
    done = moonpool(
        "up", "--on", "ray://auto", "--port", "0", "--set", f"models.served=one={model},two={model}"
    )
    assert "one model, and there are 2: start one cluster for each" in sentence_of(done, 2)


def test_too_little_memory(checkpoint: Path) -> None:
    options = ("--port", "0", "--set", "engine.pool_nbytes=4TiB")
    assert "smaller pools" in sentence_of(moonpool("up", "--model", str(checkpoint), *options), 1)


def test_a_child_that_cannot_start_shows_its_log(checkpoint: Path) -> None:
    """The checkpoint is invalid: the error shows the end of the conductor's log."""
    stderr = sentence_of(moonpool("up", "--model", str(checkpoint), "--port", "0"), 1)
    assert "ended with code" in stderr or "before it was ready" in stderr
    directory = Path(stderr.split("The end of ")[1].split(".log")[0]).parent
    assert (directory / "conductor.log").exists()
    shutil.rmtree(directory)


def test_redis_that_is_not_there(checkpoint: Path) -> None:
    options = ("--port", "0", "--redis", "unix:///nonexistent/redis.sock")
    assert "does not answer" in sentence_of(moonpool("up", "--model", str(checkpoint), *options), 1)


def test_no_cluster_to_talk_to() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
    for command in ("status", "chat"):
        assert "`moonpool up` starts one" in sentence_of(moonpool(command, "--url", url), 1)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:800000", "127.0.0.1:8000", "ftp://127.0.0.1", "http://:80"]
)
def test_a_url_that_is_none_is_a_wrong_option(url: str) -> None:
    assert "http://HOST:PORT" in sentence_of(moonpool("status", "--url", url), 2)


async def test_another_servers_answer_is_no_conductors() -> None:
    content = b""

    async def answer(http: web.Request) -> web.Response:
        return web.Response(body=content)

    app = web.Application()
    app.router.add_get("/{rest:.*}", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/"))
        async with Client(url) as client:
            for content in (b"<html>", b"\xff\xfe", b"[]", b"{}", b'{"nodes": "three"}'):  # noqa: B007
                for call in (client.cluster, client.fleet, client.canaries, client.model):
                    with pytest.raises(ApiError, match="what answers there is no conductor"):
                        await call()
        done = await asyncio.to_thread(moonpool, "status", "--url", url)
        assert "what answers there is no conductor" in sentence_of(done, 1)
        done = await asyncio.to_thread(moonpool, "status", "--url", url.replace("http:", "https:"))
        assert "its URL begins with http://" in sentence_of(done, 1)


def test_the_explained_configuration_is_the_default_one(tmp_path: Path) -> None:
    file = tmp_path / "all.toml"
    file.write_text(moonpool("config", "--explain").stdout)
    assert "[transfer.tcp]" in file.read_text()
    done = moonpool("config", "--config", str(file), "--set", "conductor.port=1")
    assert done.stdout == "conductor.port = 1\n"


def test_doctor_looks_at_everything() -> None:
    done = moonpool("doctor")
    for what in (
        "python",
        "redis",
        "memory",
        "same host",
        "open files",
        "disk",
        "CPU kernels",
        "GPU",
    ):
        assert what in done.stdout
    # Pools are anonymous memory or memfds: its size says nothing of them.
    assert "/dev/shm" not in done.stdout
    assert re.search(r"memory .* GiB for pools", done.stdout)


@pytest.mark.parametrize("kind", ["redis", "redis+cluster"])
def test_doctor_connects_to_the_redis_that_is_named(kind: str) -> None:
    done = moonpool("doctor", "--redis", f"{kind}://127.0.0.1:1")
    url = re.escape(f"{kind}://127.0.0.1:1")
    assert re.search(rf"missing redis +{url}\n .*{url} does not answer", done.stdout), done.stdout
    assert done.returncode == 1
    assert len(re.findall(r"^\w+ +redis ", done.stdout, re.MULTILINE)) == 1


def test_doctor_looks_at_each_model_and_at_the_memory_of_all(tmp_path: Path) -> None:
    models = f"models.served=one={Config().model.directory},two={tmp_path}/no"
    sets = (models, "engine.pool_nbytes=2TiB", "cluster.prefill=1", "cluster.decode=1")
    done = moonpool("doctor", *(word for one in sets for word in ("--set", one)))
    assert re.search(rf"missing model +{tmp_path}/no", done.stdout)
    assert re.search(r"missing memory .* 819\d\.\d GiB for pools", done.stdout)


@pytest.mark.slow
def test_daemons_refuse_a_wrong_model_path_alike(tmp_path: Path) -> None:
    """With the code of a wrong option, so that a supervisor does not start them again."""
    path = tmp_path / "nowhere"
    for command in ("conductor", "prefill-node", "decode-node"):
        done = moonpool(
            command, "--set", f"model.path={path}", "--set", "index.redis_url=redis://127.0.0.1:1"
        )
        assert done.returncode == 2, done.stderr
        assert f"{path} is not a directory: set model.path (--model) to a Hugging Face" in done.stderr
