"""The fingerprint of a checkpoint: every byte is hashed, and read once for each state of a file."""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

from moonpool.engine.checkpoint.weights import weight_files
from moonpool.engine.errors import CheckpointError
from moonpool.runtime.machine.file_hashes import hashes_of


def fingerprint(path: Path, variant: str = "") -> bytes:
    """Return a 16-byte name of config.json and all weights, equal on every host for equal files.

    ``variant``: what else the weights depend on; empty: nothing. The hashes of files are kept
    (``hashes_of``). Raises CheckpointError.
    """
    digest = blake2b(digest_size=16, person=b"moonpool-model")
    try:
        digest.update((path / "config.json").read_bytes())
        for file, value in hashes_of(path, weight_files(path)):
            digest.update(f":{file.name}:{value}".encode())
        digest.update(variant.encode())
    except OSError as error:
        raise CheckpointError(path, f"{error.filename} cannot be read: {error.strerror}") from error
    return digest.digest()
