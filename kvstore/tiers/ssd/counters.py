"""What an SSD tier counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SsdTierStats:
    """Totals since the tier was opened, but for the first group, which is how things stand."""

    num_blocks: int = 0  # slots that are on the disk; more are made as long as it has room
    num_held: int = 0
    num_pinned: int = 0
    is_stalled: bool = False
    is_direct: bool = True  # False: through the page cache, for want of O_DIRECT

    num_adopted: int = 0  # blocks found when it was opened,
    num_orphans: int = 0  # and those dropped then: what comes before them in their chain is missing,
    num_lost: int = 0  # or their place, or their record, is not there as it was
    open_s: float = 0.0

    num_hits: int = 0
    num_misses: int = 0
    num_stored: int = 0
    num_evictions: int = 0
    num_refusals: int = 0  # blocks not taken: everything is pinned
    num_bypassed: int = 0  # blocks not taken: the policy keeps what it has
    num_unparented: int = 0  # blocks not taken: what comes before them is not here
    num_corrupt: int = 0  # blocks dropped: their bytes are not what was stored
    num_read_errors: int = 0
    num_write_errors: int = 0
    num_no_space: int = 0  # segments that found no room on the disk
    num_stalls: int = 0
    num_given_up: int = 0  # blocks whose I/O was not waited for, or not begun, because the disk stalled
    read_nbytes: int = 0
    written_nbytes: int = 0
    read_s: float = 0.0  # callers' time in ``get``
    write_s: float = 0.0  # and in ``put``
