"""Making very many objects at once, none of them garbage."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_num_inside = 0
_was_enabled = False


@contextmanager
def gc_paused() -> Iterator[None]:
    """Python's garbage collector rests, in this process: each time so many objects have been made it would
    look through all there are, which is two fifths of what it costs to make a hundred thousand records. What
    the collector was before, it is again when the last of those inside has left."""
    global _num_inside, _was_enabled
    with _lock:
        if _num_inside == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _num_inside += 1
    try:
        yield
    finally:
        with _lock:
            _num_inside -= 1
            if _num_inside == 0 and _was_enabled:
                gc.enable()
