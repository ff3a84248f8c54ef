"""The demo checkpoint's files: configuration, tokenizer with its chat template, weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moonpool.demo.corpus import ASSISTANT, BOS, EOS, PAD, SYSTEM, USER
from moonpool.demo.net import CONFIG, VOCAB, DemoModel

ROLES = (SYSTEM, USER, ASSISTANT)
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('The roles are system, user and assistant, not ' + message['role']) }}"
    "{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """A byte-level BPE of ``VOCAB`` tokens: three marks first, the roles last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(ROLES),
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(ROLES))
    return tokenizer


def load_tokenizer(directory: Path) -> Tokenizer:
    """A checkpoint's tokenizer; where it knows no roles, its rarest merges give way to them."""
    state: dict[str, Any] = json.loads((directory / "tokenizer.json").read_text())
    vocab: dict[str, int] = state["model"]["vocab"]
    known = {token["content"] for token in state["added_tokens"]}
    if not known.issuperset(ROLES):
        state["model"]["merges"] = state["model"]["merges"][: -len(ROLES)]
        for token in sorted(vocab, key=lambda token: vocab[token])[-len(ROLES) :]:
            del vocab[token]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.add_special_tokens(list(ROLES))
    if tokenizer.get_vocab_size() != VOCAB:
        raise ValueError(f"{directory} has {tokenizer.get_vocab_size()} tokens, expected {VOCAB}")
    return tokenizer


def load_weights(directory: Path, model: DemoModel) -> None:
    """Fill ``model`` from a checkpoint of the same shape."""
    state = load_file(directory / "model.safetensors")
    named = {name.removeprefix("model."): value.float() for name, value in state.items()}
    named.pop("lm_head.weight", None)
    model.load_state_dict(named)


def save(directory: Path, model: DemoModel, tokenizer: Tokenizer) -> None:
    """Write the checkpoint; the weights last and by rename, so that a reader never sees half of them."""
    directory.mkdir(parents=True, exist_ok=True)
    length = CONFIG["max_position_embeddings"]
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    files: dict[str, Any] = {
        "config.json": CONFIG,
        # What a request that sets none of these gets: so small a model repeats itself when it is greedy.
        "generation_config.json": {**ids, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **tokens,
            "additional_special_tokens": list(ROLES),
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1) + "\n")
    tokenizer.save(str(directory / "tokenizer.json"))
    state = {f"model.{name}": value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    partial = directory / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(directory / "model.safetensors")
