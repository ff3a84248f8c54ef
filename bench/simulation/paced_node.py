"""``python -m moonpool.bench.simulation.paced_node``: a node whose steps take ``PACED_COSTS``, and compute
nothing. All else is real: scheduler, pool, cache, store, transfer, messages. Its arguments are those of
``moonpool.node``; so that a machine of two cores can host eight."""

from __future__ import annotations

import runpy
import time

import torch
from torch import Tensor

from moonpool.bench.serve.client.workload import FIRST_ID
from moonpool.bench.simulation.paced_costs import PACED_COSTS
from moonpool.engine import engine, setup
from moonpool.engine.batching.step_plan import StepPlan
from moonpool.engine.execution.cost_profile import StepCosts
from moonpool.engine.execution.runner import ModelRunner, Step

# A step that begins so soon after another is taken to have begun at its end: as on a GPU, the bookkeeping
# between two steps overlaps with them.
_OVERLAPPED_S = 20e-3


class PacedRunner(ModelRunner):
    """Waits instead of computing; every token is the same. KV blocks keep the bytes that they had."""

    _costs = StepCosts(PACED_COSTS)
    _ends_s = 0.0  # of the latest step, by time.monotonic

    def _compute(self, plan: StepPlan, sampled: Tensor | None = None) -> Step:
        now_s = time.monotonic()
        begun_s = self._ends_s if now_s - self._ends_s < _OVERLAPPED_S else now_s
        self._ends_s = begun_s + self._costs.predict_s(plan)
        time.sleep(max(self._ends_s - now_s, 0.0))
        count = len(plan.decodes) + sum(chunk.last for chunk in plan.chunks)
        tokens = torch.full((count,), FIRST_ID)
        return Step(tokens, tokens, [], {})


def install() -> None:
    """Have the engines of this process wait instead of computing, with costs that they need not measure."""
    vars(setup)["ModelRunner"] = PacedRunner
    vars(engine)["measure"] = lambda runner, clock: StepCosts(PACED_COSTS)


if __name__ == "__main__":
    install()
    runpy.run_module("moonpool.node", run_name="__main__", alter_sys=True)
