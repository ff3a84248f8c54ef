"""Tiny random checkpoints of every family, and an engine driven to the end of a list of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import FinishReason, Sequence
from moonpool.engine.batching.step_plan import StepEvent
from moonpool.engine.device.device import CpuDevice, Device
from moonpool.engine.device.selection import choose_device
from moonpool.engine.engine import Engine
from moonpool.engine.speculation.speculator import Speculator
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from tests.lazily import Lazily

transformers = Lazily("transformers")

# Two threads on a busy core wait for each other.
torch.set_num_threads(1)

VOCAB_SIZE = 160
# (device, engine.kv_dtype) of pages in few bits; no GPU kernel has int8 pages.
PAGES = [("cpu", "fp8_e4m3"), ("cpu", "int8"), pytest.param("cuda", "fp8_e4m3", marks=pytest.mark.gpu)]
ROOT = b"r" * 16

_SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 6,
    "head_dim": 8,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
}
_FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 5},
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": _EXPERTS,
    "gpt_oss": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek_v2": {**_LATENT, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 24},
    "glm4": {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
}


@dataclass
class Reference:
    """A checkpoint on disk and the transformers model that wrote it."""

    path: Path
    model: Any
    _greedy: dict[tuple[int, ...], list[int]] = field(default_factory=dict, repr=False)

    def logprobs(self, token_ids: Iterable[int]) -> torch.Tensor:
        """float32 [num_tokens, vocab]: row i is the distribution of the token after token i."""
        with torch.inference_mode():
            ids = torch.tensor([list(token_ids)])
            return self.model(ids).logits[0].float().log_softmax(-1)

    def greedy(self, prompt: Iterable[int], n: int) -> list[int]:
        return self.greedy_each([prompt], n)[0]

    def greedy_each(self, prompts: Iterable[Iterable[int]], n: int) -> list[list[int]]:
        """``n`` tokens after each prompt: the model's own. What an engine said is tried first, as a draft."""
        keys = [tuple(prompt) for prompt in prompts]
        found = {key: self._greedy.setdefault(key, []) for key in keys}
        while texts := [(key, tokens) for key, tokens in found.items() if len(tokens) < n]:
            drafts = [_said.get(key, [])[len(tokens) : n - 1] for key, tokens in texts]
            # Side by side: no position sees what stands behind it.
            ids = pad_sequence(
                [
                    torch.tensor([*key, *tokens, *draft])
                    for (key, tokens), draft in zip(texts, drafts, strict=True)
                ],
                batch_first=True,
            )
            with torch.inference_mode():
                likeliest = self.model(ids).logits.argmax(-1).tolist()
            for row, (key, tokens), draft in zip(likeliest, texts, drafts, strict=True):
                at = len(key) + len(tokens) - 1
                tokens.append(row[at])
                for i, token in enumerate(draft):
                    if token != tokens[-1]:
                        break
                    tokens.append(row[at + i + 1])
        return [found[key][:n] for key in keys]


# The tokens that the engines of these tests gave last for a prompt.
_said: dict[tuple[int, ...], list[int]] = {}


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Reference]:
    """make(family, dtype="float32", **words of config.json) → Reference; the same words give the same one."""
    made: dict[str, Reference] = {}

    def make(family: str, dtype: str = "float32", shard_size: str = "1GB", **words: Any) -> Reference:
        key = repr((family, dtype, shard_size, sorted(words.items())))
        if key not in made:
            config = transformers.AutoConfig.for_model(
                family, **{**_SHAPE, **_FAMILY_SHAPES.get(family, {}), **words}
            )
            torch.manual_seed(crc32(key.encode()))
            # Other attentions of transformers leave out soft caps and sinks.
            model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
            model = model.to(getattr(torch, dtype)).eval()
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    # Fresh biases are 0 and norms 1: a model that forgot them would pass.
                    if name.endswith(("bias", "sinks")):
                        parameter.normal_(std=0.3)
                    elif "norm" in name:
                        parameter.normal_(mean=1.0, std=0.2)
                for name, buffer in model.named_buffers():
                    if name.endswith("correction_bias"):
                        buffer.normal_(std=0.1)
            path = tmp_path_factory.mktemp(family)
            model.save_pretrained(path, max_shard_size=shard_size)
            made[key] = Reference(path, model)
        return made[key]

    return make


@pytest.fixture
def checkpoint(make_checkpoint: Callable[..., Reference]) -> Reference:
    return make_checkpoint("llama")


def prompt(n: int, seed: int = 0) -> list[int]:
    """Random tokens of its vocabulary."""
    return np.random.default_rng(seed).integers(0, 160, n).tolist()


@dataclass
class Result:
    """Everything the engine said about one sequence."""

    token_ids: list[int] = field(default_factory=list)
    events: list[StepEvent] = field(default_factory=list)
    finish_reason: FinishReason = FinishReason.NONE


class Driver:
    """An engine, and what its events said so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.results: dict[tuple[str, int], Result] = {}
        self.num_steps = 0
        self._news = asyncio.Event()
        self._count = 0
        engine.on_step = self._on_step

    def _on_step(self, events: list[StepEvent]) -> None:
        self.num_steps += 1
        for event in events:
            result = self.results.setdefault(event.sequence.key, Result())
            result.events.append(event)
            if event.token_id >= 0:
                assert event.index == len(result.token_ids), "a token was repeated or skipped"
                if not result.token_ids:
                    sequence = event.sequence
                    _said[tuple(sequence.token_ids[: sequence.num_prompt_tokens].tolist())] = result.token_ids
                result.token_ids.append(event.token_id)
            if event.finish_reason:
                assert not result.finish_reason, "a sequence finished twice"
                result.finish_reason = event.finish_reason
        self._news.set()

    def sequence(
        self, prompt: Iterable[int], *, root_key: bytes = ROOT, request_id: str = "", **words: Any
    ) -> Sequence:
        """A request for ``prompt``; words are Sampling's or Sequence's."""
        of_sequence = {
            k: words.pop(k)
            for k in ("priority", "prompt_logprobs", "num_prompt_tokens", "arrived_s")
            if k in words
        }
        ids = np.array(list(prompt), np.int32)
        self._count += 1
        of_sequence.setdefault("arrived_s", float(self._count))
        return Sequence(
            request_id or f"request-{self._count}",
            0,
            ids,
            of_sequence.pop("num_prompt_tokens", len(ids)),
            sampling=Sampling(**words),
            root_key=root_key,
            **of_sequence,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await asyncio.wait_for(self._news.wait(), 60)

    async def run(self, *sequences: Sequence, prefill_only: bool = False) -> list[Result]:
        """Add them all, wait for all to finish."""
        results = [self.results.setdefault(s.key, Result()) for s in sequences]
        for sequence in sequences:
            self.engine.add(sequence, prefill_only=prefill_only)
        await self.until(lambda: all(r.token_ids if prefill_only else r.finish_reason for r in results))
        return results


def proposing(engine: Engine) -> Speculator:
    """The engine's speculator. From now on it proposes as much as it may in every step, whatever that costs
    on this machine: what is accepted depends on no time."""
    speculator = engine._scheduler.speculator
    assert isinstance(speculator, Speculator)
    speculator._row_cost = lambda decodes: 0.0
    speculator._step_s = lambda decodes: 1.0
    speculator.stepped = lambda decodes, seconds: None
    if speculator._model is not None:
        speculator._model.missing_s = lambda sequence: 0.0
    return speculator


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def serve(request: pytest.FixtureRequest, serve_on: Callable[..., Any]) -> Callable[..., Any]:
    """``serve_on`` a CPU, and where there is one a GPU."""
    return lambda path, **words: serve_on(choose_device(request.param), path, **words)


@pytest.fixture
def serve_on() -> Callable[..., Any]:
    """async with serve_on(device, path, block_size=…, dtype=…) as driver; afterwards no block may be held.

    ``num_blocks=0``: as many as fit. On a GPU, too, the dtype is float32 unless another is asked for, so that
    tokens can be compared.
    """

    @asynccontextmanager
    async def run(device: Device, path: Path, **words: Any) -> Any:
        model = {k: words.pop(k) for k in ("dtype", "max_model_len") if k in words}
        num_blocks = words.pop("num_blocks", 128)
        if device.torch.type == "cuda":
            model.setdefault("dtype", "float32")
        if device.memory() is not None:
            words.setdefault("max_batch_size", 8)  # so few steps are recorded
            words.setdefault("max_batch_tokens", 512)
        words.setdefault("block_size", 8)
        if num_blocks:
            probe = Engine(path, EngineOptions(**words), ModelOptions(**model), device=CpuDevice())
            words["pool_nbytes"] = num_blocks * probe.layout.block_nbytes
        engine = Engine(path, EngineOptions(**words), ModelOptions(**model), device=device)
        driver = Driver(engine)
        await engine.start()
        try:
            yield driver
        finally:
            await engine.close()
        engine.pool.check_integrity()
        assert engine.pool.num_used == 0

    return run
