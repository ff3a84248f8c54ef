"""Why prompts did or did not begin with blocks of the cache: each request is told apart by what was known."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.kvstore.blocks.keys import BlockKey

# What became of a request's prefix. Exactly one a request, the first that holds.
OUTCOMES = {
    "hit": "some of it was in the cache, and used",
    "off": "the request asked for something that needs every token computed (prompt logprobs)",
    "short": "no whole block that could be found",
    "unused": "a node holds it, but it was computed all the same",
    "pending": "the same came moments ago, and was not in the index yet",
    "dropped": "the same was computed before, and nobody holds it any more",
    "salted": "the same tokens were seen, but of another tenant or cache_salt",
    "headed": "the first block was never seen, what follows it was: prompts differ at their start",
    "new": "nothing of it was seen before",
}

# What was seen is remembered for so many different beginnings, the one unused for longest forgotten first.
_REMEMBERED = 1 << 14
# What was first asked for this long ago is computed and published, if it ever will be.
_PENDING_S = 5.0


class _Seen:
    """Something bounded by key, and the value it had before."""

    def __init__(self, capacity: int) -> None:
        self._values: OrderedDict[Hashable, Any] = OrderedDict()
        self._capacity = capacity

    def swap(self, key: Hashable, value: Any) -> Any:
        """What ``key`` had; None: it was not seen, or is forgotten."""
        before = self._values.pop(key, None)
        self._values[key] = value
        if len(self._values) > self._capacity:
            self.forgot(self._values.popitem(last=False)[1])
        return before

    def forgot(self, value: Any) -> None:
        """One was pushed out."""

    def __len__(self) -> int:
        return len(self._values)


class _Salts(_Seen):
    """How many requests each salt had; how many salts had one is kept up to date."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self.num_once = 0

    def count(self, root: bytes) -> None:
        before = self.swap(root, 0) or 0
        self.num_once += (before == 0) - (before == 1)
        self.swap(root, before + 1)

    def forgot(self, value: Any) -> None:
        self.num_once -= value == 1


class PrefixWatch:
    """Counts since the start; a few microseconds and some hundred bytes a request."""

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self.outcomes: Counter[str] = Counter()
        self._tenants: dict[str, Counter[str]] = {}
        self._block_size = block_size
        self._clock = clock
        self._first_keys = _Seen(_REMEMBERED)  # when it was first seen
        self._first_tokens = _Seen(_REMEMBERED)  # the root of its keys: of one tenant and salt
        self._later_tokens = _Seen(_REMEMBERED)  # of the second block
        self._salts = _Salts(_REMEMBERED)

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
    ) -> str:
        """A request was placed for the first time: ``held`` by node, how many leading blocks of it there are;
        ``num_used_tokens``: those it will be given from the cache. ``tenant``: a configured one's name.
        Returns the outcome.
        """
        outcome = self._outcome(root, token_ids, keys, held, num_used_tokens, reads_cache)
        self.outcomes[outcome] += 1
        core_metrics.prefix_outcomes.labels(outcome).inc()
        if tenant:
            self._tenants.setdefault(tenant, Counter())[outcome] += 1
        self._salts.count(root)
        return outcome

    def _outcome(
        self,
        root: bytes,
        token_ids: npt.NDArray[np.int32],
        keys: Sequence[BlockKey],
        held: Mapping[str, int],
        num_used_tokens: int,
        reads_cache: bool,
    ) -> str:
        if not reads_cache:
            return "off"
        # One token is always computed, so a prompt of a single block finds nothing either.
        if not keys or len(token_ids) <= self._block_size:
            return "short"
        now_s, size = self._clock(), self._block_size
        first_s = self._first_keys.swap(keys[0], now_s)
        if first_s is not None:
            self._first_keys.swap(keys[0], first_s)
        seen_root = self._first_tokens.swap(_digest(token_ids[:size]), root)
        seen_later = False
        if len(token_ids) >= 2 * size:
            seen_later = self._later_tokens.swap(_digest(token_ids[size : 2 * size]), True) is not None
        if num_used_tokens:
            return "hit"
        if any(held.values()):
            return "unused"
        if first_s is not None:
            return "pending" if now_s - first_s < _PENDING_S else "dropped"
        if seen_root is not None and seen_root != root:
            return "salted"
        return "headed" if seen_later else "new"

    def to_dict(self) -> dict[str, Any]:
        """For ``/v1/cluster``: plain JSON types."""
        return {
            "outcomes": dict(self.outcomes),
            "tenants": {name: dict(outcomes) for name, outcomes in self._tenants.items()},
            # Of the latest tenants and salts: how many there were, and how many of them asked once.
            "num_salts": len(self._salts),
            "num_salts_once": self._salts.num_once,
        }


def _digest(token_ids: npt.NDArray[np.int32]) -> bytes:
    return blake2b(token_ids.tobytes(), digest_size=8).digest()
