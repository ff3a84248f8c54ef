"""Prefix outcomes: why each prompt did or did not begin with cached blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.kvstore.blocks.keys import BlockKey

# The outcome of a request's prefix: the first that applies.
OUTCOMES = {
    "hit": "some of it was in the cache and used",
    "off": "the request asked for something that needs every token computed (prompt logprobs)",
    "short": "less than one whole block to look up",
    "unused": "a node has it, but it was computed anyway",
    "pending": "an equal prefix came moments ago and is not in the index yet",
    "dropped": "an equal prefix was computed before and is no longer on any node",
    "layout": "a node has it in another layout (model, revision, dtype, block size), which is not used here",
    "salted": "equal tokens of the same tenant came before with another cache_salt",
    "headed": "the first block is new, the second is not: prompts differ at their start",
    "new": "none of it came before",
}

# Number of different prefixes remembered; the least recently used is dropped first.
_REMEMBERED = 1 << 14
# A prefix that first came longer ago than this has been computed and published.
_PENDING_S = 5.0


class _Latest:
    """A map that keeps the ``_REMEMBERED`` keys written last."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def put(self, key: Hashable, value: Any) -> tuple[Any, Any]:
        """Returns the former value of ``key``, and the value that was dropped for it; None: none."""
        before = self._values.pop(key, None)
        self._values[key] = value
        full = len(self._values) > _REMEMBERED
        return before, self._values.popitem(last=False)[1] if full else None


class PrefixWatch:
    """Counts since the start; a few microseconds and some hundred bytes a request.

    A tenant's requests are compared with its own only: no count tells whether another sent a prompt.
    """

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._tenants: dict[str, Counter[str]] = {}
        self._block_size = block_size
        self._clock = clock
        self._first_keys = _Latest()  # key of the first block -> when it first came
        self._first_tokens = _Latest()  # tenant, tokens of the first block -> root of its keys: by salt
        self._later_tokens = _Latest()  # tenant, tokens of the second block
        self._salts = _Latest()  # root of keys -> number of requests
        self._num_salts_once = 0

    def note(
        self,
        tenant: str,
        root: bytes,
        token_ids: npt.NDArray[np.int32],
        keys: Sequence[BlockKey],
        *,
        held: Mapping[str, int],
        num_used_tokens: int,
        reads_cache: bool = True,
        elsewhere: Callable[[], bool] = lambda: False,
    ) -> str:
        """A request was placed for the first time; returns its outcome.

        ``held``: its leading blocks on each node; ``num_used_tokens``: those it gets from the cache;
        ``tenant``: the name of a configured one. ``elsewhere``: whether a node of another layout has it.
        """
        outcome = self._outcome(tenant, root, token_ids, keys, held, num_used_tokens, reads_cache, elsewhere)
        self.outcomes[outcome] += 1
        core_metrics.prefix_outcomes.labels(outcome).inc()
        if tenant:
            self._tenants.setdefault(tenant, Counter())[outcome] += 1
        before, dropped = self._salts.put(root, 1)
        if before is not None:
            self._salts.put(root, before + 1)
        self._num_salts_once += (before is None) - (before == 1) - (dropped == 1)
        return outcome

    def _outcome(
        self,
        tenant: str,
        root: bytes,
        token_ids: npt.NDArray[np.int32],
        keys: Sequence[BlockKey],
        held: Mapping[str, int],
        num_used_tokens: int,
        reads_cache: bool,
        elsewhere: Callable[[], bool],
    ) -> str:
        if not reads_cache:
            return "off"
        # One token is always computed, so a prompt of a single block finds nothing either.
        if not keys or len(token_ids) <= self._block_size:
            return "short"
        now_s, size = self._clock(), self._block_size
        first_s, _ = self._first_keys.put(keys[0], now_s)
        if first_s is not None:
            self._first_keys.put(keys[0], first_s)
        seen_root, _ = self._first_tokens.put((tenant, _digest(token_ids[:size])), root)
        seen_later = False
        if len(token_ids) >= 2 * size:
            later = (tenant, _digest(token_ids[size : 2 * size]))
            seen_later = self._later_tokens.put(later, True)[0] is not None
        if num_used_tokens:
            return "hit"
        if any(held.values()):
            return "unused"
        if first_s is not None:
            return "pending" if now_s - first_s < _PENDING_S else "dropped"
        if elsewhere():
            return "layout"
        if seen_root is not None and seen_root != root:
            return "salted"
        return "headed" if seen_later else "new"

    def of_tenant(self, tenant: str) -> dict[str, int]:
        """The outcomes of one tenant's requests."""
        return dict(self._tenants.get(tenant, {}))

    def to_dict(self) -> dict[str, Any]:
        """For ``/v1/cluster``: plain JSON types."""
        return {
            "outcomes": dict(self.outcomes),
            "tenants": {name: dict(outcomes) for name, outcomes in self._tenants.items()},
            # Of the latest tenants and salts: all, and those with a single request.
            "num_salts": len(self._salts),
            "num_salts_once": self._num_salts_once,
        }


def _digest(token_ids: npt.NDArray[np.int32]) -> bytes:
    return blake2b(token_ids.tobytes(), digest_size=8).digest()
