"""The tensors of a step: from a plan to the tokens it gave. No bookkeeping is touched here."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.dtype import TORCH_DTYPES
from engine.inputs import BatchInputs
from engine.model import Model
from engine.plan import Plan, StepOutput
from engine.profile import CostProfile, measure
from engine.sampler import SamplingBatch, describe, sample
from engine.sequence import Sequence, TokenLogprobs
from engine.weights import Checkpoint, Progress
from runtime.options import EngineOptions

# Rows of logits made at once for prompt logprobs: float32, so 128 k words × 64 rows are 33 MB.
_LOGIT_ROWS = 64


class ModelRunner:
    """The model, its KV pool and the step's inputs. One call at a time, from any thread."""

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        *,
        dtype: str,
        device: torch.device,
        num_blocks: int,
        max_len: int,
        pool_memory: npt.NDArray[np.uint8] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Load the weights and lay the pool over ``pool_memory`` (on a GPU it has memory of its own)."""
        torch.set_num_threads(options.threads)
        self.config = config
        self.options = options
        self.device = device
        self.max_len = max_len
        self.model = Model(
            config,
            Checkpoint(config.path, progress),
            dtype=TORCH_DTYPES[dtype],
            device=device,
            max_len=max_len,
        )
        self.pool = self._make_pool(num_blocks, TORCH_DTYPES[dtype], pool_memory)
        self._inputs = BatchInputs(
            max_batch_size=options.max_batch_size,
            max_batch_tokens=options.max_batch_tokens,
            max_len=max_len,
            block_size=options.block_size,
            device=device,
        )
        self._sampling: SamplingBatch | None = None
        self._sampling_version = -1

    def execute(self, plan: Plan) -> StepOutput:
        """Compute the plan's tokens, writing their KV. After an error their blocks hold undefined bytes."""
        with torch.inference_mode():
            inputs = self._inputs.prepare(plan)
            hidden = self.model.forward(inputs, self.pool)
            if not plan.chunks:
                token_ids, logprobs = sample(self.model.logits(hidden), self._decode_sampling(plan))
                return StepOutput(token_ids, logprobs, {})
            return self._finish_with_chunks(plan, hidden)

    def measure_costs(self, clock: Callable[[], float]) -> CostProfile:
        """Time steps of several shapes. Uses the pool's memory: call it before anything else does."""
        return measure(self, clock)

    def _finish_with_chunks(self, plan: Plan, hidden: Tensor) -> StepOutput:
        """Sample what decodes and what ends its prompt here; describe prompt tokens where asked for."""
        num_decodes = len(plan.decodes)
        rows = list(range(num_decodes))
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        last_chunks = []
        end = num_decodes
        for i, chunk in enumerate(plan.chunks):
            first, end = end, end + chunk.num_tokens
            if chunk.sequence.prompt_logprobs:
                prompt_logprobs[i] = self._describe_prompt(hidden[first:end], chunk.sequence, chunk.start)
            if chunk.last:
                rows.append(end - 1)
                last_chunks.append(chunk.sequence)
        if not rows:
            return StepOutput([], [], prompt_logprobs)
        logits = self.model.logits(hidden[torch.tensor(rows, device=self.device)])
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if num_decodes:
            token_ids, logprobs = sample(logits[:num_decodes], self._decode_sampling(plan))
        if last_chunks:
            batch = SamplingBatch(last_chunks, self.config.vocab_size, self.device)
            more_ids, more = sample(logits[num_decodes:], batch)
            if logprobs or more:
                logprobs = (logprobs or [None] * num_decodes) + (more or [None] * len(more_ids))
            token_ids = token_ids + more_ids
        return StepOutput(token_ids, logprobs, prompt_logprobs)

    def _describe_prompt(self, hidden: Tensor, sequence: Sequence, start: int) -> list[TokenLogprobs]:
        """hidden: [n, hidden] of tokens start … start + n - 1, each of which predicts the prompt token after
        it.
        """
        targets = sequence.token_ids[start + 1 : min(start + len(hidden) + 1, sequence.num_prompt_tokens)]
        tokens = torch.from_numpy(targets.astype(np.int64)).to(self.device)
        num_top = max(sequence.sampling.num_logprobs, 0)
        rows: list[TokenLogprobs] = []
        for first in range(0, len(tokens), _LOGIT_ROWS):
            some = tokens[first : first + _LOGIT_ROWS]
            raw = self.model.logits(hidden[first : first + len(some)]).float()
            rows += describe(raw, some, [num_top] * len(some))
        return rows

    def _decode_sampling(self, plan: Plan) -> SamplingBatch:
        """The decode batch's parameters as tensors, made again when its sequences change."""
        if self._sampling is None or self._sampling_version != plan.version:
            self._sampling = SamplingBatch(plan.decodes, self.config.vocab_size, self.device)
            self._sampling_version = plan.version
        return self._sampling

    def _make_pool(self, num_blocks: int, dtype: torch.dtype, memory: npt.NDArray[np.uint8] | None) -> Tensor:
        config, block_size = self.config, self.options.block_size
        shape = (num_blocks, config.num_layers, 2, config.num_kv_heads, block_size, config.head_dim)
        if memory is None or self.device.type != "cpu":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        return torch.from_numpy(memory[:nbytes]).view(dtype).view(shape)
