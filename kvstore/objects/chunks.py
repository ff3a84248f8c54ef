"""The division of an object into chunks of equal size, in short chains, so that parts of it can be kept and
moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from xxhash import xxh3_64_intdigest

from moonpool.kvstore.blocks.keys import KEY_NBYTES, BlockKey
from moonpool.protos import store_pb2

# A small object has no chunks: its bytes are in the inventory, and travel in the messages themselves. A batch
# of 512 of them stays within half of the largest message.
SMALL_NBYTES = 64 << 10

# Chunks of one chain. A tier does not evict a chain to make room for its own end, so an object larger than
# the host tier needs several. It also bounds what a lookup or an eviction walks through.
RUN_CHUNKS = 64

_CHUNK = Struct("<16sQQ")


def is_small(info: store_pb2.ObjectInfo) -> bool:
    return info.nbytes <= SMALL_NBYTES


def folded(digest: int, checksums: Iterable[int]) -> int:
    """Continue the checksum of an object, 0 at first, with those of its next chunks."""
    for value in checksums:
        digest = xxh3_64_intdigest(digest.to_bytes(8, "little") + value.to_bytes(8, "little"))
    return digest


@dataclass(frozen=True, slots=True)
class ChainRun:
    """Chunks ``first … first + len(keys) - 1`` of an object, one chain."""

    first: int
    keys: list[BlockKey]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The bytes of one put of an object, ``nbytes`` in chunks of ``chunk_nbytes``."""

    key: bytes
    storage: int
    nbytes: int
    chunk_nbytes: int

    @classmethod
    def of(cls, info: store_pb2.ObjectInfo, chunk_nbytes: int) -> ChunkPlan:
        return cls(info.key, info.storage, info.nbytes, chunk_nbytes)

    @property
    def num_chunks(self) -> int:
        return -(-self.nbytes // self.chunk_nbytes)

    def nbytes_of(self, chunk: int) -> int:
        """Bytes of the object in a chunk; only the last one may be partial."""
        return min(self.chunk_nbytes, self.nbytes - chunk * self.chunk_nbytes)

    def key_of(self, chunk: int) -> BlockKey:
        """A key that no other object or put has."""
        data = _CHUNK.pack(self.key, self.storage, chunk)
        return BlockKey(blake2b(data, digest_size=KEY_NBYTES, person=b"moonpool-chunk").digest())

    def run_of(self, chunk: int) -> ChainRun:
        """The run that contains ``chunk``."""
        first = chunk - chunk % RUN_CHUNKS
        last = min(first + RUN_CHUNKS, self.num_chunks)
        return ChainRun(first, [self.key_of(each) for each in range(first, last)])

    def runs(self) -> Iterator[ChainRun]:
        for first in range(0, self.num_chunks, RUN_CHUNKS):
            yield self.run_of(first)
