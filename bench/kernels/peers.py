"""Attention of other libraries on the same work, gathered into dense tensors beforehand if they need them."""

# Packages that are not installed everywhere have no types here.
# mypy: disable-error-code="import-untyped,import-not-found,no-untyped-call"

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from moonpool.bench.kernels.device_limits import Work

LAYER_MAJOR = "layer-major pool"
SDPA, FLASH, CUDNN, FLASHINFER = "SDPA", "SDPA flash", "SDPA cuDNN", "FlashInfer"


def peers_here(cuda: bool) -> tuple[str, ...]:
    """The peers that can run on this machine."""
    if not cuda:
        return (SDPA,)
    return (FLASH, CUDNN, FLASHINFER) if find_spec("flashinfer") else (FLASH, CUDNN)


def dense(pool: Tensor, layer: int, table: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """K and V of the same length each sequence: [batch, num_kv_heads, context, head_dim]."""
    blocks = pool[table.long(), layer]  # [batch, blocks, 2, kv_heads, block_size, head_dim]
    k, v = blocks.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)[:, :, :, :context].contiguous().unbind(0)
    return k, v


def _sdpa(backend: SDPBackend | None, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Work:
    def run() -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)

    return run


def dense_work(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Work:
    """q: [batch, num_heads, queries, head_dim]; k, v: [batch, num_kv_heads, keys, head_dim]; with ``causal``
    as many queries as keys. Called once before it is timed, so that it raises here what it cannot do."""
    if name == FLASHINFER and causal and q.shape[0] == 1:
        import flashinfer

        rows = [x[0].transpose(0, 1).contiguous() for x in (q, k, v)]
        work: Work = lambda: flashinfer.single_prefill_with_kv_cache(*rows, causal=True)  # noqa: E731
    else:
        backends = {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}
        work = _sdpa(backends.get(name), q, k, v, causal)
    work()
    return work


def paged_decode_work(q: Tensor, pool: Tensor, layer: int, table: Tensor, context: int) -> Work:
    """FlashInfer over the very pages: our layer of the pool is its HND layout, but for the stride of a block,
    so the layer is copied out first."""
    import flashinfer

    batch, num_heads, head_dim = q.shape
    pages = pool[:, layer].contiguous()
    num_kv_heads, block_size = pages.shape[2], pages.shape[3]
    blocks = -(-context // block_size)
    scratch = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(scratch, "HND", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(0, (batch + 1) * blocks, blocks, dtype=torch.int32, device=q.device),
        table[:, :blocks].flatten().int(),
        torch.full((batch,), (context - 1) % block_size + 1, dtype=torch.int32, device=q.device),
        num_heads,
        num_kv_heads,
        head_dim,
        block_size,
        q_data_type=q.dtype,
        kv_data_type=pages.dtype,
    )
    work: Work = lambda: wrapper.run(q, pages)  # noqa: E731
    work()
    return work
