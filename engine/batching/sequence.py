"""A request in the engine: its tokens, its blocks, and its progress."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.errors import SequenceTooLong, UnknownToken
from moonpool.kvstore.blocks.keys import BlockKey, chain, extend
from moonpool.runtime.structure.automaton import Automaton


class FinishReason(IntEnum):
    """The reason why a sequence ended; values as in ``protos.FinishReason``."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    CANCELLED = 3
    ERROR = 4


@dataclass(slots=True)
class TokenLogprobs:
    """Logprobs of the model's own distribution, before temperature, penalties and bias."""

    logprob: float
    rank: int  # 1: the most likely token
    top_ids: list[int]  # the n best, best first
    top_logprobs: list[float]


@dataclass(slots=True)
class Spent:
    """Seconds of steps that a sequence took."""

    busy_s: float = 0.0
    rejected_s: float = 0.0  # of them, for proposed tokens that the model rejected
    again_s: float = 0.0  # of them, for tokens that had been computed: their blocks were taken
    # Of the whole steps in which it decoded:
    prompts_s: float = 0.0  # for prompts of other sequences
    exchange_s: float = 0.0  # for collectives and waiting on other ranks


class State(Enum):
    """State of a sequence. KEPT_FOR_TRANSFER: prefilled; the blocks stay until ``Engine.release``."""

    NEW = auto()
    WAITING = auto()
    PREFILLING = auto()
    DECODING = auto()
    KEPT_FOR_TRANSFER = auto()
    FINISHED = auto()


class Sequence:
    """One request: its tokens and its blocks.

    token_ids: int32 [num_tokens], prompt and output. keys[i]: the key of full block i, as far as hashed.
    block_table[i]: the pool block of tokens [i * block_size, (i + 1) * block_size). num_computed_tokens:
    leading tokens with their KV in the pool. num_cached_tokens: tokens found in caches at first admission.

    ``order`` is the sequence's turn: arrived_s + patience_s, until it is exchanged with one of the same
    tenant. A tenant's sequences run by ``rank`` (see ``runtime.turns``). The last one is preempted first.
    """

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
        arrived_s: float = 0.0,
        patience_s: float = 0.0,
        tbt_s: float = math.inf,
        tenant: str = "",
        prompt_logprobs: bool = False,
    ) -> None:
        """``keys`` may be shorter than the full blocks of ``token_ids``; the rest is hashed when needed.

        ``arrived_s``: by the engine's clock. Sequences that arrive within ``patience_s`` may go first.
        ``priority``: among those of its tenant, lower first. ``tbt_s``: longest time wanted between two of
        its tokens. With ``prompt_logprobs`` all prompt tokens are
        computed, without the prefix cache.
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
        self.arrived_s = arrived_s
        self.tbt_s = tbt_s
        self.order: tuple[Any, ...] = (arrived_s + patience_s, request_id, attempt)
        self.rank: tuple[Any, ...] = (priority, *self.order)
        self.tenant = tenant  # owner of its cached blocks
        self.automaton: Automaton | None = None  # of its sampling's structure; given before it is queued
        self.drafting: object = None  # what ``engine.speculation`` knows of it
        self.adapter = -1  # number of its LoRA adapter among the resident ones; -1: none
        self.adapter_blocks: list[int] = []  # of the pool, with that adapter; acquired for the sequence
        self.prompt_logprobs = prompt_logprobs
        self.prompt_rows: list[TokenLogprobs] = []  # of the prompt tokens computed so far, if requested
        self.prefill_only = False
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_passed_blocks = 0  # leading blocks that every window has passed: released or packed (-1)
        self.packed: dict[int, int] = {}  # places of blocks in packs, by their columns in block_table
        self.packs: list[int] = []  # blocks of the pool: see ``engine.memory.packing``
        self.stays_whole = False  # another node reads its blocks: none goes into a pack
        self.num_sealed_blocks = 0  # leading blocks of block_table known to carry their keys
        self.num_preemptions = 0
        self.num_lost_tokens = 0  # leading tokens: their KV was here before its blocks were taken
        self.spent = Spent()  # since the last message about it
        self.state = State.NEW
        self.finish_reason = FinishReason.NONE
        self.cancelled = False
        self.withdrawn = False  # leaves the batch after its step, with its blocks: see ``Engine.withdraw``
        self.row = -1  # in its micro-batch
        self.micro_batch = 0  # its number, while it decodes
        self.joined = 0  # version of the micro-batch since it is there
        self.stop_ids = sampling.stop_token_ids  # with the model's end-of-sequence tokens, once added
        self.scheduled_s = 0.0  # when its first step began
        self.computed_s = 0.0  # when its prefill's last step ended
        self.chunks: list[tuple[float, float, int]] = []  # began_s, ended_s, tokens of each prefill step

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id!r}, attempt={self.attempt}, {self.state.name}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens, {len(self.block_table)} blocks)"
        )

    def set_prefix(self, block_ids: list[int], block_size: int) -> None:
        """Start with these sealed blocks of the first tokens, acquired for the sequence. It is not queued
        yet."""
        self.block_table = block_ids
        self.num_sealed_blocks = len(block_ids)
        self.num_computed_tokens = self.num_cached_tokens = len(block_ids) * block_size

    def take_blocks(self, other: Sequence) -> None:
        """Continue where ``other``, which has the same tokens and maybe one more, has come to. It is left
        without blocks."""
        self.block_table, other.block_table = other.block_table, []
        self.keys = list(other.keys)
        self.num_sealed_blocks = other.num_sealed_blocks
        self.num_computed_tokens, self.num_cached_tokens = other.num_computed_tokens, other.num_cached_tokens

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
        """Extend ``keys`` to at least the first ``num_blocks`` blocks, which must be full."""
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

    def check(self, max_len: int, vocab_size: int) -> None:
        """Reject a sequence that would fail its whole batch. Raises SequenceTooLong or UnknownToken."""
        if self.num_tokens >= max_len:
            raise SequenceTooLong(self.num_tokens, max_len)
        for token_id in (int(self.token_ids.min()), int(self.token_ids.max())):
            if not 0 <= token_id < vocab_size:
                raise UnknownToken(token_id, vocab_size, "token")
        for token_id in self.sampling.logit_bias:
            if not 0 <= token_id < vocab_size:
                raise UnknownToken(token_id, vocab_size, "logit_bias for token")
