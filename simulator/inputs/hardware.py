"""Hardware of a node: cost profile, memory and links; from data sheets, or measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from moonpool.conductor.costs.model import Profile
from moonpool.runtime.errors import ConfigError

# Fractions of the published peaks that steps reach: of arithmetic in prefill, of memory bandwidth in decode.
# H200, measured: 790 of 989 TFLOP/s and 4.3 of 4.8 TB/s by kernels alone; a whole step has gaps.
_FLOPS_REACHED = 0.5
_BANDWIDTH_REACHED = 0.7
# The latency of a step without its kernels.
_STEP_S = 1e-3
# The fraction of a GPU's memory for weights and KV; activations and the runtime use the rest.
_MEMORY_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU by its data sheet, and its part of the host."""

    name: str
    flops_per_s: float  # dense, in the dtype of the weights
    memory_nbytes_per_s: float
    memory_nbytes: float
    peer_nbytes_per_s: float  # to other GPUs of the node, one direction
    network_nbytes_per_s: float  # to other nodes
    host_nbytes_per_s: float = 25e9  # to host memory
    host_nbytes: float = 128e9  # of host memory for KV
    ssd_nbytes_per_s: float = 3e9
    all_reduce_s: float = 12e-6  # latency of a tensor-parallel all-reduce


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The properties of a model that decide its costs."""

    name: str
    num_params: float  # active for a token
    num_layers: int
    hidden_size: int
    kv_token_nbytes: int
    weight_nbytes: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """One node. ``profile``: the costs that such a node would measure."""

    name: str
    profile: Profile
    kv_token_nbytes: int
    pool_tokens: int  # capacity of the paged pool
    num_gpus: int = 1
    host_tokens: int = 0
    ssd_tokens: int = 0
    host_load_nbytes_per_s: float = 0.0
    ssd_load_nbytes_per_s: float = 0.0
    network_nbytes_per_s: float = 25e9
    network_latency_s: float = 1e-3
    chunk_tokens: int = 2048  # limit of tokens in a step
    max_batch_size: int = 512
    adapter_nbytes: int = 0  # of a LoRA adapter
    adapter_step_s: float = 0.0  # that each adapter adds to a step

    def __post_init__(self) -> None:
        for name in ("kv_token_nbytes", "pool_tokens", "num_gpus", "chunk_tokens", "max_batch_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"hardware {name} must be 1 or more, got {getattr(self, name)}", key=name)
        if self.network_nbytes_per_s <= 0:
            raise ConfigError(
                f"hardware network_nbytes_per_s must be positive, got {self.network_nbytes_per_s}",
                key="network_nbytes_per_s",
            )

    def scaled(self, *, prefill: float = 1.0, decode: float = 1.0) -> Hardware:
        """Return the same hardware with slower prefills and decode steps, by these factors."""
        profile = replace(self.profile, **asdict(self.profile.scaled(prefill, decode)))
        return replace(self, profile=profile)


def tensor_parallel(gpu: Accelerator, model: ModelShape, num_gpus: int, stages: int = 1) -> Hardware:
    """Estimate a node of ``num_gpus`` with tensor parallelism. ``reached``: fraction of the peak.

    With pipeline ``stages`` of ``num_gpus`` each, this is one lane of the pipeline: it takes the time of all
    layers, there are as many lanes as stages, and the KV room is divided among them. Between two stages a
    token's hidden state crosses a link of the node, and a step has one more latency.

    A prefilled token: 2 × params / (GPUs × flops × reached) + two all-reduces a layer of its hidden state;
    plus for each earlier token: 4 × layers × hidden / (GPUs × flops × reached).
    A decode step: weights / (GPUs × bandwidth × reached) + two all-reduce latencies a layer + a constant;
    plus for each sequence a prefilled token, and for each token of context KV bytes / (GPUs × bandwidth ×
    reached).

    Raises:
        ConfigError: the weights do not fit.
    """
    flops = num_gpus * gpu.flops_per_s * _FLOPS_REACHED
    bandwidth = num_gpus * gpu.memory_nbytes_per_s * _BANDWIDTH_REACHED
    # A ring moves 2 (n-1)/n of the data over each link; 2 bytes an element, twice a layer.
    ring = 2 * (num_gpus - 1) / num_gpus
    reduced_nbytes = 2 * model.num_layers * model.hidden_size * 2
    token_s = 2 * model.num_params / flops + ring * reduced_nbytes / gpu.peer_nbytes_per_s
    token_s += (stages - 1) * model.hidden_size * 2 / gpu.peer_nbytes_per_s
    latency_s = 2 * model.num_layers * gpu.all_reduce_s if num_gpus > 1 else 0.0
    latency_s += (stages - 1) * gpu.all_reduce_s
    room = num_gpus * gpu.memory_nbytes * _MEMORY_FRACTION - model.weight_nbytes / stages
    if room < model.kv_token_nbytes:
        raise ConfigError(
            f"{model.name} ({model.weight_nbytes / 1e9:.0f} GB) does not fit {num_gpus * stages} × "
            f"{gpu.name}",
            key="gpus",
        )
    return Hardware(
        name=f"{num_gpus}×{gpu.name}, {model.name}",
        profile=Profile(
            prefill_base_s=_STEP_S + latency_s,
            prefill_token_s=token_s,
            prefill_attention_s=4 * model.num_layers * model.hidden_size / flops,
            decode_base_s=_STEP_S + latency_s + model.weight_nbytes / bandwidth,
            decode_sequence_s=token_s,
            decode_context_s=model.kv_token_nbytes / bandwidth,
        ),
        kv_token_nbytes=model.kv_token_nbytes,
        pool_tokens=int(room / model.kv_token_nbytes),
        num_gpus=num_gpus,
        host_tokens=int(num_gpus * gpu.host_nbytes / model.kv_token_nbytes),
        host_load_nbytes_per_s=num_gpus * gpu.host_nbytes_per_s,
        ssd_load_nbytes_per_s=num_gpus * gpu.ssd_nbytes_per_s,
        network_nbytes_per_s=num_gpus * gpu.network_nbytes_per_s,
    )


# NVIDIA's data sheets: A800 80GB SXM (312 TFLOP/s bf16 dense, 2,039 GB/s, NVLink 400 GB/s both ways) and H200
# SXM (989 TFLOP/s, 4.8 TB/s, 141 GB, NVLink 900 GB/s both ways). The A800 node of the Mooncake paper has four
# network cards of 200 Gb/s; for an H200 one card of 400 Gb/s. NVIDIA's DGX of A100 and H100, 80GB SXM: NVLink
# 600 and 900 GB/s both ways, a card of 200 and 400 Gb/s for each GPU.
A800 = Accelerator("A800", 312e12, 2.039e12, 80e9, 200e9, 4 * 25e9 / 8)
A100 = Accelerator("A100", 312e12, 2.039e12, 80e9, 300e9, 25e9)
H100 = Accelerator("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9)
H200 = Accelerator("H200", 989e12, 4.8e12, 141e9, 450e9, 50e9, host_nbytes_per_s=50e9)
# From the models' published configurations; KV: 2 × layers × KV heads × head size × 2 bytes.
LLAMA3_70B = ModelShape("LLaMA3-70B", 70.6e9, 80, 8192, 2 * 80 * 8 * 128 * 2, 141.2e9)
LLAMA3_8B = ModelShape("LLaMA3-8B", 8.03e9, 32, 4096, 2 * 32 * 8 * 128 * 2, 16.1e9)
MISTRAL_7B = ModelShape("Mistral-7B", 7.24e9, 32, 4096, 2 * 32 * 8 * 128 * 2, 14.5e9)
LLAMA_7B = ModelShape("LLaMA-7B", 6.74e9, 32, 4096, 2 * 32 * 4096 * 2, 13.5e9)
OPT_13B = ModelShape("OPT-13B", 12.9e9, 40, 5120, 2 * 40 * 5120 * 2, 25.7e9)

# The names of --hardware: GPU, model, GPUs of a node.
SHIPPED: Mapping[str, tuple[Accelerator, ModelShape, int]] = {
    "8xa800-llama3-70b": (A800, LLAMA3_70B, 8),
    "h200-llama3-8b": (H200, LLAMA3_8B, 1),
}
