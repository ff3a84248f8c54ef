"""A request's timeline as spans of its processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from moonpool.conductor.observing.timelines.parts import parts_of

CONDUCTOR = "conductor"

_OF_REQUEST = ("prompt_tokens", "output_tokens", "cached_tokens", "finish_reason")
# Facts that become spans or processes.
_NOT_FACTS = ("event", "unix_s", "at_s", "chunks", "reads", "node")


@dataclass(frozen=True, slots=True)
class TimelineSpan:
    """``began_s``: since the arrival at the conductor; ``seconds`` 0: a moment."""

    process: str  # "conductor", or a node's id
    name: str
    began_s: float
    seconds: float = 0.0
    facts: Mapping[str, Any] = field(default_factory=dict)


def spans_of(timeline: Mapping[str, Any]) -> list[TimelineSpan]:
    """The spans of one sequence, by begin; the first has the seconds of each of its parts (``part.NAME_s``).

    ``timeline``: from ``RequestTimeline.to_dict``.

    Spans of nodes are late by the delay of one message: their times are relative to its arrival.
    """
    return sorted(_spans(timeline), key=lambda span: (span.began_s, -span.seconds))


def _spans(timeline: Mapping[str, Any]) -> Iterator[TimelineSpan]:
    events, summary = timeline["events"], timeline["summary"]
    ends_s = events[-1]["at_s"] if events else 0.0
    of_request = {name: summary[name] for name in _OF_REQUEST}
    for part in parts_of(timeline):
        name = f"part.{part.name.replace(' ', '_')}_s"
        of_request[name] = of_request.get(name, 0.0) + part.seconds
    yield TimelineSpan(CONDUCTOR, "request", 0.0, ends_s, of_request)
    waits_since_s = 0.0
    decode_node: str | None = None
    placed_s = decodes_since_s = 0.0
    for event in events:
        at_s, name = event["at_s"], event["event"]
        facts = {key: value for key, value in event.items() if key not in _NOT_FACTS}
        match name:
            case "placed":
                decode_node, placed_s = event["placement"]["decode"], at_s
                yield TimelineSpan(CONDUCTOR, "place", waits_since_s, at_s - waits_since_s, facts)
            case "prefilled":
                decodes_since_s = at_s
                yield from _prefill(event, facts, placed_s)
            case "first_token":
                yield TimelineSpan(CONDUCTOR, "first token", at_s, 0.0, facts)
            case "transferred":
                yield from _stretches("read blocks", event["node"], event["reads"])
                yield TimelineSpan(event["node"], "blocks complete", at_s, 0.0, facts)
            case "migrated":
                if decodes_since_s and decode_node:
                    yield TimelineSpan(decode_node, "decode", decodes_since_s, at_s - decodes_since_s)
                decode_node, decodes_since_s = event["node"], at_s
                yield from _stretches("read blocks", event["node"], event["reads"])
                yield TimelineSpan(event["node"], name, at_s, 0.0, facts)
            case "retry" | "done":
                if decodes_since_s and decode_node:
                    yield TimelineSpan(decode_node, "decode", decodes_since_s, at_s - decodes_since_s)
                waits_since_s, decodes_since_s = at_s, 0.0
                yield TimelineSpan(CONDUCTOR, name, at_s, 0.0, facts)
            case "prefix_loaded":
                yield from _prefix(event, facts)
            case _:
                yield TimelineSpan(event.get("node") or CONDUCTOR, name, at_s, 0.0, facts)


def _prefix(event: Mapping[str, Any], facts: dict[str, Any]) -> Iterator[TimelineSpan]:
    node, fetched_s = event["node"], event["at_s"]
    loaded_s = fetched_s - event["fetch_s"]
    if event["load_s"]:
        yield TimelineSpan(node, "load blocks", loaded_s - event["load_s"], event["load_s"], facts)
    if event["fetch_s"]:
        yield TimelineSpan(node, "fetch blocks", loaded_s, event["fetch_s"], facts)


def _prefill(event: Mapping[str, Any], facts: dict[str, Any], placed_s: float) -> Iterator[TimelineSpan]:
    node = event["node"]
    yield TimelineSpan(node, "prefill", placed_s, event["at_s"] - placed_s, facts)
    yield from _stretches("compute chunk", node, event["chunks"])


def _stretches(name: str, node: str, stretches: Iterable[Mapping[str, Any]]) -> Iterator[TimelineSpan]:
    for one in stretches:
        facts = {fact: one[fact] for fact in ("tokens", "nbytes") if one[fact]}
        yield TimelineSpan(node, name, one["at_s"], one["seconds"], facts)
