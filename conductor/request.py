"""Requests and tokens at the interface of the conductor's core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt

from moonpool.conductor.admission.tenants import ANYONE, Tenant
from moonpool.conductor.observing.slo import Slo
from moonpool.conductor.observing.timelines.delivery import Delivery
from moonpool.protos import node_pb2
from moonpool.runtime.structure.grammars import Structure


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling parameters of one sequence, named as in the API.

    ``max_tokens`` and ``min_tokens`` count the whole output, over any number of re-placements.
    """

    max_tokens: int
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0  # 1: off
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None  # None: the conductor draws one
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0  # 1: off
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # token id -> added to its logit
    num_logprobs: int = -1  # -1: none, 0: of the chosen token, n: also of the n best
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    structure: Structure | None = None  # what the text must match
    speculation: bool = True  # where the node speculates; the tokens are the same

    def to_proto(self, seed: int) -> node_pb2.Sampling:
        """The message for nodes; ``seed``: 64 bits."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        structure = values.pop("structure")
        values["no_speculation"] = not values.pop("speculation")
        if structure is not None:
            values["structure"] = node_pb2.Structure(kind=structure.kind, text=structure.text)
        return node_pb2.Sampling(**values | {"seed": seed})


@dataclass(frozen=True, slots=True)
class CacheHint:
    """What is to happen with a request's cached blocks once it has ended, on the nodes that served it.

    Nodes may do less: they have limits, and need not be reachable.
    """

    pin_s: float = 0.0  # evict them after all others for so long
    prefetch: bool = False  # copy those of the answer to the node that computed the prompt
    drop_after: bool = False  # evict those that no other chain shares before all others


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One sequence to continue. An API request with ``n`` choices is ``n`` of these."""

    request_id: str  # unique among requests in flight
    prompt_token_ids: npt.NDArray[np.int32]  # [num_prompt_tokens], at least one
    sampling: SamplingParams
    priority: int = 0  # among the requests of its tenant: lower runs first
    deadline_s: float | None = None  # seconds from now, bounded by the conductor's; None: those alone
    tenant: str = ""  # ``Tenant.salt``: prefixes are shared only within one
    client: Tenant = ANYONE  # the tenant with the limits and weight
    slo_ttft_s: float = 0.0  # that its client asks for; 0: as its tenant's, or the cluster's
    slo_tbt_s: float = 0.0
    batch: bool = False  # of the batch class: uses only idle capacity
    follows: bool = False  # another one of the same API request was admitted: this one waits for room
    output_ids: tuple[int, ...] = ()  # tokens that another conductor has streamed: it goes on after them
    only: str = ""  # a node that it tries: the stages which that serves go there
    prompt_logprobs: bool = False  # turns the prefix cache off for this request
    adapter: node_pb2.Adapter | None = None  # LoRA; None: the model alone
    cache_hint: CacheHint | None = None
    delivery: Delivery = field(default_factory=Delivery)  # who takes its tokens tells how long that took
    origin: str = ""  # the region that its tokens go to; empty: that of the conductor
    digests: tuple[int, ...] = ()  # of its beginning, for routers of cells; empty: no router has asked lately

    def slo(self, usual: Slo) -> Slo:
        """Its latency targets. ``usual``: the cluster's."""
        return self.granted_slo(usual).with_limits(self.slo_ttft_s, self.slo_tbt_s)

    def granted_slo(self, usual: Slo) -> Slo:
        """Those of its tenant, whatever its client asks for."""
        return usual.with_limits(self.client.slo_ttft_s, self.client.slo_tbt_s)

    @property
    def adapter_name(self) -> str:
        """Its adapter's; empty: none."""
        return "" if self.adapter is None else self.adapter.name

    @property
    def adapter_key(self) -> str:
        """What names the content of its adapter in block keys; empty: none."""
        return "" if self.adapter is None else f"{self.adapter.name}@{self.adapter.digest}"


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
    # Cached prompt tokens: on the first event, or on the last one where an engine tells only then.
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None  # on the first: of token 1 … n-1
    accepted: bool = False  # by speculation: it took no decode step of its own
