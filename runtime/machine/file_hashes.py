"""Hashes of large files, each read once for each state of the file."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

import xxhash

from moonpool.runtime.machine.compiled_library import cache_folder

log = logging.getLogger(__name__)

_NAME = ".moonpool-fingerprint"
_CHUNK_NBYTES = 4 << 20
_THREADS = 4
# A file that changed this recently may change again within the same tick of its times.
_SETTLED_NS = 2_000_000_000

_Hashes = dict[str, str]  # by a file's name, size, mtime_ns and inode


def hashes_of(folder: Path, files: Sequence[Path]) -> list[tuple[Path, str]]:
    """Return each of ``files``, which are in ``folder``, with xxh3-128 of all its bytes in hex.

    The hashes are kept in ``folder``, or below ``cache_folder()`` where that is read-only, and are used until
    a file's size, mtime or inode differs. Raises OSError: a file cannot be read.
    """
    name = blake2b(os.fsencode(folder.resolve()), digest_size=10).hexdigest()
    places = [folder / _NAME, cache_folder() / f"fingerprint-{name}"]
    known = _read(places)
    states = {file: _state(file) for file in files}
    unknown = [file for file in files if states[file] not in known]
    if unknown:
        began_ns = time.time_ns()
        with ThreadPoolExecutor(_THREADS) as threads:
            found = dict(zip(unknown, threads.map(_hash, unknown), strict=True))
        known |= {states[file]: value for file, value in found.items()}
        settled = {
            states[file]: known[states[file]]
            for file in files
            if file.stat().st_mtime_ns < began_ns - _SETTLED_NS and _state(file) == states[file]
        }
        _write(places, settled)
    return [(file, known[states[file]]) for file in files]


def _state(file: Path) -> str:
    about = file.stat()
    return f"{file.name}:{about.st_size}:{about.st_mtime_ns}:{about.st_ino}"


def _hash(file: Path) -> str:
    """Return xxh3-128 of a file, in hex."""
    state, chunk = xxhash.xxh3_128(), bytearray(_CHUNK_NBYTES)
    view = memoryview(chunk)
    with file.open("rb", buffering=0) as data:
        while count := data.readinto(chunk):
            state.update(view[:count])
    return state.hexdigest()


def _read(places: list[Path]) -> _Hashes:
    for place in places:
        try:
            found = json.loads(place.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue  # absent, or damaged: the files are hashed again
        if isinstance(found, dict):
            return {str(state): str(value) for state, value in found.items()}
    return {}


def _write(places: list[Path], hashes: _Hashes) -> None:
    """Keep the hashes in the first of ``places`` that can be written; a reader sees all of them or none."""
    for place in places if hashes else ():
        partial = place.with_name(f"{place.name}-{os.getpid()}")
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(json.dumps(hashes), encoding="utf-8")
            os.replace(partial, place)
        except OSError as error:
            log.debug("the hashes of the weights are not kept in %s: %s", place.parent, error)
            continue
        return
