"""Sleep until a word of shared memory changes, without polling."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import numpy.typing as npt

# Of x86-64. The board needs its memory model, too: stores are seen in order.
_SYS_FUTEX = 202
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_ALL = 1 << 30

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = [("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long)]


class Futex:
    """A futex over the low half of one int64 of shared memory."""

    def __init__(self, words: npt.NDArray[np.int64], index: int) -> None:
        self._words = words  # keeps the mapping
        self._address = ctypes.c_void_p(int(words.__array_interface__["data"][0]) + 8 * index)

    def wait(self, value: int, timeout_s: float) -> None:
        """Sleep while the word is ``value``, until ``wake`` or the timeout. May return early."""
        whole, rest = divmod(timeout_s, 1.0)
        limit = _Timespec(int(whole), int(rest * 1e9))
        expected = ctypes.c_uint32(value & 0xFFFFFFFF)
        if _libc.syscall(_SYS_FUTEX, self._address, _FUTEX_WAIT, expected, ctypes.byref(limit), None, 0) < 0:
            error = ctypes.get_errno()
            # EAGAIN (the word had changed), ETIMEDOUT, EINTR.
            assert error in (11, 110, 4), os.strerror(error)

    def wake(self) -> None:
        """Wake all sleepers on the word."""
        _libc.syscall(_SYS_FUTEX, self._address, _FUTEX_WAKE, ctypes.c_int(_ALL), None, None, 0)
