"""``MOONPOOL_KERNELS``: the environment variable that selects the forms, read once a process.

It is no option of the configuration because it changes results only by rounding; it serves tests and
diagnosis.
"""

from __future__ import annotations

import os
from functools import cache

from moonpool.runtime.errors import ConfigError

# The fastest form of each operation; the plain torch forms; the fastest with checks of all arguments.
MODES = ("auto", "torch", "checked")


@cache
def mode() -> str:
    """One of MODES; auto if the variable is unset. Raises ConfigError for any other value."""
    selected = os.environ.get("MOONPOOL_KERNELS", "") or "auto"
    if selected not in MODES:
        raise ConfigError(f"MOONPOOL_KERNELS must be one of {', '.join(MODES)}, got {selected!r}")
    return selected
