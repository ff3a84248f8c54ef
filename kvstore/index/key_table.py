"""Tables from block keys to numbers of sets of nodes: compiled C++, or a dict where there is no compiler."""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import KEY_NBYTES
from moonpool.kvstore.index.redis.changes import pick, split
from moonpool.runtime.machine.compiled_library import BuildFailed, CompiledLibrary

_log = logging.getLogger(__name__)

LIBRARY = CompiledLibrary(
    "index",
    "the index's table of blocks",
    "a dict is used, with three times the memory",
    Path(__file__).parent / "native",
    ("-O3", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-w"),
)

# Keys are distributed over parts by their last byte; ``replace`` handles one at a time.
NUM_PARTS = 256

Change = Callable[[int], tuple[int, int]]
"""From a set to the set that replaces it (0: the block is removed), and what that adds to a count."""


class KeyTable(Protocol):
    """Block key to the number of a set; 0: the key is unknown. All methods run on one thread."""

    def __len__(self) -> int: ...

    def get(self, key: bytes) -> int: ...

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Divide a chain into runs of blocks with one set each, until the first unknown block: where each run
        ends, and its set. Blocks of equal sets have no other set between them, so each takes a binary
        search."""

    def move(self, packed: bytes, change: Change, guess: int) -> int:
        """Move every key of a packed run to another set. ``guess``: the set that most are in. Returns the sum
        of what the changes add."""

    def counts(self, num_sets: int) -> npt.NDArray[np.uint32]:
        """uint32 [num_sets]: the number of blocks of each set."""

    def replace(self, part: int, to: npt.NDArray[np.uint32]) -> int:
        """In one part, replace each set below ``len(to)`` by ``to[set]``; 0: remove. Returns how many blocks
        were visited."""

    def select(
        self, part: int, num_parts: int, wanted: npt.NDArray[np.uint8]
    ) -> tuple[list[bytes], list[int]]:
        """The keys with a last byte of ``part`` modulo ``num_parts`` and a wanted set (``wanted`` is not 0
        at its number), and their sets."""


class PlainKeyTable:
    """A dict, and the number of its keys in each set."""

    def __init__(self) -> None:
        self._sets: dict[bytes, int] = {}
        self._counts: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._sets)

    def get(self, key: bytes) -> int:
        return self._sets.get(key, 0)

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        get, found = self._sets.get, list[tuple[int, int]]()
        here = get(keys[0], 0) if keys else 0
        # (low, high, first, last): a bound between two blocks, and their sets.
        bounds = [(0, len(keys), here, 0)] if here else []
        while bounds:
            low, high, first, last = bounds.pop()
            while (middle := (low + high) >> 1) != low:
                here = get(keys[middle], 0)
                if here == first:
                    low = middle
                elif here == last:
                    high = middle
                else:
                    bounds.append((middle, high, here, last))
                    high, last = middle, here
            found.append((high, first))
            if not last:
                break
        return found

    def move(self, packed: bytes, change: Change, guess: int) -> int:
        sets, counts, known, added = self._sets, self._counts, dict[int, tuple[int, int]](), 0
        for key in split(packed):
            before = sets.get(key, 0)
            if before not in known:
                known[before] = change(before)
            after, more = known[before]
            added += more
            if before == after:
                continue
            counts[before] = counts.get(before, 0) - 1
            counts[after] = counts.get(after, 0) + 1
            if after:
                sets[key] = after
            else:
                del sets[key]
        return added

    def counts(self, num_sets: int) -> npt.NDArray[np.uint32]:
        self._counts = {each: count for each, count in self._counts.items() if each and count}
        return np.fromiter((self._counts.get(each, 0) for each in range(num_sets)), np.uint32, num_sets)

    def replace(self, part: int, to: npt.NDArray[np.uint32]) -> int:
        if part:
            return 0  # a dict has no parts: the first call has done all
        num_keys = len(self._sets)
        self.move(b"".join(self._sets), lambda set_: (int(to[set_]) if set_ < len(to) else set_, 0), 0)
        return num_keys

    def select(
        self, part: int, num_parts: int, wanted: npt.NDArray[np.uint8]
    ) -> tuple[list[bytes], list[int]]:
        chosen = set(np.flatnonzero(wanted).tolist())
        keys = [key for key in pick(b"".join(self._sets), part, num_parts) if self._sets[key] in chosen]
        return keys, [self._sets[key] for key in keys]


# Changes that a call of the library knows at once.
_NUM_CHANGES = 16


class CompiledKeyTable:
    """``native/key_table.cpp``. Raises ``BuildFailed``, MemoryError."""

    def __init__(self) -> None:
        self._library = library = _library()
        table = library.moonpool_index_new()
        if not table:
            raise MemoryError("no memory for an empty index")
        self._table = ctypes.c_void_p(table)
        weakref.finalize(self, library.moonpool_index_free, self._table)
        self._runs_call = library.moonpool_index_runs
        self._runs = (ctypes.c_uint32 * 2048)()
        self._changes = (ctypes.c_int32 * (3 * _NUM_CHANGES))()
        self._result = (ctypes.c_int64 * 2)()

    def __len__(self) -> int:
        return int(self._library.moonpool_index_size(self._table))

    def get(self, key: bytes) -> int:
        return int(self._library.moonpool_index_get(self._table, key)) if len(key) == KEY_NBYTES else 0

    def runs(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        if type(keys) is not list:
            keys = list(keys)
        if 2 * len(keys) > len(self._runs):
            self._runs = (ctypes.c_uint32 * (4 * len(keys)))()
        found = self._runs_call(self._table, keys, self._runs)
        if found <= 0:
            return [(-found >> 32, -found & 0xFFFFFFFF)] if found else []
        flat = self._runs[: 2 * found]
        return list(zip(flat[::2], flat[1::2], strict=True))

    def move(self, packed: bytes, change: Change, guess: int) -> int:
        if len(packed) == KEY_NBYTES:
            guess = self.get(packed)
        changes, result, known = self._changes, self._result, {guess: change(guess)}
        changes[0], (changes[1], changes[2]) = guess, known[guess]
        num, at, count = 1, 0, len(packed) // KEY_NBYTES
        result[0] = 0
        move = self._library.moonpool_index_move
        while (at := move(self._table, packed, count, at, changes, min(num, _NUM_CHANGES), result)) < count:
            if at < 0:
                raise MemoryError(f"no memory for more than {len(self):,} blocks of the index")
            before, place = result[1], 3 * (num % _NUM_CHANGES)
            if before not in known:
                known[before] = change(before)
            changes[place], (changes[place + 1], changes[place + 2]) = before, known[before]
            num += 1
        return result[0]

    def counts(self, num_sets: int) -> npt.NDArray[np.uint32]:
        counts = np.empty(num_sets, np.uint32)
        self._library.moonpool_index_counts(self._table, counts.ctypes.data, num_sets)
        return counts

    def replace(self, part: int, to: npt.NDArray[np.uint32]) -> int:
        call = self._library.moonpool_index_replace
        return int(call(self._table, part, to.ctypes.data, len(to)))

    def select(
        self, part: int, num_parts: int, wanted: npt.NDArray[np.uint8]
    ) -> tuple[list[bytes], list[int]]:
        counts = self.counts(len(wanted))
        room = int(counts[wanted != 0].sum())
        # Pages that no key is written to take no memory.
        keys, sets = np.empty((room, KEY_NBYTES), np.uint8), np.empty(room, np.uint32)
        found = self._library.moonpool_index_list(
            *(self._table, part, num_parts, wanted.ctypes.data, len(wanted)),
            *(keys.ctypes.data, sets.ctypes.data, room),
        )
        return split(keys[:found].tobytes()), sets[:found].tolist()


@functools.cache
def _library() -> ctypes.PyDLL:
    # It calls Python, and its calls are short: it keeps the GIL.
    library = ctypes.PyDLL(str(LIBRARY.build()))
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("new", pointer, ()),
        ("free", None, (pointer,)),
        ("size", size, (pointer,)),
        ("get", ctypes.c_uint32, (pointer, ctypes.c_char_p)),
        ("runs", size, (pointer, ctypes.py_object, pointer)),
        ("move", size, (pointer, ctypes.c_char_p, size, size, pointer, size, pointer)),
        ("counts", None, (pointer, pointer, size)),
        ("replace", size, (pointer, size, pointer, size)),
        ("list", size, (pointer, size, size, pointer, size, pointer, pointer, size)),
    ):
        function = library[f"moonpool_index_{name}"]
        function.restype, function.argtypes = result, arguments
        setattr(library, f"moonpool_index_{name}", function)
    return library


@functools.cache
def _kind() -> type[CompiledKeyTable] | type[PlainKeyTable]:
    try:
        _library()
    except (BuildFailed, OSError) as error:
        _log.warning("%s", error)
        return PlainKeyTable
    return CompiledKeyTable


def key_table() -> KeyTable:
    """An empty table: compiled, or a dict where it cannot be compiled (logged once)."""
    return _kind()()
