"""The keys of vLLM's blocks: digests of vLLM's own block hashes, which are computed here without vLLM.

vLLM names a full block ``sha256(pickle((parent, tokens, extra)))``, from a seed on (its ``hash_block_tokens``
with the algorithm ``sha256``, its default). ``extra`` of a first block is ``(("cache_salt", salt),)`` for a
request with a salt, else None. The key adds a fingerprint of everything that forms the bytes of a block.
"""

from __future__ import annotations

import pickle
from hashlib import blake2b, sha256

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import KEY_NBYTES, BlockKey

# The one that is computed here. Pickle's protocol is the highest of every Python that vLLM supports.
HASH_ALGORITHM = "sha256"
_PROTOCOL = 5


def key_of(fingerprint: bytes, block_hash: bytes) -> BlockKey:
    """``fingerprint``: of the layout, 16 bytes; ``block_hash``: vLLM's."""
    return BlockKey(blake2b(fingerprint + block_hash, digest_size=KEY_NBYTES).digest())


class VllmChain:
    """The chain of one layout and salt. ``none_hash``: vLLM's parent of first blocks."""

    def __init__(self, fingerprint: bytes, none_hash: bytes, salt: str = "") -> None:
        """``salt``: the request's ``cache_salt``; empty: none."""
        self._fingerprint = fingerprint
        self._none_hash = none_hash
        self._extra = (("cache_salt", salt),) if salt else None
        # Text and lengths before it are fixed, so that different chains give different bytes.
        parts = fingerprint + none_hash + salt.encode()
        self.root = blake2b(parts, digest_size=KEY_NBYTES, person=b"moonpool-vllm").digest()

    def extend(
        self, token_ids: npt.NDArray[np.int32], block_size: int, state: bytes | None
    ) -> tuple[list[BlockKey], bytes | None]:
        """``state`` is vLLM's hash of the block before."""
        tokens: list[int] = token_ids.tolist()
        keys = []
        for first in range(0, len(tokens) - block_size + 1, block_size):
            extra = self._extra if state is None else None
            block = (
                self._none_hash if state is None else state,
                tuple(tokens[first : first + block_size]),
                extra,
            )
            state = sha256(pickle.dumps(block, protocol=_PROTOCOL)).digest()
            keys.append(key_of(self._fingerprint, state))
        return keys, state
