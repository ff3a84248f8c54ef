"""Reads a checkpoint's safetensors, checked before anything is loaded."""

from __future__ import annotations

import json
import logging
import mmap
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moonpool.engine.errors import CheckpointError, UnsupportedModel
from moonpool.kernels.reference import QuantisedWeight
from moonpool.runtime.service.load_progress import Progress

log = logging.getLogger(__name__)

#: One slice for each dimension that is cut, from the first on; empty: the whole tensor.
Part = tuple[slice, ...]

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
# Only sources of derived tensors.
_PACKED = {
    **{"U8": torch.uint8, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64},
    "F8_E4M3": torch.uint8,
}
_MAX_HEADER_NBYTES = 100 << 20


@dataclass(frozen=True, slots=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # offsets in the file, bytes
    end: int


@dataclass(frozen=True, slots=True)
class Derived:
    """A tensor that is made from others, the sources (name → shape), which ``make`` gets in this order."""

    sources: Mapping[str, tuple[int, ...]]
    make: Callable[..., Tensor | QuantisedWeight]


class Shapes:
    """The shapes of stored tensors by name."""

    def __init__(self, entries: Mapping[str, _Entry]) -> None:
        self._entries = entries

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def dtype(self, name: str) -> str:
        """Its dtype in safetensors' words; empty for a missing tensor."""
        return self._entries[name].dtype if name in self._entries else ""

    def nbytes(self, prefix: str) -> int:
        """The bytes of all tensors with names that begin so."""
        return sum(
            entry.end - entry.start for name, entry in self._entries.items() if name.startswith(prefix)
        )


# Not reported as unused: frequencies are computed, scales are of float8 pages or of activations.
_OPTIONAL = (
    *("rotary_emb.inv_freq", ".k_scale", ".v_scale"),
    *(".input_scale", ".output_scale", ".weight_shape"),
)


class Checkpoint:
    """The tensors of a checkpoint directory by name. Opening reads only headers; files are mapped on use,
    and only the pages of a tensor's part are read."""

    def __init__(
        self, path: Path, progress: Progress | None = None, part: Callable[[str], Part] = lambda name: ()
    ) -> None:
        """``part(name)``: the slice of a tensor to read.

        Raises CheckpointError for a missing, invalid or truncated file.
        """
        self.path = path
        self._progress = progress
        self._part = part
        self._entries: dict[str, _Entry] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in weight_files(path):
            self._entries.update(_read_header(path, file))
        self._derived: Mapping[str, Derived] = {}
        self._uses: Counter[str] = Counter()
        self._nbytes_total = self._nbytes_done = 0
        self._unread: set[str] = set()

    @property
    def shapes(self) -> Shapes:
        """Of what is stored."""
        return Shapes(self._entries)

    def derive(self, tensors: Mapping[str, Derived]) -> None:
        """Read these names as tensors made from others. Before ``check``."""
        self._derived = tensors

    def _sources(self, names: Iterable[str]) -> list[str]:
        """Return the names of the stored tensors that make up ``names``."""
        return [s for n in names for s in (self._derived[n].sources if n in self._derived else (n,))]

    def check(self, expected: Mapping[str, tuple[int, ...]], others: Collection[str] = ()) -> None:
        """Raise CheckpointError or UnsupportedModel unless all of ``expected`` (name → shape) exist.

        ``others``: tensors for other ranks.
        """
        stored = dict(expected)
        for name in self._derived.keys() & expected.keys():
            del stored[name]
            stored |= self._derived[name].sources
        missing = [name for name in stored if name not in self._entries]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(self.path, f"tensor {missing[0]}{more} is missing")
        for name, shape in stored.items():
            entry = self._entries[name]
            if entry.shape != shape:
                raise CheckpointError(
                    self.path,
                    f"tensor {name} in {entry.file.name} has shape {list(entry.shape)}, "
                    f"config.json implies {list(shape)}",
                )
            is_plain = name in expected and name not in self._derived
            if entry.dtype not in _DTYPES and (is_plain or entry.dtype not in _PACKED):
                raise UnsupportedModel(self.path, f"tensor {name} is stored as {entry.dtype}")
        self._unread = set(expected)
        self._uses = Counter(self._sources(expected))
        self._nbytes_total = sum(self._nbytes(name) for name in expected)
        # With tied embeddings a head is a copy.
        used = {*self._sources(expected), *self._sources(others), "lm_head.weight"}
        ignored = [n for n in self._entries if n not in used and not n.endswith(_OPTIONAL)]
        if ignored:
            log.warning(
                "checkpoint %s: %d tensors are not used, first %s", self.path, len(ignored), ignored[0]
            )

    def read(self, name: str) -> Tensor | QuantisedWeight:
        """Return the tensor's part in its stored dtype: a read-only view of the mapped file, or made from
        such."""
        if name in self._unread:
            self._unread.discard(name)
            self._nbytes_done += self._nbytes(name)
        if self._progress is not None:
            self._progress(self._nbytes_done, self._nbytes_total, name)
        derived = self._derived.get(name)
        whole = self._stored(name) if derived is None else derived.make(*map(self._stored, derived.sources))
        return whole[self._part(name)]

    def _stored(self, name: str) -> Tensor:
        entry = self._entries[name]
        mapped = self._maps.get(entry.file)
        if mapped is None:
            with entry.file.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[entry.file] = mapped
        dtype = _DTYPES.get(entry.dtype) or _PACKED[entry.dtype]
        tensor = torch.frombuffer(mapped, dtype=dtype, count=prod(entry.shape), offset=entry.start)
        return tensor.view(entry.shape)

    def drop_pages(self) -> None:
        """Unmap the pages read so far. Views stay valid, but read their pages again."""
        for mapped in self._maps.values():
            mapped.madvise(mmap.MADV_DONTNEED)

    def find(self, name: str) -> Tensor | None:
        """The whole of a stored tensor, whatever this rank's part; None for a missing one."""
        return self._stored(name) if name in self._entries else None

    def _nbytes(self, name: str) -> int:
        """Return the size of the tensor's part; of a derived one about its share of the sources."""
        if name in self._derived:
            sources = {source: self._entries[source] for source in self._sources([name])}
            return sum((entry.end - entry.start) // self._uses[s] for s, entry in sources.items())
        entry, nbytes = self._entries[name], 1
        part = self._part(name) + (slice(None),) * len(entry.shape)
        for size, cut in zip(entry.shape, part, strict=False):
            nbytes *= len(range(size)[cut])
        return nbytes * _DTYPES[entry.dtype].itemsize


def weight_files(path: Path) -> list[Path]:
    """Return the checkpoint's safetensors files in order of their names. Raises CheckpointError."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise CheckpointError(path, f"{index.name} cannot be read: {error}") from error
        files = [path / name for name in names]
    else:
        files = [path / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise CheckpointError(path, f"has no {file.name} (weights must be safetensors)")
    return files


def _read_header(path: Path, file: Path) -> dict[str, _Entry]:
    """Read the header: its length (8 bytes), then JSON."""
    file_nbytes = file.stat().st_size
    try:
        with file.open("rb") as data:
            header_nbytes = int.from_bytes(data.read(8), "little")
            if not 2 <= header_nbytes <= min(_MAX_HEADER_NBYTES, file_nbytes - 8):
                raise ValueError(f"a header of {header_nbytes} bytes in a file of {file_nbytes}")
            header: dict[str, Any] = json.loads(data.read(header_nbytes))
        entries: dict[str, _Entry] = {}
        for name, words in header.items():
            if name == "__metadata__":
                continue
            start, end = (8 + header_nbytes + int(offset) for offset in words["data_offsets"])
            entries[name] = _Entry(file, str(words["dtype"]), tuple(map(int, words["shape"])), start, end)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(path, f"{file.name} is not a readable safetensors file: {error}") from error
    for name, entry in entries.items():
        dtype = _DTYPES.get(entry.dtype) or _PACKED.get(entry.dtype)
        if entry.end > file_nbytes:
            raise CheckpointError(
                path, f"tensor {name} is cut off: {file.name} ends at byte {file_nbytes:,} of {entry.end:,}"
            )
        if dtype is not None and entry.end - entry.start != prod(entry.shape) * dtype.itemsize:
            raise CheckpointError(path, f"tensor {name} in {file.name}: its bytes do not fit its shape")
    return entries
