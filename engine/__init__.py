"""Model execution over a paged KV pool: continuous batching, prefix cache, sampling."""

from __future__ import annotations

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence, State, TokenLogprobs
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.engine import Engine
from moonpool.engine.memory.block_pool import BlockPool
from moonpool.engine.stats import EngineStats

__all__ = [
    "BlockPool",
    "Engine",
    "EngineStats",
    "FinishReason",
    "ModelConfig",
    "Sampling",
    "Sequence",
    "State",
    "StepEvent",
    "TokenLogprobs",
]
