"""The outcome of placing a request, with the estimates it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple


class Reason(StrEnum):
    """What decided a placement."""

    LOCALITY = "locality"  # the node has more of the prefix than others
    LOAD = "load"  # prefixes are equal, or their holder is too busy
    DEADLINE = "deadline"  # the otherwise better node would have been too late
    TRANSFER = "transfer-beats-recompute"  # a prefix is fetched from another node
    ONLY = "only-candidate"
    TURN = "turn"  # round-robin
    CHANCE = "chance"  # random
    WHOLE = "whole"  # one node for both stages costs less than two
    REST = "rest-on-decode-node"  # the decode node computes a short rest sooner than its blocks would come


class Path(StrEnum):
    """How many nodes a request uses."""

    SPLIT = "split"  # prefilled on one node, decoded on another
    WHOLE = "whole"  # both on a node of the role ``both``
    REST = "rest"  # both on a decode node, which computes the short rest of the prompt
    PREFILL = "prefill"  # one token: no decode


class PrefillEstimate(NamedTuple):
    """The predicted cost of prefilling on one node.

    ``ttft_s`` is the sum of ``queue_s``, ``fetch_s``, ``load_s``, ``compute_s`` and ``rtt_s``. A node fetches
    and loads while it computes for others: those two are the parts that exceed ``queue_s``. On a node that
    decodes, ``compute_s`` includes the decode steps in between.
    """

    node_id: str
    queue_s: float
    fetch_s: float
    compute_s: float
    ttft_s: float
    local_tokens: int  # of the prefix, on the node itself
    load_s: float = 0.0  # of those in slower tiers, into the pool
    fetched_tokens: int = 0  # more tokens, read from ``fetch_from``
    fetch_from: str = ""
    transfer_s: float = 0.0  # of that read, from beginning to end
    recompute_s: float = 0.0  # with a fetch: compute time without it
    num_delayed: int = 0  # waiting prefills that it would overtake
    num_placed: int = 0
    delay_s: float = 0.0  # sum of the delays of the requests that decode there
    rtt_s: float = 0.0  # between the node and where the tokens go
    egress_s: float = 0.0  # price of the fetched bytes, as seconds: see ``costs.regions``

    @property
    def prefix_tokens(self) -> int:
        return self.local_tokens + self.fetched_tokens

    @property
    def starts_in_s(self) -> float:
        """Until it computes: the queue, and what is fetched and loaded beyond that."""
        return self.ttft_s - self.compute_s


class DecodeEstimate(NamedTuple):
    """The predicted cost of decoding on one node. ``total_s``: from the first token to the last, with the
    delay by prompts that the node computes meanwhile.
    """

    node_id: str
    transfer_s: float  # of missing blocks
    wait_s: float  # for blocks to become free
    step_s: float  # a token
    total_s: float
    local_tokens: int  # of the prefix, on the node itself
    delay_s: float = 0.0  # sum of the delays of all requests in the batch
    num_running: int = 0
    num_placed: int = 0
    egress_s: float = 0.0  # price of the transferred bytes, as seconds


@dataclass(frozen=True, slots=True)
class Placement:
    """The nodes of a request, the reason, and the best candidates of each role, best first."""

    prefill: PrefillEstimate
    decode: DecodeEstimate | None  # None: the prefill's token is the last one
    reason: Reason
    detail: str  # a sentence
    prefill_candidates: Sequence[PrefillEstimate]
    decode_candidates: Sequence[DecodeEstimate]
    patience_s: float = 0.0  # prefills that arrive within this time may overtake this one
    policy: str = ""
    path: Path = Path.SPLIT

    def nodes(self) -> dict[str, str | None]:
        """Their ids; no decode node where the prefill's token is the last one."""
        return {
            "prefill": self.prefill.node_id,
            "decode": self.decode.node_id if self.decode else None,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "policy": self.policy,
            "path": self.path.value,
            "reason": self.reason.value,
            "detail": self.detail,
            **self.nodes(),
            "patience_s": self.patience_s,
            "prefill_candidates": [estimate._asdict() for estimate in self.prefill_candidates],
            "decode_candidates": [estimate._asdict() for estimate in self.decode_candidates],
        }


@dataclass(frozen=True, slots=True)
class Rejection:
    """No node can serve the request."""

    reason: str  # a sentence
    role: str = ""  # without nodes: waiting for one may help
    capacity_tokens: int = 0  # the largest that fits: the request never will
    retry_after_s: float = 0.0  # otherwise: when a retry may succeed
    stage: str = ""  # of a rejection policy: "arrival", or "decode" when the prefill is wasted


def describe(chosen: PrefillEstimate, reason: Reason, candidates: Sequence[PrefillEstimate]) -> str:
    """The reason as a sentence."""
    first = f"first token in {_ms(chosen.ttft_s)}"
    others = [candidate.ttft_s for candidate in candidates if candidate is not chosen]
    if others:
        first += f", {_ms(min(others))} on the next best"
    match reason:
        case Reason.TRANSFER:
            instead = f"computes for {_ms(chosen.compute_s)} instead of {_ms(chosen.recompute_s)}"
            return (
                f"fetches {chosen.fetched_tokens} tokens from {chosen.fetch_from} "
                f"in {_ms(chosen.transfer_s)} and {instead}; {first}"
            )
        case Reason.LOCALITY:
            return f"holds {chosen.local_tokens} tokens of the prefix; {first}"
        case Reason.DEADLINE:
            return f"another would have been too late; {first}"
        case _:
            return first


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
