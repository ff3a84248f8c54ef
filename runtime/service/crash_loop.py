"""When starting something again does not mend it."""

from __future__ import annotations

# Who is lost again and again this soon after it was ready is not mended by a new life.
SHORT_LIFE_S = 10.0
MAX_SHORT_LIVES = 5


class ShortLives:
    """Counts the short lives in a row."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def too_many(self, lived_s: float) -> bool:
        """A life has ended ``lived_s`` after it was ready (0: it never was): is another one useless?"""
        self._in_a_row = self._in_a_row + 1 if lived_s < SHORT_LIFE_S else 0
        return self._in_a_row >= MAX_SHORT_LIVES
