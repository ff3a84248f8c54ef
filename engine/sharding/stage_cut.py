"""A cut of the layers into pipeline stages by measured seconds."""

from __future__ import annotations

from collections.abc import Sequence

# Steps that are measured before stages are judged, and the least gain that is worth a restart.
_LEAST_STEPS = 200
_LEAST_GAIN = 1.1
_ROUNDS = 40


def cut(layers_s: Sequence[float], head_s: float, num_stages: int) -> tuple[int, ...]:
    """Return the number of layers of each stage, at least 1, with the fastest slowest stage.

    layers_s: seconds of each layer, in order. head_s: more seconds of the last stage, at least 0.
    """
    assert 1 <= num_stages <= len(layers_s)
    most_s = sum(layers_s) + head_s
    least_s, found = 0.0, _filled(layers_s, head_s, num_stages, most_s)
    for _ in range(_ROUNDS):
        limit_s = (least_s + most_s) / 2
        filled = _filled(layers_s, head_s, num_stages, limit_s)
        if slowest_s(layers_s, head_s, filled) <= limit_s:
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
    return best if max(stages_s) >= _LEAST_GAIN * slowest_s(layers_s, head_s, best) else None


def _filled(layers_s: Sequence[float], head_s: float, num_stages: int, limit_s: float) -> tuple[int, ...]:
    """Fill each stage up to ``limit_s``, the last one with the rest, which may take longer."""
    counts, first = [], 0
    for left in range(num_stages - 1, 0, -1):
        end, spent_s = first + 1, layers_s[first]
        while end < len(layers_s) - left and spent_s + layers_s[end] <= limit_s:
            spent_s += layers_s[end]
            end += 1
        counts.append(end - first)
        first = end
    return (*counts, len(layers_s) - first)
