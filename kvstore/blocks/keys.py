"""Block keys: a chain of 128-bit digests. Equal keys mean an equal prefix, on every host.

``key[i] = blake2b-128(key[i-1] || tokens[i])``. The chain starts at a root that depends on everything that
changes the KV bytes of a token (model, revision, dtype, adapter) and on a secret of the tenant: tenants
never share keys, and none can compute another's. A partial tail block has no key.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NewType, Protocol

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.kvstore.errors import KeyFormatError

BlockKey = NewType("BlockKey", bytes)

KEY_NBYTES = 16


def root_key(*, model: bytes, layout: KVLayout, adapter: str = "", tenant: bytes = b"") -> bytes:
    """Return the 16 bytes that every chain of this model, adapter and tenant starts from.

    ``model`` identifies checkpoint and revision. Of the layout only dtype and block size count: how heads and
    layers are sharded does not change a prefix. ``tenant``: its secret (see ``tenant_secret``); empty: none.
    """
    digest = blake2b(digest_size=KEY_NBYTES, person=b"moonpool-root")
    for part in (model, layout.dtype.encode(), str(layout.block_size).encode(), adapter.encode(), tenant):
        # Prefixed by its length, so that different tuples give different bytes.
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def tenant_secret(cluster_secret: bytes, tenant: str) -> bytes:
    """Return 32 bytes that only processes with the cluster's secret can compute; empty for no tenant.

    So a tenant's name tells nothing about its keys: a prompt cannot be guessed by computing them.
    """
    if not tenant:
        return b""
    return blake2b(tenant.encode(), key=cluster_secret, digest_size=32, person=b"moonpool-tenant").digest()


def extend(previous: bytes, token_ids: bytes) -> BlockKey:
    """Return the key of the block of ``token_ids`` (int32 little-endian, a full block) after ``previous``."""
    return BlockKey(blake2b(previous + token_ids, digest_size=KEY_NBYTES).digest())


def chain(
    root: bytes, token_ids: npt.NDArray[np.int32], block_size: int, start: bytes | None = None
) -> list[BlockKey]:
    """Return the keys of the full blocks of ``token_ids`` (int32 [num_tokens]).

    ``start``: the key of the block before ``token_ids[0]``; None: the chain begins at ``root``.
    """
    data = np.ascontiguousarray(token_ids, dtype="<i4").tobytes()
    step = 4 * block_size
    keys: list[BlockKey] = []
    key = root if start is None else start
    for first in range(0, len(data) - step + 1, step):
        key = blake2b(key + data[first : first + step], digest_size=KEY_NBYTES).digest()
        keys.append(BlockKey(key))
    return keys


class KeyChain(Protocol):
    """How the blocks of one model and tenant are named."""

    @property
    def root(self) -> bytes:
        """16 bytes; chains with different roots share no key."""
        ...

    def extend(
        self, token_ids: npt.NDArray[np.int32], block_size: int, state: bytes | None
    ) -> tuple[list[BlockKey], bytes | None]:
        """Return the keys of the full blocks of ``token_ids``, and the state to go on from.

        ``state``: of the blocks before ``token_ids[0]``; None: there are none.
        """
        ...


class RootedChain:
    """The keys of Moonpool's own nodes: ``chain`` from a root."""

    def __init__(self, root: bytes) -> None:
        self.root = root

    def extend(
        self, token_ids: npt.NDArray[np.int32], block_size: int, state: bytes | None
    ) -> tuple[list[BlockKey], bytes | None]:
        keys = chain(self.root, token_ids, block_size, state)
        return keys, keys[-1] if keys else state


def pack(keys: Iterable[bytes]) -> bytes:
    return b"".join(keys)


def unpack(data: bytes) -> list[BlockKey]:
    """Split packed keys. Raises ``KeyFormatError``: the length is not a multiple of 16."""
    if len(data) % KEY_NBYTES:
        raise KeyFormatError(f"packed block keys must be a multiple of {KEY_NBYTES} bytes, got {len(data)}")
    return [BlockKey(data[first : first + KEY_NBYTES]) for first in range(0, len(data), KEY_NBYTES)]
