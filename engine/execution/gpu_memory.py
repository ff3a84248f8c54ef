"""Pool sizing on a GPU: its memory minus the weights minus the largest step."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool.engine.batching.sampling import Sampling
from moonpool.engine.batching.sequence import Sequence
from moonpool.engine.device.device import Device, DeviceMemory
from moonpool.engine.device.selection import TORCH_DTYPES
from moonpool.engine.errors import GpuMemoryShort
from moonpool.engine.execution.decode_graphs import padded_sizes
from moonpool.engine.execution.sampler import SamplingBatch, sample
from moonpool.engine.model.inputs import StepInputs
from moonpool.engine.model.transformer import Model
from moonpool.kvstore.blocks.layout import KVLayout
from moonpool.runtime.config.options import EngineOptions

log = logging.getLogger(__name__)

# A process needs besides its tensors: CUDA's context, its libraries and their work space, the kernels.
CONTEXT_NBYTES = 768 << 20
# Memory of recorded steps besides their logits, which each size has for itself.
GRAPHS_NBYTES = 256 << 20
# Buffers of NCCL for the exchanges of a rank.
LINK_NBYTES = 512 << 20
# Other processes may take a little more while this one starts.
SPARE = 0.02


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes needed besides the pool."""

    weights_nbytes: int
    step_nbytes: int
    graphs_nbytes: int


def pool_room(memory: DeviceMemory, fraction: float, needs: MemoryNeeds) -> int:
    """Return the bytes left for the pool, at least 0. ``fraction``: of the device, for the whole process.
    ``memory``: as measured with the weights loaded.
    """
    allowed = int(memory.total_nbytes * fraction) - memory.reserved_nbytes - CONTEXT_NBYTES
    left = memory.free_nbytes - int(memory.total_nbytes * SPARE)
    return max(0, min(allowed, left) - needs.step_nbytes - needs.graphs_nbytes)


def choose_num_blocks(
    model: Model,
    device: Device,
    options: EngineOptions,
    layout: KVLayout,
    num_blocks: int | None,
    *,
    is_single_rank: bool,
) -> int:
    """Return ``num_blocks``, or where it is None as many blocks of ``layout`` as fit on the GPU.

    On a GPU it runs a step of the largest shape, of one rank's part without its exchanges. Raises
    GpuMemoryShort where the blocks, or a single one, do not fit.
    """
    if device.memory() is None:
        assert num_blocks is not None, "main memory is never sized by its free bytes"
        return num_blocks
    with model.without_ranks():
        step_nbytes = device.peak_nbytes(lambda: largest_step(model, device, options, layout))
    step_nbytes += 0 if is_single_rank else LINK_NBYTES
    memory = device.memory()  # after the buffers of loading are freed
    assert memory is not None
    rows = min(options.max_batch_size, options.max_batch_tokens)
    itemsize = model.dtype.itemsize
    logits_nbytes = sum(padded_sizes(rows)) * model.config.vocab_size * itemsize
    # Steps that wait for other ranks are not recorded.
    records = options.decode_graphs and is_single_rank
    needs = MemoryNeeds(memory.reserved_nbytes, step_nbytes, logits_nbytes + GRAPHS_NBYTES if records else 0)
    room = pool_room(memory, options.gpu_memory, needs)
    fitting = room // layout.block_nbytes
    log.info(
        "GPU memory: weights %d MiB, largest step %d MiB, recorded steps %d MiB; %d KV blocks fit",
        *(n >> 20 for n in (needs.weights_nbytes, needs.step_nbytes, needs.graphs_nbytes)),
        fitting,
    )
    wanted = fitting if num_blocks is None else num_blocks
    if not 0 < wanted <= fitting:
        raise GpuMemoryShort(
            max(wanted, 1) * layout.block_nbytes,
            room,
            f"weights {needs.weights_nbytes:,} bytes, largest step {needs.step_nbytes:,}, "
            f"recorded decode steps {needs.graphs_nbytes:,}, engine.gpu_memory {options.gpu_memory:g} of "
            f"{memory.total_nbytes:,}, {memory.free_nbytes:,} free; "
            f"{fitting} blocks of {options.block_size} tokens would fit",
        )
    return wanted


@torch.inference_mode()
def largest_step(model: Model, device: Device, options: EngineOptions, layout: KVLayout) -> None:
    """Run a prompt of ``max_batch_tokens`` and sample the largest batch in the costliest way.

    Writes no KV: every token has slot -1 and attends to one block of zeros.
    """
    n, size, shard = options.max_batch_tokens, options.block_size, model.shard
    shape = (1, *layout.shape)

    def ints(*values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return device.upload(torch.tensor(values, dtype=dtype))

    hidden = model.forward(
        StepInputs(
            token_ids=torch.zeros(n, dtype=torch.int64, device=device.torch),
            positions=torch.arange(n, device=device.torch) % model.attention.max_len,
            slots=torch.full((n,), -1, dtype=torch.int64, device=device.torch),
            num_decodes=0,
            decode_table=torch.zeros((0, 1), dtype=torch.int32, device=device.torch),
            decode_lens=torch.zeros(0, dtype=torch.int32, device=device.torch),
            chunk_table=torch.zeros((1, -(-n // size)), dtype=torch.int32, device=device.torch),
            chunk_starts=ints(0, n),
            chunk_lens=ints(n),
        ),
        torch.zeros(shape, dtype=TORCH_DTYPES[layout.dtype], device=device.torch),
        None
        if shard.is_first
        else torch.zeros((n, model.config.hidden_size), dtype=model.dtype, device=device.torch),
    )
    rows, words = min(options.max_batch_size, n), model.config.vocab_size
    logits = model.logits(hidden[:rows]) if shard.is_last else hidden[:0]
    if shard.rank:
        return
    if logits.shape != (rows, words):  # the other ranks have the rest of them
        logits = torch.zeros((rows, words), dtype=model.dtype, device=device.torch)
    costly = Sampling(temperature=1.0, top_p=0.9)
    batch = [Sequence("largest", 0, [0], 1, sampling=costly, root_key=b"") for _ in range(rows)]
    sample(logits, SamplingBatch(batch, words, device))
