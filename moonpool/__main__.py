"""``python -m moonpool``"""

from __future__ import annotations

from moonpool.cli import main

main()
