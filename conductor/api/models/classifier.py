"""Which of two models a prompt needs: logistic regression over what is seen of it before it is tokenized.

The weights are a small JSON file (``python -m moonpool.bench.training.classifier`` writes one).
"""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt
import orjson

from moonpool.conductor.api.models.facts import Facts
from moonpool.runtime.errors import ConfigError

FORM = "moonpool-classifier-1"
_BITS = 12  # of a hash: one half of the weights for words, one for characters
_HALF = 1 << _BITS
_END_CHARS = 1000  # a longer message is read at both its ends, where questions stand
_MOST_TURNS = 8
_WORD = re.compile(r"\w+|[^\w\s]")

Vector = npt.NDArray[np.float32]
SIZE = 2 * _HALF + 5
"""Of a vector: hashed words and pairs of words, hashed runs of four bytes, three facts, and two lengths."""


def vector(facts: Facts) -> Vector:
    """float32 [SIZE]. Both halves have length 1: a long message weighs no more than a short one."""
    text = facts.asked
    if len(text) > 2 * _END_CHARS:
        text = f"{text[:_END_CHARS]} {text[-_END_CHARS:]}"
    text = text.lower()
    words = _WORD.findall(text)
    names = (*words, *map(" ".join, pairwise(words)))
    codes = np.fromiter((crc32(name.encode(errors="replace")) for name in names), np.uint32, len(names))
    raw = np.frombuffer(f"   {text} ".encode(errors="replace"), np.uint8).astype(np.uint32)
    runs = (raw[:-3] << 24 | raw[1:-2] << 16 | raw[2:-1] << 8 | raw[3:]).astype(np.uint32)
    # Fibonacci hashing: neighbouring runs differ in low bits, and the product's high bits have all of them.
    runs *= np.uint32(2654435769)
    sized = (math.log1p(facts.num_chars) / 10, math.log1p(len(facts.asked)) / 10)
    rest = (1.0, float(facts.tools), min(facts.turns, _MOST_TURNS) / _MOST_TURNS, *sized)
    return np.concatenate((_counted(codes), _counted(runs), np.array(rest, np.float32)))


def _counted(codes: npt.NDArray[np.uint32]) -> Vector:
    """Square roots of counts, by the high bits of the codes."""
    counts = np.sqrt(np.bincount(codes >> (32 - _BITS), minlength=_HALF).astype(np.float32))
    counts /= np.float32(max(float(np.linalg.norm(counts)), 1.0))
    return counts


class Classifier:
    """``score`` takes a prompt's facts and does not wait."""

    def __init__(self, weights: Vector) -> None:
        self._weights = weights

    @classmethod
    def load(cls, path: Path) -> Classifier:
        """Raises ConfigError: the file is missing, or no classifier of this version."""
        try:
            given = orjson.loads(path.read_bytes())
        except OSError as error:
            raise ConfigError(
                f"the classifier {path} cannot be read: {error.strerror}", "models.path"
            ) from error
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"the classifier {path} is not valid JSON: {error}", "models.path") from error
        if not isinstance(given, dict) or given.get("form") != FORM:
            raise ConfigError(
                f"{path} is no classifier of the form {FORM}: train it again with "
                "python -m moonpool.bench.training.classifier",
                "models.path",
            )
        try:
            weights = np.array(given["weights"], np.float32)
        except (KeyError, TypeError, ValueError):
            weights = np.empty(0, np.float32)
        if weights.shape != (SIZE,) or not np.isfinite(weights).all():
            raise ConfigError(f"the classifier {path} must have {SIZE} numbers as weights", "models.path")
        return cls(weights)

    def score(self, facts: Facts) -> float:
        """The probability, from 0 to 1, that the prompt needs the larger model."""
        return 0.5 + 0.5 * math.tanh(0.5 * float(vector(facts) @ self._weights))
