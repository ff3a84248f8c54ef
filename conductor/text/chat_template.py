"""The checkpoint's chat template, rendered as in transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from moonpool.conductor.text.checkpoint_json import read_json
from moonpool.conductor.text.tokenizer import fingerprint_of
from moonpool.runtime.errors import ConfigError, MoonpoolError
from moonpool.runtime.failures import FailureClass

_CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplateError(MoonpoolError):
    """The template rejected the conversation, with its own message."""

    code = "INVALID_ARGUMENT"
    failure = FailureClass.REQUEST


class _Generation(Extension):
    """``{% generation %} … {% endgeneration %}``, a mark for training, renders its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template, in a sandbox because it comes with a checkpoint."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], now: Callable[[], datetime] = datetime.now
    ) -> None:
        """Raises ``ConfigError`` if ``source`` is not a template."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self.fingerprint = fingerprint_of(source.encode(), json.dumps(self._special_tokens).encode())
        try:
            self._template = _compile(source, now)
        except TemplateError as error:
            raise ConfigError(f"the checkpoint's chat template is broken: {error}", "model.path") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text, special tokens included.

        Raises:
            ChatTemplateError: the template rejected the messages.
        """
        final = messages[-1].get("content") if messages else None
        if continue_final_message:
            if not isinstance(final, str):
                raise ChatTemplateError("continue_final_message needs a final message with a text")
            messages = [*messages[:-1], {**messages[-1], "content": final + _CONTINUE_MARK}]
        names = {"tools": None, "documents": None, **self._special_tokens, **(variables or {})}
        names |= {"messages": messages, "add_generation_prompt": add_generation_prompt}
        try:
            text = self._template.render(names)
        except TemplateError as error:
            raise ChatTemplateError(error.message or "the chat template rejected the messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
            # Templates compute with values of the caller: adding a list to a text fails like this, and
            # arguments of an earlier call, which are JSON in a text, may be nested deep.
            raise ChatTemplateError(f"the chat template cannot render the messages: {error}") from error
        return _cut_at_mark(text) if continue_final_message else text


def load_chat_template(
    path: Path,
    config: Mapping[str, Any],
    special_tokens: Mapping[str, str],
    now: Callable[[], datetime] = datetime.now,
) -> ChatTemplate | None:
    """The template of a checkpoint (``config``: tokenizer_config.json); None: it has none.

    As in transformers, a file of its own takes precedence over ``tokenizer_config.json``.
    """
    file = path / "chat_template.jinja"
    if file.exists():
        source: Any = file.read_text(encoding="utf-8")
    else:
        source = read_json(path / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(source, list):  # several, by name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default")
    return ChatTemplate(source, special_tokens, now) if source else None


def _compile(source: str, now: Callable[[], datetime]) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _cut_at_mark(text: str) -> str:
    position = text.rfind(_CONTINUE_MARK.strip())
    if position < 0:
        raise ChatTemplateError("the chat template omits the final message, so it cannot be continued")
    kept = text[:position]
    # If the template trimmed the mark, it would have trimmed the message, too.
    return kept if text.startswith(_CONTINUE_MARK, position) else kept.rstrip()
