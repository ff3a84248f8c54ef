"""Declaring options: a section is a frozen dataclass, an option is a field with unit, meaning and bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from moonpool.runtime.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Bounds:
    """The values that an option accepts. A list is checked item by item; ``None``: no such bound."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    choices: Sequence[Any] = ()

    def accepts(self, value: Any) -> bool:
        if isinstance(value, tuple):
            return all(self.accepts(item) for item in value)
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (not self.choices or value in self.choices)
        )

    def __str__(self) -> str:
        if self.choices:
            return f"one of {', '.join(map(str, self.choices))}"
        if self.least is not None and self.most is not None:
            return f"from {self.least} to {self.most}"
        limits = {"at least": self.least, "above": self.above, "at most": self.most}
        return " and ".join(f"{words} {limit}" for words, limit in limits.items() if limit is not None)


def option(
    default: Any,
    unit: str,
    meaning: str,
    *,
    secret: bool = False,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: Sequence[Any] = (),
) -> Any:
    """A dataclass field with the texts and bounds that ``moonpool config --explain`` prints.

    The value of a ``secret`` option is never printed.
    """
    bounds = Bounds(least, above, most, choices)
    metadata = {"unit": unit, "meaning": meaning, "secret": secret, "bounds": bounds}
    return field(default=default, repr=not secret, metadata=metadata)


def section(cls: type) -> Any:
    """A dataclass field that holds the nested section ``cls`` with its defaults."""
    return field(default_factory=cls)


def require(condition: bool, key: str, must_be: str, value: object) -> None:
    """Raise ConfigError unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{key} must be {must_be}, got {value!r}", key)


class Section:
    """Base of all sections: checks the bounds of every option when an instance is made.

    Raises:
        ConfigError: a value is outside its bounds or contradicts another; ``key`` names the option.
    """

    __slots__ = ()
    NAME: ClassVar[str]

    def __init_subclass__(cls, name: str = "") -> None:
        """``name``: the dotted name in a TOML file; empty in the copy made by ``dataclass(slots=True)``."""
        if name:
            cls.NAME = name

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            if bounds := each.metadata.get("bounds"):
                value = getattr(self, each.name)
                require(bounds.accepts(value), f"{self.NAME}.{each.name}", str(bounds), value)
        self._check()

    def _check(self) -> None:
        """Check what the bounds of single options cannot express."""
