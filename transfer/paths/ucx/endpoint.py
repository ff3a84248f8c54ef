"""The UCX connection to a peer's worker. All of it belongs to the progress thread."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from itertools import repeat

from moonpool.transfer.native import ucx as lib
from moonpool.transfer.paths.ucx.worker import UcxError, UcxWorker

# Pointers from here on are negative statuses.
_FIRST_ERROR = (1 << 64) - 100


def status_of(pointer: int | None) -> tuple[int, int]:
    """(status, request) of a non-blocking call's result; request 0: it is complete."""
    if pointer is None:
        return lib.OK, 0
    if pointer >= _FIRST_ERROR:
        return pointer - (1 << 64), 0
    return lib.IN_PROGRESS, pointer


class Endpoint:
    """failed: the status with which the connection broke, or 0. num_reads: those that use it; a key is kept
    as long as one may.

    After ``close`` it is a ``Task`` of the worker until nothing of it is left.
    """

    def __init__(self, worker: UcxWorker, address: bytes) -> None:
        """Raises UcxError."""
        if worker.stopped:
            raise UcxError("ucp_ep_create", lib.ERR_CANCELED)
        self._worker = worker
        self._ucx = worker.ucx
        self._keys: dict[int, ctypes.c_void_p] = {}
        self._forgotten: list[ctypes.c_void_p] = []  # keys to destroy
        self._closing = 0  # the request
        self.num_reads = 0
        self.failed = 0
        self.closed = False
        # UCX may call it during the endpoint's life.
        self._on_error = lib.ErrorCallback(self._broke)
        buffer = ctypes.create_string_buffer(address, len(address))
        self._handle = ctypes.c_void_p()
        params = lib.EndpointParams(
            field_mask=lib.EP_PARAM_ADDRESS | lib.EP_PARAM_ERROR_MODE | lib.EP_PARAM_ERROR_HANDLER,
            address=ctypes.addressof(buffer),
            error_mode=lib.ERROR_MODE_PEER,
            error_callback=ctypes.cast(self._on_error, ctypes.c_void_p),
        )
        status = self._ucx.call.ucp_ep_create(worker.worker, ctypes.byref(params), ctypes.byref(self._handle))
        if status != lib.OK:
            raise UcxError("ucp_ep_create", status)
        self._params = lib.RequestParams()

    def _broke(self, argument: int | None, endpoint: int | None, status: int) -> None:
        self.failed = status

    def knows(self, region_id: int) -> bool:
        return region_id in self._keys

    def learn(self, region_id: int, key: bytes) -> None:
        """Unpack the key of a region of the peer. Raises UcxError."""
        if region_id in self._keys:
            return
        unpacked = ctypes.c_void_p()
        buffer = ctypes.create_string_buffer(key, len(key))
        status = self._ucx.call.ucp_ep_rkey_unpack(self._handle, buffer, ctypes.byref(unpacked))
        if status != lib.OK:
            raise UcxError("ucp_ep_rkey_unpack", status)
        self._keys[region_id] = unpacked

    def forget(self, region_id: int) -> None:
        key = self._keys.pop(region_id, None)
        if key is not None:
            self._forgotten.append(key)
            self._destroy_keys()

    def read_ended(self) -> None:
        self.num_reads -= 1
        self._destroy_keys()

    def _destroy_keys(self) -> None:
        if not self.num_reads and not self._worker.stopped:
            for key in self._forgotten:
                self._ucx.call.ucp_rkey_destroy(key)
            self._forgotten.clear()

    def get(
        self,
        region_id: int,
        here: Sequence[int],
        nbytes: Sequence[int],
        there: Sequence[int],
        requests: list[int],
    ) -> int:
        """Post reads of ``nbytes[i]`` from address ``there[i]`` to ``here[i]``, and return a status.

        requests: receives those that are not complete at once. All are when a later ``flush`` is.
        """
        handle, key = repeat(self._handle.value), repeat(self._keys[region_id].value)
        params = repeat(ctypes.addressof(self._params))
        # A Python loop would take twice as long.
        pointers = list(map(self._ucx.quick.ucp_get_nbx, handle, here, nbytes, there, key, params))
        requests += filter(None, pointers)
        if requests and max(requests) >= _FIRST_ERROR:
            worst = max(requests)
            requests[:] = [request for request in requests if request < _FIRST_ERROR]
            return worst - (1 << 64)
        return lib.OK

    def flush(self) -> tuple[int, int]:
        """(status, request); complete when everything posted before it is."""
        return status_of(self._ucx.quick.ucp_ep_flush_nbx(self._handle, ctypes.byref(self._params)))

    def check(self, request: int) -> int:
        """The status of a request. A complete request is freed."""
        status: int = self._ucx.quick.ucp_request_check_status(request)
        if status != lib.IN_PROGRESS:
            self._ucx.quick.ucp_request_free(request)
        return status

    def free(self, requests: list[int]) -> None:
        """Free complete requests."""
        deque(map(self._ucx.quick.ucp_request_free, requests), maxlen=0)

    def are_complete(self, requests: list[int]) -> bool:
        """Whether all are. Those that are complete are freed and removed."""
        while requests and self._ucx.quick.ucp_request_check_status(requests[-1]) != lib.IN_PROGRESS:
            self._ucx.quick.ucp_request_free(requests.pop())
        return not requests

    def close(self) -> None:
        """Close the connection by force, without waiting: posted requests are over when they are complete.
        Idempotent."""
        if self.closed or self._worker.stopped:
            return
        self.closed = True
        self._forgotten += self._keys.values()
        self._keys.clear()
        params = lib.RequestParams(op_attr_mask=lib.OP_FLAGS, flags=lib.CLOSE_FORCE)
        _, self._closing = status_of(self._ucx.call.ucp_ep_close_nbx(self._handle, ctypes.byref(params)))
        self._worker.start(self)

    def step(self) -> bool:
        if not self._worker.stopped:
            if self._closing and self.check(self._closing) == lib.IN_PROGRESS:
                return False
            self._closing = 0
            self._destroy_keys()
        return self._worker.stopped or not self._forgotten
