"""What a plan computes, reads, holds and costs."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.simulator.inputs.hardware import Accelerator, ModelShape
from moonpool.simulator.sizing.search import Plan
from moonpool.simulator.sizing.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Budget:
    """All of the cluster together."""

    prefill_flops_per_s: float
    prefill_reached: float  # of the peak of the GPUs that prefill
    decode_nbytes_per_s: float  # read from GPU memory
    decode_reached: float
    weight_nbytes: float  # on each GPU that decodes
    sequences: float  # decoding at once
    kv_nbytes: float  # of the sequences that decode or compute their prompt
    kv_held: float  # the same, of the pools
    moved_nbytes_per_s: float  # from prefill to decode nodes
    link_used: float


def budget(plan: Plan, traffic: Traffic, gpu: Accelerator, model: ModelShape) -> Budget:
    """Budgets on average, by the formulas of ``tensor_parallel``.

    A computed token: 2 FLOPs for each parameter and ``4 × layers × hidden size`` for each token before it.
    A decode step: all weights once, and the KV of each sequence. KV in flight: sequences by Little's law,
    rate × time, each with its prompt and half its output.
    """
    decode = plan.decode or plan.prefill
    lane = decode.kind.lane
    before = traffic.cached_tokens + traffic.computed_tokens / 2
    token_flops = 2 * model.num_params + 4 * model.num_layers * model.hidden_size * before
    flops_per_s = traffic.rate * traffic.computed_tokens * token_flops
    steps_per_s = decode.num_lanes * traffic.gaps / plan.decodes.answer.mean_s
    read = steps_per_s * model.weight_nbytes
    read += traffic.rate * traffic.gaps * traffic.context_tokens * model.kv_token_nbytes
    sequences = plan.decodes.batch * decode.num_lanes
    prompts = traffic.rate * plan.prefills.compute_s
    kv_nbytes = (sequences * traffic.context_tokens + prompts * traffic.prompt_tokens) * model.kv_token_nbytes
    pools = {id(stage): stage for stage in (plan.prefill, decode)}.values()
    pool_tokens = sum(stage.num_lanes * stage.kind.lane.pool_tokens for stage in pools)
    moved = traffic.rate * traffic.computed_tokens * model.kv_token_nbytes if plan.decode else 0.0
    link = lane.network_nbytes_per_s * min(plan.prefill.num_lanes, decode.num_lanes)
    return Budget(
        prefill_flops_per_s=flops_per_s,
        prefill_reached=flops_per_s / (plan.prefill.num_gpus * gpu.flops_per_s),
        decode_nbytes_per_s=read,
        decode_reached=read / (decode.num_gpus * gpu.memory_nbytes_per_s),
        weight_nbytes=model.weight_nbytes / decode.kind.num_gpus,
        sequences=sequences,
        kv_nbytes=kv_nbytes,
        kv_held=kv_nbytes / (pool_tokens * model.kv_token_nbytes),
        moved_nbytes_per_s=moved,
        link_used=moved / link,
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """In the currency of the price. Prefill and decode add up to the whole."""

    prefill: float  # of a request
    decode: float
    tokens: int  # of a request, prompt and output

    @property
    def request(self) -> float:
        return self.prefill + self.decode

    @property
    def million_tokens(self) -> float:
        """Of prompt and output together."""
        return 1e6 * self.request / self.tokens


def cost(plan: Plan, traffic: Traffic, price: float) -> Cost:
    """``price``: of a GPU and hour. Replicas divide theirs by the time of prompts and of the batch."""
    request = plan.num_gpus * price / 3600 / traffic.rate
    if plan.decode is not None:
        prefill = request * plan.prefill.num_gpus / plan.num_gpus
    else:
        lane = plan.prefill.kind.lane
        step_s = traffic.gaps * plan.decodes.step_s / max(plan.decodes.batch, 1.0)
        prompt_s = lane.profile.prefill_s(traffic.computed_tokens, traffic.cached_tokens)
        prefill = request * prompt_s / (prompt_s + step_s)
    return Cost(prefill, request - prefill, traffic.prompt_tokens + traffic.output_tokens)
