"""Read a ``Config`` from a TOML file and ``--set key=value``; unknown keys are errors."""

from __future__ import annotations

import difflib
import json
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from moonpool.runtime.config.options import Config
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.redaction import HIDDEN, hide, redacted, redacted_value

# Former names, and what they are part of now.
_MOVED = {"transfer.secret": "security.cluster_key", "transfer.tls": "security"}
_STDIN = Path("-")
_TYPE_NAMES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option as ``moonpool config --explain`` prints it; ``meaning`` includes the bounds."""

    key: str
    default: Any
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class _Assignment:
    """A value as written. ``where`` is for messages; ``is_text``: from the command line, to be parsed."""

    value: Any
    where: str
    is_text: bool


def explain() -> list[OptionRow]:
    """Every option with its default, unit, meaning and bounds, section by section."""
    default = Config()
    rows = []
    for key, (field, _) in _options().items():
        bounds = str(field.metadata["bounds"])
        meaning = field.metadata["meaning"] + (f" ({bounds})" if bounds else "")
        rows.append(OptionRow(key, _get(default, key), field.metadata["unit"], meaning))
    return rows


def load_config(file: Path | None = None, sets: Sequence[str] = ()) -> Config:
    """The defaults, overridden by ``file`` (``-``: stdin), then by each ``section.key=value`` of ``sets``.

    ``section.key=@file`` reads the value from a file.

    Raises:
        ConfigError: unknown key, wrong type, value out of bounds or unreadable file. The message names the
            key, where it was written and, for an unknown key, the nearest valid name.
    """
    assigned = dict(_read_toml(file)) if file is not None else {}
    return _configure({}, assigned | _read_sets(sets))


def override(config: Config, sets: Sequence[str]) -> Config:
    """``config`` with each ``section.key=value`` of ``sets`` applied. Raises ConfigError as above."""
    return _configure({key: _get(config, key) for key in _options()}, _read_sets(sets))


def _read_sets(sets: Sequence[str]) -> dict[str, _Assignment]:
    assigned = {}
    for item in sets:
        key, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: write it as section.key=value", item)
        where = f"--set {redacted(item)}"
        assigned[key.strip()] = _Assignment(_text(text.strip(), item), where, is_text=True)
    return assigned


def _configure(before: Mapping[str, Any], assigned: Mapping[str, _Assignment]) -> Config:
    for key in assigned:
        if key not in _options():
            raise _unknown(key, assigned[key].where)
    values = {**before, **{key: _convert(key, one) for key, one in assigned.items()}}
    _hide_secrets(values)
    try:
        config: Config = _construct(Config, "", values)
        return config
    except ConfigError as error:
        # A section checks itself without knowing where its values were written.
        where = f"{assigned[error.key].where}: " if error.key in assigned else ""
        raise ConfigError(f"{where}{error}", error.key) from None


def _text(text: str, item: str) -> str:
    """``text``, or for ``@FILE`` the file's content, because command lines are visible to other users."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--set {item}: the file cannot be read: {error}", item) from error


def to_toml(config: Config) -> str:
    """The options of ``config`` that differ from the defaults, as TOML that ``load_config`` reads back."""
    default = Config()
    rows = ((key, _get(config, key)) for key in _options() if _get(config, key) != _get(default, key))
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in rows)


def _toml_value(value: Any) -> str:
    # JSON leaves DEL as it is, and TOML forbids it.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def shown_options(config: Config) -> list[dict[str, Any]]:
    """Every option with its value, for display; secrets, also those inside URLs, are hidden."""
    default = Config()
    rows = []
    for key, (field, _) in _options().items():
        value = _get(config, key)
        changed = value != _get(default, key)
        value = HIDDEN if field.metadata["secret"] and value else redacted_value(value)
        rows.append({"key": key, "value": value, "changed": changed, "unit": field.metadata["unit"]})
    return rows


def _hide_secrets(values: Mapping[str, Any]) -> None:
    """Secrets, and texts that may be URLs or options (of one role) with secrets in them."""
    for key, value in values.items():
        if _options()[key][0].metadata["secret"]:
            hide(str(value))
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str) and "://" in each:
                hide(each)
            option, equals, text = each.partition("=") if isinstance(each, str) else ("", "", "")
            known = _options().get(option.strip())
            if equals and known is not None and known[0].metadata["secret"]:
                hide(text.strip())


@cache
def _options() -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (dataclass field, type)."""

    def walk(cls: Any, prefix: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
        hints = get_type_hints(cls)
        for field in fields(cls):
            kind = hints[field.name]
            if is_dataclass(kind):
                yield from walk(kind, f"{prefix}{field.name}.")
            else:
                yield f"{prefix}{field.name}", (field, kind)

    return dict(walk(Config, ""))


def _get(config: Config, key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def _construct(cls: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(cls)
    arguments = {}
    for field in fields(cls):
        key = f"{prefix}{field.name}"
        if is_dataclass(hints[field.name]):
            arguments[field.name] = _construct(hints[field.name], f"{key}.", values)
        elif key in values:
            arguments[field.name] = values[key]
    return cls(**arguments)


def _convert(key: str, assignment: _Assignment) -> Any:
    # Imported here: most commands convert nothing.
    from moonpool.runtime.config.conversion import to_size, to_type

    field, kind = _options()[key]
    value = assignment.value
    is_tuple = kind == tuple[str, ...]
    is_size = field.metadata["unit"] == "bytes"
    try:
        if is_size and isinstance(value, str):
            return to_size(value)
        if is_tuple and assignment.is_text:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        if is_tuple and isinstance(value, list):
            value = tuple(value)
        # TOML has types, so a file's values are not converted; texts of the command line are.
        return to_type(kind, value, strict=not assignment.is_text)
    except ValueError:
        wanted = "a list of texts" if is_tuple else _TYPE_NAMES[kind]
        if is_size:
            wanted = 'a number of bytes, such as 4194304 or "4MiB"'
        raise ConfigError(
            f"{assignment.where}: {key} must be {wanted} ({field.metadata['unit']}), got "
            f"{HIDDEN if field.metadata['secret'] else repr(value)}",
            key,
        ) from None


def _read_toml(file: Path) -> Iterator[tuple[str, _Assignment]]:
    try:
        text = sys.stdin.read() if file == _STDIN else file.read_text(encoding="utf-8")
        tree = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read the configuration {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error

    def walk(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, _Assignment]]:
        for name, value in table.items():
            key = f"{prefix}{name}"
            if isinstance(value, dict):
                yield from walk(value, f"{key}.")
            else:
                yield key, _Assignment(value, f"{file}:{_line_of(text, name)}", is_text=False)

    return walk(tree, "")


def _line_of(text: str, name: str) -> int:
    """The line that first assigns ``name``; 1 if it cannot be found, as in an inline table."""
    found = re.search(rf"^.*\b{re.escape(name)}[\"']?\s*=", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1


def _unknown(key: str, where: str) -> ConfigError:
    for former, now in _MOVED.items():
        if key == former or key.startswith(f"{former}."):
            return ConfigError(f"{where}: {key} is now {now}{key.removeprefix(former)}", key)
    known = list(_options())
    sections = {name.rpartition(".")[0] for name in known}
    if key in sections:
        inside = ", ".join(name for name in known if name.startswith(f"{key}."))
        return ConfigError(f"{where}: {key} is a section; set one of {inside}", key)
    # With a wrong or missing section, the last part of the name decides.
    last = key.rpartition(".")[2]
    close = (
        difflib.get_close_matches(key, known, n=1, cutoff=0.75)
        or [name for name in known if name.rpartition(".")[2] == last]
        or difflib.get_close_matches(key, known, n=1, cutoff=0.0)
    )
    if _options()[close[0]][0].metadata["secret"]:
        where = where.partition("=")[0]  # its value may be the secret
    return ConfigError(f"{where}: unknown option {key}; the nearest is {close[0]}", key)
