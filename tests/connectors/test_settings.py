"""kv_connector_extra_config: what is read, and what is refused with a sentence."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from moonpool.connectors.checkpoint import fingerprint_of, layout_facts
from moonpool.connectors.errors import Unsupported
from moonpool.connectors.vllm.settings import check_engine, check_version, read_settings
from moonpool.runtime.config.loading import load_config, shown_options
from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError

URL = "redis://127.0.0.1:1"


def test_read() -> None:
    config = read_settings({"url": URL, "set": ["store.host.capacity_nbytes=8MiB"]}, "0123456789")
    assert (config.index.redis_url, config.store.host.capacity_nbytes) == (URL, 8 << 20)
    assert config.node.id.startswith("vllm-")
    assert config.store_node.object_nbytes == 0
    assert config.security.cluster_key, "calls between engines are signed"


@pytest.mark.parametrize(
    ("extra", "says"),
    [
        ({}, "url is missing"),
        ({"url": "127.0.0.1:8000"}, "must be that of Redis or of a conductor"),
        ({"url": URL, "uri": 1}, "uri is not known; known are url, api_key, config, set, node_id"),
        ({"url": URL, "set": ["store.ssd.path=/x"]}, "node_id is missing"),
        ({"url": URL, "set": ["store.hosts.capacity_nbytes=1"]}, "store.hosts"),
    ],
)
def test_refused(extra: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_settings(extra, "0123456789")


def test_whatever_forms_the_bytes_is_in_the_fingerprint(tmp_path: Path) -> None:
    def fingerprint(model: Path | str, revision: str, **facts: str) -> bytes:
        return fingerprint_of(layout_facts(str(model), revision, facts))

    first = tmp_path / "first"
    first.mkdir()
    (first / "config.json").write_text("{}")
    (first / "a.safetensors").write_bytes(b"weights")
    base = fingerprint(first, "", dtype="bf16")
    assert fingerprint(first, "other", dtype="bf16") == base, "a folder has no revision"
    assert fingerprint(first, "", dtype="fp32") != base
    copy = tmp_path / "copy"
    shutil.copytree(first, copy)
    assert fingerprint(copy, "", dtype="bf16") == base, "the name of a folder forms no bytes"
    (copy / "a.safetensors").write_bytes(b"Weights!")
    assert fingerprint(copy, "", dtype="bf16") != base
    assert fingerprint("hub/name", "1") != fingerprint("hub/name", "2")
    assert fingerprint("hub/name", "1") != fingerprint("hub/other", "1")


@pytest.mark.parametrize("version", ["0.31.2", "0.320.0", "1.0", "0.33.0.dev1+cpu"])
def test_an_unknown_version_is_refused_with_the_list(version: str) -> None:
    with pytest.raises(Unsupported, match=rf"vLLM {re.escape(version)} is not supported; .* are: 0\.32$"):
        check_version(version)
    check_version("0.32.0")
    check_version("0.32.1+cpu")


@pytest.fixture
def conductor() -> Iterator[tuple[str, Callable[..., None]]]:
    """Tells options as a conductor does: its URL, and a function that sets them."""
    config = Config()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = orjson.dumps({"options": shown_options(config)} if self.path == "/v1/about" else {})
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    def set_options(*sets: str) -> None:
        nonlocal config
        config = load_config(None, sets)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", set_options
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_conductor_tells_where_the_index_is(conductor: tuple[str, Callable[..., None]]) -> None:
    url, set_options = conductor
    set_options("index.redis_url=redis://127.0.0.1:7", "index.namespace=ours", "index.lease_ttl_s=7")
    for given in (url, f"{url}/v1"):
        index = read_settings({"url": given}, "0123456789").index
        assert (index.redis_url, index.namespace, index.lease_ttl_s) == ("redis://127.0.0.1:7", "ours", 7.0)


def test_a_conductor_tells_no_password(conductor: tuple[str, Callable[..., None]]) -> None:
    url, set_options = conductor
    set_options("index.redis_url=redis://user:a-long-password@127.0.0.1:7")
    with pytest.raises(ConfigError, match="a Redis with a password, which no conductor tells") as caught:
        read_settings({"url": url}, "0123456789")
    assert "a-long-password" not in str(caught.value)


def test_what_is_no_conductor(conductor: tuple[str, Callable[..., None]]) -> None:
    url, _ = conductor
    with pytest.raises(ConfigError, match="is not that of a conductor"):
        read_settings({"url": f"{url}/other"}, "0123456789")
    with pytest.raises(ConfigError, match="does not answer"):
        read_settings({"url": "http://127.0.0.1:9"}, "0123456789")


def of_vllm(**facts: Any) -> tuple[SimpleNamespace, SimpleNamespace]:
    """What is read of vLLM's configuration at its start."""
    known = {
        "device": "cpu",
        "caching": True,
        "world": 1,
        "replicas": 1,
        "groups": 1,
        "policy": "recompute",
    } | facts
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=known["device"]),
        cache_config=SimpleNamespace(enable_prefix_caching=known["caching"]),
        parallel_config=SimpleNamespace(world_size=known["world"], data_parallel_size=known["replicas"]),
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy=known["policy"]),
    )
    return config, SimpleNamespace(kv_cache_groups=[None] * known["groups"])


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"device": "cuda"}, "KV caches on cuda: so far this connector copies from main memory only"),
        ({"caching": False}, "without --enable-prefix-caching"),
        ({"world": 2}, "2 ranks"),
        ({"replicas": 4}, "4 ranks"),
        ({"groups": 2}, "several KV cache groups"),
        ({"policy": "fail"}, "kv_load_failure_policy is fail: set recompute"),
    ],
)
def test_an_engine_that_cannot_be_served_does_not_start(facts: dict[str, Any], says: str) -> None:
    check_engine(*of_vllm())
    with pytest.raises(Unsupported, match=says):
        check_engine(*of_vllm(**facts))
