"""``python -m transfer.native`` compiles the library ahead of time."""

from __future__ import annotations

from transfer.native.library import forms, library

raise SystemExit(library(forms()[0]).build_aloud())
