"""The UCX library, by ctypes: finding libucp, and the calls that are used (API 1.10 and later)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_OLDEST = (1, 10)
# UCX reads these when it is loaded. It must not catch our signals.
_ENVIRONMENT = {"UCX_ERROR_SIGNALS": "", "UCX_HANDLE_ERRORS": "none", "UCX_LOG_LEVEL": "fatal"}

_LOADER_CONFIGURATION = Path("/etc/ld.so.conf.d")
_FOLDERS = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


@dataclass(frozen=True, slots=True)
class Ucx:
    """A loaded libucp. call: releases the GIL. quick: keeps it, for short and frequent calls."""

    call: ctypes.CDLL
    quick: ctypes.PyDLL
    version: tuple[int, int, int]
    path: str
    rdma: bool
    """It was built with verbs, and this host has an RDMA device."""
    transports: tuple[str, ...]
    """Its modules, such as cma, ib, rdmacm and cuda; TCP and posix are built in."""
    from_wheel: bool
    """It belongs to the package libucx, not to the system."""


def _structure(name: str, rest_nbytes: int, **fields: Any) -> Any:
    """A structure of ucp.h, with space for the fields that later versions add."""
    members = [*fields.items(), ("rest", ctypes.c_uint8 * rest_nbytes)]
    return type(name, (ctypes.Structure,), {"_fields_": members})


_size, _pointer, _status, _int = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_int
_u32, _u64 = ctypes.c_uint32, ctypes.c_uint64

Params = _structure(
    "Params",
    64,
    field_mask=_u64,
    features=_u64,
    request_size=_size,
    request_init=_pointer,
    request_cleanup=_pointer,
    tag_sender_mask=_u64,
    mt_workers_shared=_int,
)
WorkerParams = _structure("WorkerParams", 240, field_mask=_u64, thread_mode=_int)
EndpointParams = _structure(
    "EndpointParams",
    96,
    field_mask=_u64,
    address=_pointer,
    error_mode=_int,
    error_callback=_pointer,
    error_argument=_pointer,
)
MapParams = _structure(
    "MapParams", 64, field_mask=_u64, address=_pointer, length=_size, flags=_u32, prot=_u32
)
RequestParams = _structure(
    "RequestParams",
    64,
    op_attr_mask=_u32,
    flags=_u32,
    request=_pointer,
    callback=_pointer,
    datatype=_u64,
    user_data=_pointer,
    reply_buffer=_pointer,
    memory_type=_int,
    recv_info=_pointer,
    memory_handle=_pointer,
)

# Bits of field masks, features and modes, from ucp.h.
PARAM_FEATURES, PARAM_MT_WORKERS_SHARED = 0x1, 0x20
FEATURE_RMA, FEATURE_WAKEUP = 0x2, 0x10
WORKER_PARAM_THREAD_MODE, THREAD_MODE_SERIALIZED = 0x1, 1
EP_PARAM_ADDRESS, EP_PARAM_ERROR_MODE, EP_PARAM_ERROR_HANDLER = 0x1, 0x2, 0x4
ERROR_MODE_PEER = 1
MAP_PARAM_ADDRESS, MAP_PARAM_LENGTH, MAP_PARAM_PROT = 0x1, 0x2, 0x8
PROT_LOCAL, PROT_REMOTE_READ = 0x3, 0x100
OP_FLAGS, OP_MEMORY_HANDLE = 0x10, 0x100
CLOSE_FORCE = 1
OK, IN_PROGRESS, ERR_CANCELED = 0, 1, -16
# As functions return it: the lowest 8 bits.
ERR_NO_DEVICE = -14 & 0xFF
ErrorCallback = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "ucp_init_version": (_status, ctypes.c_uint, ctypes.c_uint, _pointer, _pointer, _pointer),
    "ucp_config_read": (_status, ctypes.c_char_p, ctypes.c_char_p, _pointer),
    "ucp_config_modify": (_status, _pointer, ctypes.c_char_p, ctypes.c_char_p),
    "ucp_config_release": (None, _pointer),
    "ucp_cleanup": (None, _pointer),
    "ucp_worker_create": (_status, _pointer, _pointer, _pointer),
    "ucp_worker_destroy": (None, _pointer),
    "ucp_worker_get_address": (_status, _pointer, _pointer, _pointer),
    "ucp_worker_release_address": (None, _pointer, _pointer),
    "ucp_worker_get_efd": (_status, _pointer, _pointer),
    "ucp_worker_arm": (_status, _pointer),
    "ucp_worker_progress": (ctypes.c_uint, _pointer),
    "ucp_ep_create": (_status, _pointer, _pointer, _pointer),
    "ucp_ep_close_nbx": (_pointer, _pointer, _pointer),
    "ucp_ep_flush_nbx": (_pointer, _pointer, _pointer),
    "ucp_ep_rkey_unpack": (_status, _pointer, _pointer, _pointer),
    "ucp_rkey_destroy": (None, _pointer),
    "ucp_rkey_pack": (_status, _pointer, _pointer, _pointer, _pointer),
    "ucp_rkey_buffer_release": (None, _pointer),
    "ucp_mem_map": (_status, _pointer, _pointer, _pointer),
    "ucp_mem_unmap": (_status, _pointer, _pointer),
    "ucp_get_nbx": (_pointer, _pointer, _pointer, _size, ctypes.c_uint64, _pointer, _pointer),
    "ucp_request_check_status": (_status, _pointer),
    "ucp_request_free": (None, _pointer),
    "ucp_get_version": (None, _pointer, _pointer, _pointer),
}


@functools.cache
def load_ucx() -> Ucx | None:
    """The system's libucp if it supports RDMA, else the wheel's, else the system's, or None."""
    for path in _candidates():
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            call = ctypes.CDLL(str(path))
            quick = ctypes.PyDLL(str(path))
            for library in (call, quick):
                for name, (result, *arguments) in _FUNCTIONS.items():
                    function = getattr(library, name)
                    function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError):
            # It cannot be loaded, or is too old to have all functions.
            continue
        version = tuple(ctypes.c_uint() for _ in range(3))
        call.ucp_get_version(*(ctypes.byref(part) for part in version))
        major, minor, release = (part.value for part in version)
        if (major, minor) >= _OLDEST and major == _OLDEST[0]:
            return Ucx(
                call,
                quick,
                (major, minor, release),
                str(path),
                _has_rdma(path),
                _modules(path),
                from_wheel=path.parent.parent.name == "libucx",
            )
    return None


def _candidates() -> list[Path]:
    system = _system_library()
    wheel = importlib.util.find_spec("libucx")
    found: list[Path] = []
    if system is not None and _has_rdma(system):
        found.append(system)
    for parent in wheel.submodule_search_locations or () if wheel is not None else ():
        if (library := Path(parent) / "lib" / "libucp.so.0").exists():
            found.append(library)
    if system is not None and system not in found:
        found.append(system)
    return found


def _system_library() -> Path | None:
    """The file that the loader would find. ``find_library`` would run a compiler, which takes 0.4 s."""
    folders = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    for configured in sorted(_LOADER_CONFIGURATION.glob("*.conf")):
        # As the loader, skip a file that cannot be read, such as a dangling link.
        with contextlib.suppress(OSError):
            folders += [line.strip() for line in configured.read_text(errors="replace").splitlines()]
    for folder in (*folders, *_FOLDERS):
        path = Path(folder) / "libucp.so.0"
        if folder.startswith("/") and os.access(path, os.R_OK):
            return path.resolve()
    return None


def _has_rdma(library: Path) -> bool:
    return "ib" in _modules(library) and any(Path("/sys/class/infiniband").glob("*"))


def _modules(library: Path) -> tuple[str, ...]:
    found = (library.parent / "ucx").glob("libuct_*.so.0")
    return tuple(sorted(file.name.removeprefix("libuct_").removesuffix(".so.0") for file in found))
