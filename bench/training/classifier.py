"""Train the classifier of prompts that ships, in seconds on a CPU core.

    python -m moonpool.bench.training.classifier

L2-regularised logistic regression on the vectors that serving uses, by Newton's method over all examples,
with systems solved by conjugate gradients: numpy alone. What it prints of templates that were not
trained on is written into the file, too. ``--labelled FILE`` trains on your own prompts: a line is one JSON
object with ``prompt``, ``larger`` (whether it needs the larger model), and, if known, ``tools``, ``turns``
and ``num_chars``.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from moonpool.bench.training.prompt_kinds import (
    DEMANDING,
    DEMANDING_HELD_OUT,
    SIMPLE,
    SIMPLE_HELD_OUT,
    Example,
    examples,
)
from moonpool.conductor.api.models.classifier import FORM, Classifier, vector
from moonpool.conductor.api.models.facts import Facts
from moonpool.runtime.config.routes import SHIPPED

EACH = 25  # prompts a template
# Of 0.1, 1 and 10, which get .971, .969 and .958 of templates that were left out (``--choose``): of two that
# are equal the one with the smaller weights.
L2 = 1.0
_FOLDS = 5
_NEWTON_STEPS, _CG_STEPS, _CLOSE = 30, 200, 1e-5

Matrix = npt.NDArray[np.float64]


def fitted(rows: Sequence[Example], l2: float) -> Matrix:
    """Return the weights with the least mean logistic loss plus ``l2`` · |w|² / 2n."""
    x = np.stack([vector(row.facts) for row in rows]).astype(np.float64)
    y = np.array([row.demanding for row in rows], np.float64)
    weights = np.zeros(x.shape[1])
    for _ in range(_NEWTON_STEPS):
        p = 0.5 + 0.5 * np.tanh(0.5 * (x @ weights))
        gradient = x.T @ (p - y) + l2 * weights
        if np.linalg.norm(gradient) < _CLOSE * len(y):
            break
        step = _solved(x, p * (1 - p), l2, gradient)
        weights -= step
    return weights


def _solved(x: Matrix, curvature: Matrix, l2: float, b: Matrix) -> Matrix:
    """Conjugate gradients for (Xᵀ diag(curvature) X + l2) s = b."""
    solution, residual = np.zeros_like(b), b.copy()
    direction, size = residual.copy(), float(residual @ residual)
    least = _CLOSE**2 * size
    for _ in range(_CG_STEPS):
        if size <= least:
            break
        applied = x.T @ (curvature * (x @ direction)) + l2 * direction
        length = size / float(direction @ applied)
        solution += length * direction
        residual -= length * applied
        size, before = float(residual @ residual), size
        direction = residual + (size / before) * direction
    return solution


def accuracy(weights: Matrix, rows: Sequence[Example]) -> float:
    """The part of ``rows`` on the right side of a score of 0.5."""
    classifier = Classifier(weights.astype(np.float32))
    return float(np.mean([(classifier.score(row.facts) >= 0.5) == row.demanding for row in rows]))


def by_length(rows: Sequence[Example], held_out: Sequence[Example]) -> float:
    """What a rule on ``min_chars`` gets of ``held_out``, at the best bound on ``rows``: the peer to beat."""

    def right(least: int, among: Sequence[Example]) -> float:
        return float(np.mean([(row.facts.num_chars >= least) == row.demanding for row in among]))

    bounds = sorted({row.facts.num_chars for row in rows})
    return right(max(bounds, key=lambda least: right(least, rows)), held_out)


def validated(l2: float, seed: int) -> float:
    """Mean accuracy on templates of the training set that were left out, over folds of templates."""
    found = []
    for fold in range(_FOLDS):
        rng = random.Random(seed)
        rows, others = (
            list(examples(_part(SIMPLE, fold, held), _part(DEMANDING, fold, held), EACH, rng))
            for held in (False, True)
        )
        found.append(accuracy(fitted(rows, l2), others))
    return float(np.mean(found))


def _part(templates: Sequence[str], fold: int, held: bool) -> list[str]:
    """The templates of a fold, or all others."""
    return [one for i, one in enumerate(templates) if (i % _FOLDS == fold) == held]


def labelled(file: Path) -> list[Example]:
    """Examples of a file with a JSON object a line."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        asked, tools, turns = str(one["prompt"]), bool(one.get("tools", False)), int(one.get("turns", 1))
        facts = Facts("", int(one.get("num_chars", len(asked))), tools, 0, "", asked, turns)
        rows.append(Example(facts, bool(one["larger"])))
    return rows


def write(out: Path, weights: Matrix, about: dict[str, Any]) -> None:
    rounded = [round(float(weight), 3) for weight in weights]
    out.write_text(json.dumps({"form": FORM, **about, "weights": rounded}) + "\n", encoding="utf-8")


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=SHIPPED, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--labelled", "file", type=click.Path(exists=True, path_type=Path), help="your own examples")
@click.option("--choose", is_flag=True, help="compare strengths of regularisation, and write nothing")
def main(out: Path, seed: int, file: Path | None, choose: bool) -> None:
    """Write the weights into OUT."""
    if choose:
        for l2 in (0.1, 1.0, 10.0):
            click.echo(f"l2 {l2:g}: {validated(l2, seed):.3f} on templates left out of the fit")
        return
    rng, began_s = random.Random(seed), time.monotonic()
    if file is None:
        rows = list(examples(SIMPLE, DEMANDING, EACH, rng))
        held_out = list(examples(SIMPLE_HELD_OUT, DEMANDING_HELD_OUT, EACH, rng))
    else:
        rows = labelled(file)
        rng.shuffle(rows)
        held_out, rows = rows[: len(rows) // 5], rows[len(rows) // 5 :]
    weights = fitted(rows, L2)
    about = {
        "examples": len(rows),
        "held_out": len(held_out),
        "accuracy": round(accuracy(weights, rows), 3),
        "held_out_accuracy": round(accuracy(weights, held_out), 3),
        "held_out_accuracy_by_length": round(by_length(rows, held_out), 3),
        "held_out_demanding": round(float(np.mean([row.demanding for row in held_out])), 3),
    }
    write(out, weights, about)
    click.echo(f"{out}, {out.stat().st_size:,} bytes, after {time.monotonic() - began_s:.1f} s")
    for name, value in about.items():
        click.echo(f"{name}: {value}")


if __name__ == "__main__":
    main()
