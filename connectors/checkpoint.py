"""What forms the bytes of an engine's KV blocks: its checkpoint, and facts of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.machine.file_hashes import hashes_of


def layout_facts(model: str, revision: str, facts: Mapping[str, object]) -> dict[str, str]:
    """Whatever forms the bytes of a block, by name: ``facts``, and the checkpoint.

    ``model``: a directory, of which config.json and all weights are hashed, or a name of a hub with its
    ``revision``. Raises ``ConfigError``: a file cannot be read.
    """
    found = {name: str(value) for name, value in facts.items()}
    folder = Path(model)
    try:
        if not folder.is_dir():
            return found | {"model": model, "checkpoint": f"revision {revision}"}
        files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf"))
        digest = blake2b((folder / "config.json").read_bytes(), digest_size=16)
        for file, value in hashes_of(folder, files):
            digest.update(f"\0{file.name}\0{value}".encode())
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}", "model") from error
    return found | {"model": folder.resolve().name, "checkpoint": digest.hexdigest()}


def fingerprint_of(facts: Mapping[str, str]) -> bytes:
    """Return 16 bytes that differ wherever ``facts`` do. The name of a checkpoint's folder does not count."""
    digest = blake2b(digest_size=16, person=b"moonpool-engine")
    for name in sorted(facts):
        if name != "model" or facts["checkpoint"].startswith("revision "):
            digest.update(f"\0{name}={facts[name]}".encode())
    return digest.digest()
