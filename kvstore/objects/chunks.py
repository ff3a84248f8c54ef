"""How an object is cut: chunks of equal size in short chains, so that parts of it can be kept and moved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from struct import Struct

from moonpool.kvstore.blocks.keys import KEY_NBYTES, BlockKey
from moonpool.protos import store_pb2

# Chunks of one chain. A tier never evicts a chain to make room for its own end, so an object larger than the
# host tier must be of several; within one, a lookup or an eviction walks at most so many.
RUN_CHUNKS = 64

_CHUNK = Struct("<16sQQ")


@dataclass(frozen=True, slots=True)
class ChainRun:
    """Chunks ``first … first + len(keys) - 1`` of an object, one chain."""

    first: int
    keys: list[BlockKey]


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """One version of an object of ``nbytes`` in chunks of ``chunk_nbytes``."""

    key: bytes
    version: int
    nbytes: int
    chunk_nbytes: int

    @classmethod
    def of(cls, info: store_pb2.ObjectInfo, chunk_nbytes: int) -> ChunkPlan:
        return cls(info.key, info.version, info.nbytes, chunk_nbytes)

    @property
    def num_chunks(self) -> int:
        return -(-self.nbytes // self.chunk_nbytes)

    def nbytes_of(self, chunk: int) -> int:
        """Of the object's bytes in a chunk: all but the last one are full."""
        return min(self.chunk_nbytes, self.nbytes - chunk * self.chunk_nbytes)

    def key_of(self, chunk: int) -> BlockKey:
        """Unlike any other object's and any other version's."""
        data = _CHUNK.pack(self.key, self.version, chunk)
        return BlockKey(blake2b(data, digest_size=KEY_NBYTES, person=b"moonpool-chunk").digest())

    def run_of(self, chunk: int) -> ChainRun:
        """The part that ``chunk`` is in."""
        first = chunk - chunk % RUN_CHUNKS
        last = min(first + RUN_CHUNKS, self.num_chunks)
        return ChainRun(first, [self.key_of(each) for each in range(first, last)])

    def runs(self) -> Iterator[ChainRun]:
        for first in range(0, self.num_chunks, RUN_CHUNKS):
            yield self.run_of(first)
