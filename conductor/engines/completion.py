"""A request as vLLM's OpenAI server takes it, and what its stream says: token ids, no text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import orjson

from moonpool.conductor.request import CacheHint
from moonpool.protos import node_pb2
from moonpool.runtime.errors import RemoteError

_FINISH = {"stop": node_pb2.FINISH_STOP, "length": node_pb2.FINISH_LENGTH}
_SEED_BITS = 63


@dataclass(frozen=True, slots=True)
class Delta:
    """Tokens that came together. ``finish``: after the last of them; FINISH_NONE: there will be more."""

    token_ids: Sequence[int]
    logprobs: Sequence[node_pb2.TokenLogprobs]  # one a token, or none at all
    finish: node_pb2.FinishReason.ValueType
    num_cached_tokens: int | None = None  # of the prompt; known at the end of the stream


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt that an engine has computed for another one."""

    params: dict[str, Any]  # for that one; empty: it has to compute the prompt itself
    num_cached_tokens: int | None  # of the prompt; None: it does not say


def prefill_body_of(
    work: node_pb2.Work, *, model: str, salt: str, hint: CacheHint | None = None
) -> dict[str, Any]:
    """The body of ``POST /v1/completions`` that computes the prompt of ``work`` for another engine.

    Its one token is not used: the other engine draws all of them, so that one seed gives one sequence.
    """
    body: dict[str, Any] = {
        "model": model,
        "prompt": np.frombuffer(work.token_ids, "<i4").tolist(),
        "request_id": f"{work.request_id}-{work.attempt}",
        "max_tokens": 1,
        "temperature": 0.0,
        # The parameters of a hand-over are not in streams.
        "stream": False,
        "kv_transfer_params": {"do_remote_decode": True, **_tenant_of(work), **_hint_of(hint)},
    }
    return body | {"cache_salt": salt} if salt else body


def prefilled_of(node_id: str, answer: Mapping[str, Any]) -> Prefilled:
    """Read the answer. Raises ``RemoteError``."""
    try:
        _finish_of(node_id, answer["choices"][0].get("finish_reason"))
        return Prefilled(dict(answer.get("kv_transfer_params") or {}), _cached_of(answer))
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise RemoteError(node_id, "Failed", "INTERNAL", f"its answer cannot be read: {error!r}") from error


def body_of(
    work: node_pb2.Work,
    *,
    model: str,
    max_model_len: int,
    salt: str,
    given: Mapping[str, Any] = MappingProxyType({}),
    hint: CacheHint | None = None,
) -> dict[str, Any]:
    """The body of ``POST /v1/completions`` that continues ``work``.

    ``salt``: of the tenant; ``given``: the parameters with which another engine hands its prompt over, which
    are read at once, so that there is nothing to prefetch.
    """
    sampling = work.sampling
    token_ids: list[int] = np.frombuffer(work.token_ids, "<i4").tolist()
    so_far = len(token_ids) - work.num_prompt_tokens
    room = min(sampling.max_tokens - so_far, max_model_len - len(token_ids))
    body: dict[str, Any] = {
        "model": model,
        "prompt": token_ids,
        "request_id": f"{work.request_id}-{work.attempt}",
        "max_tokens": room,
        "min_tokens": max(min(sampling.min_tokens - so_far, room), 0),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": list(sampling.stop_token_ids),
        # vLLM's random numbers begin anew with each call: the same seed would repeat those of earlier tokens.
        "seed": (sampling.seed + so_far) % 2**_SEED_BITS,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if sampling.logit_bias:
        body["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()}
    if sampling.num_logprobs >= 0:
        body |= {"logprobs": sampling.num_logprobs, "return_tokens_as_token_ids": True}
    if sampling.HasField("structure"):
        body["structured_outputs"] = _structured_outputs(sampling.structure)
    if salt:
        body["cache_salt"] = salt
    if hint is not None and given:
        hint = replace(hint, prefetch=False)
    if params := {**given, **_tenant_of(work), **_hint_of(hint)}:
        body["kv_transfer_params"] = params
    return body


def _tenant_of(work: node_pb2.Work) -> dict[str, Any]:
    """What the connector needs for the tenant's quota, which is 0 for no limit; empty: there is no tenant."""
    if not work.tenant:
        return {}
    return {"tenant": work.tenant, "tenant_cached_nbytes": work.tenant_cached_nbytes}


def _hint_of(hint: CacheHint | None) -> dict[str, Any]:
    """As the connector reads it, which follows it once its engine has ended the request; empty: none."""
    given = {} if hint is None else {name: value for name, value in asdict(hint).items() if value}
    return {"cache_hint": given} if given else {}


def _structured_outputs(structure: node_pb2.Structure) -> dict[str, Any]:
    if structure.kind == "json_object":
        return {"json_object": True}
    parsed = structure.kind in ("json", "choice")
    return {structure.kind: orjson.loads(structure.text) if parsed else structure.text}


def delta_of(node_id: str, chunk: Mapping[str, Any]) -> Delta | None:
    """Read a chunk of the stream; None: it says nothing of tokens. Raises ``RemoteError``."""
    if error := chunk.get("error"):
        raise RemoteError(node_id, "Failed", "INTERNAL", str(error.get("message", error)))
    try:
        if not chunk["choices"]:
            cached = _cached_of(chunk)
            return None if cached is None else Delta((), (), node_pb2.FINISH_NONE, cached)
        choice = chunk["choices"][0]
        reason, logprobs = choice.get("finish_reason"), choice.get("logprobs")
        return Delta(
            [int(token_id) for token_id in choice["token_ids"]],
            [] if logprobs is None else _logprobs(logprobs),
            node_pb2.FINISH_NONE if reason is None else _finish_of(node_id, reason),
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RemoteError(node_id, "Failed", "INTERNAL", f"a chunk cannot be read: {error!r}") from error


def _finish_of(node_id: str, reason: str | None) -> node_pb2.FinishReason.ValueType:
    if reason not in _FINISH:
        raise RemoteError(node_id, "Failed", "UNAVAILABLE", f"it ended the request: {reason}")
    return _FINISH[reason]


def _cached_of(answer: Mapping[str, Any]) -> int | None:
    """None: without --enable-prompt-tokens-details it does not say."""
    cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    return None if cached is None else int(cached)


def _logprobs(found: Mapping[str, Any]) -> list[node_pb2.TokenLogprobs]:
    """vLLM gives no ranks: a token's is its position among the best ones that it lists."""
    messages = []
    for logprob, top in zip(found["token_logprobs"], found["top_logprobs"], strict=True):
        best = sorted(
            ((int(name.removeprefix("token_id:")), value) for name, value in (top or {}).items()),
            key=lambda each: -each[1],
        )
        messages.append(
            node_pb2.TokenLogprobs(
                logprob=logprob,
                rank=1 + sum(value > logprob for _, value in best),
                top_ids=[token_id for token_id, _ in best],
                top_logprobs=[value for _, value in best],
            )
        )
    return messages
