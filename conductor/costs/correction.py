"""Factors on a node's profile: they follow what its work takes, and return to trust without measurements."""

from __future__ import annotations

import math
from collections import deque

# A correction is the mean of about the last eight measurements, within a factor of eight. Half of it is
# forgotten after a minute without measurements, so that a bad moment shuts no node out.
_MEMORY = 8
_BOUND = 8.0
_HALF_LIFE_S = 60.0
# This many measurements weigh as much as the correction of the other nodes.
_DOUBT = 2.0
# A node whose profile is slower than usual is doubted when it got no requests for the first time; after the
# second it is expected to be as fast as the usual one, and by this part of it faster: then it is tried even
# where all others are idle.
_DOUBTED_S, _RETRY_S = 60.0, 300.0
_KEEN = 0.1
# Nodes that tell what is usual.
_NODES = 64


class Usual:
    """What the same work usually takes: the median of the latest nodes, by their own profiles."""

    __slots__ = ("_logs", "log")

    def __init__(self) -> None:
        self._logs: deque[float] = deque(maxlen=_NODES)
        self.log = math.inf  # of seconds

    def add(self, log_s: float) -> None:
        """A node has measured itself. ``log_s``: the logarithm of its seconds for this work."""
        self._logs.append(log_s)
        # Of two nodes, the faster one.
        self.log = sorted(self._logs)[(len(self._logs) - 1) // 2]


class Correction:
    """A factor on a profile that follows measurements. Without recent ones it returns to ``wider``, or to 1.

    ``wider``: the correction of all nodes of the role. A node that measured itself as slower than ``usual``,
    perhaps on a busy machine, is trusted more and more while it gets no requests: see ``used``.
    """

    __slots__ = (
        "_at_s", "_count", "_factor", "_log", "_own_log", "_since_s", "_tried", "_trust", "_used_s", "_usual",
        "_wider",
    )  # fmt: skip

    def __init__(self, wider: Correction | None = None, usual: Usual | None = None) -> None:
        self._wider = wider
        self._usual = usual
        self._own_log = -math.inf  # what ``usual`` is of, by the node's profile
        self._used_s = 0.0
        self._trust = 0.0  # logarithm, at most 0: so much faster than its profile it has been since
        self._tried = 0.0  # the most that was assumed for requests that have not been measured
        self._log = 0.0  # the logarithm: twice as slow and twice as fast weigh the same
        self._count = 0.0  # of measurements, fading
        self._since_s = 0.0
        self._at_s = -math.inf  # when ``_factor`` was computed: one decision reads it several times
        self._factor = 1.0

    def measured(self, seconds: float, now_s: float) -> None:
        """The node has measured itself: ``seconds`` for the work that ``usual`` is of."""
        self._own_log = -math.inf
        self._trust, self._tried, self._used_s = 0.0, 0.0, now_s
        if self._usual is not None and seconds > 0:
            self._own_log = math.log(seconds)
            self._usual.add(self._own_log)

    @property
    def tried(self) -> float:
        """The factor of trust by which requests were placed that have not been measured; 1: none."""
        return math.exp(self._tried)

    def used(self, now_s: float) -> None:
        """A request was placed there. Until it has been measured, others are placed by what is known."""
        self._tried = min(self._tried, self._trusted(now_s))
        self._used_s = now_s

    def observe(self, predicted_s: float, actual_s: float, now_s: float) -> None:
        """``predicted_s``: by the profile, uncorrected."""
        if predicted_s <= 0 or actual_s <= 0:
            return
        target = math.log(min(max(actual_s / predicted_s, 1 / _BOUND), _BOUND))
        if self._wider is not None:
            lean = math.log(self._wider.factor(now_s))
            self._trust = self._tried = max(min(self._tried, self._trust), min(target - lean, 0.0))
            # The others' profiles are not wrong in the same way.
            self._wider.observe(predicted_s * math.exp(self._trust), actual_s, now_s)
        self._used_s = now_s
        count = self._faded(now_s)
        self._log += (target - self._log) / (count + 1)
        self._count = min(count + 1, _MEMORY - 1)
        self._since_s = now_s
        self._at_s = -math.inf

    def factor(self, now_s: float) -> float:
        wider = self._wider
        if wider is None:
            return self._alone(now_s)
        trusted = self._trusted(now_s)
        if not self._count and not trusted:
            return wider.factor(now_s)
        count = self._faded(now_s)
        # It also depends on later measurements of others, so it is not kept.
        lean = math.log(wider.factor(now_s)) + trusted
        return math.exp(lean + (self._log - lean) * count / (count + _DOUBT))

    def _alone(self, now_s: float) -> float:
        if not self._count:
            return 1.0
        if now_s != self._at_s:
            count = self._faded(now_s)
            self._factor = math.exp(self._log * count / (count + _DOUBT))
            self._at_s = now_s
        return self._factor

    def _trusted(self, now_s: float) -> float:
        """How much faster the node is expected to be than its profile says, as a logarithm; at most 0."""
        if self._usual is None or self._own_log <= self._usual.log:
            return 0.0
        most = self._own_log - self._usual.log + _KEEN
        idle_s = max(now_s - self._used_s - _DOUBTED_S, 0.0)
        return max(self._trust - most * idle_s / (_RETRY_S - _DOUBTED_S), -most)

    def _faded(self, now_s: float) -> float:
        if not self._count:
            return 0.0
        return self._count * math.exp2(-max(now_s - self._since_s, 0.0) / _HALF_LIFE_S)
