"""The tensors of a step: from a plan to its tokens. No bookkeeping happens here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moonpool.engine.adapters.packing import AdapterPacking
from moonpool.engine.adapters.pages import AdapterPages
from moonpool.engine.batching.sequence import Sequence, TokenLogprobs
from moonpool.engine.batching.step_plan import StepOutput, StepPlan
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.checkpoint.weights import Checkpoint
from moonpool.engine.collectives.link import Link
from moonpool.engine.device.device import Device, Launched
from moonpool.engine.device.selection import TORCH_DTYPES, page_dtype
from moonpool.engine.device.threads import use_threads
from moonpool.engine.errors import DeviceLost, WeightsTooLarge
from moonpool.engine.execution.attention_check import check_attention
from moonpool.engine.execution.decode_graphs import DecodeGraphs
from moonpool.engine.execution.gpu_memory import choose_num_blocks
from moonpool.engine.execution.input_builder import InputBuilder
from moonpool.engine.execution.logit_rows import LOGIT_ROWS, decode_rows
from moonpool.engine.execution.mask_thread import MaskThread
from moonpool.engine.execution.sampler import SamplingBatch, describe, sample
from moonpool.engine.memory.packing import Packing
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.transformer import Model
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard
from moonpool.engine.sharding.tensor_slices import TensorSlices
from moonpool.kernels.cpu.memory import weight_memory
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import EngineOptions
from moonpool.runtime.service.load_progress import Progress


@dataclass(slots=True)
class Step:
    """Results of a step. sampled: int64 [num_sampled], on the device; token_ids: the same, in host memory
    once the step has ended."""

    sampled: Tensor | None
    token_ids: Tensor | None
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


class ModelRunner:
    """The model, its KV pool and the step's inputs. One call at a time, from any thread."""

    is_single_rank = True  # no step waits for another rank

    def __init__(
        self,
        config: ModelConfig,
        options: EngineOptions,
        *,
        dtype: str,
        device: Device,
        max_len: int,
        num_blocks: int | None,
        pool_memory: npt.NDArray[np.uint8] | None = None,
        progress: Progress | None = None,
        shard: Shard | None = None,
        link: Link | None = None,
        expert_load: Tensor | None = None,
        agree: Callable[[int], int] | None = None,
    ) -> None:
        """Load the weights and create the pool, over ``pool_memory`` on a CPU.

        ``shard``: this rank's part of both; None: all. ``link``: to the other ranks. ``expert_load``: see
        ``Model``. ``num_blocks``: of this rank; None: as many as fit on the GPU beside the largest step, or
        of them those that ``agree`` returns, where other ranks have as many. ``max_len`` is lowered to the
        capacity of the pool on all cp ranks.

        Raises CheckpointError, WeightsTooLarge, or GpuMemoryShort where the pool does not fit.
        """
        use_threads(options)
        self.config = config
        self.options = options
        self.device = device
        self._dtype = TORCH_DTYPES[dtype]
        shard = shard or ParallelPlan().shard(config, 0)
        checkpoint = Checkpoint(config.path, progress, TensorSlices(config, shard))
        memory = device.memory()
        try:
            self.model = device.run(
                lambda: Model(
                    config,
                    checkpoint,
                    dtype=self._dtype,
                    device=device.torch,
                    max_len=max_len,
                    shard=shard,
                    link=link,
                    expert_load=expert_load,
                )
            ).wait()
        except torch.OutOfMemoryError:
            if memory is None:
                raise
            raise WeightsTooLarge(config.path, memory.free_nbytes) from None
        layout = shard.layout(config, options.block_size, page_dtype(options, dtype))
        own = choose_num_blocks(self.model, device, options, layout, num_blocks, is_single_rank=link is None)
        if num_blocks is None and agree is not None:
            own = agree(own)
        self.num_blocks = own * shard.cp  # of the pool, on all cp ranks
        self.max_len = min(max_len, self.num_blocks * options.block_size)
        self.pool = device.run(lambda: pool_tensor(layout, own, device.torch, pool_memory)).wait()
        if device.runs_ahead:
            scale = self.model.attention.scale
            device.run(lambda: check_attention(config, shard, self.pool, self._dtype, scale)).wait()
        packing = AdapterPacking(config, shard, self._dtype, layout.block_nbytes)
        self.adapters = self.model.adapters = AdapterPages(packing, self.pool)
        self._packing = Packing.choose(config.windows, pp=shard.pp, cp=shard.cp, runs_ahead=device.runs_ahead)
        self._inputs = {0: self._input_builder()}  # by micro-batch
        self._masks = MaskThread()
        self._sampling: dict[int, tuple[int, SamplingBatch]] = {}  # by micro-batch, with its version
        self._graphs: DecodeGraphs | None = None
        # Steps that wait for other ranks cannot be recorded.
        if device.runs_ahead and options.decode_graphs and link is None:
            self._graphs = DecodeGraphs(
                device,
                self._inputs[0],
                lambda inputs: self.model.logits(self.model.forward(inputs, self.pool)),
                max_batch_size=min(options.max_batch_size, options.max_batch_tokens),
            )

    def _input_builder(self) -> InputBuilder:
        options = self.options
        return self.device.run(
            lambda: InputBuilder(
                max_batch_size=options.max_batch_size,
                max_batch_tokens=options.max_batch_tokens,
                max_len=self.max_len,
                block_size=options.block_size,
                device=self.device,
                packing=self._packing,
            )
        ).wait()

    def execute(self, plan: StepPlan) -> StepOutput:
        """Compute the plan's tokens, writing their KV. After an error their blocks hold undefined bytes.

        The device has ended the step when this returns: transfers and copies may read its blocks at once.

        Raises DeviceLost if no step can run any more; after another error the next step may.
        """
        return self.finish(lambda: self.launch(plan))

    def launch(self, plan: StepPlan, sampled: Tensor | None = None) -> Launched[Step]:
        """Launch the plan's step. ``sampled``: of the step before, where ``plan.after`` refers to it; that
        may still run. After an error nothing runs."""
        try:
            return self.device.run(lambda: self._compute(plan, sampled))
        except Exception:
            # The kernels launched before it still write to the step's blocks, which others get now.
            self.device.run(lambda: None).wait()
            raise

    def finish(self, launched: Callable[[], Launched[Step]]) -> StepOutput:
        """Wait for a step, which the function returns or fails to launch. Raises as ``execute``."""
        try:
            step = launched().wait()
        except Exception as error:
            try:
                self.device.check()
            except Exception as lost:
                raise DeviceLost(lost) from error
            raise
        token_ids = [] if step.token_ids is None else step.token_ids.tolist()
        return StepOutput(token_ids, step.logprobs, step.prompt_logprobs)

    def expert_load(self) -> npt.NDArray[np.int64]:
        """Return the table of ``ExpertLoad``. From any thread."""
        return self.model.expert_load.cpu().numpy().copy()

    def forget_expert_load(self) -> None:
        """Reset the counts. No step is running."""
        self.model.expert_load.zero_()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan, sampled: Tensor | None = None) -> Step:
        """Launch the step. Only logprobs may wait for values computed on the device."""
        masks = self._masks.begin(plan)
        # Recorded steps have no adapters.
        if self._graphs is not None and not plan.runs and not plan.has_adapters:
            return self._sample_decodes(plan, self._graphs.run(plan, sampled), masks)
        inputs = self._inputs[plan.micro_batch].prepare(plan, sampled)
        return self._sample(plan, inputs, self.model.forward(inputs, self.pool), masks)

    def _sample(
        self, plan: StepPlan, inputs: StepInputs, hidden: Tensor, masks: Callable[[], object]
    ) -> Step:
        """Sample the step's tokens. ``hidden``: of ``Model.forward``. ``masks``: of ``MaskThread.begin``."""
        if not plan.runs:
            return self._sample_decodes(plan, self._logits(hidden, None), masks)
        masks()
        return self._finish_with_runs(plan, inputs, hidden)

    def _sample_decodes(self, plan: StepPlan, logits: Tensor, masks: Callable[[], object]) -> Step:
        masks()
        token_ids, logprobs = sample(logits, self._decode_sampling(plan))
        return Step(token_ids, self.device.download(token_ids), logprobs, {})

    def _logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Return logits [n, vocab] of all rows of ``hidden``, or of ``rows``."""
        return self.model.logits(hidden if rows is None else hidden[rows])

    def _finish_with_runs(self, plan: StepPlan, inputs: StepInputs, hidden: Tensor) -> Step:
        """Sample decodes, drafts and last chunks; compute prompt logprobs where requested."""
        drafted = [draft.sequence for draft in plan.drafts for _ in draft.proposed]
        num_decodes, rows = len(plan.decodes), decode_rows(plan, inputs)
        end = len(rows)
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        last_chunks = []
        for i, chunk in enumerate(plan.chunks):
            first, end = end, end + chunk.num_tokens
            if chunk.sequence.prompt_logprobs:
                prompt_logprobs[i] = self._describe_prompt(hidden[first:end], chunk.sequence, chunk.start)
            if chunk.last:
                rows.append(end - 1)
                last_chunks.append(chunk.sequence)
        if not rows:
            return Step(None, None, [], prompt_logprobs)
        logits = self._logits(hidden, self.device.upload(torch.tensor(rows)))
        batches: list[tuple[int, SamplingBatch]] = []
        if num_decodes:
            batches.append((num_decodes, self._decode_sampling(plan)))
        if others := drafted + last_chunks:
            batch = SamplingBatch(others, self.config.vocab_size, self.device)
            ahead = [i + 1 for draft in plan.drafts for i in range(draft.num_tokens)]
            batch.expect(ahead + [0] * len(last_chunks))
            batches.append((len(others), batch))
        token_ids: list[Tensor] = []
        logprobs: list[TokenLogprobs | None] = []
        end = 0
        for count, batch in batches:
            first, end = end, end + count
            some, more = sample(logits[first:end], batch)
            token_ids.append(some)
            logprobs += more or [None] * count
        sampled = torch.cat(token_ids)
        return Step(sampled, self.device.download(sampled), logprobs, prompt_logprobs)

    def _describe_prompt(self, hidden: Tensor, sequence: Sequence, start: int) -> list[TokenLogprobs]:
        """Return prompt logprobs. hidden: [n, hidden], of tokens start … start + n - 1; each row predicts the
        prompt token after its own."""
        targets = sequence.token_ids[start + 1 : min(start + len(hidden) + 1, sequence.num_prompt_tokens)]
        tokens = self.device.upload(torch.from_numpy(targets.astype(np.int64)))
        num_top = max(sequence.sampling.num_logprobs, 0)
        rows: list[TokenLogprobs] = []
        for first in range(0, len(tokens), LOGIT_ROWS):
            some = tokens[first : first + LOGIT_ROWS]
            raw = self._logits(hidden[first : first + len(some)], None).float()
            rows += describe(raw, some, [num_top] * len(some))
        return rows

    def _decode_sampling(self, plan: StepPlan) -> SamplingBatch:
        """Return the decode batch's parameters as tensors, rebuilt when its sequences change."""
        version, batch = self._sampling.get(plan.micro_batch, (-1, None))
        if batch is None or version != plan.version:
            batch = SamplingBatch(plan.decodes, self.config.vocab_size, self.device)
            self._sampling[plan.micro_batch] = plan.version, batch
        batch.expect([int(row >= 0) for row in plan.after or ()])
        return batch


def pool_tensor(
    layout: KVLayout, num_blocks: int, device: torch.device, memory: npt.NDArray[np.uint8] | None
) -> Tensor:
    """Return a rank's blocks, [num_blocks, *layout.shape], on a CPU over ``memory`` where it is given."""
    dtype, shape = TORCH_DTYPES[layout.dtype], (num_blocks, *layout.shape)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    if memory is None:
        return weight_memory(num_blocks * layout.block_nbytes).view(dtype).view(shape)
    return torch.from_numpy(memory[: num_blocks * layout.block_nbytes]).view(dtype).view(shape)
