"""How long the tokens of a request were with the API, on their way from its nodes to its client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Delivery:
    """Seconds of all tokens so far. While the API has one token it does not wait for the next, so these and
    the waits for nodes sum to the whole. ``add`` is called for each token: it only adds."""

    detokenize_s: float = 0.0
    stream_s: float = 0.0
    _taken_detokenize_s: float = 0.0
    _taken_stream_s: float = 0.0

    def add(self, *, detokenize_s: float, stream_s: float) -> None:
        """One token became text, and was given on."""
        self.detokenize_s += detokenize_s
        self.stream_s += stream_s

    @property
    def total_s(self) -> dict[str, float]:
        """By part; empty: no token was given on."""
        total_s = {"detokenize": self.detokenize_s, "stream": self.stream_s}
        return total_s if any(total_s.values()) else {}

    def take(self) -> dict[str, dict[str, float]]:
        """A fact for the timeline: the seconds by part since the last call; empty: no token was given on."""
        since_s = {
            "detokenize": self.detokenize_s - self._taken_detokenize_s,
            "stream": self.stream_s - self._taken_stream_s,
        }
        self._taken_detokenize_s, self._taken_stream_s = self.detokenize_s, self.stream_s
        return {"delivered_s": since_s} if any(since_s.values()) else {}
