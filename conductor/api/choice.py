"""One choice of an answer: turns token events into text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.conductor.api.prompts import Prompt
from moonpool.conductor.api.schemas import CompletionBody, GenerationBody
from moonpool.conductor.request import TokenEvent, TokenLogprobs
from moonpool.conductor.text.stop_strings import StopStrings
from moonpool.conductor.text.tokenizer import Tokenizer
from moonpool.conductor.tools.parser import CallDelta
from moonpool.conductor.tools.use import ToolUse


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token with its logprobs. ``offset``: characters of the choice's text before it."""

    token_id: int
    logprobs: TokenLogprobs | None  # None: the first token of a prompt
    offset: int


@dataclass(slots=True)
class Delta:
    """The addition of one event to a choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)  # if logprobs were requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None  # stop string or stop token; None: ended by the model
    calls: list[CallDelta] = field(default_factory=list)


class Choice:
    """The text of one sequence: detokenized, ended at the first stop string, divided into content and calls
    of tools, counted."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        body: GenerationBody,
        tokenizer: Tokenizer,
        tools: ToolUse | None = None,
    ) -> None:
        self.index = index
        self.prompt = prompt
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self._tokenizer = tokenizer
        self._calls = None if tools is None else tools.reader()
        self._skip_special = body.skip_special_tokens and not (tools is not None and tools.form.special)
        self._detokenizer = tokenizer.detokenizer(prompt.token_ids, skip_special=self._skip_special)
        self._stops = StopStrings(body.stop)
        self._stop_token_ids = frozenset(body.stop_token_ids)
        self._include_stop = body.include_stop_str_in_output
        self._min_tokens = body.min_tokens
        self._echo = self.prompt_text() if isinstance(body, CompletionBody) and body.echo else ""
        self._only_echo = body.token_limit == 0
        self._offset = len(self._echo)
        self._begun = False

    def echo(self) -> Delta:
        """The whole answer of a request for the prompt's text only (``max_tokens`` 0)."""
        return Delta(self._echo, finish_reason="length")

    def push(self, event: TokenEvent) -> Delta:
        """The addition of ``event``. Cancel the sequence once ``finish_reason`` is set."""
        delta = Delta(finish_reason=event.finish_reason)
        self.num_cached_tokens += event.num_cached_tokens
        if not self._begun:
            self._begun = True
            if event.prompt_logprobs is not None:
                delta.entries += self._prompt_entries(event.prompt_logprobs)
            delta.text = self._echo
        if self._only_echo:  # one token was generated only for the prompt's logprobs
            delta.finish_reason = "length"
            return delta
        if event.token_id >= 0:
            self.num_tokens += 1
            delta.token_ids.append(event.token_id)
            if event.logprobs is not None:
                delta.entries.append(TokenEntry(event.token_id, event.logprobs, self._offset))
        self._add_text(event, delta)
        if self._calls is not None:
            ended = delta.finish_reason is not None
            delta.text, delta.calls = self._calls.read(delta.text, ended=ended)
            if delta.finish_reason == "stop" and self._calls.called:
                delta.finish_reason = "tool_calls"
        return delta

    def prompt_text(self) -> str:
        """The given text, or the text of the given tokens."""
        if self.prompt.text is not None:
            return self.prompt.text
        return self._tokenizer.decode(self.prompt.token_ids, skip_special=self._skip_special)

    def _prompt_entries(self, logprobs: Sequence[TokenLogprobs]) -> list[TokenEntry]:
        """``logprobs``: of the prompt from its second token on."""
        detokenizer = self._tokenizer.detokenizer(skip_special=self._skip_special)
        entries, offset = [], 0
        for token_id, one in zip(self.prompt.token_ids.tolist(), (None, *logprobs), strict=True):
            entries.append(TokenEntry(token_id, one, offset))
            offset += len(detokenizer.push(token_id))
        return entries

    def _add_text(self, event: TokenEvent, delta: Delta) -> None:
        stopped_by_token = event.finish_reason == "stop" and event.token_id >= 0
        if stopped_by_token and event.token_id in self._stop_token_ids:
            delta.stop_reason = event.token_id
        # The stop token is part of the text only on request.
        hidden = event.token_id < 0 or (stopped_by_token and not self._include_stop)
        piece = "" if hidden else self._detokenizer.push(event.token_id)
        if event.finish_reason is not None:
            piece += self._detokenizer.flush()
        self._offset += len(piece)
        if self.num_tokens <= self._min_tokens:
            delta.text += self._stops.skip(piece)
        else:
            delta.text += self._stops.push(piece)
        if self._stops.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", self._stops.matched
            if self._include_stop:
                delta.text += self._stops.matched
        elif event.finish_reason is not None:
            delta.text += self._stops.flush()
