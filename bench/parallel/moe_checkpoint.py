"""A small mixture of experts with random weights, some of whose experts are hot."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.tensor_slices import expected_tensors

NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 16, 2
_WORDS: dict[str, object] = {
    "model_type": "mixtral",
    "torch_dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": NUM_EXPERTS,
    "num_experts_per_tok": TOP_K,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}


def write_mixture(directory: Path) -> ModelConfig:
    """Seeded. What an expert's row of the router is scaled by decides how often it is chosen: in each layer
    other ones are hot."""
    torch.manual_seed(0)
    (directory / "config.json").write_text(json.dumps(_WORDS))
    config = ModelConfig.from_checkpoint(directory)
    tensors = {}
    for name, shape in expected_tensors(config).items():
        tensors[name] = torch.ones(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5
        if name.endswith(".gate.weight"):
            heat = 1 / (
                1 + torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(len(tensors)))
            )
            tensors[name] *= 4 * heat.sqrt()[:, None]
    save_file(tensors, directory / "model.safetensors")
    return config
