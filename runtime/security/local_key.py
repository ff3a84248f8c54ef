"""The key of the clusters that a user runs on a machine."""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from contextlib import suppress
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
    try:
        return _kept_key(_key_file())
    except OSError as error:
        log.info("the key of local clusters is not kept: %s", error)
        return _unkept_key()


def _kept_key(file: Path) -> str:
    """The key in ``file``, which gets a new one if it is missing or empty. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    directory = os.open(file.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # of several at once, one makes it
        with suppress(FileNotFoundError):
            if key := file.read_text(encoding="ascii").strip():
                return key
        key = secrets.token_hex(32)
        partial = file.with_name(f"{file.name}-{os.getpid()}")
        partial.unlink(missing_ok=True)
        try:
            partial.touch(mode=0o600)
            with partial.open("w", encoding="ascii") as written:
                written.write(key)
                written.flush()
                os.fsync(written.fileno())  # or a power loss may leave it empty
            partial.replace(file)
        finally:
            partial.unlink(missing_ok=True)
        return key
    finally:
        os.close(directory)


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
