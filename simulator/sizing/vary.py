"""Maps: both clusters by formula over one or two values of the question."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from moonpool.runtime.errors import ConfigError
from moonpool.simulator.sizing.answer import Question, Sized, size


def _traffic(name: str) -> Callable[[Question, float], Question]:
    def vary(question: Question, value: float) -> Question:
        field: dict[str, Any] = {name: value if name in ("rate", "hit") else int(value)}
        return replace(question, traffic=replace(question.traffic, **field))

    return vary


def _limit(name: str) -> Callable[[Question, float], Question]:
    return lambda question, value: replace(question, limits=replace(question.limits, **{name: value}))


def _link(question: Question, value: float) -> Question:
    return replace(question, gpu=replace(question.gpu, network_nbytes_per_s=value * 1e9))


# What can vary, by the option's name, and how a value of it changes the question.
VARIED: Mapping[str, Callable[[Question, float], Question]] = {
    "rate": _traffic("rate"),
    "prompt": _traffic("prompt_tokens"),
    "output": _traffic("output_tokens"),
    "hit": _traffic("hit"),
    "link": _link,
    "e2e-p99": _limit("e2e_s"),
    "slo-ttft": _limit("ttft_s"),
    "slo-tbt": _limit("tbt_s"),
}
Axis = tuple[str, Sequence[float]]


def axis(text: str) -> Axis:
    """Read ``NAME=VALUE,…``."""
    name, _, values = text.partition("=")
    try:
        numbers = [float(value) for value in values.split(",")]
    except ValueError:
        numbers = []
    if name not in VARIED or not numbers:
        raise ConfigError(
            f"--vary {text!r} is not like prompt=500,2000; what can vary: {', '.join(VARIED)}", key="vary"
        )
    return name, numbers


def table(question: Question, axes: Sequence[Axis]) -> Table:
    """One row for each value of the first axis, one column for each of the second."""
    (name, values), *others = axes
    second, columns = others[0] if others else ("", [0.0])
    found = Table(box=None, pad_edge=False, header_style="dim")
    found.add_column(name)
    for column in columns:
        found.add_column(f"{second} {column:g}" if second else "prefill + decode | replicas", justify="right")
    for value in values:
        here = VARIED[name](question, value)
        cells = [VARIED[second](here, column) if second else here for column in columns]
        found.add_row(f"{value:g}", *(_cell(cell) for cell in cells))
    return found


def _cell(question: Question) -> str:
    try:
        sized = size(question)
    except ConfigError:
        return "–"
    return f"{_split(sized)} | {sized.replicas.num_gpus if sized.replicas else '–'}"


def _split(sized: Sized) -> str:
    plan = sized.split
    if plan is None or plan.decode is None:
        return "–"
    return f"{plan.num_gpus} ({plan.prefill.num_gpus} + {plan.decode.num_gpus})"
