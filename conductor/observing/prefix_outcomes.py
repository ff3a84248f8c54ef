"""Prefix outcomes: why each prompt did or did not begin with cached blocks."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from moonpool.conductor.observing import scheduling_metrics as core_metrics
from moonpool.conductor.observing.prefix_marks import Mark, Marks
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

# Why a hit did not reach further: the first that applies. Outcomes of whole prompts have the same names.
MISSED = {
    "unused": "a node has more of it, which was computed anyway",
    "pending": "more of it came moments ago and is not in the index yet",
    "dropped": "more of it was computed before and is no longer on any node",
    "layout": "a node has more of it in another layout, which is not used here",
    "salted": "more equal tokens of the same tenant came before with another cache_salt",
    "new": "the rest did not come before",
}

# Number of different prefixes remembered; the least recently used is dropped first.
_REMEMBERED = 1 << 14
# Tenants with counts of their own, those that asked last: every snapshot of the cluster has them.
_MAX_TENANTS = 1000
# A prefix that first came longer ago than this has been computed and published.
_PENDING_S = 5.0


@dataclass(frozen=True, slots=True)
class PrefixOutcome:
    """``outcome``: one of ``OUTCOMES``. ``missed``: of a hit, one of ``MISSED``; empty: every whole block
    that could be used was. ``known_tokens``: leading ones that had come before and could have been cached, as
    far as is remembered."""

    outcome: str = ""
    missed: str = ""
    known_tokens: int = 0


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
    """Counts since the start; some tens of microseconds and some kilobytes a request.

    A tenant's requests are compared with its own only: no count tells whether another sent a prompt.
    """

    def __init__(self, block_size: int, clock: Callable[[], float]) -> None:
        self.outcomes: Counter[str] = Counter()
        self.missed: Counter[str] = Counter()  # of hits
        self._tenants: dict[str, Counter[str]] = {}
        self._block_size = block_size
        self._clock = clock
        self._first_keys = _Latest()  # key of the first block -> when it first came
        self._marks = Marks()
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
        elsewhere: Callable[[int], bool] = lambda _: False,
    ) -> PrefixOutcome:
        """A request was placed for the first time; returns what came of its prefix.

        ``held``: its leading blocks on each node; ``num_used_tokens``: those it gets from the cache;
        ``tenant``: the name of a configured one. ``elsewhere``: whether a node of another layout has more
        than so many of its tokens.
        """
        outcome = self._outcome(tenant, root, token_ids, keys, held, num_used_tokens, reads_cache, elsewhere)
        size, now_s = self._block_size, self._clock()
        marks = self._marks.put(tenant, root, token_ids, keys, size, now_s) if keys and reads_cache else []
        missed, num_used = "", num_used_tokens // size
        # The last token is always computed.
        num_usable = min((len(token_ids) - 1) // size, len(keys))
        if outcome == "hit" and num_used < num_usable:
            rest = [mark for mark in marks if mark.block >= num_used]
            num_held = min(max(held.values(), default=0), num_usable)
            missed = _missed(rest, num_held > num_used, lambda: elsewhere(num_used_tokens), now_s)
            self.missed[missed] += 1
        self.outcomes[outcome] += 1
        core_metrics.prefix_outcomes.labels(outcome, missed).inc()
        if tenant:
            counts = self._tenants[tenant] = self._tenants.pop(tenant, Counter[str]())
            counts[outcome] += 1
            if len(self._tenants) > _MAX_TENANTS:
                del self._tenants[next(iter(self._tenants))]
        before, dropped = self._salts.put(root, 1)
        if before is not None:
            self._salts.put(root, before + 1)
        self._num_salts_once += (before is None) - (before == 1) - (dropped == 1)
        num_known = max((mark.block + 1 for mark in marks if mark.first_s is not None), default=0)
        return PrefixOutcome(outcome, missed, min(num_known, num_usable) * size)

    def _outcome(
        self,
        tenant: str,
        root: bytes,
        token_ids: npt.NDArray[np.int32],
        keys: Sequence[BlockKey],
        held: Mapping[str, int],
        num_used_tokens: int,
        reads_cache: bool,
        elsewhere: Callable[[int], bool],
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
        if elsewhere(0):
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
            "missed": dict(self.missed),
            "tenants": {name: dict(outcomes) for name, outcomes in self._tenants.items()},
            # Of the latest tenants and salts: all, and those with a single request.
            "num_salts": len(self._salts),
            "num_salts_once": self._num_salts_once,
        }


def _missed(rest: Sequence[Mark], is_held: bool, elsewhere: Callable[[], bool], now_s: float) -> str:
    """Why a hit did not reach further; ``rest``: what is known of the part after it; ``is_held``: a node has
    more of it than was used."""
    if is_held:
        return "unused"
    if seen_s := [mark.first_s for mark in rest if mark.first_s is not None]:
        return "pending" if now_s - min(seen_s) < _PENDING_S else "dropped"
    if elsewhere():
        return "layout"
    return "salted" if rest else "new"


def _digest(token_ids: npt.NDArray[np.int32]) -> bytes:
    return blake2b(token_ids.tobytes(), digest_size=8).digest()
