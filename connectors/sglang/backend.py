"""SGLang's interface to storage backends of HiCache, mapped to Moonpool's store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import sglang
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from moonpool.connectors.service_thread import OnceAMinute
from moonpool.connectors.sglang import metrics
from moonpool.connectors.sglang.host_pages import HostPages, bytes_of
from moonpool.connectors.sglang.identity import engine_prefix, pool_name
from moonpool.connectors.sglang.page_objects import PageObjects, remove_all
from moonpool.connectors.sglang.page_pool import PagePool
from moonpool.connectors.sglang.prefix_hits import PoolHits, leading, restorable
from moonpool.connectors.sglang.settings import check_version, read_settings
from moonpool.connectors.sglang.store_thread import StoreThread
from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.security import process

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class MoonpoolStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang has no types here
    """Keeps pages of SGLang's host pools on Moonpool's store nodes, and finds them again.

    Raises ``Unsupported`` and ``ConfigError`` while SGLang starts. Later a fault of the store is a miss;
    only ``clear`` raises.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Mapping[str, Any]) -> None:
        check_version(sglang.__version__)
        settings = read_settings(storage_config.extra_config or {})
        process.use_as_client(settings.config.security)
        self._engine = storage_config
        self._zero_copy = settings.zero_copy
        self._prefix = engine_prefix(get_server_args(), sglang.__version__)
        self._store = StoreThread(settings)
        self._pools: dict[str, PagePool] = {}
        self._flat = PageObjects(f"{self._prefix}/flat", 1, self._store)
        self._is_logical = False  # the KV pool has no memory: its pages are in other pools
        self._warnings = OnceAMinute()
        self._stats = StorageMetrics()

    # ------------------------------------------------------------------ pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._is_logical = mem_pool_host.kv_buffer is None
        if self._zero_copy and not self._is_logical:
            self._add(str(PoolName.KV), mem_pool_host)
        elif not self._is_logical:
            prefix = self._prefix_of(str(PoolName.KV), mem_pool_host, "flat")
            self._flat = PageObjects(prefix, 1, self._store)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        if host_pool_name != PoolName.KV:
            self._add(str(host_pool_name), host_pool)

    def _add(self, name: str, pool: Any) -> None:
        pages = HostPages(pool)
        prefix = self._prefix_of(name, pool, str(pages.run_nbytes))
        self._pools[name] = added = PagePool(pages, prefix, self._store)
        how = "without a copy" if added.is_zero_copy else "gathered (pages first would need no copy)"
        size = (pages.page_nbytes, len(pages.run_nbytes))
        log.info("keeps pages of pool %s: %d bytes in %d runs of memory, %s", name, *size, how)

    def _prefix_of(self, name: str, pool: Any, how: str) -> str:
        engine = self._engine
        # As SGLang sees it: what one rank writes for all (``should_backup``).
        is_replicated = (
            engine.is_mla_model and name != PoolName.MAMBA and not isinstance(pool, MHATokenToKVPoolHost)
        )
        return f"{self._prefix}/{pool_name(name, pool, engine, is_replicated=is_replicated, more=how)}"

    # ------------------------------------------------------------------ version 1: the KV pool

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        if self._is_logical:
            return 0
        return leading(self._exists(str(PoolName.KV), keys))

    def batch_get_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return [True] * len(keys) if self._is_logical else self._get(str(PoolName.KV), keys, host_indices)

    def batch_set_v1(
        self, keys: list[str], host_indices: Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return [True] * len(keys) if self._is_logical else self._put(str(PoolName.KV), keys, host_indices)

    # ------------------------------------------------------------------ version 2: all pools

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        num_pages = len(keys) if self._is_logical else self.batch_exists(keys, extra_info)
        pools = {
            transfer.name: _pool_hits(transfer, self._exists(str(transfer.name), keys[:num_pages]))
            for transfer in (pool_transfers or ())
            # A second form of pages that are there anyway: never used here.
            if num_pages and transfer.hit_policy != PoolHitPolicy.BLOCK_GROUPS
        }
        lengths, longest = restorable(num_pages, pools)
        if num_pages:
            longest[PoolName.KV] = num_pages
        hits = {name: length for name, length in longest.items() if length}
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._get(str(each.name), each.keys or [], each.host_indices) for each in transfers
        }

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return {
            each.name: self._put(str(each.name), each.keys or [], each.host_indices) for each in transfers
        }

    # ------------------------------------------------------------------ copies of pages, without interface_v1

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key], [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        pages = [[bytes_of(target)] for target in target_locations]
        hits = self._guarded("get", len(keys), lambda: self._flat.get(keys, pages)) or [False] * len(keys)
        _count("get", hits)
        return [target if hit else None for target, hit in zip(target_locations, hits, strict=True)]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        return self._guarded("set", len(keys), lambda: self._set_flat(keys, values)) is not None

    def _set_flat(self, keys: Sequence[str], values: Sequence[Tensor]) -> int:
        missing = [at for at, is_here in enumerate(self._flat.exists(keys)) if not is_here]
        self._flat.put([keys[at] for at in missing], [[bytes_of(values[at].contiguous())] for at in missing])
        metrics.PAGES.labels("set", "stored").inc(len(missing))
        return len(missing)

    # ------------------------------------------------------------------ the whole

    def clear(self) -> None:
        """Remove the pages of all engines that serve this model with these settings.

        Raises what ``remove_all`` does: SGLang tells its caller of the failure then, and serves on.
        """
        log.info("%d objects removed", remove_all(f"{self._prefix}/", self._store))

    def get_stats(self) -> StorageMetrics:
        stats, self._stats = self._stats, StorageMetrics()
        return stats

    def close(self) -> None:
        self._store.close()

    # ------------------------------------------------------------------ at the boundary

    def _exists(self, pool: str, keys: Sequence[str]) -> list[bool]:
        copied = pool == PoolName.KV and not self._zero_copy
        found = self._guarded(
            "exists", len(keys), lambda: (self._flat if copied else self._pools[pool]).exists(keys)
        )
        _count("exists", found or [])
        return found or [False] * len(keys)

    def _get(self, pool: str, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        began_s = time.perf_counter()
        found = self._guarded("get", len(keys), lambda: self._pools[pool].get(keys, host_indices))
        _count("get", found or [])
        if found and self._engine.enable_storage_metrics:
            seconds = time.perf_counter() - began_s
            self._stats.prefetch_pgs.append(len(keys))
            self._stats.prefetch_bandwidth.append(
                sum(found) * self._pools[pool].page_nbytes / seconds / (1 << 30)
            )
        return found or [False] * len(keys)

    def _put(self, pool: str, keys: Sequence[str], host_indices: Tensor) -> list[bool]:
        began_s = time.perf_counter()
        stored = self._guarded("set", len(keys), lambda: self._pools[pool].put(keys, host_indices))
        if stored is None:
            return [False] * len(keys)
        metrics.PAGES.labels("set", "stored").inc(stored)
        metrics.PAGES.labels("set", "present").inc(len(keys) - stored)
        if stored and self._engine.enable_storage_metrics:
            seconds = time.perf_counter() - began_s
            self._stats.backup_pgs.append(stored)
            self._stats.backup_bandwidth.append(stored * self._pools[pool].page_nbytes / seconds / (1 << 30))
        return [True] * len(keys)

    def _guarded(self, operation: str, num_pages: int, work: Callable[[], Result]) -> Result | None:
        """None: it failed, which is counted and said. SGLang goes on as after a miss."""
        try:
            return work()
        except (MoonpoolError, TimeoutError, CancelledError) as error:
            self._warnings.say(
                f"HiCache pages: {operation} failed, which is a miss: {error or type(error).__name__}"
            )
        except Exception:
            # Whatever it is: the engine must serve on, and its log has the traceback.
            log.exception("HiCache pages: %s failed, which is a miss", operation)
        metrics.PAGES.labels(operation, "failed").inc(num_pages)
        return None


def _pool_hits(transfer: PoolTransfer, is_here: Sequence[bool]) -> PoolHits:
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return PoolHits(is_here, max(1, len(transfer.keys or ())))
    return PoolHits(is_here)


def _count(operation: str, found: Sequence[bool]) -> None:
    metrics.PAGES.labels(operation, "hit").inc(sum(found))
    metrics.PAGES.labels(operation, "miss").inc(len(found) - sum(found))
