"""Prompts and answers are logged only if log.prompt_chars is set, and only up to it."""

from __future__ import annotations

import logging

import pytest

from moonpool.runtime.config.options import LogOptions
from tests.conductor.conftest import Api


async def test_nothing_is_logged_by_default(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await api.complete(prompt="In the", max_tokens=4)
    assert answer["choices"][0]["text"]
    assert "In the" not in caplog.text


async def test_each_choice_is_logged_with_its_prompt(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.context.log_options = LogOptions(prompt_chars=1000)
    caplog.set_level(logging.INFO)
    answer = await api.complete(prompt=["In the", "Once upon"], max_tokens=4)
    for choice, asked in zip(answer["choices"], ("In the", "Once upon"), strict=True):
        assert f"prompt {asked!r}, answer {choice['text']!r} (length)" in caplog.text


async def test_a_streamed_answer_is_logged_as_it_was_sent(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.context.log_options = LogOptions(prompt_chars=1000)
    caplog.set_level(logging.INFO)
    events = await api.events("/v1/completions", prompt="In the", max_tokens=4)
    text = "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])
    assert f"prompt 'In the', answer {text!r}" in caplog.text


async def test_no_more_characters_than_configured(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.context.log_options = LogOptions(prompt_chars=6)
    caplog.set_level(logging.INFO)
    await api.complete(prompt="In the beginning", max_tokens=4)
    assert "prompt 'In the… (16 characters)'" in caplog.text
    assert "beginning" not in caplog.text
