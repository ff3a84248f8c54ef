"""One of the two processes of a peer, run by the peer's own python: imports nothing of Moonpool but its like.

    python -m moonpool.bench.transfer.peers.nixl_child ROLE POOL_NBYTES VARIANT

It prints ``{"address": a, "facts": …}`` when its pool is registered. ``ROLE`` is target or client. Questions
are JSON lines, each answered with one:

    {"connect": facts}                                          -> {}
    {"prepare": {"direction", "nbytes", "here": [[address…]…], "there": [[address…]…]}}   -> {}
    {"move": s}        all batches at once, again and again      -> {"seconds": [of each pass but the first]}
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

Batches = list[list[int]]
"""Addresses of the blocks of each."""


class Engine(Protocol):
    """A peer's library, made as ``Engine(address, nbytes, variant)`` of a pool it has to register."""

    @property
    def facts(self) -> Any:
        """What the client must be told of the target; JSON."""

    def connect(self, facts: Any) -> None: ...

    def mover(self, direction: str, here: Batches, there: Batches, nbytes: int) -> Callable[[], None]:
        """A function that moves all batches at the same time and returns when that is done."""


def serve(make: Callable[[int, int, str], Engine]) -> None:
    _, nbytes, variant = sys.argv[1:]
    # What its libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pool = _pool(int(nbytes))
    address = int(pool.__array_interface__["data"][0])
    engine = make(address, len(pool), variant)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    answer({"address": address, "facts": engine.facts})
    for line in sys.stdin:
        question = json.loads(line)
        if "connect" in question:
            engine.connect(question["connect"])
            answer({})
        elif "prepare" in question:
            what = question["prepare"]
            move = engine.mover(what["direction"], what["here"], what["there"], what["nbytes"])
            answer({})
        else:
            answer({"seconds": _repeat(move, question["move"])})


def _repeat(move: Callable[[], None], seconds: float) -> list[float]:
    took: list[float] = []
    move()
    until = time.perf_counter() + seconds
    while not took or time.perf_counter() < until:
        started = time.perf_counter()
        move()
        took.append(time.perf_counter() - started)
    return took


def _pool(nbytes: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """In huge pages and present, as Moonpool's own."""
    huge = 2 << 20
    mapping = mmap.mmap(-1, nbytes + huge, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapping, np.uint8)
    start = -int(whole.__array_interface__["data"][0]) % huge
    pool = whole[start : start + nbytes]
    pool[:] = 0
    return pool
