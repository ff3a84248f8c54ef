"""Tokenizing and chat templates agree with transformers on the same checkpoint."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as TokenizerCore
from tokenizers.processors import TemplateProcessing

from moonpool.conductor.api.sampling_defaults import SamplingDefaults
from moonpool.conductor.text.chat_template import ChatTemplateError, load_chat_template
from moonpool.conductor.text.tokenizer import MAX_INLINE_CHARS, Tokenizer
from moonpool.runtime.errors import ConfigError

NOW = datetime(2026, 3, 4)
MESSAGES = [
    {"role": "system", "content": "Be <b>good</b> & 'kind'."},
    {"role": "user", "content": "Hi  there\n"},
    {"role": "assistant", "content": "Hello"},
]
TEMPLATES = [
    "{% for m in messages %}{{ m.role }}: {{ m.content | tojson }}\n{% endfor %}",
    "{{ bos_token }}{% for m in messages %}\n    {% if m.role == 'user' %}\n{{ m.content | trim }}"
    "{% endif %}\n{% endfor %}",
    "{{ strftime_now('%Y') }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m }}"
    "{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endfor %}",
    "{% set ns = namespace(x=0) %}{% for m in messages %}{% set ns.x = ns.x + 1 %}{% endfor %}{{ ns.x }}"
    "{{ flag }}{% if tools %}T{% endif %}{% if add_generation_prompt %}G{% endif %}",
]


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    shutil.copytree(checkpoint, target)
    return target


def set_config(path: Path, **values: Any) -> None:
    file = path / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def load(path: Path) -> Any:
    tokenizer = Tokenizer.from_checkpoint(path)
    return load_chat_template(path, tokenizer.config, tokenizer.special_tokens, lambda: NOW)


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=80))
def test_text_survives_the_round_trip(checkpoint: Path, text: str) -> None:
    tokenizer = _cached(checkpoint)
    assert tokenizer.decode(tokenizer.encode_now(text, add_special_tokens=False)) == text


def _cached(path: Path, known: dict[Path, Tokenizer] = {}) -> Tokenizer:  # noqa: B006
    return known.setdefault(path, Tokenizer.from_checkpoint(path))


async def test_long_texts_are_tokenized_alike(checkpoint: Path) -> None:
    tokenizer = _cached(checkpoint)
    text = "In the beginning " * MAX_INLINE_CHARS
    ids = await tokenizer.encode(text, add_special_tokens=True)
    assert ids.tolist() == tokenizer.encode_now(text, add_special_tokens=True).tolist()


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
@pytest.mark.parametrize("processed", [False, True])
def test_special_tokens_as_transformers_adds_them(
    copy: Path, flags: dict[str, bool], processed: bool
) -> None:
    set_config(copy, **flags)
    if processed:
        core = TokenizerCore.from_file(str(copy / "tokenizer.json"))
        core.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
        core.save(str(copy / "tokenizer.json"))
    tokenizer = Tokenizer.from_checkpoint(copy)
    ids = tokenizer.encode_now("In the", add_special_tokens=True).tolist()
    assert ids == reference(copy)("In the").input_ids
    bare = tokenizer.encode_now("In the", add_special_tokens=False).tolist()
    assert ids == [0] * processed + bare


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("generate", [False, True])
def test_templates_render_as_in_transformers(copy: Path, source: str, generate: bool) -> None:
    set_config(copy, chat_template=source)
    ours = load(copy).render(MESSAGES, add_generation_prompt=generate, variables={"flag": True})
    theirs = reference(copy).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=generate, flag=True
    )
    assert ours == theirs.replace(str(datetime.now().year), "2026")


@pytest.mark.parametrize("content", ["Hello", "Hello  ", " Hello"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_final_message_is_continued_as_in_transformers(copy: Path, content: str, trim: str) -> None:
    set_config(copy, chat_template="{% for m in messages %}<{{ m.content" + trim + " }}>{% endfor %}")
    messages = [*MESSAGES[:2], {"role": "assistant", "content": content}]
    ours = load(copy).render(messages, add_generation_prompt=False, continue_final_message=True)
    theirs = reference(copy).apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert ours == theirs


def test_where_templates_come_from(copy: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    set_config(copy, chat_template=named)
    assert load(copy).render(MESSAGES) == "named"
    (copy / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert load(copy).render(MESSAGES) == "json"
    (copy / "chat_template.jinja").write_text("file")
    assert load(copy).render(MESSAGES) == "file"
    for name in ("chat_template.json", "chat_template.jinja", "tokenizer_config.json"):
        (copy / name).unlink()
    assert load(copy) is None


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 5 }}",
        "{{ messages[7].content.x }}",
        "{{ ''.__class__.__mro__ }}",  # the sandbox
        "{% set _ = messages.append(1) %}",
        "{{ 1 // (messages | length - 3) }}",
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(messages) }}",
    ],
)
def test_a_template_that_refuses_says_so(copy: Path, source: str) -> None:
    set_config(copy, chat_template=source)
    if "__class__" in source:
        with pytest.raises(ChatTemplateError, match="unsafe"):
            load(copy).render(MESSAGES)
    else:
        with pytest.raises(ChatTemplateError):
            load(copy).render(MESSAGES)


def test_broken_checkpoints_are_named(copy: Path) -> None:
    set_config(copy, chat_template="{% for %}")
    with pytest.raises(ConfigError, match="chat template"):
        load(copy)
    (copy / "generation_config.json").write_text('{"top_p": "high"}')
    with pytest.raises(ConfigError, match="top_p"):
        SamplingDefaults.from_checkpoint(copy)
    (copy / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        Tokenizer.from_checkpoint(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        Tokenizer.from_checkpoint(copy)


async def test_a_checkpoint_without_a_template_has_no_chat(api: Any) -> None:
    api.context.template = None
    status, answer = await api.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
    assert (status, answer["error"]["code"]) == (400, "no_chat_template")
