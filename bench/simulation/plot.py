"""Pictures of outcomes: how many requests were as fast, and where their KV came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from moonpool.runtime.errors import ConfigError
from moonpool.simulator.outcome import Outcome

_PARTS = ("pool", "host", "ssd", "peer", "computed")


def draw(outcomes: Mapping[str, Outcome], path: Path) -> None:
    """Write a PNG or SVG, by the file's ending: one line a case."""
    check_ending(path)
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (ttft, tbt, hits) = pyplot.subplots(1, 3, figsize=(15, 4.5))
    for axes, name, unit in (
        (ttft, "ttft_s", "TTFT, s"),
        (tbt, "tbt_s", "TBT, mean of the longest tenth, s"),
    ):
        for case, outcome in outcomes.items():
            values = np.sort([getattr(each, name) for each in outcome.completed])
            # Requests that were rejected never get there: the line ends below one.
            shares = np.arange(1, len(values) + 1) / len(outcome.served)
            axes.plot(values, shares, label=case)
        limit = getattr(next(iter(outcomes.values())).slo, name)
        if np.isfinite(limit):
            axes.axvline(limit, color="grey", linestyle=":", label="SLO")
        axes.set_xscale("log")
        axes.set_xlabel(unit)
        axes.set_ylabel("share of requests")
        axes.set_ylim(0, 1.02)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    left = np.zeros(len(outcomes))
    for part in _PARTS:
        shares = np.array(
            [o.hit_tokens[part] / max(sum(o.hit_tokens.values()), 1) for o in outcomes.values()]
        )
        hits.barh(list(outcomes), shares, left=left, label=part)
        left += shares
    hits.set_xlabel("prompt tokens by where their KV came from")
    hits.legend(fontsize=8, ncols=len(_PARTS), loc="upper center", bbox_to_anchor=(0.5, 1.12))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def check_ending(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"--plot writes .png or .svg, not {path.name!r}", key="plot")
