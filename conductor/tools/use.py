"""The tools of one request: how the model writes calls, and what of them is enforced."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.conductor.tools.formats import ToolFormat
from moonpool.conductor.tools.parser import CallParser
from moonpool.runtime.structure.grammars import Structure


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``structure``: of the answer, where a call is required. ``several``: an answer may have more than one
    call; where it may not, the others are dropped. ``arguments``: of each tool that may be required."""

    form: ToolFormat
    structure: Structure | None = None
    several: bool = True
    arguments: Mapping[str, Structure] = field(default_factory=dict)

    def reader(self) -> CallParser:
        """Of one choice."""
        return CallParser(self.form, several=self.several)
