"""The one redaction of secrets, for whatever is logged, printed, reported, or sent as an error's text.

Hidden are the secrets that ``hide`` was told (those of a loaded configuration and of its URLs), and what
looks like one: passwords in URLs, values of options and parameters named as secrets.
"""

from __future__ import annotations

import ctypes
import re
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final
from urllib.parse import unquote

# Printed in place of a secret.
HIDDEN: Final = "•••"
# Shorter texts are only hidden where they stand as secrets: they are parts of ordinary words.
_MIN_CHARS = 6

_NAMES = r"password|passwd|secret|token|salt|api[_-]?key|cluster[_-]?key"
# What a text must contain, what is hidden in it, and how. Lengths are bounded, so that no text takes time
# quadratic in its length.
_PATTERNS: Final = (
    # As far as the last @, because a password may contain / and @ although it must not.
    ("@", re.compile(r"(://)[^\s\"'<>]{0,1000}@"), rf"\1{HIDDEN}@"),
    (
        "=",
        re.compile(rf"(?i)([?&;][\w.-]{{0,40}}(?:{_NAMES}|key)[\w.-]{{0,40}}=)[^&;\s\"']+"),
        rf"\1{HIDDEN}",
    ),
    (
        "=",
        re.compile(rf"(?i)((?:{_NAMES})[\"']?\s*=\s*[\"']?)(?!{HIDDEN})[^\s\"',@][^\s\"',]*"),
        rf"\1{HIDDEN}",
    ),
    ("--", re.compile(rf"(?i)(--(?:{_NAMES})[\s=])[^\s\"',]+"), rf"\1{HIDDEN}"),
    ("bearer ", re.compile(r"(?i)(\bbearer )[\w~+/.=-]{4,}"), rf"\1{HIDDEN}"),
)
_URL_PASSWORDS = (
    re.compile(r"://[^\s/@]*?:([^\s\"'<>]*)@"),
    re.compile(r"[?&;][\w.-]*password=([^&;\s]+)"),
)

_hidden: dict[str, None] = {}


def hide(*secrets: str) -> None:
    """Never show these texts, nor the passwords in those that are URLs, wherever they occur."""
    for secret in secrets:
        found = [each for url in _URL_PASSWORDS for each in url.findall(secret)]
        found = found if "://" in secret else [secret]
        for each in (text for one in found for text in (one, unquote(one))):
            if len(each) >= _MIN_CHARS:
                _hidden[each] = None
    hide_arguments()


def redacted(text: str) -> str:
    """``text`` without secrets. Applied twice, it changes nothing more."""
    for secret in _hidden:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    lower = text.lower()
    for part, pattern, shown in _PATTERNS:
        if part in lower:
            text = pattern.sub(shown, text)
    return text


def redacted_value(value: Any) -> Any:
    """``value`` with every text in its lists, tuples and dictionaries redacted."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {key: redacted_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(redacted_value, value))
    return value


def redacted_arguments(arguments: Sequence[str]) -> list[str]:
    """A command line without secrets."""
    shown, before = [], ""
    for argument in arguments:
        # The name of an option and its value may be two arguments.
        pair = redacted(f"{before} {argument}")
        is_secret = before.startswith("--") and pair == f"{before} {HIDDEN}"
        shown.append(HIDDEN if is_secret else redacted(argument))
        before = argument
    return shown


def hide_arguments() -> None:
    """Redact this process's command line where other users see it (``ps``). Linux only; until it is called,
    they saw it as it was given."""
    with suppress(OSError, ValueError, IndexError):
        # arg_start and arg_end, fields 48 and 49 of proc(5); the first after the name is field 3.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        if not 0 < start < end:
            return
        arguments = ctypes.string_at(start, end - start).split(b"\0")
        given = [argument.decode(errors="surrogateescape") for argument in arguments]
        for argument, shown, was in zip(arguments, redacted_arguments(given), given, strict=True):
            if shown != was:
                text = shown.replace(HIDDEN, "***").encode(errors="surrogateescape")
                ctypes.memmove(start, text.ljust(len(argument))[: len(argument)], len(argument))
            start += len(argument) + 1


def hide_in_tracebacks() -> None:
    """Redact what Python prints of uncaught exceptions."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        sys.stderr.write(redacted("".join(traceback.format_exception(kind, error, trace))))

    sys.excepthook = show
