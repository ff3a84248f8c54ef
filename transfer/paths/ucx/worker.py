"""A UCX worker and its progress thread."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import queue
import select
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from moonpool.transfer.errors import TransferError
from moonpool.transfer.native import ucx as lib
from moonpool.transfer.native.ucx import Ucx
from moonpool.transfer.paths.ucx.topology import num_rdma_rails, rdma_devices

_log = logging.getLogger(__name__)
T = TypeVar("T")

_MOST_TRIES = 10  # of a context and a worker, where interfaces come and go
# Settings to survive a peer's death and to make TCP fast; names as in `ucx_info -c`. An environment variable
# UCX_<name> takes precedence. Not every build knows every name.
_CONFIG = {
    "MM_ERROR_HANDLING": "y",
    "CMA_MEMORY_INVALIDATE": "y",
    # Copies per call of progress. The default is one, and each call acquires the GIL.
    "CMA_TX_QUOTA": "64",
    "TCP_TX_SEG_SIZE": "512K",
    "TCP_RX_SEG_SIZE": "512K",
    "RNDV_FRAG_MEM_TYPES": "host",
    # By default the progress thread, and with it all peers, waits for each connection. And UCX (1.21) never
    # closes a socket that was refused at once.
    "TCP_CONN_NB": "y",
}
# Idle rounds before the thread sleeps: about 20 µs, less than waking up takes.
_SPINS = 20
# Longest sleep while there are tasks: some wait for a time.
_TASK_SLEEP_MS = 20
# Longest that closing waits for endpoints that are being closed.
_CLOSE_S = 1.0


class UcxError(TransferError):
    """A call of libucp failed."""

    code = "UNAVAILABLE"

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call} failed with status {status}")
        self.status = status


class Task(Protocol):
    """Work that the progress thread calls repeatedly."""

    def step(self) -> bool:
        """Do what can be done now. True: it is complete. Must not raise."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """Memory mapped by UCX. key: what a peer needs to read it."""

    handle: int
    key: bytes


class UcxWorker:
    """``submit`` and ``start`` may be called from any thread; ``worker`` belongs to the progress thread.

    ``stopped``: it, its endpoints and their requests must not be used any more (see ``give_up``).
    """

    def __init__(self, ucx: Ucx) -> None:
        """Raises UcxError when no transport works here."""
        self.ucx = ucx
        self._context, self.worker = self._make_both()
        self.address = self._own_address()
        event_fd = ctypes.c_int()
        self._check("ucp_worker_get_efd", ucx.call.ucp_worker_get_efd(self.worker, ctypes.byref(event_fd)))
        self._event_fd = event_fd.value
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for fd in (self._event_fd, self._wake_fd):
            self._poll.register(fd, select.POLLIN)
        self.stopped = False
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tasks: list[Task] = []
        self._closing_s = math.inf
        self._thread = threading.Thread(target=self._run, name="moonpool ucx", daemon=True)
        self._thread.start()

    def _make_context(self) -> ctypes.c_void_p:
        call = self.ucx.call
        config, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._check("ucp_config_read", call.ucp_config_read(None, None, ctypes.byref(config)))
        try:
            # By default an operation uses one device.
            rails = {"MAX_RMA_RAILS": str(max(1, num_rdma_rails(rdma_devices())))}
            for name, value in (_CONFIG | rails).items():
                if f"UCX_{name}" not in os.environ:
                    call.ucp_config_modify(config, name.encode(), value.encode())
            params = lib.Params(
                field_mask=lib.PARAM_FEATURES | lib.PARAM_MT_WORKERS_SHARED,
                features=lib.FEATURE_RMA | lib.FEATURE_WAKEUP,
                # Other threads map regions.
                mt_workers_shared=1,
            )
            version = self.ucx.version
            status = call.ucp_init_version(
                version[0], version[1], ctypes.byref(params), config, ctypes.byref(context)
            )
        finally:
            call.ucp_config_release(config)
        self._check("ucp_init", status)
        return context

    def _make_both(self) -> tuple[ctypes.c_void_p, ctypes.c_void_p]:
        """A context and its worker."""
        params = lib.WorkerParams(
            field_mask=lib.WORKER_PARAM_THREAD_MODE, thread_mode=lib.THREAD_MODE_SERIALIZED
        )
        for _ in range(_MOST_TRIES):
            context, worker = self._make_context(), ctypes.c_void_p()
            status = self.ucx.call.ucp_worker_create(context, ctypes.byref(params), ctypes.byref(worker))
            if status == lib.OK:
                return context, worker
            self.ucx.call.ucp_cleanup(context)
            if status != lib.ERR_NO_DEVICE:
                break
            # An interface that the context had found is gone, as those of containers come and go.
        raise UcxError("ucp_worker_create", status)

    def _own_address(self) -> bytes:
        call = self.ucx.call
        address, nbytes = ctypes.c_void_p(), ctypes.c_size_t()
        status = call.ucp_worker_get_address(self.worker, ctypes.byref(address), ctypes.byref(nbytes))
        self._check("ucp_worker_get_address", status)
        try:
            assert address.value is not None
            return ctypes.string_at(address.value, nbytes.value)
        finally:
            call.ucp_worker_release_address(self.worker, address)

    @staticmethod
    def _check(call: str, status: int) -> None:
        if status != lib.OK:
            raise UcxError(call, status)

    # ------------------------------------------------------------------ from any thread

    def map(self, address: int, nbytes: int) -> Mapping:
        """Raises UcxError."""
        call = self.ucx.call
        handle, key, key_nbytes = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t()
        # Peers get a key to read. No peer writes by UCX, see ``WriteGrants``.
        params = lib.MapParams(
            field_mask=lib.MAP_PARAM_ADDRESS | lib.MAP_PARAM_LENGTH | lib.MAP_PARAM_PROT,
            address=address,
            length=nbytes,
            prot=lib.PROT_LOCAL | lib.PROT_REMOTE_READ,
        )
        status = call.ucp_mem_map(self._context, ctypes.byref(params), ctypes.byref(handle))
        self._check("ucp_mem_map", status)
        status = call.ucp_rkey_pack(self._context, handle, ctypes.byref(key), ctypes.byref(key_nbytes))
        self._check("ucp_rkey_pack", status)
        assert key.value is not None
        assert handle.value is not None
        packed = ctypes.string_at(key.value, key_nbytes.value)
        call.ucp_rkey_buffer_release(key)
        return Mapping(handle.value, packed)

    def unmap(self, mapping: Mapping) -> None:
        self.ucx.call.ucp_mem_unmap(self._context, mapping.handle)

    def submit(self, command: Callable[[], None]) -> None:
        """Run ``command``, which may not raise, on the progress thread."""
        self._commands.put(command)
        self.wake()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run ``function`` on the progress thread; return or raise what it does."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def command() -> None:
            try:
                result = function(*arguments)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, done, error)
            else:
                loop.call_soon_threadsafe(_settle, done, result)

        self.submit(command)
        return await done

    def wake(self) -> None:
        os.eventfd_write(self._wake_fd, 1)

    def start(self, task: Task) -> None:
        self.submit(lambda: self._tasks.append(task))

    def close(self) -> None:
        """End the thread and the worker. All reads have ended."""
        self.submit(self._stop)
        self._thread.join()
        os.close(self._wake_fd)

    def cleanup(self) -> None:
        """Release the library. After ``close`` and the last ``unmap``."""
        if not self.stopped:
            self.ucx.call.ucp_cleanup(self._context)

    # ------------------------------------------------------------------ the progress thread

    def give_up(self, reason: str) -> None:
        """Stop for good: without progress UCX copies nothing, and a device writes nothing for a closed
        connection. Reads of this process take other paths, those of peers from here do when they stall.

        The worker is not destroyed: a peer that is about to answer would abort (UCX 1.21).
        """
        if not self.stopped:
            _log.error("UCX is not used any more until this process restarts: %s", reason)
            self.stopped = True
            self._poll.unregister(self._event_fd)

    def _stop(self) -> None:
        self._closing_s = time.monotonic()

    def _run(self) -> None:
        progress = self.ucx.call.ucp_worker_progress
        idle = 0
        while time.monotonic() < self._closing_s + (_CLOSE_S if self._tasks else 0):
            moved = 0 if self.stopped else progress(self.worker)
            while not self._commands.empty():
                self._commands.get()()
                moved = 1
            if self._tasks:
                self._tasks = [task for task in self._tasks if not task.step()]
            idle = 0 if moved else idle + 1
            if idle > (_SPINS if self._tasks else 0):
                self._sleep()
                idle = 0
        if not self.stopped:
            self.ucx.call.ucp_worker_destroy(self.worker)

    def _sleep(self) -> None:
        # The worker signals later events only if nothing is left to progress.
        if not self.stopped and self.ucx.call.ucp_worker_arm(self.worker) != lib.OK:
            return
        if not self._commands.empty():
            return
        self._poll.poll(_TASK_SLEEP_MS if self._tasks else None)
        # The worker's own descriptor may have caused the wake-up.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)


def _settle(done: asyncio.Future[T], result: T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[T], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
