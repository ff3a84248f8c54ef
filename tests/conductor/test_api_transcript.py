"""People's words are logged where that was asked for, as far as was asked for, and nowhere else."""

from __future__ import annotations

import logging

import pytest

from moonpool.runtime.config.options import LogOptions
from tests.conductor.conftest import Api


async def test_nothing_of_them_is_logged_unless_asked_for(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    answer = await api.complete(prompt="In the", max_tokens=4)
    assert answer["choices"][0]["text"]
    assert "In the" not in caplog.text


async def test_each_choice_is_logged_with_its_question(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.context.log_options = LogOptions(prompt_chars=1000)
    caplog.set_level(logging.INFO)
    answer = await api.complete(prompt=["In the", "Once upon"], max_tokens=4)
    for choice, asked in zip(answer["choices"], ("In the", "Once upon"), strict=True):
        assert f"was asked {asked!r} and said {choice['text']!r} (length)" in caplog.text


async def test_a_streamed_answer_is_logged_as_it_was_sent(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.context.log_options = LogOptions(prompt_chars=1000)
    caplog.set_level(logging.INFO)
    events = await api.events("/v1/completions", prompt="In the", max_tokens=4)
    text = "".join(event["choices"][0]["text"] for event in events[:-1] if event["choices"])
    assert f"was asked 'In the' and said {text!r}" in caplog.text


async def test_no_more_than_was_asked_for_is_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    api.context.log_options = LogOptions(prompt_chars=6)
    caplog.set_level(logging.INFO)
    await api.complete(prompt="In the beginning", max_tokens=4)
    assert "was asked 'In the… (16 characters)'" in caplog.text
    assert "beginning" not in caplog.text
