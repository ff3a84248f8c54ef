"""The stores of a store node's two shelves, made from its options."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moonpool.kvstore.blocks.layout import BlockFormat, OpaqueLayout
from moonpool.kvstore.objects.errors import LayoutRefused
from moonpool.kvstore.store import TieredStore
from moonpool.kvstore.store.residency import OnChange
from moonpool.kvstore.tiers.ssd import SsdTier
from moonpool.runtime.config.options import Config, StoreOptions
from moonpool.transfer import Region

# The fingerprint of objects' chunks: change it with the order of bytes in them.
_CHUNK_FORMAT = b"moonpool-chunk-1".ljust(16, b"\0")
# Callers name the layouts. Each has its own files on disk, of up to store.ssd.capacity_nbytes.
MAX_FOLDERS = 8
# Each slot takes some hundred bytes besides its block.
MAX_SLOTS = 1 << 22


@dataclass(frozen=True, slots=True)
class ShelfFactory:
    """``directory``: of this node, below ``store.ssd.path``; None: there is no disk tier."""

    config: Config
    directory: Path | None

    @classmethod
    def of(cls, config: Config, node_id: str) -> ShelfFactory:
        path = config.store.ssd.path
        return cls(config, Path(path) / node_id if path else None)

    async def kv(self, layout: OpaqueLayout, region: Region, on_change: OnChange) -> TieredStore:
        """The store of KV blocks of one layout, with a folder of its own. Raises ``LayoutRefused``."""
        folder = self._folder(kv_folder(layout))
        _check_cost(layout, region, folder)
        return await _make(layout, self.config.store, region, on_change, folder)

    async def objects(self, region: Region, on_change: OnChange) -> TieredStore:
        """The store of objects' chunks: LRU, and everything goes to disk at once."""
        own = self.config.store_node
        options = self.config.store
        options = replace(
            options,
            lease_ttl_s=2 * self.config.transfer.deadline_s,  # as long as the transfer of a window, and more
            write_policy="write-through",
            host=replace(options.host, capacity_nbytes=own.object_nbytes, policy="lru"),
            ssd=replace(
                options.ssd, capacity_nbytes=max(own.object_ssd_nbytes, own.chunk_nbytes), policy="lru"
            ),
        )
        layout = OpaqueLayout(own.chunk_nbytes, _CHUNK_FORMAT)
        folder = self._folder(f"objects-{own.chunk_nbytes}") if own.object_ssd_nbytes else None
        return await _make(layout, options, region, on_change, folder, keep_until_written=True)

    @property
    def catalogue(self) -> Path | None:
        own = self.config.store_node
        return self._folder(f"catalogue-{own.chunk_nbytes}") if own.object_ssd_nbytes else None

    def stored_layout(self) -> OpaqueLayout | None:
        """The layout of the KV blocks on disk; of several, the last written. None: there are none."""
        if self.directory is None:
            return None
        found = [
            (folder.stat().st_mtime_ns, layout)
            for folder in self.directory.glob("kv-*")
            if (layout := _layout_of(folder.name)) is not None
        ]
        return max(found, key=lambda pair: pair[0])[1] if found else None

    def _folder(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / name


async def _make(
    layout: BlockFormat,
    options: StoreOptions,
    region: Region,
    on_change: OnChange,
    folder: Path | None,
    *,
    keep_until_written: bool = False,
) -> TieredStore:
    ssd = None
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        ssd = await SsdTier.open(
            folder,
            layout,
            capacity_nbytes=options.ssd.capacity_nbytes,
            threads=options.ssd.io_threads,
            policy=options.ssd.policy,
            io_deadline_s=options.ssd.deadline_s,
        )
    return TieredStore(
        layout, options, region.array, ssd=ssd, on_change=on_change, keep_until_written=keep_until_written
    )


def _check_cost(layout: OpaqueLayout, region: Region, folder: Path | None) -> None:
    if (num_slots := region.nbytes // layout.block_nbytes) > MAX_SLOTS:
        raise LayoutRefused(
            f"blocks of {layout.block_nbytes} bytes would make {num_slots} slots of this node's memory, more "
            f"than {MAX_SLOTS}"
        )
    if folder is None or folder.exists():
        return
    others = sorted(path.name for path in folder.parent.glob("kv-*"))
    if len(others) >= MAX_FOLDERS:
        raise LayoutRefused(
            f"{folder.parent} has KV blocks of {len(others)} layouts, the most: remove the folders of models "
            f"that are not served any more ({', '.join(others)})"
        )


def kv_folder(layout: OpaqueLayout) -> str:
    return f"kv-{layout.block_nbytes}-{layout.fingerprint.hex()}"


def _layout_of(folder: str) -> OpaqueLayout | None:
    """The reverse of ``kv_folder``; None for any other name."""
    try:
        _, nbytes, fingerprint = folder.split("-")
        return OpaqueLayout(int(nbytes), bytes.fromhex(fingerprint))
    except ValueError:
        return None
