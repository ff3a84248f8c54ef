"""Stop strings, found across token borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Ends a text, given in pieces, before the first stop string.

    The stop string that is complete first wins; of several that end at the same character, the longest. Text
    is held back only while it may be the beginning of a stop string.
    """

    __slots__ = ("_held", "_longest", "_stops", "matched")

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string matches everywhere; the schema refuses it"
        self._stops = tuple(stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.matched: str | None = None  # the stop string that ended the text

    def push(self, piece: str) -> str:
        """The text that can be shown now. After ``matched`` is set there is no more."""
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
        """Pass ``piece`` unchecked (below ``min_tokens``), after the text held back."""
        text, self._held = self._held + piece, ""
        return text

    def flush(self) -> str:
        """The text held back, at the end of a text without a stop string."""
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
        """Start of the longest tail that begins a stop string; ``len(text)``: there is none."""
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
