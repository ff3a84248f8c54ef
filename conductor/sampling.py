"""How the next token is drawn: what the API validated, as nodes receive it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moonpool.protos import node_pb2


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one sequence, in the API's words, already validated.

    ``max_tokens`` and ``min_tokens`` count the whole output, over any number of re-placements.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None  # None: the conductor draws one, so that a re-placement continues exactly
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    num_logprobs: int = -1  # -1: none, 0: the chosen token's only, n: and the n best
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def to_proto(self, seed: int) -> node_pb2.Sampling:
        """The message nodes get; ``seed`` (64 bits) is the request's, whoever chose it."""
        return node_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=seed,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=self.num_logprobs,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
        )
