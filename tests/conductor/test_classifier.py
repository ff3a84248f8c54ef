"""The classifier that ships, its file, and its training."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest

from moonpool.bench.training.classifier import Matrix, accuracy, by_length, fitted, labelled, write
from moonpool.bench.training.prompt_kinds import (
    DEMANDING,
    DEMANDING_HELD_OUT,
    SIMPLE,
    SIMPLE_HELD_OUT,
    examples,
)
from moonpool.conductor.api.models.classifier import SIZE, Classifier, vector
from moonpool.conductor.api.models.facts import Facts
from moonpool.runtime.config.routes import SHIPPED
from moonpool.runtime.errors import ConfigError


def asked(text: str, *, tools: bool = False) -> Facts:
    return Facts("", len(text), tools, 0, "", text)


def test_the_one_that_ships_does_what_its_file_says_on_kinds_it_was_not_trained_on() -> None:
    about = json.loads(SHIPPED.read_text())
    assert SHIPPED.stat().st_size < 200_000
    assert not {*SIMPLE, *DEMANDING} & {*SIMPLE_HELD_OUT, *DEMANDING_HELD_OUT}
    rng = random.Random(1)
    rows = list(examples(SIMPLE, DEMANDING, 25, rng))
    held_out = list(examples(SIMPLE_HELD_OUT, DEMANDING_HELD_OUT, 25, rng))
    weights = np.array(about["weights"])
    assert (about["examples"], about["held_out"]) == (len(rows), len(held_out))
    assert accuracy(weights, held_out) == pytest.approx(about["held_out_accuracy"], abs=0.005)
    assert accuracy(weights, rows) == pytest.approx(about["accuracy"], abs=0.005)
    assert by_length(rows, held_out) == pytest.approx(about["held_out_accuracy_by_length"], abs=0.005)
    assert about["held_out_accuracy"] > about["held_out_accuracy_by_length"] + 0.1


def test_training_finds_the_least_loss() -> None:
    rows = list(examples(SIMPLE[:4], DEMANDING[:4], 3, random.Random(2)))

    def loss(weights: Matrix) -> float:
        logits = np.stack([vector(row.facts) for row in rows]).astype(np.float64) @ weights
        signs = np.array([1 if row.demanding else -1 for row in rows])
        return float(np.log1p(np.exp(-signs * logits)).sum() + 0.5 * weights @ weights)

    weights, rng = fitted(rows, 1.0), np.random.default_rng(3)
    for _ in range(50):
        assert loss(weights) < loss(weights + 0.01 * rng.normal(size=SIZE) / np.sqrt(SIZE)) + 1e-9
    assert accuracy(weights, rows) == 1.0


def test_your_own_examples_make_a_file_that_a_route_loads(tmp_path: Path) -> None:
    file, out = tmp_path / "labelled.jsonl", tmp_path / "own.json"
    lines = [{"prompt": f"blue {i}", "larger": False} for i in range(8)]
    lines += [{"prompt": f"red {i}", "larger": True, "tools": True} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    rows = labelled(file)
    write(out, fitted(rows, 0.1), {})
    classifier = Classifier.load(out)
    assert classifier.score(asked("blue 99")) < 0.5 < classifier.score(asked("red 99", tools=True))


@pytest.mark.parametrize("text", ["", "a", "É ☃ \ud800", "x" * 1_000_000, "0 " * 3000])
def test_any_text_has_a_score(text: str) -> None:
    assert 0 < Classifier.load(SHIPPED).score(asked(text)) < 1


def test_of_a_long_message_both_ends_are_read() -> None:
    score = Classifier.load(SHIPPED).score
    text = "word " * 2000
    assert score(asked(text)) != score(asked("prove " + text[6:]))
    assert score(asked(text)) != score(asked(text[:-6] + " prove"))
    assert score(asked(text)) == score(asked(text[:5000] + "prove" + text[5005:]))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "cannot be read"),
        ("{", "not valid JSON"),
        ("[]", "no classifier of the form"),
        ('{"form": "other"}', "no classifier of the form"),
        ('{"form": "moonpool-classifier-1"}', "numbers as weights"),
        ('{"form": "moonpool-classifier-1", "weights": [1, "a"]}', "numbers as weights"),
        ('{"form": "moonpool-classifier-1", "weights": [1, 2]}', f"must have {SIZE} numbers"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, content: str | None, why: str) -> None:
    path = tmp_path / "classifier.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=why):
        Classifier.load(path)
