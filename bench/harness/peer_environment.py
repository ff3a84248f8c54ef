"""Where the tools of others live that benchmarks compare with: each in an environment of its own, under the
user's cache directory, so that what they need never meets what Moonpool needs.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from moonpool.runtime.errors import MoonpoolError


class PeerFailed(MoonpoolError):
    """A peer could not be installed, started or asked. Nothing of it is left running."""


class PeerAbsent(PeerFailed):
    """A peer is not installed here. The message is a sentence with the command that installs it."""


def peers_dir() -> Path:
    """``$XDG_CACHE_HOME/moonpool/peers``."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "moonpool" / "peers"


def python_of(name: str, packages: Sequence[str], also: str = "") -> Path:
    """The python of the peer's environment.

    also: a command for what pip does not bring. Raises PeerAbsent when there is none.
    """
    home = peers_dir() / name
    python = home / "bin" / "python"
    if not python.exists():
        pip = f"{shlex.quote(str(home / 'bin' / 'pip'))} install {' '.join(packages)}"
        commands = [f"python3 -m venv {shlex.quote(str(home))}", pip, *([also] if also else [])]
        raise PeerAbsent(f"{name} is not installed; this does it: {' && '.join(commands)}")
    return python
