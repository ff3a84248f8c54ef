"""Prefixes of requests without a tokenizer: digests of the beginning of what is sent, and which are hot."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import orjson
from xxhash import xxh3_64_intdigest

MAX_DIGESTS: Final = 32
"""Of a request: a digest for each end of a message, and where its text is as long as ``_STEPS`` say."""
_STEPS: Final = tuple(int(512 * 1.5**step) for step in range(14))  # to 100,000 bytes
_WINDOW_S: Final = 10.0
_CAPACITY: Final = 8192
# Counting ends when no router has asked for so long: a cluster without a router pays nothing.
_ASKED_WITHIN_S: Final = 60.0


def prefix_digests(body: Mapping[str, Any], salt: str) -> list[int]:
    """64-bit digests of longer and longer beginnings of a request's prompt; empty: it has none.

    ``body``: any JSON object, as it was sent. ``salt``: of tenant and request, as in ``Tenant.salt``.
    Equal digests mean equal model, salt and beginning, but for collisions: they are for routing only.
    """
    digest = xxh3_64_intdigest(f"{body.get('model')}\0{salt}".encode())
    found: list[int] = []
    position = 0
    for part in _parts(body):
        begin = 0
        for cut in _cuts(position, len(part)):
            digest = xxh3_64_intdigest(part[begin:cut], digest)
            begin = cut
            found.append(digest)
            if len(found) == MAX_DIGESTS:
                return found
        position += len(part)
    return found


def _cuts(position: int, length: int) -> Iterator[int]:
    """Where to cut a part that begins at ``position`` of the whole; its end is the last."""
    for step in _STEPS:
        if position < step < position + length:
            yield step - position
    yield length


def _parts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """The prompt in the order in which templates write it; of several prompts the first."""
    if isinstance(messages := body.get("messages"), list):
        if body.get("tools"):
            yield orjson.dumps(body["tools"])
        yield from map(orjson.dumps, messages)
        return
    prompt = body.get("prompt", body.get("input"))
    if body.get("instructions"):
        yield orjson.dumps(body["instructions"])
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
        yield from map(orjson.dumps, prompt)
        return
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if prompt:
        yield prompt.encode() if isinstance(prompt, str) else orjson.dumps(prompt)[1:-1]


class HotPrefixes:
    """How often each prefix was asked for lately, in bounded memory: exact for the frequent ones.

    A request adds at most one prefix that was not known, the shortest: prefixes of one request stay out.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._asked_s = -_ASKED_WITHIN_S
        self._began_s = clock()
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._num_now = self._num_before = 0
        self._before_s = 0.0  # how long the window before lasted

    @property
    def is_wanted(self) -> bool:
        """Whether a router has asked lately."""
        return self._clock() - self._asked_s < _ASKED_WITHIN_S

    def count(self, digests: Sequence[int]) -> None:
        """A request came. 1 to 3 µs."""
        self._roll()
        self._num_now += 1
        for digest in digests:
            known = self._now.get(digest, 0)
            self._now[digest] = known + 1
            if not known and digest not in self._before:
                break
        if len(self._now) > _CAPACITY:
            self._now = {digest: count for digest, count in self._now.items() if count > 1}

    def rates(self, most: int) -> tuple[float, list[tuple[int, float]]]:
        """Requests a second, and the ``most`` hottest prefixes with theirs, the hottest first."""
        if not self.is_wanted:
            self._now, self._before, self._num_now, self._num_before = {}, {}, 0, 0
            self._began_s, self._before_s = self._clock(), 0.0
        self._asked_s = self._clock()
        self._roll()
        seconds = max(self._clock() - self._began_s + self._before_s, 1.0)
        counts = dict(self._before)
        for digest, count in self._now.items():
            counts[digest] = counts.get(digest, 0) + count
        hottest = heapq.nsmallest(most, counts.items(), key=lambda one: (-one[1], one[0]))
        rates = [(digest, count / seconds) for digest, count in hottest if count > 1]
        return (self._num_now + self._num_before) / seconds, rates

    def _roll(self) -> None:
        if (passed_s := self._clock() - self._began_s) >= _WINDOW_S:
            self._before, self._num_before, self._before_s = self._now, self._num_now, passed_s
            self._now, self._num_now, self._began_s = {}, 0, self._clock()
