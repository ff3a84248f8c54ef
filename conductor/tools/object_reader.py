"""One JSON object of a call, read as its text comes."""

from __future__ import annotations

import json
from typing import Final

_ARGUMENTS: Final = ("arguments", "parameters")


class ObjectReader:
    """Reads ``{"name": …, "arguments": {…}}``. Arguments are passed on as they come, once the name is known.

    name: empty until it is known. raw: all text of the object so far. closed: the object is complete.
    """

    def __init__(self, name: str = "") -> None:
        """``name``: it was told already, and the whole object is the arguments."""
        self.name = name
        self.raw = ""
        self.closed = False
        self._is_bare = bool(name)
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key = ""
        self._began = -1  # position of the current key or value at depth 1; -1: it has not begun
        self._at_value = False
        self._first, self._end = 0, 0  # positions of the arguments, as far as read
        self._text: str | None = None  # the arguments, where they are a JSON text
        self._num_told = 0

    def push(self, text: str) -> str:
        """Read ``text`` up to the end of the object; return what comes after it."""
        position = len(self.raw)
        self.raw += text
        while position < len(self.raw):
            self._read(position)
            position += 1
            if self.closed:
                rest, self.raw = self.raw[position:], self.raw[:position]
                return rest
        return ""

    def arguments(self) -> str:
        """The arguments that were not returned before; empty while the name is unknown."""
        if not self.name:
            return ""
        if self._text is not None:
            known = self._text
        else:
            known = self.raw if self._is_bare else self.raw[self._first : self._end]
        new, self._num_told = known[self._num_told :], len(known)
        return new

    def _read(self, at: int) -> None:
        character = self.raw[at]
        if self._in_string:
            self._read_string(character, at)
        elif character == '"':
            self._in_string = True
            self._begin(at)
        elif character in "{[":
            self._begin(at)
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if self._depth == 0:
                self._end_value(at)
                self.closed = True
            elif self._depth == 1 and self._streams:
                self._end = at + 1
        elif self._depth == 1 and character == ":" and not self._at_value:
            self._at_value, self._began = True, -1
        elif self._depth == 1 and character == ",":
            self._end_value(at)
        elif not character.isspace():
            self._begin(at)
        if self._depth > 1 and self._streams:
            self._first, self._end = self._began, at + 1

    def _read_string(self, character: str, at: int) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            if self._depth == 1 and not self._at_value:
                self._key = _text_of(self.raw[self._began : at + 1])

    @property
    def _streams(self) -> bool:
        """Whether the current value is the object of arguments, which is passed on as it comes."""
        return self._at_value and self._key in _ARGUMENTS and self.raw[self._began] == "{"

    def _begin(self, at: int) -> None:
        if self._depth == 1 and self._began < 0:
            self._began = at

    def _end_value(self, at: int) -> None:
        """The value at depth 1, if there is one, ends before ``at``."""
        if self._at_value and self._began >= 0:
            value = self.raw[self._began : at].rstrip()
            if self._key == "name":
                self.name = self.name or _text_of(value)
            elif self._key in _ARGUMENTS:
                self._first, self._end = self._began, self._began + len(value)
                if value.startswith('"'):  # some models write them as a text
                    self._text = _text_of(value)
        self._at_value, self._began, self._key = False, -1, ""


def _text_of(value: str) -> str:
    """A JSON text; empty for anything else."""
    try:
        text = json.loads(value)
    except ValueError:
        return ""
    return text if isinstance(text, str) else ""
