"""Calls of the C library that Python lacks. They release the GIL."""

from __future__ import annotations

import ctypes
import errno
import os

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23
PR_GET_DUMPABLE = 3
PR_SET_PTRACER = 0x59616D61
_EHWPOISON = 133
_SYS_PIDFD_GETFD = 438  # the same number on all machines
IOV_MAX = 1024
"""Most buffers in one vectored call."""

_libc = ctypes.CDLL(None, use_errno=True)
# Keeps the GIL. Winning it back after a call of microseconds may take half a millisecond.
_quick_libc = ctypes.PyDLL(None, use_errno=True)


def _declare(
    name: str, result: type, *arguments: type, library: ctypes.CDLL = _libc
) -> ctypes._NamedFuncPointer:
    function = getattr(library, name)
    function.restype = result
    function.argtypes = arguments
    return function  # type: ignore[no-any-return]


_size, _pointer = ctypes.c_size_t, ctypes.c_void_p
_madvise = _declare("madvise", ctypes.c_int, _pointer, _size, ctypes.c_int)
_prctl = _declare("prctl", ctypes.c_int, ctypes.c_int, *([ctypes.c_ulong] * 4))
_vm_arguments = (ctypes.c_int, _pointer, ctypes.c_ulong, _pointer, *([ctypes.c_ulong] * 2))
_process_vm_readv = _declare("process_vm_readv", ctypes.c_ssize_t, *_vm_arguments)
_quick_vm_readv = _declare("process_vm_readv", ctypes.c_ssize_t, *_vm_arguments, library=_quick_libc)
_syscall = _declare("syscall", ctypes.c_long, ctypes.c_long, *([ctypes.c_long] * 3))
_sendmsg = _declare("sendmsg", ctypes.c_ssize_t, ctypes.c_int, _pointer, ctypes.c_int)
_recvmsg = _declare("recvmsg", ctypes.c_ssize_t, ctypes.c_int, _pointer, ctypes.c_int)


class _MessageHeader(ctypes.Structure):
    _fields_ = [
        ("name", _pointer),
        ("name_nbytes", ctypes.c_uint),
        ("vectors", _pointer),
        ("num_vectors", _size),
        ("control", _pointer),
        ("control_nbytes", _size),
        ("flags", ctypes.c_int),
    ]


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def madvise(address: int, nbytes: int, advice: int) -> bool:
    """False: the kernel does not know or refuses the advice. Raises MemoryError when no page is left."""
    ctypes.set_errno(0)
    if _madvise(address, nbytes, advice) == 0:
        return True
    if ctypes.get_errno() in (errno.ENOMEM, _EHWPOISON):
        raise MemoryError(f"the kernel has not got {nbytes} bytes left")
    return False


def allow_reader(pid: int) -> bool:
    """Allow one process, and none that was named before, to read this one's memory, where Yama allows only
    parents. False: there is no Yama."""
    return bool(_prctl(PR_SET_PTRACER, pid, 0, 0, 0) == 0)


def is_dumpable() -> bool:
    """False: the process gained privileges by exec, so its user's processes cannot read it."""
    return bool(_prctl(PR_GET_DUMPABLE, 0, 0, 0, 0) == 1)


def process_vm_readv(
    pid: int, local: int, num_local: int, remote: int, num_remote: int, *, quick: bool = False
) -> int:
    """Copy from the memory of process ``pid``; ``local`` and ``remote`` are addresses of iovec arrays.

    quick: keep the GIL. Returns the bytes copied: fewer than requested if a remote page is missing. Raises
    OSError: EPERM without permission, ESRCH when the process is gone, EFAULT, ENOSYS.
    """
    function = _quick_vm_readv if quick else _process_vm_readv
    copied = function(pid, local, num_local, remote, num_remote, 0)
    if copied < 0:
        raise _failure()
    return int(copied)


def pidfd_getfd(pidfd: int, fd: int) -> int:
    """Duplicate another process's descriptor. Needs permission to read its memory. Raises OSError."""
    own = _syscall(_SYS_PIDFD_GETFD, pidfd, fd, 0)
    if own < 0:
        raise _failure()
    return int(own)


def send_vectors(fd: int, vectors: int, num_vectors: int, flags: int) -> int:
    """``sendmsg`` of an iovec array at address ``vectors``. Returns bytes sent. Raises OSError."""
    return _message(_sendmsg, fd, vectors, num_vectors, flags)


def receive_vectors(fd: int, vectors: int, num_vectors: int, flags: int) -> int:
    """``recvmsg`` into an iovec array. Returns bytes received; 0: end of stream. Raises OSError."""
    return _message(_recvmsg, fd, vectors, num_vectors, flags)


def _message(call: ctypes._NamedFuncPointer, fd: int, vectors: int, num_vectors: int, flags: int) -> int:
    header = _MessageHeader(vectors=vectors, num_vectors=num_vectors)
    while (moved := call(fd, ctypes.byref(header), flags)) < 0:
        if ctypes.get_errno() != errno.EINTR:
            raise _failure()
    return int(moved)
