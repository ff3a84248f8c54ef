"""The answer as text and as rows of a report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.table import Table

from moonpool.runtime.reports.conditions import BASELINE
from moonpool.runtime.reports.report import Row, versus
from moonpool.simulator.sizing.answer import Change, Question, Sized, by_kind
from moonpool.simulator.sizing.budget import budget, cost
from moonpool.simulator.sizing.check import Check
from moonpool.simulator.sizing.search import Plan
from moonpool.simulator.sizing.traffic import Traffic

_MISSED = "none keeps the limits"


def show(
    out: Console,
    question: Question,
    sized: Sized,
    found: Mapping[str, Check],
    changes: Sequence[Change],
    price: float | None,
) -> None:
    out.print(headline(question, sized.traffic))
    out.print()
    out.print(_clusters(question, sized, price))
    out.print()
    out.print("GPUs by kind of node (a phase beside the other phase above):")
    out.print(_kinds(question, sized))
    out.print()
    out.print("The formulas beside the simulator, on a part of each cluster at the formulas' most load:")
    out.print(_checks(sized, found))
    out.print(advice(sized, found))
    out.print()
    out.print(f"If something changes, by formula ({sized.plans[0].name}):")
    out.print(_changes(sized.plans[0], changes))


def headline(question: Question, traffic: Traffic) -> str:
    limits = question.limits
    kept = ", ".join(
        f"{name} {value:g} s"
        for name, value in (("TTFT", limits.ttft_s), ("TBT", limits.tbt_s), ("E2E", limits.e2e_s))
        if value < math.inf
    )
    users = f"{question.users:,} users, {question.think_s:g} s between answers: " if question.users else ""
    hit = f", {100 * traffic.cached_tokens / traffic.prompt_tokens:.0f} % of it cached" if traffic.hit else ""
    return (
        f"{users}{traffic.rate:,.4g} requests/s of {traffic.prompt_tokens:,} + {traffic.output_tokens:,} "
        f"tokens{hit}; {question.model.name} on {question.gpu.name}; p99 within {kept}"
    )


def _table(first: str, *headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(first)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table


def _clusters(question: Question, sized: Sized, price: float | None) -> Table:
    table = _table("by formula", "prefill + decode nodes", "replicas")
    cells = [
        _figures(question, plan, sized.traffic, price) if plan else {}
        for plan in (sized.split, sized.replicas)
    ]
    for name in dict.fromkeys(name for figures in cells for name in figures):
        missing = _MISSED if name == "GPUs" else "–"
        table.add_row(name, *(figures.get(name, missing) for figures in cells))
    return table


def _figures(question: Question, plan: Plan, traffic: Traffic, price: float | None) -> dict[str, str]:
    used, decode = budget(plan, traffic, question.gpu, question.model), plan.decode or plan.prefill
    first = f"{plan.prefill.num_nodes:,} × {plan.prefill.kind.name}"
    figures = {
        "GPUs": f"{plan.num_gpus:,}",
        "nodes that prefill": first,
        "nodes that decode": f"{decode.num_nodes:,} × {decode.kind.name}" if plan.decode else "the same",
        "tokens a step": f"{plan.prefill.chunk_tokens:,}",
        "TTFT mean, p99": _ms(plan.ttft.mean_s, plan.ttft.p99_s),
        "hand-over mean, p99": _ms(plan.move.mean_s, plan.move.p99_s) if plan.decode else "–",
        "TBT p99": f"{1e3 * plan.tbt_s:.1f} ms",
        "E2E mean, p99": _ms(plan.e2e.mean_s, plan.e2e.p99_s),
        "prompts: arithmetic": f"{used.prefill_flops_per_s / 1e15:.3g} PFLOP/s, {_of(used.prefill_reached)}",
        "decode: memory reads": f"{used.decode_nbytes_per_s / 1e12:.3g} TB/s, {_of(used.decode_reached)}",
        "weights on a GPU": f"{used.weight_nbytes / 1e9:.3g} GB",
        "sequences that decode": f"{used.sequences:,.0f}, {plan.decodes.batch:.0f} a batch",
        "KV in flight": f"{used.kv_nbytes / 1e9:,.3g} GB, {100 * used.kv_held:.2g} % of the pools",
        "KV moved": f"{used.moved_nbytes_per_s / 1e9:.3g} GB/s, {100 * used.link_used:.2g} % of the links"
        if plan.decode
        else "–",
        "GPU seconds a request": f"{plan.num_gpus / traffic.rate:.3g}",
    }
    if price is not None:
        paid = cost(plan, traffic, price)
        figures["cost of 1,000 requests"] = f"{1e3 * paid.request:.3g}"
        figures["of that, prefill + decode"] = f"{1e3 * paid.prefill:.3g} + {1e3 * paid.decode:.3g}"
        figures["cost of a million tokens"] = f"{paid.million_tokens:.3g}"
    return figures


def _ms(*seconds: float) -> str:
    return ", ".join(f"{1e3 * value:,.0f}" for value in seconds) + " ms"


def _of(fraction: float) -> str:
    return f"{100 * fraction:.0f} % of the peak"


def _kinds(question: Question, sized: Sized) -> Table:
    table = _table("node", "prefill", "decode", "replicas")
    for name, cells in by_kind(question, sized):
        table.add_row(name, *("–" if cell is None else f"{cell:,}" for cell in cells))
    return table


def _checks(sized: Sized, found: Mapping[str, Check]) -> Table:
    table = _table("", *("prefill + decode nodes" if plan.decode else "replicas" for plan in sized.plans))
    rows: dict[str, list[str]] = {}
    for plan in sized.plans:
        check = found[plan.name]
        part, load = check.part, check.part.traffic.rate
        here, simulated = part.plan, check.simulated
        nodes = f"{here.prefill.num_nodes}" + (f" + {here.decode.num_nodes}" if here.decode else "")
        most = "under 0.6 of that: – GPUs"
        if check.simulated_rate:
            most = f"{check.simulated_rate:.4g} requests/s, {_off(check.simulated_rate, load)}"
        for name, text in (
            ("part: nodes, load", f"{nodes}, {load:.4g} requests/s"),
            ("E2E mean, formula → simulated", _beside(here.e2e.mean_s, simulated.e2e_mean_s)),
            ("E2E p99", _beside(here.e2e.p99_s, simulated.e2e_p99_s)),
            ("TTFT p99", _beside(here.ttft.p99_s, simulated.ttft_p99_s)),
            ("TBT p99", _beside(here.tbt_s, simulated.tbt_p99_s)),
            ("most load in the simulation", most),
            ("GPUs of the whole by that", f"{check.num_gpus(plan):,}" if check.simulated_rate else "–"),
        ):
            rows.setdefault(name, []).append(text)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _beside(formula_s: float, simulated_s: float) -> str:
    digits = 1 if formula_s < 0.1 else 0
    return (
        f"{1e3 * formula_s:,.{digits}f} → {1e3 * simulated_s:,.{digits}f} ms, {_off(simulated_s, formula_s)}"
    )


def _off(value: float, reference: float) -> str:
    return f"{100 * (value / reference - 1):+.0f} %"


def advice(sized: Sized, found: Mapping[str, Check]) -> str:
    """Compare the clusters by the simulation, or say why not."""
    if sized.split is None or sized.replicas is None:
        (plan,) = sized.plans
        other = "replicas" if plan.decode else "prefill and decode nodes"
        return f"No number of {other} keeps these limits, so there is nothing to compare {plan.name} with."
    if not all(found[plan.name].simulated_rate for plan in sized.plans):
        return "The simulation contradicts the formulas for one of them by more than 0.6: not compared."
    split, plain = (found[plan.name].num_gpus(plan) for plan in (sized.split, sized.replicas))
    verdict = "pays" if split < plain else "does not pay"
    return (
        f"Disaggregation {verdict} here: {split:,} GPUs against {plain:,} of replicas, with the same policy, "
        "placement and choice of chunk sizes."
    )


def _changes(plan: Plan, changes: Iterable[Change]) -> Table:
    table = _table("change", "E2E p99 of this cluster", "limits", "GPUs needed")
    table.add_row("none", f"{1e3 * plan.e2e.p99_s:,.0f} ms", "kept", f"{plan.num_gpus:,}")
    for change in changes:
        late = "does not keep up" if change.e2e_p99_s is None else f"{1e3 * change.e2e_p99_s:,.0f} ms"
        needed = "" if change.num_gpus is None else f"{change.num_gpus:,}"
        table.add_row(change.name, late, "kept" if change.keeps else "missed", needed)
    return table


def rows(sized: Sized, found: Mapping[str, Check], price: float | None) -> list[Row]:
    """Return the figures of both clusters; the simulation's beside the formulas' as peers."""
    made: list[Row] = []
    for plan in sized.plans:
        check = found[plan.name]
        made.append(Row(plan.name, "GPUs by formula", plan.num_gpus, "GPUs"))
        part, simulated = check.part.plan, check.simulated
        for metric, value, formula, unit in (
            ("E2E mean of a part", simulated.e2e_mean_s, part.e2e.mean_s, "s"),
            ("E2E p99 of a part", simulated.e2e_p99_s, part.e2e.p99_s, "s"),
            ("most load of a part", check.simulated_rate, check.part.traffic.rate, "requests/s"),
        ):
            made.append(versus(Row(plan.name, metric, value, unit), "formula", formula, BASELINE))
        if price is not None:
            paid = cost(plan, sized.traffic, price)
            made.append(
                Row(plan.name, "cost of a million tokens", paid.million_tokens, "of the price's currency")
            )
    return made
