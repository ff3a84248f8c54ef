"""Errors of the store and the index."""

from __future__ import annotations

from runtime.errors import MoonpoolError


class StoreError(MoonpoolError):
    """Base of everything ``kvstore`` raises on purpose."""


class LayoutError(StoreError):
    """A block layout is impossible, or not the one this store was made for."""


class KeyFormatError(StoreError):
    """Bytes that should be packed block keys are not."""
