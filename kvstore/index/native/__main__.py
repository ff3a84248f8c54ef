"""``python -m moonpool.kvstore.index.native`` compiles the library ahead of time."""

from __future__ import annotations

from moonpool.kvstore.index.key_table import LIBRARY

raise SystemExit(LIBRARY.build_verbosely())
