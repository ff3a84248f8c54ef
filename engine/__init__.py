"""Runs a model over a paged KV pool: continuous batching, prefix cache, sampling."""

from __future__ import annotations

from engine.block_pool import BlockPool
from engine.config import ModelConfig
from engine.engine import Engine, EngineStats
from engine.events import StepEvent
from engine.sampling import Sampling
from engine.sequence import FinishReason, Sequence, State, TokenLogprobs

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
