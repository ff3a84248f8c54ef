"""Checkpoints of Qwen3's shape as GGUF files for llama.cpp. Its environment's Python runs this file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf  # type: ignore[import-not-found,unused-ignore]
import numpy as np

_BF16 = gguf.GGMLQuantizationType.BF16


class Writer:
    """Matrices keep their bfloat16; vectors become float32, as llama.cpp needs them."""

    def write(self, model_dir: str, target: str) -> None:
        """Raises ``ValueError``: another family, or weights that are not bfloat16."""
        source = Path(model_dir)
        config = json.loads((source / "config.json").read_text())
        if config["model_type"] != "qwen3":
            raise ValueError(f"only checkpoints of Qwen3 are rewritten, this is {config['model_type']}")
        file = gguf.GGUFWriter(target, "qwen3")
        _add_sizes(file, config)
        _add_tokens(file, json.loads((source / "tokenizer.json").read_text()), config)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
        for name, bits in _weights(source / "model.safetensors"):
            theirs = names.get_name(name, try_suffixes=(".weight",))
            if theirs is None:
                raise ValueError(f"llama.cpp has no name for {name}")
            if bits.ndim == 1:
                file.add_tensor(theirs, (bits.astype(np.uint32) << 16).view(np.float32))
            else:
                file.add_tensor(theirs, bits.view(np.uint8), raw_dtype=_BF16)
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_tensors_to_file()
        file.close()


def _add_sizes(file: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    file.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    file.add_block_count(config["num_hidden_layers"])
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(config["num_attention_heads"])
    file.add_head_count_kv(config["num_key_value_heads"])
    file.add_key_length(config["head_dim"])
    file.add_value_length(config["head_dim"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_freq_base(config["rope_theta"])


def _add_tokens(file: gguf.GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """All ids, so that any output has a text. Prompts come as ids: how text is cut does not matter."""
    words = {i: word for word, i in tokenizer["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words |= special
    ids = range(config["vocab_size"])
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("gpt-2")
    file.add_token_list([words[i] for i in ids])
    file.add_token_types([control if i in special else normal for i in ids])
    file.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    file.add_bos_token_id(config["bos_token_id"])
    file.add_eos_token_id(config["eos_token_id"])
    file.add_add_bos_token(False)


def _weights(path: Path) -> Iterator[tuple[str, np.ndarray[Any, Any]]]:
    """Names and bits of a safetensors file, mapped: uint16."""
    with path.open("rb") as opened:
        header_nbytes = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(header_nbytes))
    for name, about in header.items():
        if name == "__metadata__":
            continue
        if about["dtype"] != "BF16":
            raise ValueError(f"{name} is {about['dtype']}, not BF16")
        first = 8 + header_nbytes + about["data_offsets"][0]
        yield name, np.memmap(path, np.uint16, "r", first, tuple(about["shape"]))
