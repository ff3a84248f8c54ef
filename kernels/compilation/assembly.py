"""What is wrong with a compiled kernel's machine code (SASS, as cuobjdump prints it)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?);")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_TARGET = re.compile(r"\b0x([0-9a-f]+)\s*$")
_ENDS = ("EXIT", "RET", "BRX", "JMX")


@dataclass
class _Step:
    """One instruction: the uniform registers that it reads and writes, and where execution goes on."""

    text: str
    reads: set[int]
    writes: set[int]
    next: list[int] = field(default_factory=list)  # indices


def unset_registers(assembly: str) -> list[str]:
    """Return the instructions that read a uniform register which some path to them has not written.

    ptxas 12.8, which Triton 3.6 brings, makes such code for the descriptors of some tiles in shared memory:
    the kernel then reads another's memory, or none. It warns of nothing. A write under a predicate counts:
    what reads it has that condition too.
    """
    wrong: list[str] = []
    for function in assembly.split("Function :")[1:]:
        wrong += _unset_in(list(_steps(function)))
    return wrong


def _unset_in(steps: list[_Step]) -> list[str]:
    # None: not reached so far. Else what every path found so far has written.
    written: list[set[int] | None] = [set(), *[None] * (len(steps) - 1)] if steps else []
    ahead = [0] if steps else []
    while ahead:
        i = ahead.pop()
        after = (written[i] or set()) | steps[i].writes
        for following in steps[i].next:
            before = written[following]
            merged = after if before is None else before & after
            if before is None or merged != before:
                written[following] = set(merged)
                ahead.append(following)
    pairs = zip(steps, written, strict=True)
    return [step.text for step, found in pairs if found is not None and step.reads - found]


def _steps(function: str) -> Iterator[_Step]:
    lines = [(int(at, 16), text.strip()) for at, text in _LINE.findall(function)]
    index_of = {at: i for i, (at, _) in enumerate(lines)}
    for i, (_, text) in enumerate(lines):
        predicate, _, plain = (
            text.rpartition("@")[2].partition(" ") if text.startswith("@") else ("", "", text)
        )
        name, _, operands = plain.partition(" ")
        step = _Step(text, *_registers(name, operands))
        going_on = i + 1 < len(lines) and (bool(predicate) or not name.startswith((*_ENDS, "BRA")))
        if going_on or name.startswith("BRA.DIV"):
            step.next.append(i + 1)
        target = _TARGET.search(operands) if name.startswith(("BRA", "CALL")) else None
        if target is not None and int(target[1], 16) in index_of:
            step.next.append(index_of[int(target[1], 16)])
        yield step


def _registers(name: str, operands: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction reads and writes."""
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", operands)]
    writes: set[int] = set()
    if (target := re.fullmatch(r"UR(\d+)", parts[0])) is not None:
        count = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
        writes = set(range(int(target[1]), int(target[1]) + count))
        parts = parts[1:]
    reads: set[int] = set()
    for i, part in enumerate(parts):
        for found in map(int, _REGISTER.findall(part)):
            first, count = found, 1
            if part.startswith("gdesc"):
                # Two descriptors, or with the left matrix in registers only the second.
                first, count = (found, 4) if i == 1 else (found + 2, 2)
            elif part.startswith("desc"):
                count = 2
            reads |= set(range(first, first + count))
    return reads, writes
