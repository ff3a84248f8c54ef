"""The one switch of the package: ``MOONPOOL_KERNELS`` in the environment, read once a process.

Not an option of the configuration: it changes no result by more than rounding, and exists for tests and for
finding a fault.
"""

from __future__ import annotations

import os
from functools import cache

from moonpool.runtime.errors import ConfigError

MODES = {
    "auto": "the fastest form of each operation",
    "torch": "the plain torch forms",
    "checked": "the fastest forms, with every argument verified first",
}


@cache
def mode() -> str:
    """One of MODES; unset means auto.

    Raises:
        ConfigError: the variable says something else.
    """
    asked = os.environ.get("MOONPOOL_KERNELS", "") or "auto"
    if asked not in MODES:
        raise ConfigError(f"MOONPOOL_KERNELS must be one of {', '.join(MODES)}, got {asked!r}")
    return asked
