"""Both halves of the connector without vLLM, around pages whose right contents are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from moonpool.connectors.checkpoint import fingerprint_of, layout_facts
from moonpool.connectors.vllm.lookup.prefix_index import PrefixIndex
from moonpool.connectors.vllm.plan import Outcome
from moonpool.connectors.vllm.scheduler import SchedulerSide
from moonpool.connectors.vllm.settings import identify, read_settings
from moonpool.connectors.vllm.worker import WorkerSide
from tests.forked_command import forked_command

BLOCK = 16
PAGE_NBYTES = 4096
_NUM_LAYERS = 2
_WITHIN_S = 60.0


@dataclass
class Request:
    """A prompt of ``num_prompt_tokens``; those with equal names and salts have equal tokens."""

    request_id: str
    num_prompt_tokens: int
    name: str = ""
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    cache_salt: str | None = None
    lora_request: object | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: object | None = None

    def __post_init__(self) -> None:
        name = self.name or self.request_id[0]
        self.all_token_ids = [ord(name[0])] * self.num_prompt_tokens
        keyed = f"{name}{self.cache_salt or ''}"
        self.block_hashes = [f"{keyed}{i}".encode() for i in range(self.num_prompt_tokens // BLOCK)]

    @property
    def contents(self) -> list[bytes]:
        """Names of what its blocks contain, the partial one included."""
        rest = self.num_prompt_tokens % BLOCK
        tail = f"{self.all_token_ids[0]}{self.cache_salt or ''} {self.num_prompt_tokens}".encode()
        return [*self.block_hashes, tail] if rest else self.block_hashes


class SmallEngine:
    """It has no cache of its own: what it does not load it computes."""

    def __init__(self, redis_url: str, name: str, *, sets: Sequence[str] = (), **facts: str) -> None:
        # A lease that an engine without a processor for two seconds does not lose.
        every = ["store.host.capacity_nbytes=1MiB", "store.ssd.deadline_s=60", "index.lease_ttl_s=10", *sets]
        config = read_settings({"url": redis_url, "node_id": name, "set": every}, name)
        identify(config)
        known = layout_facts("hub/small", "1", {"block_size": str(BLOCK), **facts})
        fingerprint = fingerprint_of(known)
        self.layers = {
            f"layer{i}": torch.zeros(64, PAGE_NBYTES, dtype=torch.uint8) for i in range(_NUM_LAYERS)
        }
        self.scheduler = SchedulerSide(name, fingerprint, BLOCK, PrefixIndex(config.index, _WITHIN_S))
        self.worker = WorkerSide(config, fingerprint, known)
        self.worker.register(self.layers)
        self.answer: dict[str, Any] | None = None  # to the latest request: its kv_transfer_params
        self.num_asked = 0  # by ``until_hit``

    @property
    def node(self) -> Any:
        """The store node; the engine's only while it runs."""
        assert self.worker._node is not None
        return self.worker._node._node

    def serve(self, request: Request) -> int:
        """Load what can be loaded, compute and save the rest. Returns how many tokens were loaded; they are
        checked."""
        if self.begin(request):
            self.end_load(request)
        return self.finish(request)

    def begin(self, request: Request) -> int:
        """Begin the load; returns how many tokens it is of."""
        blocks = list(range(request.num_prompt_tokens // BLOCK + 1))
        self.scheduler.arrived(request)
        num_tokens = self.scheduler.match(request, 0)
        self.scheduler.allocated(request, blocks, num_tokens)
        self._blocks = blocks
        self._step({})
        return num_tokens

    def end_load(self, request: Request) -> None:
        """Wait for its end; while it fails it is asked for again."""
        while self.await_load().failed and self.begin(request):
            pass

    def await_load(self) -> Outcome:
        outcome = Outcome()

        def ended() -> bool:
            nonlocal outcome
            outcome = self.worker.ended_loads()
            return bool(outcome.loaded)

        until(ended)
        self.scheduler.ended(outcome.loaded, outcome.failed)
        return outcome

    def finish(self, request: Request) -> int:
        """Check what was loaded, compute and save the rest. Returns how many tokens were loaded."""
        num_loaded = self.scheduler._tracked[request.request_id].report.loaded_tokens
        for block, name in enumerate(request.contents):
            if block < -(-num_loaded // BLOCK):
                assert self.page(block) == content(name), f"block {block} has other bytes"
            for layer in self.layers.values():
                layer[block] = torch.from_numpy(np.frombuffer(content(name), np.uint8).copy())
        request.num_computed_tokens = num_loaded
        self._step({request.request_id: request.num_prompt_tokens - num_loaded})
        self.worker.fence()
        self.answer = self.scheduler.finished(request.request_id)
        self._step({})
        return num_loaded

    def page(self, block: int) -> bytes:
        pages = [layer[block].numpy().tobytes() for layer in self.layers.values()]
        assert len(set(pages)) == 1
        return pages[0]

    def _step(self, num_scheduled: dict[str, int]) -> None:
        plan = self.scheduler.plan(num_scheduled, lambda _: self._blocks)
        self.worker.begin_loads(plan)
        self.worker.begin_saves(plan)

    def until_hit(self, name: str, num_blocks: int) -> None:
        """Ask until so many blocks are loaded."""

        def hit() -> bool:
            self.num_asked += 1
            request = Request(f"{name}-{self.num_asked}", num_blocks * BLOCK + 1, name)
            return self.serve(request) == num_blocks * BLOCK

        until(hit)

    def hits_itself(self, name: str, num_blocks: int) -> bool:
        """Whether the index knows that it has the blocks."""
        self.until_hit(name, num_blocks)
        return bool(self.reports()[0]["tier"] == "host")

    def reports(self) -> list[Any]:
        """Of its requests, newest first."""
        return self.worker._requests.latest()

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()

    def break_blocks(self) -> None:
        """Change one bit of every block in host memory."""
        host = self.node._kv.store.host
        for key in list(host.keys()):
            host.bytes_of(host.slot_of(key))[100] ^= 1


class Peer:
    """A small engine in a process of its own."""

    def __init__(self, redis_url: str, name: str, *, sets: Sequence[str] = (), **facts: str) -> None:
        self.name = name
        arguments = json.dumps({"redis_url": redis_url, "name": name, "sets": list(sets), **facts})
        command = [*forked_command("tests.connectors.small_engine"), arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = int(self._answer())

    def hold(self, name: str, num_blocks: int) -> None:
        """Returns once it can load the blocks itself, so that they are in the index."""
        self._tell(f"{name} {num_blocks}")

    def give(self, name: str, num_tokens: int) -> dict[str, Any]:
        """Compute a prompt for another engine; returns what that one must be sent."""
        self._tell(f"give {name} {num_tokens}")
        return {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self.name}

    def take(self, name: str, num_tokens: int, params: dict[str, Any]) -> None:
        """Load a prompt that another engine has computed."""
        self._tell(f"take {name} {num_tokens} {json.dumps(params)}")

    def break_blocks(self) -> None:
        self._tell("break")

    def _tell(self, words: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{words}\n")
        self._process.stdin.flush()
        assert self._answer() == "done"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Idempotent."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):
            self._process.communicate(timeout=_WITHIN_S)


def content(name: bytes) -> bytes:
    """The right bytes of a page."""
    return (sha256(name).digest() * (PAGE_NBYTES // 32))[:PAGE_NBYTES]


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        time.sleep(0.005)


def _serve_as_peer(redis_url: str, name: str, sets: Sequence[str], **facts: str) -> None:
    engine = SmallEngine(redis_url, name, sets=sets, **facts)
    print(os.getpid(), flush=True)
    for line in sys.stdin:
        words = line.split(maxsplit=3)
        if words == ["break"]:
            engine.break_blocks()
        elif words[0] == "give":
            asked = {"do_remote_decode": True}
            engine.serve(Request(words[1], int(words[2]), kv_transfer_params=asked))
        elif words[0] == "take":
            params = json.loads(words[3])
            until(lambda params=params: engine.scheduler._index.address_of(params["remote_engine_id"]))
            request = Request(words[1], int(words[2]), kv_transfer_params=params)
            assert engine.serve(request) == request.num_prompt_tokens - 1
        else:
            engine.until_hit(words[0], int(words[1]))
        print("done", flush=True)
    engine.close()


if __name__ == "__main__":
    _serve_as_peer(**json.loads(sys.argv[1]))
