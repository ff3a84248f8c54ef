"""Engine setup: the choices that precede loading (device, dtype, plan, layouts, pool size)."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.device.device import Device
from moonpool.engine.device.selection import (
    TORCH_DTYPES,
    check_pages,
    choose_device,
    choose_dtype,
    page_dtype,
    step_limits,
)
from moonpool.engine.errors import PoolTooSmall
from moonpool.engine.execution.gpu_memory import CONTEXT_NBYTES, LINK_NBYTES
from moonpool.engine.execution.runner import ModelRunner
from moonpool.engine.memory.packing import Packing
from moonpool.engine.ranks.assignment import Assignment
from moonpool.engine.ranks.link_factory import choose_link
from moonpool.engine.sharding.expert_placement import ExpertPlacement
from moonpool.engine.sharding.parallel_plan import ParallelPlan, Shard
from moonpool.engine.sharding.stage_work import StepShape, balanced_layers
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import EngineOptions, ModelOptions
from moonpool.runtime.errors import ConfigError
from moonpool.runtime.service.load_progress import Progress

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """Everything known of an engine before its weights are read."""

    config: ModelConfig
    options: EngineOptions
    device: Device
    dtype: str
    plan: ParallelPlan
    max_len: int  # longest sequence of the model and its options, in tokens

    @classmethod
    def choose(
        cls,
        model: Path | ModelConfig,
        options: EngineOptions,
        chosen: ModelOptions,
        device: Device | None,
        *,
        decodes: bool = True,
    ) -> EngineSetup:
        """Read config.json and make all choices. ``device``: None: the one ``chosen`` names. ``decodes``:
        whether decode steps are what pipeline stages are balanced for, or prompts.

        Raises CheckpointError, UnsupportedModel, or ConfigError for a device that does not exist or a plan
        that the model does not allow.
        """
        config = model if isinstance(model, ModelConfig) else ModelConfig.from_checkpoint(model)
        device = choose_device(chosen.device) if device is None else device
        limits = step_limits(device.memory())
        options = options.within(limits)
        log.info("steps on %s have %s, unless options say otherwise", device.torch, limits)
        max_len = min(chosen.max_model_len or config.max_position, config.max_position)
        config = config.for_length(max_len).with_weights(options.weights)
        check_pages(options, config, device)
        if config.moe is not None and config.weights is not None and device.torch.type == "cuda":
            raise ConfigError(
                f"engine.weights: mixtures of experts have no GPU kernel for weights in few bits "
                f"({config.weights.name}) yet: set model.device to cpu or use plain weights",
                "engine.weights",
            )
        dtype = choose_dtype(chosen.dtype, config, device)
        plan = ParallelPlan.from_options(options.parallel, config, device.torch)
        if plan.pp > 1 and not plan.pp_layers:
            layers = _balanced(config, options, device, dtype, plan, decodes)
            if layers != plan.stage_layers(config):  # all ranks read the options
                words = "+".join(map(str, layers))
                options = replace(options, parallel=replace(options.parallel, pp_layers=words))
                plan = replace(plan, pp_layers=layers)
        return cls(config, options, device, dtype, plan, max_len)

    def placing(self, experts: ExpertPlacement | None) -> EngineSetup:
        """Return this setup with another placement of experts, which fits; None: the configured one."""
        return self if experts is None else replace(self, plan=replace(self.plan, experts=experts))

    def fingerprint(self) -> bytes:
        """Return 16 bytes that name the model and what else its KV depends on: only nodes with equal ones
        share blocks. Raises CheckpointError."""
        plain, capacity = self.config.fingerprint(), self.plan.expert_capacity
        if not capacity:
            return plain
        variant = f":expert capacity {capacity:g}, {'reroute' if self.plan.reroutes else 'drop'}"
        return blake2b(plain + variant.encode(), digest_size=16).digest()

    def layout(self, shard: Shard) -> KVLayout:
        """Return the layout of the shard's part of a KV block."""
        return shard.layout(self.config, self.options.block_size, page_dtype(self.options, self.dtype))

    @property
    def whole_layout(self) -> KVLayout:
        """The layout of a KV block of all ranks."""
        return self.layout(ParallelPlan().shard(self.config, 0))

    @property
    def rank_layouts(self) -> list[KVLayout]:
        return [self.layout(shard) for shard in self.plan.shards(self.config)]

    @property
    def packing(self) -> Packing | None:
        """How blocks are packed that every window has passed. None: they are not."""
        plan, runs_ahead = self.plan, self.device.runs_ahead
        return Packing.choose(self.config.windows, pp=plan.pp, cp=plan.cp, runs_ahead=runs_ahead)

    @property
    def steps_in_flight(self) -> int:
        """See ``Assignment``. Raises ConfigError for an impossible link."""
        return self.assignment(None).steps_in_flight if self.plan.world_size > 1 else 1

    def num_blocks(self, pool_memory: npt.NDArray[np.uint8] | None) -> int | None:
        """Return the size of the pool, in blocks of which each cp rank has as many. None: as many as fit on
        each GPU beside the weights.

        Raises PoolTooSmall.
        """
        options, layouts = self.options, self.rank_layouts
        nbytes, block_nbytes = options.pool_nbytes, sum(layout.block_nbytes for layout in layouts)
        if pool_memory is not None:
            nbytes, block_nbytes = pool_memory.nbytes, layouts[0].block_nbytes
        elif self.device.memory() is None:
            nbytes = options.host_pool_nbytes
        elif not nbytes:
            return None
        if nbytes < block_nbytes:
            raise PoolTooSmall(nbytes, block_nbytes)
        return nbytes // block_nbytes * self.plan.cp

    def load(
        self,
        num_blocks: int | None,
        pool_memory: npt.NDArray[np.uint8] | None,
        progress: Progress | None = None,
    ) -> ModelRunner:
        """Load the whole model in this process. Raises as ``ModelRunner``."""
        return ModelRunner(
            self.config,
            self.options,
            dtype=self.dtype,
            device=self.device,
            num_blocks=num_blocks,
            max_len=self.max_len,
            pool_memory=pool_memory,
            progress=progress,
        )

    def assignment(self, num_blocks: int | None) -> Assignment:
        """Return rank 0's assignment in a group of ranks. ``num_blocks``: of the pool on all cp ranks.

        Raises ConfigError for an impossible link.
        """
        parallel, experts = self.options.parallel, self.plan.experts
        return Assignment(
            rank=0,
            model=str(self.config.path.resolve()),
            dtype=self.dtype,
            device=self.device.torch.type,
            link=choose_link(parallel.link, self.device.torch, parallel.hosts),
            options=self.options,
            model_len=self.max_len,
            num_blocks=num_blocks and num_blocks // self.plan.cp,
            max_len=min(self.max_len, num_blocks * self.options.block_size) if num_blocks else self.max_len,
            first_device=self.device.torch.index or 0,
            experts=asdict(experts) if experts is not None else None,
        )


def _balanced(
    config: ModelConfig, options: EngineOptions, device: Device, dtype: str, plan: ParallelPlan, decodes: bool
) -> tuple[int, ...]:
    """Return the layers of each stage for full steps. Raises ConfigError where the weights do not fit the
    GPUs, which are taken to be equal."""
    rows = max(1, options.max_batch_size // options.parallel.num_micro_batches)
    if not decodes:
        rows = options.parallel.micro_batch_tokens
    memory, limit_nbytes = device.memory(), None
    if memory is not None:
        limit_nbytes = memory.total_nbytes * options.gpu_memory - CONTEXT_NBYTES - LINK_NBYTES
    shape = StepShape(rows, decodes, TORCH_DTYPES[dtype].itemsize, device.torch.type)
    return balanced_layers(config, plan.pp, shape, tp=plan.tp, limit_nbytes=limit_nbytes)
