"""Errors of the latest predictions of one kind."""

from __future__ import annotations

from collections import deque


class PredictionErrors:
    """Absolute errors in percent of what was measured, and the latest pairs of predicted and measured."""

    def __init__(self, window: int = 256, shown: int = 48) -> None:
        self._percents: deque[float] = deque(maxlen=window)
        self._latest: deque[tuple[float, float]] = deque(maxlen=shown)
        self.count = 0

    def add(self, predicted: float, actual: float) -> None:
        if actual > 0:
            self._percents.append(100 * abs(predicted - actual) / actual)
            self._latest.append((predicted, actual))
            self.count += 1

    def latest(self) -> list[tuple[float, float]]:
        """(predicted, measured), rounded to a millionth, for charts."""
        return [(round(predicted, 6), round(actual, 6)) for predicted, actual in self._latest]

    def quantile(self, q: float) -> float | None:
        """The ``q`` quantile (0 … 1) in percent; None: nothing was measured yet."""
        if not self._percents:
            return None
        ordered = sorted(self._percents)
        return ordered[min(int(q * len(ordered)), len(ordered) - 1)]

    def to_dict(self) -> dict[str, float | int | None]:
        return {"count": self.count, "p50_percent": self.quantile(0.5), "p90_percent": self.quantile(0.9)}
