"""``python -m moonpool.bench NAME``: the same as ``moonpool bench NAME``."""

from __future__ import annotations

from moonpool.bench.cli import bench
from moonpool.errors import exit_on_error

if __name__ == "__main__":
    with exit_on_error("moonpool bench"):
        bench()
