"""Where the time of a request went: parts that sum to the whole, and the longest as a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from moonpool.conductor.observing.timelines.crowding import burst_of

# Names of parts, with their sentences.
SENTENCES = {
    "api": "the API parsed and tokenized the request, and wrote its answer",
    "conductor": "the conductor had it until it was placed",
    "no node": "it waited for a node that takes requests",
    "asked": "{node} had its prompt and had not answered",
    "queue": "its prompt waited in the queue of {node}",
    "host load": "{node} loaded cached blocks from its host memory",
    "disk load": "{node} read cached blocks from its disk",
    "fetch": "{node} fetched cached blocks from {other}",
    "prefill": "{node} computed its prompt",
    "index lag": "{node} computed blocks that the index named and that were gone",
    "batch": "its prompt waited between its chunks while {node} computed other work",
    "messages": "messages between the conductor and {node} were on their way",
    "room": "it waited until {node} had room for its blocks and began to decode",
    "transfer": "{node} read its blocks from {other}",
    "decode": "{node} produced its tokens",
    "prompts": "steps of {node} that produced its tokens also computed prompts of others",
    "speculation": "{node} computed proposed tokens that the model rejected",
    "exchange": "ranks of {node} exchanged results, or waited for one another",
    "recompute": "{node} had taken its blocks away, computed them again, and produced its tokens",
    "migration": "it moved from {other} to {node}, without tokens meanwhile",
    "failed": "an attempt ran that failed",
    "detokenize": "the API turned its tokens into text",
    "stream": "the API wrote its tokens, and waited until its client took them",
}


# Events with a time inside the stretch before another one.
_INSIDE = ("prefix_loaded", "cached", "stayed", "recovered")


@dataclass(frozen=True, slots=True)
class TimePart:
    """``name``: one of ``SENTENCES``. ``node``: where; ``other``: the node that blocks came from. ``cause``:
    of a queue, see ``burst_of``."""

    name: str
    seconds: float
    node: str = ""
    other: str = ""
    cause: str = ""

    @property
    def sentence(self) -> str:
        said = SENTENCES[self.name].format(node=self.node or "a node", other=self.other or "another node")
        return f"{said}, which grew by {self.cause}" if self.cause else said


def parts_of(timeline: Mapping[str, Any]) -> list[TimePart]:
    """The parts of one sequence in the order of their begin; those of equal name and nodes are one.
    ``timeline``: from ``RequestTimeline.to_dict``.

    They sum to the time of its last event, since each stretch between two events is divided and nothing is
    counted twice. What nodes say of a stretch may be longer than it, by their clocks: it is cut then.
    """
    whole: dict[tuple[str, str, str, str], float] = {}
    for part in _parts(timeline["events"]):
        if part.seconds > 0:
            key = part.name, part.node, part.other, part.cause
            whole[key] = whole.get(key, 0.0) + part.seconds
    return [TimePart(name, seconds, *rest) for (name, *rest), seconds in whole.items()]


def with_api(parts: list[TimePart], whole_s: float, delivered_s: Mapping[str, float]) -> list[TimePart]:
    """The parts of an HTTP request of ``whole_s``; ``parts``: those of its only sequence. ``delivered_s``: in
    all, for the end of a sequence comes before its last token is given on. Zeros: it runs."""
    rest_s = whole_s - sum(part.seconds for part in parts)
    if rest_s <= 0:
        return parts
    found = [part for part in parts if part.name not in delivered_s]
    for name, seconds in delivered_s.items():
        before_s = sum(part.seconds for part in parts if part.name == name)
        last_s = min(max(seconds - before_s, 0.0), rest_s)
        rest_s -= last_s
        found.append(TimePart(name, before_s + last_s))
    return [part for part in (TimePart("api", rest_s), *found) if part.seconds > 0]


def explanation_of(parts: list[TimePart]) -> str:
    """What took longest, as a sentence; empty without parts."""
    if not parts:
        return ""
    longest, total_s = max(parts, key=lambda part: part.seconds), sum(part.seconds for part in parts)
    return f"{longest.seconds:.3g} of {total_s:.3g} s: {longest.sentence}"


def _parts(events: list[Mapping[str, Any]]) -> Iterator[TimePart]:
    since_s = 0.0
    # The event before; what the prefill node said of the prefix; why its queue was long.
    last, loaded, burst = "", {}, ""
    prefill, decode, is_decoding, is_again = "", "", False, False
    delivered = Counter[str]()
    for event in events:
        name, seconds = event["event"], max(event["at_s"] - since_s, 0.0)
        delivered.update(event.get("delivered_s", {}))
        if name == "prefix_loaded":
            loaded = dict(event)
        if name in _INSIDE:
            continue
        for part, part_s in delivered.items():
            part_s = min(part_s, seconds)
            seconds -= part_s
            yield TimePart(part, part_s)
        delivered.clear()
        match name:
            case "placed":
                yield TimePart("no node" if last == "waits_for_node" else "conductor", seconds)
                prefill, decode = event["placement"]["prefill"], event["placement"]["decode"] or ""
                loaded, is_decoding, is_again = {}, False, False
                burst = burst_of(event.get("queued", {}))
            case "prefilled":
                yield from _prefill(event, loaded, seconds, burst)
            case "transferred":
                decode, is_decoding = event["node"] or decode, True
                read_s = min(event["transfer_s"], seconds)
                yield TimePart("room", seconds - read_s, decode)
                yield TimePart("transfer", read_s, decode, prefill)
            case "migrated":
                gap_s = min(max(event["downtime_s"], 0.0), seconds)
                yield from _decode(event, seconds - gap_s, event["source"], is_again=is_again)
                yield TimePart("migration", gap_s, event["node"], event["source"])
                decode, is_decoding, is_again = event["node"], True, False
            case _ if is_decoding:
                yield from _decode(event, seconds, decode or prefill, is_again=is_again)
                is_again = is_again or name == "preempted"
            case _:
                yield _until(name, seconds, prefill, decode, last)
                is_decoding = name == "first_token" and decode in ("", prefill)
        since_s, last = max(event["at_s"], since_s), name


def _decode(event: Mapping[str, Any], seconds: float, node: str, *, is_again: bool) -> Iterator[TimePart]:
    """The decode before an event. What its node told with a message of a token counts as before the event."""
    for cause, part_s in event.get("slowed_s", {}).items():
        part_s = min(part_s, seconds)
        seconds -= part_s
        yield TimePart(cause, part_s, node)
    yield TimePart("recompute" if is_again else "decode", seconds, node)


def _until(name: str, seconds: float, prefill: str, decode: str, last: str) -> TimePart:
    """The stretch before an event that says nothing of it."""
    if name == "retry":
        return TimePart("failed", seconds)
    if last == "placed":
        # An engine of another kind says no more.
        return TimePart("prefill" if name == "first_token" else "asked", seconds, prefill)
    if name == "first_token":
        return TimePart("messages", seconds, prefill)
    if last in ("prefilled", "first_token"):
        return TimePart("room", seconds, decode or prefill)
    return TimePart("no node" if last == "waits_for_node" else "conductor", seconds)


def _prefill(
    event: Mapping[str, Any], loaded: Mapping[str, Any], seconds: float, burst: str
) -> Iterator[TimePart]:
    node, compute_s = event["node"], event["compute_s"]
    chunks_s = sum(chunk["seconds"] for chunk in event["chunks"])
    own_s = min(chunks_s, compute_s) if event["chunks"] else compute_s
    stale_s, disk_s = min(loaded.get("stale_s", 0.0), own_s), loaded.get("disk_s", 0.0)
    computed, waited, moved = list[TimePart](), list[TimePart](), list[TimePart]()
    # What is certain first: the last ones are cut where it all takes longer than the stretch.
    for found, name, part_s, other in (
        (computed, "index lag", stale_s, ""),
        (computed, "prefill", own_s - stale_s, ""),
        (computed, "batch", compute_s - own_s, ""),
        (waited, "queue", event["queued_s"], ""),
        (moved, "disk load", disk_s, ""),
        (moved, "host load", loaded.get("load_s", 0.0) - disk_s, ""),
        (moved, "fetch", loaded.get("fetch_s", 0.0), loaded.get("fetch_from", "")),
    ):
        part_s = max(min(part_s, seconds), 0.0)
        seconds -= part_s
        found.append(TimePart(name, part_s, node, other, burst if name == "queue" else ""))
    yield TimePart("messages", seconds, node)
    yield from (*moved, *waited, *computed)
