"""A picture of the answer: nodes and links with their load, and where an answer's time goes."""

from __future__ import annotations

from html import escape

from moonpool.simulator.sizing.answer import Question
from moonpool.simulator.sizing.budget import budget
from moonpool.simulator.sizing.page import headline
from moonpool.simulator.sizing.search import Plan
from moonpool.simulator.sizing.traffic import Traffic

_WIDTH, _HEIGHT = 860, 330
_BLUE, _GREEN, _GREY, _INK = "#4c7bd9", "#3f9b6b", "#c9ced6", "#1d2430"


def draw(question: Question, plan: Plan, traffic: Traffic) -> str:
    """Return the plan as an SVG."""
    used = budget(plan, traffic, question.gpu, question.model)
    parts = [_text(20, 28, headline(question, traffic), 11, "bold")]
    decode = plan.decode or plan.prefill
    batch = f"{plan.decodes.batch:.0f} sequences a batch"
    kv = f"KV in flight {used.kv_nbytes / 1e9:,.3g} GB"
    arithmetic, reads = used.prefill_reached, used.decode_reached
    if plan.decode is None:
        lines = [f"{decode.num_nodes:,} replicas of {decode.kind.name}", f"{plan.num_gpus:,} GPUs", batch, kv]
        parts += _box(280, 60, lines, ("arithmetic", arithmetic, _BLUE), ("memory reads", reads, _GREEN))
    else:
        first = plan.prefill
        compute = f"{1e3 * plan.prefills.compute_s:.3g} ms a prompt"
        name = f"{first.num_nodes:,} prefill nodes of {first.kind.name}"
        lines = [name, f"{first.num_gpus:,} GPUs", compute, f"busy {100 * plan.prefills.busy:.0f} %"]
        parts += _box(20, 60, lines, ("arithmetic", arithmetic, _BLUE))
        name = f"{decode.num_nodes:,} decode nodes of {decode.kind.name}"
        lines = [name, f"{decode.num_gpus:,} GPUs", batch, kv]
        parts += _box(560, 60, lines, ("memory reads", reads, _GREEN))
        parts.append(f'<path d="M300 130H550l-9 -6m9 6l-9 6" fill="none" stroke="{_INK}" stroke-width="2"/>')
        moved = f"KV {used.moved_nbytes_per_s / 1e9:,.3g} GB/s, {100 * used.link_used:.2g} % of links"
        parts.append(_text(330, 120, moved))
    parts += _times(plan)
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'fill="{_INK}">\n<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def _text(x: float, y: float, text: str, size: int = 12, weight: str = "normal") -> str:
    return f'<text x="{x:.0f}" y="{y}" font-size="{size}" font-weight="{weight}">{escape(text)}</text>'


def _box(x: int, y: int, lines: list[str], *bars: tuple[str, float, str]) -> list[str]:
    """A box with lines of text, and below them bars: name, fraction, colour."""
    parts = [f'<rect x="{x}" y="{y}" width="280" height="150" rx="8" fill="none" stroke="{_GREY}"/>']
    parts += [
        _text(x + 12, y + 22 + 19 * i, line, 12, "normal" if i else "bold") for i, line in enumerate(lines)
    ]
    for i, (name, fraction, colour) in enumerate(bars):
        top = y + 102 + 24 * i
        width = 120 * min(fraction, 1.0)
        parts.append(f'<rect x="{x + 12}" y="{top}" width="120" height="12" fill="{_GREY}"/>')
        parts.append(f'<rect x="{x + 12}" y="{top}" width="{width:.1f}" height="12" fill="{colour}"/>')
        parts.append(_text(x + 140, top + 11, f"{name} {100 * fraction:.0f} %"))
    return parts


def _times(plan: Plan) -> list[str]:
    """The mean answer from arrival to last token, as one bar."""
    stretches = (
        ("wait", plan.prefills.wait.mean_s, _GREY),
        ("prompt", plan.prefills.compute_s, _BLUE),
        ("hand-over", plan.move.mean_s, "#d98b3a"),
        ("decode", plan.decodes.answer.mean_s, _GREEN),
    )
    whole_s, x = plan.e2e.mean_s, 20.0
    parts = [
        _text(20, 240, f"mean answer {1e3 * whole_s:,.0f} ms, p99 {1e3 * plan.e2e.p99_s:,.0f} ms", 12, "bold")
    ]
    for i, (name, seconds, colour) in enumerate(stretches):
        width = 820 * seconds / whole_s
        parts.append(f'<rect x="{x:.1f}" y="250" width="{width:.1f}" height="22" fill="{colour}"/>')
        parts.append(f'<rect x="{20 + 205 * i}" y="290" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(38 + 205 * i, 301, f"{name} {1e3 * seconds:,.{0 if seconds > 0.1 else 1}f} ms"))
        x += width
    return parts
