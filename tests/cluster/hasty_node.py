"""A node as any, which acts on a slow rank from its first second on."""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    from moonpool.engine.node import slow_rank_decision

    slow_rank_decision.LEAST_LIFE_S = 0.0
    runpy.run_module("moonpool.node", run_name="__main__", alter_sys=True)
