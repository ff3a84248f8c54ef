"""How long the tokens of a request were with the API, on their way from its nodes to its client."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Delivery:
    """Seconds by part: ``detokenize``, ``stream``. While the API has one token it does not wait for the next,
    so these and the waits for nodes sum to the whole. ``since_s``: since they were last taken."""

    total_s: dict[str, float] = field(default_factory=dict)
    since_s: dict[str, float] = field(default_factory=dict)

    def add(self, *, detokenize_s: float, stream_s: float) -> None:
        """One token became text, and was given on."""
        for part, seconds in (("detokenize", detokenize_s), ("stream", stream_s)):
            self.total_s[part] = self.total_s.get(part, 0.0) + seconds
            self.since_s[part] = self.since_s.get(part, 0.0) + seconds

    def take(self) -> dict[str, dict[str, float]]:
        """A fact for the timeline: the seconds since the last call; empty: no token was given on."""
        since_s, self.since_s = self.since_s, {}
        return {"delivered_s": since_s} if since_s else {}
