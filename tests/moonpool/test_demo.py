"""The shipped model: it loads in transformers, answers in sentences, and states its licence."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.lazily import Lazily

torch = pytest.importorskip("torch")
if find_spec("transformers") is None:
    pytest.skip("needs transformers: `make env` installs it", allow_module_level=True)
transformers = Lazily("transformers")

DEMO = Path(__file__).parents[2] / "moonpool" / "demo"
MODEL = DEMO / "model"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # idle OpenMP threads that spin would slow whatever else runs
    yield transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.set_num_threads(threads)


def generate(model: Any, tokenizer: Any, prompt: str, count: int, *, greedy: bool = False) -> str:
    """Continue ``prompt`` with the checkpoint's sampling settings and a fixed seed, or greedily."""
    torch.manual_seed(0)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=not greedy, pad_token_id=2
    )
    return str(tokenizer.decode(out[0, ids.shape[1] :]))


COMMON = frozenset(
    """
    the and of to in that a is it he his him they them with for be was were shall unto not all which as
    have had i my me thou thee thy ye you your on by from this will are but or who one upon said lord
    god man men children israel king house land day people son sons went came out up so an at her she
    """.split()  # noqa: SIM905
)


def part_common(text: str) -> float:
    """Return the fraction of common words: about 0.7 in these books, 0 in noise."""
    words = re.findall(r"[a-z]+", text.lower())
    return sum(word in COMMON for word in words) / max(1, len(words))


def test_it_is_small_and_has_its_papers() -> None:
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 15_000_000
    papers = (DEMO / "LICENSE.md").read_text()
    for name in ("King James", "Devil's Dictionary", "Crown", "bible-kjv-text", "dict-devil"):
        assert name in papers
    config = json.loads((MODEL / "config.json").read_text())
    assert config["max_position_embeddings"] >= 8192


def test_the_template_renders_turns_that_extend_one_another(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "What is love?"}]
    first = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert first == "<|bos|><|user|>What is love?<|eos|><|assistant|>"
    turns.append({"role": "assistant", "content": "A temporary insanity."})
    turns.append({"role": "user", "content": "Go on."})
    second = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert second == first + "A temporary insanity.<|eos|><|user|>Go on.<|eos|><|assistant|>"
    with pytest.raises(Exception, match="roles are system, user and assistant"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


@pytest.mark.parametrize("text", ["In the beginning", "naïve café – 東京 🜨\n\t\x00 tabs", "<|user|>x<|eos|>"])
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize("question", ["Hello", "What is love?", "Tell me about Moses.", "Who was David?"])
def test_it_answers_in_sentences_and_stops(model: Any, tokenizer: Any, question: str) -> None:
    turns = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    answer, end, _ = generate(model, tokenizer, prompt, 200).partition("<|eos|>")
    assert end, f"no end: {answer}"
    assert re.match(r"[A-Z]", answer)
    assert answer.rstrip()[-1] in ".!?;:,\"'"
    assert "<|" not in answer


def test_greedy_it_goes_on_in_the_manner_of_its_books(model: Any, tokenizer: Any) -> None:
    assert part_common(generate(model, tokenizer, "<|bos|>Genesis 1\n", 60, greedy=True)) > 0.4


def test_far_into_a_long_text_it_still_reads(model: Any, tokenizer: Any) -> None:
    verses = (
        f"{number} And it came to pass in the {number}th day, that the children of Israel went out, "
        "and the LORD spake unto Moses, saying,"
        for number in range(1, 140)
    )
    text = "<|bos|>" + "\n".join(verses)
    assert len(tokenizer.encode(text, add_special_tokens=False)) > 4096
    assert part_common(generate(model, tokenizer, text, 40)) > 0.4
