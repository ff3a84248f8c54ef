"""One step's batch as bytes, from the leader to the other ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from torch import Tensor

from moonpool.engine.memory.packing import MOST_MOVES
from moonpool.engine.model.inputs import StepInputs

_HEADER = 11  # int64 words


def payload_nbytes(*, max_tokens: int, max_rows: int, max_blocks: int, has_places: bool) -> int:
    """Return the size of the largest batch: ``max_rows`` decodes and as many chunks, of ``max_blocks``
    each."""
    row = max_blocks * (1 + has_places) + 3
    return 8 * (_HEADER + 3 * max_tokens) + 4 * (2 * (max_rows * row + MOST_MOVES) + 4 * max_tokens + 16)


def pack(
    inputs: StepInputs,
    rounds: Sequence[Sequence[int]],
    block_size: int,
    payload: npt.NDArray[np.uint8],
    expert_switch: int = 0,
) -> int:
    """Write the batch into ``payload`` and return its size in bytes.

    rounds: rows of the step's tokens for logits, a list for each request, in order. expert_switch: see
    ``ExpertSwitches``.
    """
    n = inputs.num_decodes
    width = -(-int(inputs.decode_lens.max()) // block_size) if n else 0
    table = inputs.decode_table[:, :width]
    chunked = inputs.chunk_table is not None
    chunk_shape = tuple(inputs.chunk_table.shape) if inputs.chunk_table is not None else (0, 0)
    header = np.array(
        [
            *(len(inputs.token_ids), n, width, *chunk_shape, len(rounds), len(inputs.adapters)),
            *(inputs.max_chunk_tokens, expert_switch),
            *(inputs.decode_places is not None, 0 if inputs.moves is None else len(inputs.moves)),
        ],
        np.int64,
    )
    wide = [header, *(t.cpu().numpy() for t in (inputs.token_ids, inputs.positions, inputs.slots))]
    narrow = [table.cpu().numpy(), inputs.decode_lens.cpu().numpy()]
    if chunked:
        for tensor in (inputs.chunk_table, inputs.chunk_starts, inputs.chunk_lens):
            assert tensor is not None
            narrow.append(tensor.cpu().numpy())
    if inputs.adapter_ids is not None:
        narrow += [inputs.adapter_ids.cpu().numpy(), np.array(inputs.adapters, np.int32)]
    if inputs.decode_places is not None:
        narrow.append(inputs.decode_places[:, :width].numpy())
        narrow += [some.numpy() for some in (inputs.chunk_places, inputs.moves) if some is not None]
    narrow.append(np.array([len(rows) for rows in rounds], np.int32))
    narrow += [np.asarray(rows, np.int32) for rows in rounds]
    at = 0
    for array in (*wide, *narrow):
        end = at + array.nbytes
        payload[at:end].view(array.dtype)[:] = array.reshape(-1)
        at = end
    return at


def unpack(batch: npt.NDArray[np.uint8]) -> tuple[StepInputs, list[Tensor], int]:
    """Return the inputs as views of ``batch``, the rounds (int64 rows each), and the expert switch."""
    words = batch[: 8 * _HEADER].view(np.int64).tolist()
    num_tokens, n, width, chunks, chunk_width, num_rounds, num_adapters = words[:7]
    max_chunk_tokens, switch, has_places, num_moves = words[7:]
    at = 8 * _HEADER

    def take(dtype: type[np.generic], *shape: int) -> Tensor:
        nonlocal at
        count = int(np.prod(shape))
        first, at = at, at + count * np.dtype(dtype).itemsize
        return torch.from_numpy(batch[first:at].view(dtype).reshape(shape))

    token_ids, positions, slots = (take(np.int64, num_tokens) for _ in range(3))
    decode_table, decode_lens = take(np.int32, n, width), take(np.int32, n)
    inputs = StepInputs(
        token_ids, positions, slots, n, decode_table, decode_lens, max_chunk_tokens=max_chunk_tokens
    )
    if chunks:
        inputs.chunk_table = take(np.int32, chunks, chunk_width)
        inputs.chunk_starts = take(np.int32, chunks + 1)
        inputs.chunk_lens = take(np.int32, chunks)
    if num_adapters:
        inputs.adapter_ids = take(np.int32, num_tokens)
        inputs.adapters = tuple(take(np.int32, num_adapters).tolist())
    if has_places:
        inputs.decode_places = take(np.int32, n, width)
        inputs.chunk_places = take(np.int32, chunks, chunk_width) if chunks else None
        inputs.moves = take(np.int32, num_moves, 2) if num_moves else None
    lengths = take(np.int32, num_rounds).tolist()
    return inputs, [take(np.int32, length).long() for length in lengths], switch


def chain_digest(previous: int, batch: npt.NDArray[np.uint8]) -> int:
    """Return 63 bits over this batch and all before it, to detect ranks that ran other steps."""
    return xxhash.xxh3_64_intdigest(batch.data, seed=previous) >> 1
