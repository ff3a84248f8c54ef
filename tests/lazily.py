"""Modules that take seconds to import, and that not every worker needs."""

from __future__ import annotations

from importlib import import_module
from typing import Any


class Lazily:
    """``openai = Lazily("openai")`` is ``import openai`` at its first use, not when tests are collected."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):
            raise AttributeError(attribute)  # pytest asks every name of a module for those
        return getattr(import_module(self._name), attribute)
