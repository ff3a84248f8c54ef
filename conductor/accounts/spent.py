"""What one request took of the nodes: seconds that they measured, and what came of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moonpool.protos import node_pb2

USEFUL = "useful"
# Uses of seconds that served no request.
WASTES = {
    "retry": "a prompt was computed again, after an attempt that had computed it",
    "recomputed": "tokens were computed that had been before: their KV was gone, or was not used",
    "speculation": "tokens were computed that speculation proposed and the model rejected",
    "rejected": "the request was rejected, or failed, before its answer began",
    "abandoned": "the request was given up, or nodes computed for it after its end",
}


@dataclass(slots=True)
class Spent:
    """A request's shares of nodes' steps, by its rows in each. Engines of other projects tell none."""

    prefill_s: float = 0.0
    decode_s: float = 0.0
    known_tokens: int = 0  # leading ones of the prompt that had come before its first attempt
    wasted_s: Counter[str] = field(default_factory=Counter)  # by ``WASTES``
    # Parts of the decode's own time since they were last taken, which others or guesses made longer.
    slowed_s: dict[str, float] = field(default_factory=dict)
    _num_prefills: int = 0

    @property
    def total_s(self) -> float:
        return self.prefill_s + self.decode_s

    @property
    def useful_s(self) -> float:
        return max(self.total_s - self.wasted_s.total(), 0.0)

    def prefilled(self, token: node_pb2.TokenOut, num_tokens: int, num_cached: int) -> None:
        """A prompt was computed. ``num_tokens``: of the prompt and of what was streamed before."""
        self.prefill_s += token.busy_s
        if self._num_prefills:
            self._waste("retry", token.busy_s)
        else:
            computed = max(num_tokens - num_cached, 1)
            known = min(max(self.known_tokens - num_cached, 0), computed)
            once_s = max(token.busy_s - token.again_s, 0.0)
            self._waste("recomputed", token.again_s + once_s * known / computed)
        self._num_prefills += 1

    def decoded(self, token: node_pb2.TokenOut) -> None:
        """A message of a decode node."""
        self.decode_s += token.busy_s
        if token.prompts_s:
            self._slow("prompts", token.prompts_s)
        if token.exchange_s:
            self._slow("exchange", token.exchange_s)
        if token.rejected_s:
            self._slow("speculation", token.rejected_s)
            self._waste("speculation", token.rejected_s)
        if token.again_s:
            self._waste("recomputed", token.again_s)

    def ended_unanswered(self, use: str) -> None:
        """No token has reached the client: all of it is of this use."""
        self.wasted_s.clear()
        self._waste(use, self.total_s)

    def uses(self) -> dict[str, float]:
        """Seconds by use, without zeros."""
        of_uses = {USEFUL: self.useful_s, **self.wasted_s}
        return {use: seconds for use, seconds in of_uses.items() if seconds > 0}

    def take_slowed(self) -> dict[str, dict[str, float]]:
        """A fact for the timeline: what made the steps since the last call longer; empty: nothing did."""
        slowed, self.slowed_s = self.slowed_s, {}
        return {"slowed_s": slowed} if slowed else {}

    def _slow(self, cause: str, seconds: float) -> None:
        self.slowed_s[cause] = self.slowed_s.get(cause, 0.0) + seconds

    def _waste(self, use: str, seconds: float) -> None:
        if seconds > 0:
            self.wasted_s.update({use: seconds})
