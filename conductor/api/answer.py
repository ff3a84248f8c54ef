"""Answers as one JSON object, or as server-sent events; logprobs in the shapes of both APIs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar

import orjson

from moonpool.conductor.api.choice import Choice, Delta, TokenEntry
from moonpool.conductor.api.schemas import GenerationBody
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.conductor.tools.parser import CallDelta

DONE = b"data: [DONE]\n\n"
# JSON has no infinity: OpenAI and vLLM use this number.
LOWEST = -9999.0


@dataclass(slots=True)
class Outcome:
    """The whole output of one choice, for an answer without streaming."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    calls: list[CallDelta] = field(default_factory=list)  # one each, whole

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.token_ids += delta.token_ids
        self.entries += delta.entries
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        for call in delta.calls:
            if call.name:
                self.calls.append(replace(call))
            else:
                self.calls[-1].arguments += call.arguments


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request: each prompt once, and the output of all choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Answer(ABC):
    """Writes one answer. The parts that are equal for all tokens are encoded once, by the constructor."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    text_open: ClassVar[bytes]  # between a choice's index and its text
    text_close: ClassVar[bytes]
    repeats_text: ClassVar[bool] = False  # its end has all that came before

    def __init__(
        self, answer_id: str, created: int, model: str, body: GenerationBody, tokenizer: Tokenizer
    ) -> None:
        self.answer_id = self._id = answer_id
        self._created = created
        self._model = model
        self._tokenizer = tokenizer
        self._token_ids = body.return_token_ids
        head = orjson.dumps(
            {"id": answer_id, "object": self.chunk_object, "created": created, "model": model}
        )
        self._head = b"data: " + head[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if body.include_usage else b"]}\n\n"
        # The end of an ordinary chunk, after its text.
        self._plain = self.text_close + b',"logprobs":null,"finish_reason":null}' + self._tail
        self._opens: dict[int, bytes] = {}
        self._asked_logprobs = body.num_logprobs >= 0

    @abstractmethod
    def opening(self, index: int) -> bytes:
        """The event before a choice's first token."""

    @abstractmethod
    def logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]: ...

    @abstractmethod
    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        """The fields of a choice that are particular to this API, without streaming."""

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        """One event; empty if ``delta`` is."""
        open_ = self._opens.get(choice.index) or self._open(choice.index)
        if delta.finish_reason is None and not delta.entries and not self._token_ids:
            return open_ + orjson.dumps(delta.text) + self._plain if delta.text else b""
        text = open_ + orjson.dumps(delta.text) + self.text_close
        return text + b"," + orjson.dumps(self._rest(choice, delta))[1:] + self._tail

    def passed(self, choice: Choice, delta: Delta) -> None:
        """What the client of a stream that goes on has already. Comes before what ``chunk`` gets."""
        if self.repeats_text:
            self.chunk(choice, delta)

    def _rest(self, choice: Choice, delta: Delta) -> dict[str, Any]:
        """The fields of an event's choice after its text."""
        rest: dict[str, Any] = {
            "logprobs": self.logprobs(delta.entries) if delta.entries else None,
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            rest["stop_reason"] = delta.stop_reason
        if self._token_ids:
            first = choice.num_tokens == len(delta.token_ids)
            rest["prompt_token_ids"] = choice.prompt.token_ids.tolist() if first else None
            rest["token_ids"] = delta.token_ids
        return rest

    def ending(
        self, usage: Usage, *, include_usage: bool, explained: Sequence[dict[str, Any]] | None
    ) -> bytes:
        """The events after the last token. ``explained``: as of ``whole``."""
        events = b""
        if include_usage:
            events += self._head + b'],"usage":' + orjson.dumps(usage.to_dict()) + b"}\n\n"
        if explained is not None:
            events += self._head + b'],"moonpool":' + orjson.dumps(explained) + b"}\n\n"
        return events + DONE

    async def finish(self) -> None:  # noqa: B027 (most have nothing to wait for)
        """What to wait for before the last bytes are sent."""

    def call_id(self, choice: int, call: int) -> str:
        """The name of a call: the same at every conductor that goes on with the answer."""
        return "call_" + blake2b(f"{self._id} {choice} {call}".encode(), digest_size=12).hexdigest()

    def _call(self, index: int, call: CallDelta) -> dict[str, Any]:
        """A call, or a part of it: the first one has the name."""
        function = {"arguments": call.arguments}
        if not call.name:
            return {"function": function}
        written = {"name": call.name, **function}
        return {"id": self.call_id(index, call.index), "type": "function", "function": written}

    def whole(
        self,
        choices: Sequence[tuple[Choice, Outcome]],
        usage: Usage,
        explained: Sequence[dict[str, Any]] | None = None,
    ) -> bytes:
        """The answer without streaming. ``explained``: the placements of its sequences, if requested."""
        answer = self.fields(choices, usage)
        return orjson.dumps(answer if explained is None else answer | {"moonpool": explained})

    def fields(self, choices: Sequence[tuple[Choice, Outcome]], usage: Usage) -> dict[str, Any]:
        """The fields of the answer without streaming."""
        return {
            "id": self._id,
            "object": self.whole_object,
            "created": self._created,
            "model": self._model,
            "choices": [self._whole_choice(choice, outcome) for choice, outcome in choices],
            "usage": usage.to_dict(),
        }

    def _whole_choice(self, choice: Choice, outcome: Outcome) -> dict[str, Any]:
        written = self.choice(choice.index, outcome) | {
            "logprobs": self.logprobs(outcome.entries) if self._asked_logprobs else None,
            "finish_reason": outcome.finish_reason,
            "stop_reason": outcome.stop_reason,
        }
        if self._token_ids:
            written["prompt_token_ids"] = choice.prompt.token_ids.tolist()
            written["token_ids"] = outcome.token_ids
        return written

    def _open(self, index: int) -> bytes:
        open_ = self._head + b'{"index":%d,' % index + self.text_open
        self._opens[index] = open_
        return open_


class CompletionAnswer(Answer):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"
    text_open = b'"text":'
    text_close = b""

    def opening(self, index: int) -> bytes:
        return b""

    def logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return completion_logprobs(entries, self._tokenizer)

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        return {"index": index, "text": "".join(outcome.text)}


class ChatAnswer(Answer):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    text_open = b'"delta":{"content":'
    text_close = b"}"

    def opening(self, index: int) -> bytes:
        delta = b'{"index":%d,"delta":{"role":"assistant","content":""},' % index
        return self._head + delta + b'"logprobs":null,"finish_reason":null}' + self._tail

    def logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)

    def choice(self, index: int, outcome: Outcome) -> dict[str, Any]:
        content = "".join(outcome.text)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if outcome.calls:
            calls = [self._call(index, call) for call in outcome.calls]
            message |= {"content": content or None, "tool_calls": calls}
        return {"index": index, "message": message}

    def chunk(self, choice: Choice, delta: Delta) -> bytes:
        if not delta.calls:
            return super().chunk(choice, delta)
        calls = [{"index": call.index, **self._call(choice.index, call)} for call in delta.calls]
        new = {"tool_calls": calls} | ({"content": delta.text} if delta.text else {})
        written = {"index": choice.index, "delta": new, **self._rest(choice, delta)}
        return self._head + orjson.dumps(written) + self._tail


def completion_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """Parallel lists; ``top_logprobs`` maps texts to logprobs and always has the token itself."""
    tops: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprobs is None:
            tops.append(None)
            continue
        top = {token_label(i, tokenizer): _finite(value) for i, value in entry.logprobs.top}
        top.setdefault(token_label(entry.token_id, tokenizer), _finite(entry.logprobs.logprob))
        tops.append(top)
    return {
        "tokens": [token_label(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [_finite(entry.logprobs.logprob) if entry.logprobs else None for entry in entries],
        "top_logprobs": tops,
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any]:
    """One object per token, with its exact bytes: its text may be an incomplete character."""

    def describe(token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_label(token_id, tokenizer),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    content = [
        describe(entry.token_id, entry.logprobs.logprob)
        | {"top_logprobs": [describe(i, value) for i, value in entry.logprobs.top]}
        for entry in entries
        if entry.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def token_label(token_id: int, tokenizer: Tokenizer) -> str:
    """The text of a token; bytes that are not UTF-8 as OpenAI writes them: ``bytes:\\xe4\\xbd``."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
