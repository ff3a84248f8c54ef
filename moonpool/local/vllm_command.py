"""Command line and environment of vLLM's OpenAI server, alone or with our KV connector."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any


def vllm_command(
    python: str | Path,
    model: Path,
    port: int,
    *,
    name: str,
    store: Mapping[str, Any] | None = None,
    arguments: Sequence[str] = (),
) -> list[str]:
    """A server on 127.0.0.1 that says how many tokens of a prompt were cached.

    name: the model's, in requests. store: kv_connector_extra_config of our connector; None: without it.
    """
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", name, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--enable-prompt-tokens-details", *arguments]
    if store is not None:
        transfer = {
            "kv_connector": "MoonpoolConnector",
            "kv_connector_module_path": "moonpool.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(store),
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return command


def vllm_environment(cores: Iterable[int], cache: Path, *, kv_gib: int, imports: str = "") -> dict[str, str]:
    """Variables of vLLM on a CPU: one thread on each of ``cores``, ``kv_gib`` GiB of KV blocks.

    cache: a folder for what it compiles. imports: PYTHONPATH; empty: the packages of its environment only.
    """
    return {
        "PYTHONPATH": imports,
        # Without this, the number of threads depends on whether there is a connector.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(cores))),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_CACHE_ROOT": str(cache),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
