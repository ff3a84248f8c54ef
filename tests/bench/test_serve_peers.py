"""The peers: a real child process generating, and what happens when one cannot start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from moonpool.bench.harness import shapes
from moonpool.bench.harness.peers import PeerAbsent, PeerFailed
from moonpool.bench.serve.client.answer import read_json
from moonpool.bench.serve.peers.contestants import transformers_peer
from moonpool.bench.serve.peers.llama_cpp import llama_server, server_program
from moonpool.runtime.config.options import ModelOptions

pytestmark = pytest.mark.slow  # each starts a Python with transformers


async def test_transformers_generates_in_a_process_of_its_own() -> None:
    pytest.importorskip("transformers")
    async with transformers_peer(ModelOptions().directory, "float32") as peer:
        assert peer.name == "transformers float32"
        assert await peer.together([[5, 6, 7], [8, 9, 10]], 4) > 0
        assert await peer.alone([5, 6, 7], 4) < 10


async def test_a_peer_that_cannot_load_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match=r"transformers float32: .*Unrecognized model"):
        async with transformers_peer(tmp_path, "float32"):
            pass


@pytest.fixture
def llama_cpp() -> None:
    try:
        server_program()
    except PeerAbsent:
        pytest.skip("no llama.cpp here: `make llama-cpp` builds its server")


def qwen3_checkpoint(directory: Path) -> torch.nn.Module:
    """A small checkpoint whose norms are not all one, and its model in float32."""
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 3, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 3000}
    shapes.write_checkpoint(directory, {**shapes.SHAPES["qwen3-0.6b"], **sizes, **heads})
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    for name, weight in weights.items():
        if "norm" in name:
            weight.normal_(1, 0.3, generator=generator)
        else:
            weight.mul_(5)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


@pytest.mark.usefixtures("llama_cpp")
async def test_llama_cpp_computes_the_same_model(tmp_path: Path) -> None:
    """Its likeliest tokens, and their likelihoods, are those of the checkpoint."""
    model = qwen3_checkpoint(tmp_path)
    prompt = [300, 1700, 2999, 5, 1234, 77, 900]
    async with llama_server(tmp_path, threads=2) as peer:
        assert peer.name == "llama-cpp 2 threads"
        words = {"prompt": prompt, "n_predict": 8, "temperature": 0, "n_probs": 5, "return_tokens": True}
        async with peer.turn():
            status, answer = read_json(await peer.server.http.post("/completion", orjson.dumps(words)))
        assert status == 200, answer
        assert answer["tokens_evaluated"] == len(prompt)
        with torch.inference_mode():
            ids = torch.tensor([prompt + answer["tokens"]])
            expected = torch.log_softmax(model(ids).logits[0, len(prompt) - 1 : -1], -1)
        assert answer["tokens"] == expected.argmax(-1).tolist()
        steps: list[dict[str, Any]] = answer["completion_probabilities"]
        for step, row in zip(steps, expected, strict=True):
            for found in step["top_logprobs"]:
                assert found["logprob"] == pytest.approx(row[found["id"]].item(), abs=0.05)
        assert await peer.first_token(prompt) < 10
        assert await peer.alone(prompt, 4) < 10
        assert await peer.together([prompt] * 8, 4) > 0


@pytest.mark.usefixtures("llama_cpp")
async def test_llama_cpp_does_not_get_another_family() -> None:
    with pytest.raises(PeerFailed, match="only checkpoints of Qwen3 are rewritten, this is llama"):
        async with llama_server(ModelOptions().directory, threads=1):
            pass
