"""The demo checkpoint's files: configuration, tokenizer with its chat template, weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moonpool.demo.corpus import ASSISTANT, BOS, EOS, PAD, SYSTEM, USER

VOCAB = 2048
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "torch_dtype": "bfloat16",
}
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
    """Train a byte-level BPE of ``VOCAB`` tokens: three special tokens first, the roles last."""
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


def save(directory: Path, model: torch.nn.Module, tokenizer: Tokenizer) -> None:
    """Write the checkpoint of a ``LlamaForCausalLM``; the weights last and atomically."""
    directory.mkdir(parents=True, exist_ok=True)
    length = CONFIG["max_position_embeddings"]
    tokens = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    files: dict[str, Any] = {
        "config.json": CONFIG,
        # Defaults of a request: a model this small repeats itself when it is greedy.
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
    state = {
        name: value.to(torch.bfloat16)
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    partial = directory / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(directory / "model.safetensors")
