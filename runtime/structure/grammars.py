"""Structures compiled for one tokenizer: outside of event loops, once each, within bounds."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.structure.automaton import Automaton
from moonpool.runtime.structure.refusals import refusal, unsound
from moonpool.runtime.structure.schemas import WHITESPACE, enforceable

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from moonpool.protos import node_pb2

log = logging.getLogger(__name__)

KINDS: Final = ("json", "json_object", "regex", "choice", "grammar")
MAX_CHARS: Final = 1 << 16
"""Of a structure's text."""
# Compiled structures kept, and those that wait to be compiled.
_KEPT = 128
_MAX_WAITING = 32
_NOTHING = np.empty(0, np.int32)


class StructureInvalid(MoonpoolError):
    """A structure is malformed, cannot be satisfied, costs too much, or allows no token any more. It would be
    so on any node."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST


class StructureUnsupported(MoonpoolError):
    """This process cannot enforce structures."""

    code = "UNIMPLEMENTED"
    failure = FailureClass.REQUEST


class GrammarsBusy(MoonpoolError):
    """Too many structures wait to be compiled. Try again."""

    code = "RESOURCE_EXHAUSTED"
    failure = FailureClass.REQUEST

    def __init__(self) -> None:
        super().__init__(f"{_MAX_WAITING} structures wait to be compiled: try again")


@dataclass(frozen=True, slots=True)
class Structure:
    """What the text of an answer must match.

    ``text``, by ``kind``: json: a JSON schema; json_object: nothing; regex: an expression; choice: a JSON
    list of texts; grammar: Lark or GBNF.
    """

    kind: str
    text: str = ""

    @classmethod
    def from_proto(cls, message: node_pb2.Structure) -> Structure:
        return cls(message.kind, message.text)


class Grammars:
    """The structures of one model. Used on one event loop; compiles in a thread of its own.

    A structure is compiled at first use; the least recently used ones are forgotten.
    """

    def __init__(self, directory: Path, vocab_size: int, end_ids: Iterable[int]) -> None:
        """``directory``: of the checkpoint. ``vocab_size``: of the model. ``end_ids``: its end-of-sequence
        tokens. Reads nothing yet."""
        self._file = directory / "tokenizer.json"
        self._vocab_size = vocab_size
        self._end_ids = sorted(i for i in end_ids if 0 <= i < vocab_size)
        self._compiled: OrderedDict[Structure, Future[LLMatcher | Exception]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="moonpool-grammars")
        self._tokenizer: Any = None

    @property
    def lacking(self) -> str:
        """Why structures cannot be enforced here; empty: they can."""
        if find_spec("llguidance") is None:
            return "llguidance is not installed: install moonpool[serve]"
        if not self._file.exists():
            return f"{self._file} does not exist"
        return "" if self._end_ids else "the model has no end-of-sequence token"

    async def warm_up(self) -> None:
        """Import llguidance, read the tokenizer and compile a structure now: no request waits for them then.

        Where structures cannot be enforced nothing happens: requests with one are told why."""
        try:
            await self.check(Structure("json_object"))
        except StructureUnsupported as error:
            log.info("%s", error)

    async def check(self, structure: Structure) -> None:
        """Compile the structure, unless it is. Raises as ``automaton``."""
        await self._matcher(structure)

    async def automaton(
        self, structure: Structure, output_ids: npt.NDArray[np.int32] = _NOTHING
    ) -> Automaton:
        """Return the structure's automaton after ``output_ids``.

        Raises StructureInvalid, StructureUnsupported or GrammarsBusy. An output that does not match is no
        error here: see ``Automaton.error``.
        """
        matcher = (await self._matcher(structure)).deep_copy()
        automaton = Automaton(matcher, self._vocab_size, self._end_ids)
        if len(output_ids):
            await asyncio.to_thread(automaton.advance, output_ids)
        return automaton

    async def _matcher(self, structure: Structure) -> LLMatcher:
        """Return the compiled structure, at its beginning. Whoever cancels this leaves the work to others."""
        if why := self.lacking:
            raise StructureUnsupported(f"structured output is not supported here: {why}")
        if structure.kind not in KINDS or len(structure.text) > MAX_CHARS:
            raise StructureInvalid(
                f"a structure has at most {MAX_CHARS} characters and one of the kinds {', '.join(KINDS)}, "
                f"got {len(structure.text)} of the kind {structure.kind[:32]!r}"
            )
        compiling = self._compiled.get(structure)
        if compiling is None:
            if sum(not each.done() for each in self._compiled.values()) >= _MAX_WAITING:
                raise GrammarsBusy
            compiling = self._compiled[structure] = self._thread.submit(self._compile_or_fail, structure)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(structure)
        if compiling.done():
            compiled = compiling.result()
        else:
            compiled = await asyncio.shield(asyncio.wrap_future(compiling))
        if isinstance(compiled, Exception):
            # An error that is raised keeps the frames of its caller; this one is kept for later requests.
            raise copy.copy(compiled) from compiled
        return compiled

    def _compile_or_fail(self, structure: Structure) -> LLMatcher | Exception:
        """Return the error instead of raising it."""
        try:
            return self._compile(structure)
        except Exception as error:
            return error

    def _compile(self, structure: Structure) -> LLMatcher:
        import llguidance

        if self._tokenizer is None:
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    str(self._file), n_vocab=self._vocab_size, eos_token=self._end_ids[0]
                )
            except ValueError as error:
                raise StructureUnsupported(f"{self._file} cannot be used for structures: {error}") from error
        try:
            grammar = _grammar_of(structure)
        except ValueError as error:
            raise StructureInvalid(f"the {structure.kind} cannot be read: {error}") from error
        # A quarter or less of the defaults: the whole batch waits for the slowest mask.
        limits = llguidance.LLParserLimits(
            max_items_in_row=500, step_max_items=10_000, step_lexer_fuel=50_000
        )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            schema = json.loads(structure.text) if structure.kind == "json" else None
            raise StructureInvalid(refusal(matcher.get_error(), schema))
        first = Automaton(matcher.deep_copy(), self._vocab_size, self._end_ids)
        first.fill(_NOTHING)
        if first.error:
            raise StructureInvalid(f"no text matches the {structure.kind}: {first.error}")
        return matcher


def _grammar_of(structure: Structure) -> str:
    """Return the structure in llguidance's own form. Raises ValueError or StructureInvalid."""
    from llguidance import LLMatcher, grammar_from

    match structure.kind:
        case "json" | "json_object":
            given = json.loads(structure.text) if structure.kind == "json" else {"type": "object"}
            schema = enforceable(given)
            if why := unsound(given, schema):
                raise StructureInvalid(why)
            return LLMatcher.grammar_from_json_schema(schema, overrides={"whitespace_pattern": WHITESPACE})
        case "regex":
            return LLMatcher.grammar_from_regex(structure.text)
        case "choice":
            return "start: " + " | ".join(map(json.dumps, json.loads(structure.text)))
        case _:
            return grammar_from("grammar", structure.text)
