"""The tools of one request: how the model writes calls, and what of them is enforced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.conductor.tools.formats import ToolFormat
from moonpool.conductor.tools.parser import CallDelta, CallParser
from moonpool.runtime.structure.grammars import Structure


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``structure``: of the answer, where a call is required. ``several``: an answer may have more than one
    call; where it may not, the others are dropped. ``arguments``: of each tool that may be required."""

    form: ToolFormat
    structure: Structure | None = None
    several: bool = True
    arguments: Mapping[str, Structure] = field(default_factory=dict)

    def reader(self) -> CallReader:
        return CallReader(CallParser(self.form), several=self.several)


class CallReader:
    """The content and the calls of one choice. ``called``: there is a call."""

    def __init__(self, parser: CallParser, *, several: bool) -> None:
        self._parser = parser
        self._several = several

    @property
    def called(self) -> bool:
        return self._parser.num_calls > 0

    def read(self, text: str, *, ended: bool) -> tuple[str, list[CallDelta]]:
        """Divide more text. ``ended``: there is no more after it."""
        content, calls = self._parser.push(text)
        if ended:
            rest, more = self._parser.flush()
            content, calls = content + rest, calls + more
        return content, [call for call in calls if self._several or call.index == 0]
