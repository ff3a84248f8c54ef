"""Train the small model that ships beside the large one, on a CPU core in about ten minutes.

    python -m moonpool.bench.training.small_model

No texts are needed. It begins as two layers of the shipped model and learns that model's distributions, on
texts and answers which the model itself has drawn. The tokenizer and the chat template are those of the
shipped model, so that the small one can draft for it.
"""

from __future__ import annotations

import random
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from moonpool import demo

MODEL = Path(demo.__file__).parent / "model"
SMALL = MODEL.parent / "small"

LAYERS = (0, 5)  # of the shipped model's six
LEARNING_RATE = 1e-3
BATCH = 16  # rows of a step
ROW = 128  # tokens of a row at most
_DRAWN = 64  # rows drawn at a time
_DRAWING = 0.4  # of the time; the rest is training

DEFINE = ("What is {w}?", "What is a {w}?", "Define {w}.", "What does {w} mean?", "What do you mean by {w}?")
TELL = ("Tell me about {w}.", "Tell me of {w}.", "What is written of {w}?", "Speak of {w}.", "Who was {w}?")
PLAIN = ("Hello", "Hi", "Who are you?", "What can you do?", "How are you?", "Good morning", "Thank you")
ASKED = DEFINE + TELL + PLAIN
_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")

Row = tuple[list[int], Tensor]
"""Tokens, and the shipped model's log-probabilities after each but the last: float16 [tokens - 1, vocab]."""


def words_of(tokenizer: Any, least: int) -> list[str]:
    """Return the whole words of the vocabulary with at least so many letters, sorted."""
    words = re.compile(f"Ġ[A-Za-z][a-z]{{{least - 1},}}")
    return sorted({token[1:] for token in tokenizer.get_vocab() if words.fullmatch(token)})


def prompt_of(tokenizer: Any, question: str) -> list[int]:
    """Return the tokens of a conversation that begins with this question."""
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


class Drawn:
    """Rows of tokens that the shipped model draws: half answers to questions, half texts of its own."""

    def __init__(self, teacher: Any, tokenizer: Any, rng: random.Random) -> None:
        self._teacher, self._tokenizer, self._rng = teacher, tokenizer, rng
        self._words = words_of(tokenizer, 3)

    @torch.no_grad()
    def draw(self) -> Iterator[Row]:
        """Yield ``_DRAWN`` rows of at most ``ROW`` tokens, each with its prompt and its end."""
        pad, eos = self._tokenizer.pad_token_id, self._tokenizer.eos_token_id
        prompts = [self._prompt(number) for number in range(_DRAWN)]
        width = max(map(len, prompts))
        # Padded on the left, so that all answers begin in one column.
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        output = self._teacher.generate(
            input_ids=ids,
            attention_mask=(ids != pad).long(),
            do_sample=True,
            temperature=self._rng.choice((0.6, 0.8, 1.0)),
            top_k=0,
            top_p=1.0,
            max_new_tokens=ROW - width,
            pad_token_id=pad,
        )
        for prompt, row in zip(prompts, output[:, width:].tolist(), strict=True):
            tokens = prompt + row[: row.index(eos) + 1 if eos in row else len(row)]
            logits = self._teacher(input_ids=torch.tensor([tokens[:-1]])).logits[0]
            yield tokens, logits.log_softmax(-1).half()

    def _prompt(self, number: int) -> list[int]:
        word = self._rng.choice(self._words)
        if number % 2:
            first: list[int] = self._tokenizer.encode(word.capitalize(), add_special_tokens=False)
            return [self._tokenizer.bos_token_id, *first]
        return prompt_of(self._tokenizer, self._rng.choice(ASKED).format(w=word))


def new_model(teacher: Any) -> Any:
    """Return the teacher with ``LAYERS`` alone."""
    config = LlamaConfig(**teacher.config.to_dict() | {"num_hidden_layers": len(LAYERS)})
    small: Any = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    weights = teacher.state_dict()
    for new, old in enumerate(LAYERS):
        prefix = f"model.layers.{old}."
        own = {name.removeprefix(prefix): weights[name] for name in weights if name.startswith(prefix)}
        small.model.layers[new].load_state_dict(own)
    small.model.embed_tokens.load_state_dict(teacher.model.embed_tokens.state_dict())
    small.model.norm.load_state_dict(teacher.model.norm.state_dict())
    return small


def distance(student: Any, rows: Sequence[Row], pad: int) -> Tensor:
    """Return the divergence of the student's distributions from the teacher's, in nats a token."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    ids = torch.tensor([tokens[:-1] + [pad] * (width + 1 - len(tokens)) for tokens, _ in rows])
    mask = torch.tensor([[column < len(tokens) - 1 for column in range(width)] for tokens, _ in rows])
    target = torch.cat([logprobs for _, logprobs in rows]).float()
    found = student(input_ids=ids).logits[mask].log_softmax(-1)
    return F.kl_div(found, target, log_target=True, reduction="batchmean")


def train(*, minutes: float, seed: int, threads: int) -> tuple[Any, float]:
    """Return the trained model and its divergence from the shipped one on rows kept apart."""
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    rng = random.Random(seed)
    began_s, budget_s = time.monotonic(), minutes * 60
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    teacher: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]
    drawn = Drawn(teacher, tokenizer, rng)
    kept, rows = list(drawn.draw()), list(drawn.draw())
    while time.monotonic() - began_s < _DRAWING * budget_s:
        rows += drawn.draw()
    trained_s = time.monotonic()
    click.echo(f"{sum(len(tokens) for tokens, _ in rows):,} tokens drawn in {trained_s - began_s:.0f} s")
    student, pad = new_model(teacher), tokenizer.pad_token_id
    optimizer = torch.optim.AdamW(student.parameters(), lr=LEARNING_RATE, weight_decay=0.1)
    steps = 0
    while (spent_s := time.monotonic() - began_s) < budget_s:
        done = (time.monotonic() - trained_s) / (budget_s - (trained_s - began_s))
        for group in optimizer.param_groups:
            # Constant, then to zero over the second half.
            group["lr"] = LEARNING_RATE * min(1.0, (steps + 1) / 20, 2 * (1 - done) + 0.01)
        loss = distance(student, rng.sample(rows, BATCH), pad)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % 50 == 0:
            click.echo(f"step {steps}, {spent_s:.0f} s: {loss.item():.3f} nats")
    with torch.no_grad():
        return student, distance(student.eval(), kept, pad).item()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=SMALL, show_default=True)
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(out: Path, minutes: float, seed: int, threads: int) -> None:
    """Write the checkpoint, in bfloat16, into OUT."""
    student, divergence = train(minutes=minutes, seed=seed, threads=threads)
    student.to(torch.bfloat16).save_pretrained(str(out))
    for name in _FILES:
        shutil.copy(MODEL / name, out / name)
    num_weights = sum(weight.numel() for weight in student.parameters())
    click.echo(f"{num_weights:,} weights, {divergence:.3f} nats a token from the shipped model")


if __name__ == "__main__":
    main()
