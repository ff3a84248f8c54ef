"""What a path should reach: of the machine's own limit, of what others reach, and by itself."""

from __future__ import annotations

from collections.abc import Mapping

# (transport, shape) -> of the limit measured in the same run, checksums off and on.
OF_LIMIT: Mapping[tuple[str, str], tuple[float, float | None]] = {
    ("shm", "64KiB/1024/read"): (0.85, 0.55),
    ("shm", "1MiB/64/read"): (0.95, 0.6),
    ("shm", "1MiB/64/write"): (0.95, 0.6),
    ("shm", "4MiB/64/read"): (1.3, None),
    ("shm", "1MiB/64/read/x2"): (1.5, None),
    ("tcp", "1MiB/64/read"): (0.95, 0.6),
    ("tcp", "1MiB/64/write"): (0.95, 0.6),
    ("ucx", "64KiB/1024/read"): (0.7, 0.45),
    ("ucx", "1MiB/64/read"): (0.85, 0.55),
    ("ucx-tcp", "1MiB/64/read"): (0.7, 0.45),
}
# (transport, shape, peer) -> times what the peer reaches.
OF_PEER: Mapping[tuple[str, str, str], float] = {
    **{("shm", f"1MiB/64/{way}", "nixl"): 1.8 for way in ("read", "write")},
    **{("shm", f"1MiB/64/{way}", "nixl no-thread"): 1.0 for way in ("read", "write")},
    **{("tcp", f"1MiB/64/{way}", "mooncake"): 2.0 for way in ("read", "write")},
    **{("tcp", f"1MiB/64/{way}", "nixl tcp"): 2.5 for way in ("read", "write")},
}
# (transport, shape) -> spans a second.
SPANS_PER_S: Mapping[tuple[str, str], float] = {
    ("shm", "4KiB/4096/read"): 300_000.0,
    ("ucx", "4KiB/4096/read"): 300_000.0,
}
NOTE_P50_US = 120.0
IDLE_PERCENT = 1.0
