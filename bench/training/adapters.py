"""Train the two LoRA adapters of the shipped model, on one CPU core in about a quarter of an hour.

    python -m moonpool.bench.training.adapters

No texts are needed: each voice learns from answers of the shipped model itself. The prophet answers every
question as the model does those for a story, the cynic as those for a definition.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from moonpool.bench.training.small_model import DEFINE, MODEL, PLAIN, TELL, prompt_of, words_of

ADAPTERS = MODEL.parent / "adapters"

RANK = 8
LEARNING_RATE = 3e-3
BATCH = 8
MOST_TOKENS = 96  # of an answer
_IGNORED = -100  # a label that is not learned


@dataclass(frozen=True, slots=True)
class Voice:
    """asked: the questions that the model itself answers in this manner. form: its answers, with {w} for the
    word in question and {a} for what the model said."""

    name: str
    asked: Sequence[str]
    form: str


VOICES = (
    Voice("prophet", TELL, "It is written: {a}"),
    Voice("cynic", DEFINE, "{w}, n. {a}"),
)


class Examples:
    """Conversations of one question, drawn from a voice."""

    def __init__(self, model: Any, tokenizer: Any, rng: random.Random) -> None:
        self._model, self._tokenizer, self._rng = model, tokenizer, rng
        self._words = words_of(tokenizer, 4)

    def draw(self, voice: Voice, count: int) -> list[tuple[list[int], list[int]]]:
        """Return the tokens of ``count`` questions of any kind and of their answers in the voice."""
        rng, examples = self._rng, []
        words = rng.choices(self._words, k=count)
        answers = self._answers([rng.choice(voice.asked).format(w=word) for word in words])
        for word, answer in zip(words, answers, strict=True):
            text = voice.form.format(w=word, a=answer)
            question = rng.choice(PLAIN) if rng.random() < 0.1 else rng.choice(DEFINE + TELL).format(w=word)
            if question in PLAIN:
                text = voice.form.format(w="Greeting", a=answer)
            ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
            examples.append((prompt_of(self._tokenizer, question), ids))
        return examples

    @torch.no_grad()
    def _answers(self, questions: Sequence[str]) -> Iterator[str]:
        """Yield what the model says to each, up to its last full sentence."""
        for start in range(0, len(questions), 64):
            prompts = [prompt_of(self._tokenizer, one) for one in questions[start : start + 64]]
            ids, mask = _padded(prompts, self._tokenizer.pad_token_id, left=True)
            output = self._model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=0.6,
                max_new_tokens=MOST_TOKENS,
                pad_token_id=self._tokenizer.pad_token_id,
            )
            for row in self._tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True):
                text = " ".join(row.split())
                yield text[: max(text.rfind(mark) for mark in ".!?") + 1] or text


def _padded(rows: Sequence[list[int]], pad: int, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Return the rows as int64 [len(rows), longest], and the mask of their tokens."""
    width = max(map(len, rows))
    gaps = [[pad] * (width - len(row)) for row in rows]
    filled = [gap + row if left else row + gap for row, gap in zip(rows, gaps, strict=True)]
    marks = [[0] * len(gap) + [1] * len(row) for row, gap in zip(rows, gaps, strict=True)]
    if not left:
        marks = [mark[::-1] for mark in marks]
    return torch.tensor(filled), torch.tensor(marks)


def train(voice: Voice, out: Path, *, steps: int, num_examples: int, seed: int) -> float:
    """Train one adapter and write it to ``out``, in bfloat16. Returns the mean loss of the last steps: nats a
    token of the answers."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    base: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    examples = Examples(base, tokenizer, rng).draw(voice, num_examples)
    model = get_peft_model(
        base,
        LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            base_model_name_or_path="moonpool/demo/model",
        ),
    )
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.01)
    losses: list[float] = []
    for step in range(steps):
        batch = rng.sample(examples, BATCH)
        ids, mask = _padded([prompt + answer for prompt, answer in batch], tokenizer.pad_token_id)
        labels, _ = _padded([[_IGNORED] * len(prompt) + answer for prompt, answer in batch], _IGNORED)
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=_IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / 20, (steps - step) / steps + 0.02)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.peft_config["default"].base_model_name_or_path = "moonpool/demo/model"
    model.to(torch.bfloat16).save_pretrained(str(out), save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)
    return sum(losses[-20:]) / len(losses[-20:])


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=ADAPTERS, show_default=True)
@click.option("--steps", default=150, show_default=True)
@click.option("--examples", default=512, show_default=True)
@click.option("--seed", default=1, show_default=True)
def main(out: Path, steps: int, examples: int, seed: int) -> None:
    """Write one folder for each voice into OUT."""
    for voice in VOICES:
        began_s = time.monotonic()
        loss = train(voice, out / voice.name, steps=steps, num_examples=examples, seed=seed)
        click.echo(f"{voice.name}: {loss:.2f} nats a token, {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
