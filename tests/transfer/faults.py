"""Ways to fail: links that can be cut, and what a batch came to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from moonpool.runtime.config.options import TransferOptions
from moonpool.transfer import Span, TransferAgent, TransferReport
from moonpool.transfer.native.ucx import load_ucx
from moonpool.transfer.paths.tcp.stream_path import StreamPath


def choose(transport: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The transport's name; ucx-tcp: UCX is made to use TCP. Skips what is not installed."""
    name, _, variant = transport.partition("-")
    if name == "ucx" and load_ucx() is None:
        pytest.skip("there is no libucp: pip install moonpool[ucx]")
    if variant:
        monkeypatch.setenv("UCX_TLS", "tcp,self")
    return name


async def start_here(transports: str) -> TransferAgent:
    options = TransferOptions(transports=tuple(transports.split(",")))
    return await TransferAgent.start(options, agent_id="here", epoch=1)


async def outcome(batch: Awaitable[TransferReport]) -> tuple[TransferReport | BaseException, float]:
    """What a batch came to, and after how many seconds."""
    started = time.perf_counter()
    (result,) = await asyncio.gather(batch, return_exceptions=True)
    return result, time.perf_counter() - started


async def again(move: Any, ours: list[Span], spans: list[Span]) -> TransferReport:
    while True:
        await move(ours, spans, deadline_s=20)


# What an error may be late: by the loop's own clock it is 3 ms, and 10 at most (docs/decisions/transfer.md).
GRACE_S = 0.5


async def late(batch: Awaitable[Any], deadline_s: float) -> tuple[Any, float]:
    """What a batch that has just begun came to, and how many seconds after its deadline; 0: before it.

    The deadline is when an alarm set for it rings on the same loop: a machine that is busy with other things
    makes both late. While this process gets no processor no time counts.
    """
    loop = asyncio.get_running_loop()
    clock = ProcessorClock()
    rang_s: asyncio.Future[float] = loop.create_future()
    alarm = loop.call_later(deadline_s, lambda: rang_s.set_result(clock.now_s()))
    result, _ = await outcome(batch)
    alarm.cancel()
    now_s = clock.close()
    return result, now_s - rang_s.result() if rang_s.done() else 0.0


class ProcessorClock:
    """Stands still while a thread of this process that only sleeps is not woken: then it got no processor. A
    call that blocks the loop does not stop it."""

    _TICK_S, _LATE_S = 0.01, 0.05

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._woken_s = time.perf_counter()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.wait(self._TICK_S):
            self._note()

    def _note(self) -> None:
        woken_s = time.perf_counter()
        late_s = woken_s - self._woken_s - self._TICK_S
        self._stood_s += late_s if late_s > self._LATE_S else 0.0
        self._woken_s = woken_s

    def now_s(self) -> float:
        return time.perf_counter() - self._stood_s

    def close(self) -> float:
        """The time at the end."""
        ended_s = time.perf_counter()
        self._closed.set()
        self._thread.join()
        self._note()
        return ended_s - self._stood_s


async def settled(agent: TransferAgent) -> None:
    """Wait until no thread, stream or device works for an ended batch of ``agent`` any more.

    Whatever could still write to its memory has written then.
    """
    pool = agent._pool
    barrier = threading.Barrier(pool._num_threads + 1)
    for _ in range(pool._num_threads):
        pool.submit(lambda: barrier.wait(60) and None)
    await asyncio.to_thread(barrier.wait, 60)
    async with asyncio.timeout(60):
        while streams_at_work(agent):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        if agent.memory.ucx is not None:
            worker = agent.memory.ucx.worker
            await worker.run(lambda: None)
            while worker._tasks:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    if agent.memory.cuda is not None:
        staging = agent.memory.cuda.staging
        for one in (*staging._idle, *staging._busy):
            await asyncio.to_thread(one.finish)


def stream_paths(agent: TransferAgent) -> list[StreamPath]:
    """Also those inside other paths, for writes."""
    paths = [path for peer in agent._peers._by_link.values() for path in peer.paths]
    inner = [getattr(path, name, None) for path in paths for name in ("_streams", "_writes")]
    return [path for path in (*paths, *inner) if isinstance(path, StreamPath)]


def num_streams(agent: TransferAgent) -> int:
    """Data connections that ``agent`` has made and that are not broken."""
    return sum(len(path._streams) for path in stream_paths(agent))


def streams_at_work(agent: TransferAgent) -> bool:
    """Whether a connection is being made or waits for a reply, or a broken one still has its thread."""
    rails = [rail for path in stream_paths(agent) for rail in path._rails]
    if any(rail.connecting is not None and not rail.connecting.done() for rail in rails):
        return True
    threads = [thread for thread in threading.enumerate() if thread.name.endswith(" stream")]
    streams = [stream for path in stream_paths(agent) for stream in list(path._streams)]
    return len(threads) > len(streams) or any(stream._sent or stream._next for stream in streams)


class Proxy:
    """Forwards TCP connections to ``port`` of a loopback address until told to hold everything back, as a cut
    cable does. ``passed_nbytes`` counts what went through, both ways.
    """

    def __init__(
        self, port: int, see: Callable[[bytes], object] = lambda _: None, host: str = "127.0.0.1"
    ) -> None:
        """``see`` is shown all that passes."""
        self._see = see
        self._target = (host, port)
        self._plugged = threading.Event()
        self._plugged.set()
        self._lock = threading.Lock()
        self._due: tuple[int, Callable[[], None]] | None = None
        self.passed_nbytes = 0
        self.change: Callable[[bytes], bytes] = lambda answered: answered
        """Of what the target answers."""
        self._listener = socket.create_server((host, 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def hold(self) -> None:
        """Let nothing through, and keep the connections open."""
        self._plugged.clear()

    def release(self) -> None:
        """Go on, first with what was held back."""
        self._plugged.set()

    @property
    def held(self) -> bool:
        return not self._plugged.is_set()

    @property
    def waits(self) -> bool:
        """Whether what was given to ``after`` has not been called yet."""
        return self._due is not None

    def after(self, nbytes: int, do: Callable[[], None]) -> None:
        """Call ``do`` once, as soon as ``nbytes`` more have passed: in the middle of what passes then."""
        self._due = (self.passed_nbytes + nbytes, do)

    async def drained(self, threads: list[threading.Thread]) -> None:
        """Wait until all that these ``threads`` held back has gone on, and its connections have ended."""
        for thread in threads:
            await asyncio.to_thread(thread.join, 60)
            assert not thread.is_alive(), "a connection that was given up is still open"

    def forwarding(self) -> list[threading.Thread]:
        """The threads of the connections there are now."""
        return [thread for thread in self._threads[1:] if thread.is_alive()]

    def cut(self) -> None:
        """Break every connection there is; both ends are told."""
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                far = socket.create_connection(self._target)
                self._sockets.append(far)
                for source, sink in ((near, far), (far, near)):
                    self._start(self._forward, source, sink, source is far)

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                self._plugged.wait()
                self._see(received)
                with self._lock:
                    self.passed_nbytes += len(received)
                    due = self._due
                    if due is not None and self.passed_nbytes >= due[0]:
                        due[1]()
                        self._due = None
                sink.sendall(self.change(received) if answers else received)
        self._plugged.wait()
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._plugged.set()
        # Before the connections are ended: it may be about to add one.
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for sock in (self._listener, *self._sockets):
            sock.close()
