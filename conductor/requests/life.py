"""The decisions in one request's life: place, start, stream, place again, end. Pure: events in, actions out.

``RequestRun`` and the simulator tell what happened, and do what is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.placing.placement import Placement, Rejection

LOOK_AGAIN_S = 0.1
"""Pause of a request without a node. A circuit breaker closes by time, so it looks this often."""
# The first and the longest pause before busy nodes are asked again.
_REFUSED_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0

# Causes of a failed attempt that matter here. QUEUE: no failure, another node would begin sooner.
QUEUE = "queue"
REFUSED = "refused"
LOST = "lost"

Rejects = Callable[[], Rejection | None]
"""A rejection policy's answer, asked for only where it counts."""


@dataclass(frozen=True, slots=True)
class Start:
    """Book the nodes and start an attempt: ``RequestLife.started``."""

    placement: Placement


@dataclass(frozen=True, slots=True)
class Look:
    """Place the request again after this time. ``role``: of which no node is up; a driver limits the wait."""

    after_s: float = 0.0
    role: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    """End the request: it cannot be served, or not in time."""

    rejection: Rejection


@dataclass(frozen=True, slots=True)
class Fail:
    """End the request: so many attempts failed without a token in between."""

    num_failures: int


class RequestLife:
    """``num_attempts``: started so far. ``avoid``: nodes that failed it since its latest token.

    ``num_tokens`` of an event: that were streamed before it.
    """

    def __init__(self, *, max_attempts: int, begun: bool = False, follows: bool = False) -> None:
        """``begun``: another conductor has streamed tokens of it. ``follows``: it waits instead of being
        refused, as a part of a request that has begun."""
        self.num_attempts = 0
        self.avoid: set[str] = set()
        self._max_attempts = max_attempts
        self._was_begun = begun
        self._follows = follows
        self._num_failures = 0  # of attempts, since the latest token
        self._num_without_decode = 0  # attempts in a row without a token of their decode node
        self._num_tokens_failed = 0  # streamed before the latest failure

    @property
    def begun(self) -> bool:
        """A request that has begun is finished if at all possible."""
        return self.num_attempts > 0 or self._was_begun

    def slo(self, own: Slo) -> Slo:
        """The limits for its placement."""
        return Slo() if self.begun else own

    def decided(self, outcome: Placement | Rejection, rejects: Rejects) -> Start | Look | Refuse:
        """``place`` has answered. ``rejects``: at arrival, for this placement."""
        if isinstance(outcome, Rejection):
            return Look(LOOK_AGAIN_S, outcome.role) if outcome.role else Refuse(outcome)
        if self.num_attempts == 0 and (rejection := rejects()) is not None:
            return Look(LOOK_AGAIN_S) if self._follows else Refuse(rejection)
        return Start(outcome)

    def started(self) -> None:
        """An attempt was started, or the running one moves to another node under a new number."""
        self.num_attempts += 1

    def prefilled(self, num_tokens: int, rejects: Rejects) -> Refuse | None:
        """The first token of an attempt has come. ``rejects``: before the decode. None: stream it."""
        if num_tokens or self._follows:
            return None
        rejection = rejects()
        return None if rejection is None else Refuse(rejection)

    def failed(self, cause: str, nodes: Iterable[str], num_tokens: int) -> Look | Fail:
        """An attempt has failed on ``nodes``."""
        if cause == QUEUE:
            return Look()  # no node failed
        num_new = num_tokens - self._num_tokens_failed
        # Where only prefills succeed, each placement brings one token, at the price of a prefill.
        self._num_without_decode = self._num_without_decode + 1 if num_new < 2 else 0
        if num_new:
            # Failures of a long stream are not counted together.
            self._num_tokens_failed, self._num_failures = num_tokens, 0
            self.avoid.clear()
        self._num_failures += 1
        self.avoid.update(nodes)
        if self._num_failures >= self._max_attempts:
            return Fail(self._num_failures)
        if cause == REFUSED or self._num_without_decode > self._max_attempts:
            num_pauses = max(self._num_failures, self._num_without_decode) - 1
            return Look(min(_REFUSED_PAUSE_S * num_pauses, _LONGEST_PAUSE_S))
        return Look()

    def pays(self, num_new: int, *, ended_by_client: bool) -> bool:
        """Whether its tenant pays for it. ``num_new``: tokens that it got.

        Work for an answer that never began is the cluster's loss, except where the client ended it.
        """
        return num_new > 0 or (ended_by_client and self.num_attempts > 0)
