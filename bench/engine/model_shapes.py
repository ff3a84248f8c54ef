"""Models of a known shape for the engine alone."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.model.transformer import Model
from moonpool.engine.model.weight_loader import Mlp
from moonpool.engine.sharding.tensor_slices import expected_tensors
from moonpool.kernels.packed import PackedLinear

_SMALL: dict[str, object] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2048,
    "rope_theta": 10000.0,
}
SHAPES: dict[str, dict[str, object]] = {
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
    "small": _SMALL,
    "small-moe": {
        **_SMALL,
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    # Weights of 0.76 GB, so that a CPU reads those of a stage for some milliseconds, and they outweigh a
    # stage's pool and buffers.
    "pipeline": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 8192,
        "rope_theta": 10000.0,
    },
}
# A small mixture of experts, some of which are hot.
MIXTURE: dict[str, object] = {
    "model_type": "mixtral",
    "torch_dtype": "float32",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
}
# The weights that send tokens to different experts, and make different tokens.
_ROUTING = ("mlp.gate.weight", "embed_tokens.weight", "lm_head.weight")


def make_checkpoint(name: str, directory: Path, max_position: int) -> ModelConfig:
    """A bfloat16 checkpoint of this shape with all weights 0, as a sparse file.

    In a mixture of experts the weights that choose experts are random, and norms are 1.
    """
    words = {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "eos_token_id": None,
        **SHAPES[name],
    }
    (directory / "config.json").write_text(json.dumps(words))
    config = ModelConfig.from_checkpoint(directory)
    header, starts, end = {}, {}, 0
    for tensor, shape in expected_tensors(config).items():
        begin, end = end, end + 2 * prod(shape)
        starts[tensor] = begin, shape
        header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
        for tensor, (begin, shape) in starts.items():
            if config.moe is not None and ("norm" in tensor or tensor.endswith(_ROUTING)):
                weight = torch.ones(shape) if "norm" in tensor else torch.randn(shape)
                file.seek(8 + len(encoded) + begin)
                file.write(weight.bfloat16().view(torch.uint8).numpy().tobytes())
    return config


def write_mixture(directory: Path) -> None:
    """A seeded checkpoint of ``MIXTURE`` with random weights.

    The scale of an expert's row of the router sets how often it is chosen; hot ones differ between layers.
    """
    torch.manual_seed(0)
    (directory / "config.json").write_text(json.dumps(MIXTURE))
    tensors = {}
    for name, shape in expected_tensors(ModelConfig.from_checkpoint(directory)).items():
        tensors[name] = torch.ones(shape) if "norm" in name else torch.randn(shape) * shape[-1] ** -0.5
        if name.endswith(".gate.weight"):
            order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(len(tensors)))
            tensors[name] *= 4 * (1 + order).rsqrt()[:, None]
    save_file(tensors, directory / "model.safetensors")


@torch.inference_mode()
def randomize(model: Model) -> None:
    """Fill a GPU's weights with random values in place: products of zeros are faster there, not on a CPU.

    Experts stay 0: they are not measured on a GPU yet.
    """
    matrices = [model.embedding]
    norms = [model.norm]
    parts: list[object] = [model.head]
    for layer in model.layers:
        parts += [layer.qkv, layer.o]
        if isinstance(layer.mlp, Mlp):
            parts += [layer.mlp.gate_up, layer.mlp.down]
        norms += [layer.attention_in, layer.mlp_in]
    linears = [part for part in parts if isinstance(part, PackedLinear)]
    matrices += [linear.weight for linear in linears if linear.weight is not None]
    for norm in norms:
        assert norm is not None
        norm.fill_(1)
    for matrix in matrices:
        matrix.normal_(0, 0.02)
