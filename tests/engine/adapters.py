"""LoRA adapters as PEFT writes them, and what transformers and PEFT answer with them merged."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.adapters.residency import AdapterRef
from moonpool.engine.batching.sequence import Sequence as Request
from moonpool.engine.engine import Engine
from tests.engine.conftest import Reference
from tests.lazily import Lazily

peft = Lazily("peft")

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_adapter(base: Reference, path: Path, *, seed: int = 0, std: float = 0.15, **words: Any) -> Reference:
    """Write a random adapter to ``path``; words are LoraConfig's. Returns the merged model with that path."""
    torch.manual_seed(seed)
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", **{"r": 8, "lora_alpha": 12, "target_modules": list(ALL), **words}
    )
    model = peft.get_peft_model(copy.deepcopy(base.model), settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)
    # Without a look at the Hub for the base model's embeddings.
    model.save_pretrained(path, save_embedding_layers=False)
    return Reference(path, model.merge_and_unload().eval())


def ref_of(engine: Engine, path: Path, name: str = "") -> AdapterRef:
    adapter = PeftAdapter(path, engine.config)
    return AdapterRef(name or path.name, adapter.digest, path, adapter.rank)


@asynccontextmanager
async def adapted(engine: Engine, sequences: Sequence[tuple[Request, Path | None]]) -> AsyncIterator[None]:
    """Each sequence has the adapter of its path inside."""
    async with AsyncExitStack() as stack:
        for sequence, path in sequences:
            if path is not None:
                pinned = engine.adapters.pinned(ref_of(engine, path), sequence)
                await (await stack.enter_async_context(pinned)).give(sequence)
        yield
    engine.adapters.check_integrity()
