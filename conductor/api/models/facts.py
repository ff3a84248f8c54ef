"""What routes see of a request, before it is tokenized."""

from __future__ import annotations

from dataclasses import dataclass

from moonpool.conductor.api.schemas import ChatBody, CompletionBody, GenerationBody

_HEAD_CHARS = 256
# A token id stands for about so many characters.
_CHARS_A_TOKEN = 4


@dataclass(frozen=True, slots=True)
class Facts:
    """``head``: equal for all turns of a conversation. ``asked``: the text of its last turn; empty for a
    prompt of token ids. ``turns``: messages of the user."""

    tenant: str
    num_chars: int
    tools: bool
    priority: int
    head: str
    asked: str = ""
    turns: int = 1


def facts_of(body: GenerationBody, tenant: str) -> Facts:
    """The facts of a request that was parsed."""
    if isinstance(body, ChatBody):
        num_chars = sum(len(message.content or "") for message in body.messages)
        said = [one.content or "" for one in body.messages if one.role == "user"] or [""]
        tools, head = bool(body.tools), said[0][:_HEAD_CHARS]
        return Facts(tenant, num_chars, tools, body.priority, head, said[-1], len(said))
    prompt = body.prompt if isinstance(body, CompletionBody) else ""
    head, asked = str(prompt)[:_HEAD_CHARS], _text(prompt)
    return Facts(tenant, _chars(prompt), False, body.priority, head, asked)


def _chars(prompt: object) -> int:
    if isinstance(prompt, str):
        return len(prompt)
    if not isinstance(prompt, list):
        return 0
    return sum(_CHARS_A_TOKEN if isinstance(each, int) else _chars(each) for each in prompt)


def _text(prompt: object) -> str:
    if isinstance(prompt, list):
        return "\n".join(each for each in prompt if isinstance(each, str))
    return prompt if isinstance(prompt, str) else ""
