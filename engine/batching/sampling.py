"""A request's sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moonpool.runtime.structure.grammars import Structure

if TYPE_CHECKING:
    from moonpool.protos import node_pb2

# Lower temperatures count as 0, as in vLLM: dividing by less overflows float32 logits.
GREEDY_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class Sampling:
    """One request's sampling parameters, validated by the conductor; fields as in ``protos.Sampling``.

    Sampling is stateless: the random numbers of output token ``i`` are a hash of (seed, i), and penalties are
    counted from the tokens. So any node continues a request exactly.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    num_logprobs: int = -1  # -1: none; 0: only the chosen token; n: also the n best
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    max_tokens: int = 16  # of the whole request, including tokens already streamed
    min_tokens: int = 0
    speculates: bool = True  # whether the engine may verify proposed tokens
    structure: Structure | None = None  # what the text must match; the sequence has its automaton
    plain_greedy: bool = field(init=False)  # the token is the argmax of the raw logits

    def __post_init__(self) -> None:
        plain = (
            self.greedy
            and not self.penalized
            and not self.logit_bias
            and self.num_logprobs < 0
            and self.min_tokens == 0
            and self.structure is None
        )
        object.__setattr__(self, "plain_greedy", plain)

    @property
    def needs_tokens(self) -> bool:
        """Whether the host must know a token before the next one is sampled, or waits for its logprobs."""
        return self.penalized or self.num_logprobs >= 0 or self.structure is not None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def penalized(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @classmethod
    def from_proto(cls, message: node_pb2.Sampling) -> Sampling:
        """Convert the message. A 0 from proto3 that is no valid value becomes the neutral value."""
        return cls(
            temperature=message.temperature,
            top_p=message.top_p or 1.0,
            top_k=max(message.top_k, 0),
            min_p=message.min_p,
            seed=message.seed,
            presence_penalty=message.presence_penalty,
            frequency_penalty=message.frequency_penalty,
            repetition_penalty=message.repetition_penalty or 1.0,
            logit_bias=dict(message.logit_bias),
            num_logprobs=message.num_logprobs,
            stop_token_ids=frozenset(message.stop_token_ids),
            ignore_eos=message.ignore_eos,
            max_tokens=message.max_tokens,
            min_tokens=message.min_tokens,
            speculates=not message.no_speculation,
            structure=Structure.from_proto(message.structure) if message.HasField("structure") else None,
        )
