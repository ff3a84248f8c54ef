"""One of Mooncake Store's two processes, run by Mooncake's own python: imports nothing of Moonpool.

    python bench/store/peers/mooncake_remote_child.py ROLE MASTER_PORT POOL_NBYTES

The node lends POOL_NBYTES and keeps them lent until its standard input ends; the client lends nothing, so
that what it puts goes to the node. Questions are JSON lines, each answered with one:

    {"prepare": {"count": n, "nbytes": n}}   objects, as many, of that size   -> {}
    {"move": "put"|"get", "seconds": s}      all of them, again and again     -> {"seconds": [of each time]}

A put of objects that are there is a put after their removal, which is not timed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from typing import Any

import numpy as np
from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found,unused-ignore]

_LOCAL_NBYTES = 64 << 20


class Objects:
    def __init__(self, store: Any, case: int, count: int, nbytes: int) -> None:
        self._store = store
        self._keys = [f"{case}-{number}" for number in range(count)]
        self._sizes = [nbytes] * count
        self._memory = np.frombuffer(mmap.mmap(-1, count * nbytes), np.uint8)
        self._memory[:] = 7
        base = int(self._memory.__array_interface__["data"][0])
        self._base = base
        if store.register_buffer(base, count * nbytes):
            raise RuntimeError("the buffer could not be registered")
        self._addresses = [base + number * nbytes for number in range(count)]
        self.put()

    def close(self) -> None:
        self._remove()
        self._store.unregister_buffer(self._base)

    def _remove(self) -> None:
        for key in self._keys:
            self._store.remove(key, True)

    def put(self) -> float:
        self._remove()
        began_s = time.perf_counter()
        codes = self._store.batch_put_from(self._keys, self._addresses, self._sizes)
        return self._timed(began_s, all(code == 0 for code in codes), "put", codes)

    def get(self) -> float:
        began_s = time.perf_counter()
        codes = self._store.batch_get_into(self._keys, self._addresses, self._sizes)
        return self._timed(began_s, codes == self._sizes, "get", codes)

    @staticmethod
    def _timed(began_s: float, done: bool, what: str, codes: list[int]) -> float:
        seconds = time.perf_counter() - began_s
        if not done:
            raise RuntimeError(f"{what} failed: {codes}")
        return seconds


def main(role: str, port: str, nbytes: int) -> None:
    # What its libraries print must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        print(json.dumps(content), file=answers, flush=True)

    store = MooncakeDistributedStore()
    lent = nbytes if role == "node" else 0
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", lent, _LOCAL_NBYTES, "tcp", "", f"127.0.0.1:{port}")
    if code:
        raise RuntimeError(f"setup failed: {code}")
    answer({"ready": True})
    objects: Objects | None = None
    for case, line in enumerate(sys.stdin):
        question = json.loads(line)
        if "prepare" in question:
            if objects is not None:
                objects.close()
            objects = Objects(store, case, **question["prepare"])
            answer({})
        else:
            assert objects is not None
            move = objects.put if question["move"] == "put" else objects.get
            took: list[float] = []
            until = time.perf_counter() + question["seconds"]
            while not took or time.perf_counter() < until:
                took.append(move())
            answer({"seconds": took})
    store.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
