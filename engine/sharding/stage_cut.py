"""A cut of the layers into pipeline stages by seconds, measured or estimated, and by memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Steps that are measured before stages are judged, and the least gain that is worth a restart.
_LEAST_STEPS = 200
_LEAST_GAIN = 1.1
_ROUNDS = 40


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Bytes of each layer, of the embedding on the first stage and of the head on the last one, and the most
    that a stage has room for."""

    layers_nbytes: Sequence[float]
    embedding_nbytes: float
    head_nbytes: float
    limit_nbytes: float

    def holds(self, first: int, end: int) -> bool:
        """Whether the layers ``first`` … ``end`` - 1 fit one stage."""
        nbytes = sum(self.layers_nbytes[first:end])
        nbytes += self.embedding_nbytes if first == 0 else 0.0
        nbytes += self.head_nbytes if end == len(self.layers_nbytes) else 0.0
        return nbytes <= self.limit_nbytes


def cut(
    layers_s: Sequence[float], head_s: float, num_stages: int, memory: StageMemory | None = None
) -> tuple[int, ...] | None:
    """Return the number of layers of each stage, at least 1, with the fastest slowest stage; None: none of
    these holds the limit of ``memory``.

    layers_s: seconds of each layer, in order. head_s: more seconds of the last stage, at least 0.
    """
    assert 1 <= num_stages <= len(layers_s)
    most_s = sum(layers_s) + head_s
    least_s, found = 0.0, _filled(layers_s, head_s, num_stages, most_s, memory)
    for _ in range(_ROUNDS if found else 0):
        limit_s = (least_s + most_s) / 2
        filled = _filled(layers_s, head_s, num_stages, limit_s, memory)
        if filled is not None:
            most_s, found = limit_s, filled
        else:
            least_s = limit_s
    return found


def slowest_s(layers_s: Sequence[float], head_s: float, layers: Sequence[int]) -> float:
    """Return the seconds of the slowest stage. layers: of each stage."""
    ends = [sum(layers[: i + 1]) for i in range(len(layers))]
    stages_s = [sum(layers_s[end - n : end]) for end, n in zip(ends, layers, strict=True)]
    return max([*stages_s[:-1], stages_s[-1] + head_s])


def better_cut(stages_s: Sequence[float], layers: Sequence[int], num_steps: int) -> tuple[int, ...] | None:
    """Return a cut with a slowest stage that takes at most 1 / ``_LEAST_GAIN`` of the time, or None.

    stages_s: compute of each stage in ``num_steps`` steps. layers: of each stage now. A layer takes what
    those of its stage take on average, one of the last stage what those of the others do. The rest is the
    head.
    """
    if num_steps < _LEAST_STEPS or len(layers) < 2:
        return None
    of_stages_s = [spent_s / n for spent_s, n in zip(stages_s, layers, strict=True)]
    of_stages_s[-1] = min(of_stages_s[-1], sum(stages_s[:-1]) / sum(layers[:-1]))
    layers_s = [layer_s for layer_s, n in zip(of_stages_s, layers, strict=True) for _ in range(n)]
    head_s = stages_s[-1] - layers[-1] * of_stages_s[-1]
    best = cut(layers_s, head_s, len(layers))
    assert best is not None
    return best if max(stages_s) >= _LEAST_GAIN * slowest_s(layers_s, head_s, best) else None


def _filled(
    layers_s: Sequence[float], head_s: float, num_stages: int, limit_s: float, memory: StageMemory | None
) -> tuple[int, ...] | None:
    """Give each stage as many layers as take ``limit_s`` and fit; None: some are left over."""

    def fits(first: int, end: int) -> bool:
        spent_s = sum(layers_s[first:end]) + (head_s if end == len(layers_s) else 0.0)
        return spent_s <= limit_s and (memory is None or memory.holds(first, end))

    counts, first = [], 0
    for left in reversed(range(num_stages)):
        end = first + 1 if left else len(layers_s)
        while end < len(layers_s) - left and fits(first, end + 1):
            end += 1
        if not fits(first, end):
            return None
        counts.append(end - first)
        first = end
    return tuple(counts)
