"""What is asked of a run of ``moonpool bench store``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """``say`` gets a line for each case that begins."""

    rounds: int
    peers: tuple[str, ...]
    say: Callable[[str], None]
