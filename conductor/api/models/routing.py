"""The pure decision of a route: which models shall answer a request, in turn."""

from __future__ import annotations

from dataclasses import dataclass
from zlib import crc32

from moonpool.conductor.api.schemas import ChatBody, CompletionBody, GenerationBody
from moonpool.runtime.config.routes import Route, Rule

_HEAD_CHARS = 256
# A token id stands for about so many characters.
_CHARS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules see of a request. ``head``: equal for all turns of a conversation."""

    tenant: str
    num_chars: int
    tools: bool
    priority: int
    head: str


def facts_of(body: GenerationBody, tenant: str) -> Facts:
    """The facts of a request that was parsed, before it is tokenized."""
    if isinstance(body, ChatBody):
        texts = [message.content or "" for message in body.messages]
        first = next((one.content or "" for one in body.messages if one.role == "user"), "")
        head = first[:_HEAD_CHARS]
        return Facts(tenant, sum(map(len, texts)), bool(body.tools), body.priority, head)
    prompt = body.prompt if isinstance(body, CompletionBody) else ""
    return Facts(tenant, _chars(prompt), False, body.priority, str(prompt)[:_HEAD_CHARS])


def _chars(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, list):
        return 0
    return sum(_CHARS_A_TOKEN if isinstance(each, int) else _chars(each) for each in prompt)


def choose(route: Route, facts: Facts) -> tuple[str, ...]:
    """Return the models that shall answer, in turn: all but the last one only if they are sure enough."""
    for rule in route.rules:
        if _fits(rule, facts):
            return (rule.model,)
    if route.cascade is not None:
        return route.cascade.models
    if route.weights:
        return (_weighted(route.weights, facts),)
    return (route.model,)


def _fits(rule: Rule, facts: Facts) -> bool:
    return (
        rule.tenant in (None, facts.tenant)
        and (rule.tools in (None, facts.tools))
        and (rule.min_chars is None or facts.num_chars >= rule.min_chars)
        and (rule.max_chars is None or facts.num_chars <= rule.max_chars)
        and (rule.min_priority is None or facts.priority >= rule.min_priority)
        and (rule.max_priority is None or facts.priority <= rule.max_priority)
    )


def _weighted(weights: tuple[tuple[str, float], ...], facts: Facts) -> str:
    """By a hash of tenant and first message, so that a conversation stays where its blocks are."""
    draw = crc32(f"{facts.tenant}\0{facts.head}".encode()) / 2**32 * sum(weight for _, weight in weights)
    for model, weight in weights:
        draw -= weight
        if draw < 0:
            return model
    return next(model for model, weight in reversed(weights) if weight)
