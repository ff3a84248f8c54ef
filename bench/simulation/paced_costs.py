"""The step times of paced nodes: so long that the noise of a busy machine decides nothing."""

from __future__ import annotations

from moonpool.runtime.cost_profile import CostProfile

PACED_COSTS = CostProfile(
    prefill_base_s=20e-3,
    prefill_token_s=0.4e-3,
    prefill_attention_s=1e-7,
    decode_base_s=40e-3,
    decode_sequence_s=1e-3,
    decode_context_s=1e-6,
)
