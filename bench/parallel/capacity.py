"""A limit on the rows of each expert: what it saves, and how often the model's best token changes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

from moonpool.bench.engine.model_shapes import MIXTURE, write_mixture
from moonpool.bench.engine.perplexity import prompt_logprobs
from moonpool.bench.harness.command import Run
from moonpool.bench.harness.turns import spread
from moonpool.bench.parallel.steps import Settings, running
from moonpool.runtime.config.options import ParallelOptions
from moonpool.runtime.reports.report import Curve, Row, versus

EP = 2
FACTORS = (1.0, 1.25, 1.5, 2.0, 4.0)
OVERFLOWS = ("reroute", "drop")
# A step each.
_PROMPT, _NUM_TEXTS = 2048, 4


@dataclass(frozen=True, slots=True)
class _Found:
    first_s: Sequence[float]
    skew: float  # the busiest rank's rows over the mean
    dropped: float  # fraction of all choices
    best: Sequence[int]  # the most likely token after each one of the texts


async def capacity_rows(run: Run, settings: Settings) -> list[Row]:
    """A mixture with random weights, some experts of which are hot. A trained one has not been measured: the
    project ships none."""
    vocab_size = MIXTURE["vocab_size"]
    assert isinstance(vocab_size, int)
    random = np.random.default_rng(0)
    texts = [random.integers(0, vocab_size, _PROMPT, np.int32) for _ in range(_NUM_TEXTS)]
    with TemporaryDirectory() as folder:
        model = Path(folder)
        write_mixture(model)
        run.say("no limit")
        every = await _measured(model, settings.device, ParallelOptions(tp=EP, ep=EP), texts, run.rounds)
        rows = _rows(f"ep {EP}, no limit", every)
        points: dict[str, list[tuple[float, float]]] = {overflow: [] for overflow in OVERFLOWS}
        for factor in FACTORS[: 1 if run.quick else None]:
            for overflow in OVERFLOWS:
                name = f"ep {EP}, at most {factor:g} × the mean, {overflow}"
                run.say(name)
                options = ParallelOptions(tp=EP, ep=EP, expert_capacity=factor, expert_overflow=overflow)
                found = await _measured(model, settings.device, options, texts, run.rounds)
                first, *others = _rows(name, found)
                rows += [versus(first, "no limit", 1e3 * statistics.median(every.first_s)), *others]
                same = float(np.mean(np.array(found.best) == every.best))
                points[overflow].append((factor, same))
                rows.append(Row(name, "best token as without a limit", same, "of all tokens"))
    run.curves += [
        Curve("best token as without a limit", overflow, "limit over the mean", "of all tokens", of_factor)
        for overflow, of_factor in points.items()
    ]
    return rows


def _rows(name: str, found: _Found) -> list[Row]:
    return [
        spread(f"{name}, prompt of {_PROMPT}", "first token", found.first_s, "ms", 1e3),
        Row(name, "busiest rank over mean", found.skew, "×"),
        Row(name, "dropped", found.dropped, "of all choices"),
    ]


async def _measured(
    model: Path, device: str, options: ParallelOptions, texts: Sequence[npt.NDArray[np.int32]], rounds: int
) -> _Found:
    async with running(model, device, options) as session:
        engine = session.engine
        await session.first_token_s(_PROMPT)
        first_s = [await session.first_token_s(_PROMPT) for _ in range(rounds)]
        best = [token.top_ids[0] for token in await prompt_logprobs(engine, texts, num_top=1)]
        await engine.refresh_expert_load()
        load, dropped = engine.expert_load(), engine.num_dropped_choices()
        skew = engine.expert_placement.skew(load)
        return _Found(first_s, skew, dropped / (int(load.sum()) + dropped), best)
