"""``python -m moonpool.transfer.native`` compiles the library ahead of time."""

from __future__ import annotations

from moonpool.transfer.native.compiled_copy import forms, library

raise SystemExit(library(forms()[0]).build_verbosely())
