"""The key of the clusters that a user runs on a machine."""

from __future__ import annotations

import logging
import os
import secrets
from functools import cache
from pathlib import Path

log = logging.getLogger(__name__)


def local_key() -> str:
    """The key of the clusters that this user runs on this machine; made when it is first needed.

    It is in a file that only the user can read, so that commands in other terminals have it. Where no file
    can be written, the key is this process's alone.
    """
    if key := read_local_key():
        return key
    file, key = _key_file(), secrets.token_hex(32)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{file.name}-{os.getpid()}")
        partial.touch(mode=0o600)
        partial.write_text(key, encoding="ascii")
        try:
            os.link(partial, file)  # of several at once, one wins
        finally:
            partial.unlink()
    except FileExistsError:
        return read_local_key()
    except OSError as error:
        log.info("the key of local clusters is not kept: %s", error)
        return _unkept_key()
    return key


@cache
def _unkept_key() -> str:
    return secrets.token_hex(32)


def _key_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base) / "moonpool" / "cluster_key"


def read_local_key() -> str:
    """That key; empty: there is none yet."""
    try:
        return _key_file().read_text(encoding="ascii").strip()
    except (OSError, RuntimeError):
        return ""  # none yet, or a user without a home
