"""``python -m moonpool.bench NAME``: as ``moonpool bench NAME``, without what only the rest of ``moonpool``
needs."""

from __future__ import annotations

from moonpool.bench.cli import bench

if __name__ == "__main__":
    bench()
