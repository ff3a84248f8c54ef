"""A request as the engine sees it: its tokens, its blocks, and how far both have come."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum, auto

import numpy as np
import numpy.typing as npt

from moonpool.engine.batching.sampling import Sampling
from moonpool.kvstore.blocks.keys import BlockKey, chain, extend


class FinishReason(IntEnum):
    """Why a sequence stopped; the values are ``protos.FinishReason``'s."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


@dataclass(slots=True)
class TokenLogprobs:
    """Of the model's own distribution, before temperature, penalties and bias."""

    logprob: float
    rank: int  # 1: the most likely token
    top_ids: list[int]  # the n best, best first
    top_logprobs: list[float]


class State(Enum):
    """State of a sequence. KEPT_FOR_TRANSFER: prefilled; the blocks stay until ``Engine.release``."""

    NEW = auto()
    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    KEPT_FOR_TRANSFER = auto()
    FINISHED = auto()


class Sequence:
    """One request: its lineage and its place in the pool.

    token_ids: int32 [num_tokens], the prompt and then what was generated. keys[i] names block i for every
    full block of token_ids that has been hashed; it grows as blocks are filled. block_table[i] is the pool
    block of tokens [i * block_size, (i + 1) * block_size). The KV of the first num_computed_tokens tokens
    lies in the pool. num_cached_tokens counts the tokens that were found instead of computed when the
    sequence was first admitted.

    Sequences are ordered by (priority, arrived_s + patience_s): the last one is the first to be preempted.
    """

    __slots__ = (
        "_tokens",
        "arrived_s",
        "attempt",
        "block_table",
        "cancelled",
        "chunks",
        "computed_s",
        "deadline_unix_s",
        "finish_reason",
        "key",
        "keys",
        "last_token_id",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_sealed_blocks",
        "num_tokens",
        "order",
        "prefill_only",
        "priority",
        "prompt_logprobs",
        "prompt_rows",
        "request_id",
        "root_key",
        "row",
        "sampling",
        "scheduled_s",
        "state",
        "stop_ids",
        "tenant",
    )

    def __init__(
        self,
        request_id: str,
        attempt: int,
        token_ids: npt.ArrayLike,
        num_prompt_tokens: int,
        *,
        sampling: Sampling,
        root_key: bytes,
        keys: list[BlockKey] | None = None,
        priority: int = 0,
        deadline_unix_s: float = math.inf,
        arrived_s: float = 0.0,
        patience_s: float = 0.0,
        tenant: str = "",
        prompt_logprobs: bool = False,
    ) -> None:
        """``keys`` may be shorter than the full blocks of ``token_ids``; the rest is hashed when needed.

        ``arrived_s`` is of the engine's clock; those of its priority that arrive within ``patience_s`` may go
        first. With ``prompt_logprobs`` the prefix cache is not read for this sequence (every prompt token
        must be computed to have a logprob), though its blocks are still sealed.
        """
        tokens = np.asarray(token_ids, dtype=np.int32)
        assert tokens.ndim == 1
        assert 0 < num_prompt_tokens <= len(tokens)
        self.request_id = request_id
        self.attempt = attempt
        self.key = (request_id, attempt)
        self.num_tokens = len(tokens)
        self.num_prompt_tokens = num_prompt_tokens
        self._tokens = np.empty(len(tokens) + 64, dtype=np.int32)
        self._tokens[: len(tokens)] = tokens
        self.last_token_id = int(tokens[-1])
        self.sampling = sampling
        self.root_key = root_key
        self.keys: list[BlockKey] = list(keys or ())
        self.priority = priority
        self.deadline_unix_s = deadline_unix_s
        self.arrived_s = arrived_s
        self.order = (priority, arrived_s + patience_s, request_id, attempt)
        self.tenant = tenant  # whose its cached blocks are
        self.prompt_logprobs = prompt_logprobs
        self.prompt_rows: list[TokenLogprobs] = []  # of the prompt tokens computed so far, where asked for
        self.prefill_only = False
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_sealed_blocks = 0  # leading blocks of block_table known to carry their keys
        self.num_preemptions = 0
        self.state = State.NEW
        self.finish_reason = FinishReason.NONE
        self.cancelled = False
        self.row = -1  # its place in the decode batch
        self.stop_ids = sampling.stop_token_ids  # with the model's end-of-sequence tokens, once added
        self.scheduled_s = 0.0  # when its first step began
        self.computed_s = 0.0  # when its prefill's last step ended
        self.chunks: list[tuple[float, float, int]] = []  # began_s, ended_s, tokens of each of those steps

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, attempt={self.attempt}, {self.state.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens, {len(self.block_table)} blocks)"
        )

    def hold_prefix(self, block_ids: list[int], block_size: int) -> None:
        """Begin with these blocks, sealed and held for the sequence, of its first tokens; it was not queued
        yet. Whoever releases the sequence releases them."""
        self.block_table = block_ids
        self.num_sealed_blocks = len(block_ids)
        self.num_computed_tokens = self.num_cached_tokens = len(block_ids) * block_size

    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """int32 [num_tokens], a view: valid until the next ``append``."""
        return self._tokens[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def append(self, token_id: int) -> None:
        n = self.num_tokens
        if n == len(self._tokens):
            grown = np.empty(2 * n, dtype=np.int32)
            grown[:n] = self._tokens
            self._tokens = grown
        self._tokens[n] = token_id
        self.num_tokens = n + 1
        self.last_token_id = token_id

    def hash_blocks(self, block_size: int, num_blocks: int) -> None:
        """Make ``keys`` name at least the first ``num_blocks`` blocks, which must be full."""
        done = len(self.keys)
        if done >= num_blocks:
            return
        assert num_blocks * block_size <= self.num_tokens
        tokens = self._tokens[done * block_size : num_blocks * block_size]
        previous = self.keys[-1] if done else self.root_key
        if num_blocks == done + 1:
            self.keys.append(extend(previous, tokens.tobytes()))
        else:
            self.keys += chain(self.root_key, tokens, block_size, start=previous)
