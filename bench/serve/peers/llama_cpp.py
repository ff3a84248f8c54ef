"""llama.cpp's own server: the peer ``llama-cpp``. ``make llama-cpp`` builds it for this processor.

Not the server of ``llama-cpp-python``, which answers one request at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.bench.harness.child import peer
from moonpool.bench.harness.peers import peers_dir, python_of
from moonpool.bench.serve.peers.contestants import PausedServer, running_server
from moonpool.runtime.network.sockets import free_port

_START_S = 300.0
# Requests at a time, and the longest prompt of the cases with room, in whole pages of its cache.
_SLOTS, _SLOT_TOKENS = 8, 2304


def server_program() -> Path:
    """Raises ``PeerAbsent``."""
    return python_of("llama-cpp", "llama-server")


@asynccontextmanager
async def llama_server(model_dir: Path, *, threads: int) -> AsyncIterator[PausedServer]:
    """A running server of the checkpoint, rewritten as GGUF. Raises ``PeerFailed``."""
    program, port = server_program(), free_port()
    name = f"llama-cpp {threads} threads" if threads > 1 else "llama-cpp"
    with tempfile.TemporaryDirectory(prefix="llama-cpp-", dir=peers_dir()) as folder:
        target = Path(folder) / "model.gguf"
        async with peer("llama-cpp", Path(__file__).parent / "gguf_child.py", "Writer") as writer:
            await writer.call("write", model_dir=str(model_dir), target=str(target))
        command = [str(program), *llama_arguments(target, port, threads)]
        async with running_server(name, command, port, _START_S, {}) as (server, child):
            yield PausedServer(server, child)


def llama_arguments(model: Path, port: int, threads: int) -> list[str]:
    """Its fastest settings here: docs/decisions/bench.md."""
    return [
        *("--model", str(model), "--alias", "peer", "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(threads), "--threads-batch", str(threads), "--flash-attn", "on"),
        *("--parallel", str(_SLOTS), "--ctx-size", str(_SLOTS * _SLOT_TOKENS), "--no-kv-unified"),
        *("--batch-size", "2048", "--ubatch-size", "512"),
        # Greedy, and no copies of old prompts' caches.
        *("--samplers", "temperature", "--cache-ram", "0", "--no-ui", "--offline"),
    ]
