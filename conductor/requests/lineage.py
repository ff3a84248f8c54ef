"""The tokens of a request so far and their block keys, from which any node can continue it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import BlockKey, KeyChain, pack


class Lineage:
    """The prompt and the streamed tokens. Each full block is hashed once."""

    def __init__(self, prompt_token_ids: npt.NDArray[np.int32], block_size: int) -> None:
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output_ids: list[int] = []
        self.root_key = b""
        self.keys: list[BlockKey] = []
        self._prompt = np.ascontiguousarray(prompt_token_ids, dtype="<i4")
        self._block_size = block_size
        self._state: bytes | None = None  # of the chain, after ``keys``

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + len(self.output_ids)

    def hash_blocks(self, chain: KeyChain) -> list[BlockKey]:
        """The keys of all full blocks. Only new blocks are hashed while the root stays the same."""
        if chain.root != self.root_key:
            self.root_key, self.keys, self._state = chain.root, [], None
        done = len(self.keys) * self._block_size
        if self.num_tokens - done >= self._block_size:
            new, self._state = chain.extend(self.token_ids()[done:], self._block_size, self._state)
            self.keys += new
        return self.keys

    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [num_tokens]"""
        if not self.output_ids:
            return self._prompt
        return np.concatenate((self._prompt, np.array(self.output_ids, dtype="<i4")))

    def packed_keys(self) -> bytes:
        return pack(self.keys)
