"""What goes into the conductor's core and what comes out of it: one request, and its tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moonpool.conductor.admission.tenants import ANYONE, Tenant
from moonpool.conductor.sampling import SamplingParams
from moonpool.protos import node_pb2


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue. An API request with ``n`` choices is ``n`` of these, each with its own id."""

    request_id: str  # unique among requests in flight
    prompt_token_ids: npt.NDArray[np.int32]  # [num_prompt_tokens], at least one
    sampling: SamplingParams
    priority: int = 0  # lower runs first
    deadline_s: float | None = None  # seconds from now; None: conductor.request_timeout_s
    tenant: str = ""  # prefixes are shared only among requests with the same one: ``Tenant.salt``
    client: Tenant = ANYONE  # whose limits and weight it counts against
    batch: bool = False  # takes what interactive requests leave, and yields to them
    prompt_logprobs: bool = False  # turns the prefix cache off for this request


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """``rank`` 1 is the most likely token; ``top`` holds (token id, logprob), best first."""

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()

    @classmethod
    def from_proto(cls, message: node_pb2.TokenLogprobs) -> TokenLogprobs:
        return cls(
            message.logprob, message.rank, tuple(zip(message.top_ids, message.top_logprobs, strict=True))
        )


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One token of the output.

    ``finish_reason`` is "stop" (end of sequence or one of ``stop_token_ids``, which is then this token) or
    "length", on the last event and only there. ``token_id`` is -1 on a last event that brings no token.
    """

    index: int  # 0 is the first token after the prompt
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    num_cached_tokens: int = 0  # on the first event: prompt tokens that were not computed
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # on the first: of token 1 … n-1
