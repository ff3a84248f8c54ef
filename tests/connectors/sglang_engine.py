"""What SGLang's scheduler does with a storage backend, by its own classes, in a process with SGLang.

The model's configurations are stood in for: importing them takes packages that need a GPU or torchvision.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import sys
import types
from queue import Queue
from typing import Any


class _Name(type):
    """A class whose attributes are their names."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


def _stand_in(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {"model_type": name})


class _Torchvision(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__.update(__version__="0.28.0", __getattr__=_stand_in)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.append(_Torchvision())

import sglang.srt  # noqa: E402

_configs = types.ModuleType("sglang.srt.configs")
_configs.__dict__.update(__path__=[f"{sglang.srt.__path__[0]}/configs"], __getattr__=_stand_in)
sys.modules["sglang.srt.configs"] = _configs

import torch  # noqa: E402
from prometheus_client import REGISTRY  # noqa: E402
from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.managers.cache_controller import (  # noqa: E402
    HiCacheController,
    PrefetchOperation,
    StorageOperation,
)
from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo, MLABufferInfo  # noqa: E402
from sglang.srt.mem_cache.hicache_storage import (  # noqa: E402
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.storage import StorageBackendFactory  # noqa: E402
from sglang.srt.mem_cache.utils import get_storage_hash_str  # noqa: E402

_PAGE_SIZE, _LAYERS, _HEADS, _HEAD_DIM, _PAGES = 64, 6, 2, 64, 300
_TOKENS = _PAGE_SIZE * _PAGES


class Engine:
    """One rank. ``dtype``: torch's name; ``page_size``: tokens."""

    def __init__(
        self,
        extra: dict[str, Any],
        layout: str,
        model: str,
        *,
        mla: bool = False,
        tp_rank: int = 0,
        tp_size: int = 1,
        dtype: str = "bfloat16",
        page_size: int = _PAGE_SIZE,
    ) -> None:
        runtime_context._CONTEXT._server_args = types.SimpleNamespace(
            model_path=model, revision=None, dtype="auto", kv_cache_dtype="auto", quantization=None
        )
        self._page_size = page_size
        with host_memory_budget_scope(1 << 30):
            self._pool = _mla(layout, dtype, page_size) if mla else _mha(layout, dtype, page_size)
        config = HiCacheStorageConfig(
            tp_rank=tp_rank,
            tp_size=tp_size,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=mla,
            enable_storage_metrics=True,
            is_page_first_layout=layout == "page_first",
            model_name="a-name",
            extra_config=extra,
        )
        self._backend = StorageBackendFactory.create_backend("dynamic", config, self._pool)
        self._backend.register_mem_pool_host(self._pool)
        self._backend.on_host_pools_registered()
        self._controller = controller = object.__new__(HiCacheController)
        controller.storage_config = config
        controller.storage_backend = self._backend
        controller.storage_host_pool = controller.mem_pool_host = self._pool
        controller.page_size = page_size
        controller.prefetch_sync_queue = Queue()
        zero_copy = bool(extra.get("interface_v1", 0))
        controller.page_get_func = (
            controller._page_get_zero_copy if zero_copy else controller._generic_page_get
        )
        controller.page_set_func = (
            controller._page_set_zero_copy if zero_copy else controller._generic_page_set
        )
        self._side: Any = None
        self.ready = {"writes": not controller.backup_skip}

    def backup(self, seed: int, num_pages: int) -> int:
        """Fill pages with what a seed makes of them, and store them; returns how many were."""
        indices = self._allocate(num_pages)
        self._fill(indices, seed)
        operation = StorageOperation(indices, [], hash_value=_hashes(seed, num_pages, self._page_size))
        self._controller._page_backup_or_log(operation)
        self._pool.free(indices)
        return operation.completed_tokens // self._page_size

    def prefetch(self, seed: int, num_pages: int) -> dict[str, Any]:
        """Load pages: how many there are, how many were loaded, and whether these are right."""
        operation = PrefetchOperation("r", _tokens(seed, num_pages, self._page_size))
        operation.hash_value, num_tokens = self._controller._storage_hit_query(operation)
        num_hits = num_tokens // self._page_size
        operation.host_indices = indices = self._allocate(num_hits)
        self._fill(indices, seed + 1)
        loaded = self._controller._page_transfer(operation)
        found = [self._page(indices, at).clone() for at in range(loaded)]
        self._fill(indices, seed)
        right = all(torch.equal(page, self._page(indices, at)) for at, page in enumerate(found))
        self._pool.free(indices)
        return {"hits": num_hits, "loaded": loaded, "right": right}

    def add_side_pool(self, layout: str) -> None:
        """A second pool beside the KV pool, as of layers with a sliding window."""
        with host_memory_budget_scope(1 << 30):
            self._side = _mha(layout, "float16", self._page_size)
        self._backend.register_mem_host_pool_v2(self._side, PoolName.SWA)

    def backup_side(self, seed: int, num_pages: int, begin: int) -> list[bool]:
        indices = self._side.alloc((num_pages - begin) * self._page_size)
        self._side.kv_buffer.view(torch.uint8).fill_(seed % 251 + 1)
        keys = _hashes(seed, num_pages, self._page_size)[begin:]
        return self._backend.batch_set_v2([PoolTransfer(PoolName.SWA, indices, keys=keys)])[PoolName.SWA]

    def side_hits(self, seed: int, num_pages: int, num_trailing: int) -> dict[str, Any]:
        keys = _hashes(seed, num_pages, self._page_size)
        transfer = PoolTransfer(
            PoolName.SWA, keys=keys[-num_trailing:], hit_policy=PoolHitPolicy.TRAILING_PAGES
        )
        found = self._backend.batch_exists_v2(keys, [transfer])
        return {
            "hits": found.kv_hit_pages,
            "restorable": found.restorable_prefix_pages,
            "pools": {str(name): pages for name, pages in found.extra_pool_hit_pages.items()},
        }

    def load_side(self, seed: int, num_pages: int, begin: int) -> dict[str, Any]:
        indices = self._side.alloc((num_pages - begin) * self._page_size)
        self._side.kv_buffer.view(torch.uint8).fill_(0)
        keys = _hashes(seed, num_pages, self._page_size)[begin:]
        got = self._backend.batch_get_v2([PoolTransfer(PoolName.SWA, indices, keys=keys)])[PoolName.SWA]
        pages = [self._side.get_data_page(int(indices[at])) for at in range(0, len(indices), self._page_size)]
        right = all(bool((page.view(torch.uint8) == seed % 251 + 1).all()) for page in pages)
        self._side.free(indices)
        return {"got": got, "right": right}

    def bytes_of_page(self, seed: int, at: int) -> list[int]:
        """Some bytes in the middle of a page."""
        indices = self._allocate(at + 1)
        self._fill(indices, seed)
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        self._pool.free(indices)
        run = -len(addresses) // (at + 1)
        return list(ctypes.string_at(addresses[run] + sizes[run] // 2, 32))

    def clear(self) -> None:
        self._backend.clear()

    def failures(self) -> dict[str, float]:
        """Pages whose operation failed, by operation."""
        return {
            sample.labels["operation"]: sample.value
            for metric in REGISTRY.collect()
            if metric.name == "moonpool_hicache_pages"
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.labels["outcome"] == "failed"
        }

    def pages_moved(self) -> list[int]:
        stats = self._backend.get_stats()
        assert len(stats.prefetch_pgs) == len(stats.prefetch_bandwidth)
        return [sum(stats.backup_pgs), sum(stats.prefetch_pgs)]

    def close(self) -> None:
        self._backend.close()

    def _allocate(self, num_pages: int) -> torch.Tensor:
        # Not in the order of memory: pages are where there is room.
        indices = self._pool.alloc(num_pages * self._page_size)
        return indices.view(-1, self._page_size).flip(0).reshape(-1)

    def _page(self, indices: torch.Tensor, at: int) -> torch.Tensor:
        page = self._pool.get_data_page(int(indices[at * self._page_size]))
        return page.contiguous().view(torch.uint8)

    def _fill(self, indices: torch.Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        blank = self._pool.get_dummy_flat_data_page()
        for at in range(0, len(indices), self._page_size):
            page = torch.randint(0, 256, (blank.nbytes,), dtype=torch.uint8, generator=generator)
            self._pool.set_from_flat_data_page(int(indices[at]), page.view(blank.dtype))


class Engines:
    """Engines by name, in one process."""

    def __init__(self) -> None:
        self._engines: dict[str, Engine] = {}

    def open(self, name: str, **keywords: Any) -> Any:
        self._engines[name] = engine = Engine(**keywords)
        return engine.ready

    def do(self, name: str, what: str, **keywords: Any) -> Any:
        return getattr(self._engines[name], what)(**keywords)

    def close_one(self, name: str) -> None:
        self._engines.pop(name).close()

    async def close(self) -> None:
        for name in list(self._engines):
            self.close_one(name)


def _tokens(seed: int, num_pages: int, page_size: int) -> list[int]:
    return [seed * 7 + at for at in range(num_pages * page_size)]


def _hashes(seed: int, num_pages: int, page_size: int) -> list[str]:
    return list(get_storage_hash_str(_tokens(seed, num_pages, page_size), page_size=page_size))


def _mha(layout: str, dtype: str, page_size: int) -> MHATokenToKVPoolHost:
    kind = getattr(torch, dtype)
    # What the pool knows of the GPU's memory; nothing is copied from there here.
    on_device = tuple(torch.empty(1, _HEADS, _HEAD_DIM, dtype=kind) for _ in range(_LAYERS))
    pointers = torch.tensor([each.data_ptr() for each in on_device], dtype=torch.uint64)
    buffers = KVBuffers(
        k=on_device, v=on_device, k_data_ptrs=pointers, v_data_ptrs=pointers, layout=KVBufferLayout.NHD
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=page_size,
        head_num=_HEADS,
        head_dim=_HEAD_DIM,
        v_head_dim=_HEAD_DIM,
        dtype=kind,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info, 1.0, 0, page_size, layout, pin_memory=False,
        device_capacity_tokens=_TOKENS, start_layer=0, end_layer=_LAYERS,
    )  # fmt: skip


def _mla(layout: str, dtype: str, page_size: int) -> MLATokenToKVPoolHost:
    kind = getattr(torch, dtype)
    row = 128 + 32
    on_device = tuple(torch.empty(1, 1, row, dtype=kind) for _ in range(_LAYERS))
    info = MLABufferInfo(
        buffers=on_device,
        data_ptrs=torch.tensor([each.data_ptr() for each in on_device], dtype=torch.uint64),
        layer_indices=tuple(range(_LAYERS)),
        device_layer_num=_LAYERS,
        page_size=page_size,
        kv_lora_rank=128,
        qk_rope_head_dim=32,
        kv_cache_dim=row,
        dtype=kind,
        device=torch.device("cpu"),
    )
    return MLATokenToKVPoolHost(
        info, 1.0, 0, page_size, layout, pin_memory=False,
        device_capacity_tokens=_TOKENS, start_layer=0, end_layer=_LAYERS, target_layer_num=_LAYERS,
    )  # fmt: skip
