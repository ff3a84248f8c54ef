"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "wrong", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``missing``: Moonpool cannot run like this; ``wrong``: it runs, and not as it should; ``slow``: it can,
    with less. ``fact`` has the figures, ``advice`` is what to do.
    """

    what: str
    state: State
    fact: str
    advice: str = ""
