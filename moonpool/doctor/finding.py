"""The result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "slow", "wrong", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """``missing``: Moonpool cannot run; ``wrong``: it misbehaves; ``slow``: it works below its best.

    ``fact`` states the figures, ``advice`` what to do.
    """

    what: str
    state: State
    fact: str
    advice: str = ""
