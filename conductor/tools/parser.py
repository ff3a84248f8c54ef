"""Calls of tools in the text of an answer, as it comes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moonpool.conductor.tools.formats import ToolFormat
from moonpool.conductor.tools.object_reader import ObjectReader

# Mistral's later models write a call as NAME[ARGS]{…}, maybe with [CALL_ID]… in between.
_BARE = re.compile(r"\s*([\w.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_MAX_BARE_CHARS = 256


@dataclass(slots=True)
class CallDelta:
    """A part of the ``index``-th call. ``name``: in its first part only; ``arguments``: more of the JSON."""

    index: int
    name: str = ""
    arguments: str = ""


class CallParser:
    """Divides a text into content and calls. What is no call after all is content.

    Text is held back only while it may be the beginning of a call. ``several``: calls after the first count.
    """

    def __init__(self, form: ToolFormat, *, several: bool = True) -> None:
        self.num_calls = 0
        self._several = several
        self._form = form
        self._text = ""  # not divided yet
        self._opened = ""  # since the beginning of the calls: content, if no call follows
        self._inside = False  # the calls have begun
        self._object: ObjectReader | None = None
        self._told = False  # the name of the call that is being read
        self._plain = False  # no call can come any more
        self._after_call = False  # nothing but white space has come since

    @property
    def called(self) -> bool:
        return self.num_calls > 0

    def read(self, text: str, *, ended: bool) -> tuple[str, list[CallDelta]]:
        """Divide more text. ``ended``: there is no more after it."""
        content, calls = self.push(text)
        if ended:
            content += self.flush()
        return content, [call for call in calls if self._several or call.index == 0]

    def push(self, text: str) -> tuple[str, list[CallDelta]]:
        """Return the content and the parts of calls that ``text`` completes."""
        self._text += text
        content, calls = "", list[CallDelta]()
        while self._text:
            before = self._text, self._inside, self._object, self._plain
            content += self._step(calls)
            if before == (self._text, self._inside, self._object, self._plain):
                break
        return content, calls

    def flush(self) -> str:
        """The content that was held back, at the end."""
        text, self._text = self._text, ""
        reader, self._object = self._object, None
        if reader is not None:
            text = "" if self._told else reader.raw
        elif self._inside and not self._opened:
            rest = text.strip(self._separators)
            text = "" if self._form.end.startswith(rest) else text
        elif self._after_call and not text.strip():
            text = ""
        opened, self._opened = self._opened, ""
        return opened + text

    def _step(self, calls: list[CallDelta]) -> str:
        """Divide the next part of the text. Returns content; nothing changes where more must be known."""
        if self._object is not None:
            return self._read(self._object, calls)
        if self._inside:
            return self._next_call()
        return self._outside()

    def _outside(self) -> str:
        begin = self._form.begin
        if self._plain:
            content, self._text = self._text, ""
            return content
        if not begin:
            return self._at_start()
        at = self._text.find(begin)
        if at >= 0:
            content, self._text = self._text[:at], self._text[at + len(begin) :]
            self._inside, self._opened = True, begin
            content = content if content.strip() or not self._after_call else ""
        else:
            possible = range(min(len(begin) - 1, len(self._text)), 0, -1)
            kept = next((n for n in possible if begin.startswith(self._text[-n:])), 0)
            end = len(self._text) - kept
            content = self._text[:end]
            if self._after_call and not content.strip():
                return ""  # dropped, if another call follows
            self._text = self._text[end:]
        self._after_call = False
        return content

    def _at_start(self) -> str:
        """Of a format without a mark: an answer is calls from its first character on, or has none."""
        tag = "<|python_tag|>"
        text = self._text.lstrip()
        if text.startswith(tag):
            text = text[len(tag) :].lstrip()
        if not text or tag.startswith(text):
            return ""
        if text.startswith("{"):
            self._inside, self._text = True, text
        else:
            self._plain = True
        return ""

    @property
    def _separators(self) -> str:
        return self._form.separators + " \t\r\n"

    def _next_call(self) -> str:
        """Between calls, or before the first."""
        begin, end = self._form.begin, self._form.end
        if not end and begin:
            # Each call may have the mark, which begins like a list of calls.
            marked = self._text.lstrip()
            if marked.startswith(begin):
                self._text = marked[len(begin) :]
                return ""
            if marked and begin.startswith(marked):
                return ""
        text = self._text.lstrip(self._separators)
        if not text:
            self._text = ""
            return ""
        if text.startswith("{"):
            self._object, self._told, self._text = ObjectReader(), False, text
            return ""
        if end and self.num_calls and (text.startswith(end) or end.startswith(text)):
            if text.startswith(end):
                self._text, self._inside, self._opened = text[len(end) :], False, ""
            return ""
        if not end and begin:
            if bare := _BARE.match(text):
                self._object, self._told = ObjectReader(bare[1]), False
                self._text = text[bare.end() :]
                return ""
            if len(text) < _MAX_BARE_CHARS:
                return ""
        self._inside, self._plain = False, not end
        content, self._opened = self._opened, ""
        return content

    def _read(self, reader: ObjectReader, calls: list[CallDelta]) -> str:
        self._text = reader.push(self._text)
        arguments = reader.arguments()
        if reader.name and not self._told:
            self._told, self._opened = True, ""
            calls.append(CallDelta(self.num_calls, reader.name, arguments))
            self.num_calls += 1
        elif arguments:
            calls.append(CallDelta(self.num_calls - 1, "", arguments))
        if not reader.closed:
            return ""
        self._object = None
        if self._told:
            self._after_call = True
            return ""
        # An object that calls nothing.
        self._inside, self._plain = False, not self._form.end
        opened, self._opened = self._opened, ""
        return opened + reader.raw
