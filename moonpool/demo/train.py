"""Train the model that ships with Moonpool, on one CPU core, from public-domain text.

    apt-get install bible-kjv bible-kjv-text dict-devil    # and the extra moonpool[dev]
    GLIBC_TUNABLES=glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184 \\
        python -m moonpool.demo.train --out moonpool/demo/model --minutes 60

The tunables keep freed memory, which saves a third of the time. The context grows from 512 tokens to 8,192;
the last part is mostly conversation. A checkpoint is written every three minutes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from moonpool.demo.checkpoint import CONFIG, save, train_tokenizer
from moonpool.demo.corpus import Chapter, Conversations, Entry, documents, read_chapters, read_entries


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the run. ``since``: the fraction of the time at which it starts."""

    since: float
    context: int  # tokens
    sequences: int  # in a step
    talk: float  # characters of conversation per character of documents
    definitions: float  # fraction of the questions that ask for a word's meaning


STAGES = (
    Stage(0.0, 512, 8, 0.67, 0.4),
    Stage(0.4, 2048, 2, 0.67, 0.4),
    Stage(0.6, 4096, 1, 0.67, 0.4),
    Stage(0.72, 8192, 1, 0.67, 0.4),
    # At last what the demo shows: answers, and the dictionary.
    Stage(0.8, 2048, 2, 3.0, 0.65),
    Stage(0.87, 512, 8, 6.0, 0.8),
)
MATRIX_LR, OTHER_LR = 3e-3, 2e-3
WARMUP, DECAY_FROM = 0.01, 0.3
CHECKPOINT_S = 180.0


def windows(
    stage: Stage, chapters: list[Chapter], entries: list[Entry], tokenizer: Tokenizer, rng: random.Random
) -> Iterator[Tensor]:
    """Yield int64 [context + 1] windows of a shuffled stream of documents and conversations, endlessly."""
    context = stage.context
    talk = Conversations(chapters, entries, rng, stage.definitions)
    most_turns = max(4, context // 256)
    while True:
        texts = documents(chapters, entries, rng, whole_books=context >= 2048)
        wanted = stage.talk * sum(map(len, texts))
        while wanted > 0:
            texts.append(talk.draw(rng.randint(1, rng.choice((2, 4, most_turns)))))
            wanted -= len(texts[-1])
        rng.shuffle(texts)
        encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        stream = torch.tensor([token for item in encoded for token in item.ids], dtype=torch.int64)
        for start in range(rng.randrange(context), len(stream) - context - 1, context):
            yield stream[start : start + context + 1]


def learning_rate(done: float) -> float:
    """Return the factor on the learning rates at the fraction ``done`` of the time."""
    return min(1.0, (done + 1e-4) / WARMUP, max(0.0, (1.0 - done) / (1.0 - DECAY_FROM)))


@torch.no_grad()
def validate(model: LlamaForCausalLM, texts: list[str], tokenizer: Tokenizer, context: int) -> float:
    """Return the loss in nats a token over ``texts``, joined and cut into windows of ``context`` tokens."""
    ids = torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])
    total, count = 0.0, 0
    for start in range(0, len(ids) - 1, context):
        part = ids[start : start + context + 1]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(part[None, :-1], use_cache=False).logits
        total += F.cross_entropy(logits[0].float(), part[1:], reduction="sum").item()
        count += len(part) - 1
    return total / count


class Trainer:
    """The model and its two optimizers: Muon for the matrices of the layers, AdamW for the rest."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if not any(p is m for m in matrices)]
        self.model = model
        self._optimizers: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=OTHER_LR, betas=(0.9, 0.95), weight_decay=0.01, fused=True),
        )

    def step(self, batch: Tensor, factor: float) -> float:
        """Train one step over ``batch`` [sequences, context + 1]; returns the loss in nats a token."""
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(batch[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self._optimizers, (MATRIX_LR, OTHER_LR), strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad()
        return loss.item()


@click.command()
@click.option("--out", type=click.Path(path_type=Path), required=True, help="directory of the checkpoint")
@click.option("--init", type=click.Path(path_type=Path, exists=True), help="checkpoint to start from")
@click.option("--minutes", default=60.0, help="wall-clock time of the whole run")
@click.option("--start", default=0.0, help="fraction of the run to start at, with --init")
@click.option("--threads", default=1)
@click.option("--seed", default=1)
def main(out: Path, init: Path | None, minutes: float, start: float, threads: int, seed: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    everything, entries = read_chapters(), read_entries()
    held_out = documents(everything[7::60], [], random.Random(0), whole_books=False)
    chapters = [chapter for number, chapter in enumerate(everything) if number % 60 != 7]
    if init:
        tokenizer = Tokenizer.from_file(str(init / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(init, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(documents(chapters, entries, rng, False))
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))  # type: ignore[no-untyped-call]
    trainer = Trainer(model)
    saved = time.monotonic()
    began = saved - start * 60 * minutes
    save(out, model, tokenizer)
    tokens, step, running = 0, 0, 0.0
    done = start
    for stage, until in zip(STAGES, [*(stage.since for stage in STAGES[1:]), 1.0], strict=True):
        source = windows(stage, chapters, entries, tokenizer, rng)
        while done < until:
            batch = torch.stack([next(source) for _ in range(stage.sequences)])
            loss = trainer.step(batch, learning_rate(done))
            now = time.monotonic()
            done = (now - began) / (60 * minutes)
            tokens, step = tokens + stage.sequences * stage.context, step + 1
            running = loss if step == 1 else 0.98 * running + 0.02 * loss
            if step % 50 == 0:
                click.echo(f"{done:6.1%} {tokens:,} tokens, context {stage.context}, loss {running:.3f}")
            if now - saved > CHECKPOINT_S:
                save(out, model, tokenizer)
                click.echo(f"saved; held-out chapters {validate(model, held_out, tokenizer, 2048):.3f}")
                saved = time.monotonic()
    save(out, model, tokenizer)
    click.echo(f"done: {tokens:,} tokens; held-out chapters {validate(model, held_out, tokenizer, 2048):.3f}")


if __name__ == "__main__":
    main()
