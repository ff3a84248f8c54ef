"""Stop strings, found across token borders; text that could still become one waits, and nothing else does."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Reads a text in pieces and ends it just before the first stop string.

    The result does not depend on where the pieces are cut: the stop that is complete first wins, and of those
    complete at the same character the longest. Text is held back only while it is the beginning of a stop.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere; the schema refuses it"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None  # the stop that ended the text

    def push(self, piece: str) -> str:
        """The text that is safe to show now. Once ``matched`` is set there is no more."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = self._first_complete(text)
        if found is not None:
            start, self.matched = found
            self._held = ""
            return text[:start]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def skip(self, piece: str) -> str:
        """Let ``piece`` through unread (tokens below ``min_tokens``), with what was held."""
        text, self._held = self._held + piece, ""
        return text

    def flush(self) -> str:
        """What was held back, when the text ended without a stop."""
        return self.skip("")

    def _first_complete(self, text: str) -> tuple[int, str] | None:
        """(start, stop) of the stop string that is complete first, the longest of several."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and (best[1], best[2])

    def _possible_start(self, text: str) -> int:
        """Where the longest tail begins that is the beginning of some stop; ``len(text)`` when none is."""
        earliest = max(0, len(text) - self._longest + 1)
        best = len(text)
        for stop in self._stops:
            start = text.find(stop[0], max(earliest, len(text) - len(stop) + 1), best)
            while start >= 0:
                if stop.startswith(text[start:]):
                    best = start
                    break
                start = text.find(stop[0], start + 1, best)
        return best
