"""A client with a clock of its own: ``client_process URL OFFSET_S NUMBER DEADLINE_S HOST``.

Reads the numbers of histories from standard input, a line each; plays its part in each, several at a time;
and writes each part as a line of JSON: ``[history, [[key, kind, value, called_s, ended_s], …], errors]``.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from types import SimpleNamespace

OFFSET_S = float(sys.argv[2])
_time, _time_ns = time.time, time.time_ns
# Before anything else is imported: nothing of the client sees another clock.
time.time = lambda: _time() + OFFSET_S
time.time_ns = lambda: _time_ns() + int(OFFSET_S * 1e9)

import grpc.aio._utils  # noqa: E402
import numpy as np  # noqa: E402

import moonpool  # noqa: E402
from moonpool.kvstore.client import StoreClient  # noqa: E402
from moonpool.kvstore.client.errors import OutcomeUnknown, StoreClientError  # noqa: E402
from moonpool.kvstore.errors import IndexUnavailable  # noqa: E402
from moonpool.kvstore.index.redis.kv_index import KVIndex  # noqa: E402
from moonpool.runtime.config.options import TransferOptions  # noqa: E402
from moonpool.runtime.config.transfer_options import TcpOptions  # noqa: E402
from moonpool.runtime.security.call_tokens import TokenSigner  # noqa: E402

# Deadlines are compared with the machine's own clock, in C.
grpc.aio._utils.time = SimpleNamespace(time=_time)
# What was signed or sealed by a clock that differs by more than half a minute is refused.
TokenSigner.__init__.__kwdefaults__["clock"] = _time
KVIndex.__init__.__kwdefaults__["unix_clock"] = _time

NUM_OPERATIONS = 9
NUM_KEYS = 2
# Of int64: a small object, and one in chunks.
LENGTHS = (2, 2, 10_000)


async def play(store: StoreClient, history: int, client: int) -> None:
    rng = random.Random(history * 1000 + client)
    done: list[list[object]] = []
    errors: list[str] = []
    for number in range(NUM_OPERATIONS):
        key = rng.randrange(NUM_KEYS)
        name = f"history {history} key {key}"
        kind = rng.choices(("put", "get", "remove"), (4, 5, 1))[0]
        value: object = history * 10_000 + client * 100 + number
        called_s = time.monotonic()
        try:
            if kind == "put":
                await store.put(name, np.full(rng.choice(LENGTHS), value), copies=2)
            elif kind == "remove":
                value = await store.remove(name)
            else:
                found = await store.get(name)
                value = None if found is None else int(found[0])
                if found is not None and not (found == found[0]).all():
                    errors.append(f"{name}: bytes of two puts are mixed")
        except OutcomeUnknown:
            done.append([key, kind, value, called_s, None])
            continue
        except (StoreClientError, IndexUnavailable):
            continue  # It had no effect, or is a read.
        except Exception as error:
            errors.append(f"{kind} of {name}: {error!r}")
            done.append([key, kind, value, called_s, None])
            continue
        done.append([key, kind, value, called_s, time.monotonic()])
    print(json.dumps([history, done, errors]), flush=True)


async def main() -> None:
    client, deadline_s, host = int(sys.argv[3]), float(sys.argv[4]), sys.argv[5]
    transfer = TransferOptions(transports=("local", "tcp"), tcp=TcpOptions(host=host))
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with moonpool.connect(sys.argv[1], deadline_s=deadline_s, transfer=transfer) as store:
        print("ready", flush=True)
        async with asyncio.TaskGroup() as group:
            while line := await reader.readline():
                group.create_task(play(store, int(line), client))


asyncio.run(main())
