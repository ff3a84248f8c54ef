"""What is known of adapters whose files were read, so that their blocks can be found without them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moonpool.engine.adapters.packing import AdapterPacking, Ranks, ranks_of
from moonpool.engine.adapters.peft import PeftAdapter
from moonpool.engine.checkpoint.config import ModelConfig
from moonpool.engine.sharding.parallel_plan import Shard
from moonpool.kvstore.blocks.keys import BlockKey, extend, root_key
from moonpool.kvstore.blocks.layout import KVLayout

_MOST_SHAPES = 1 << 14
# Part of every key: raise it when rows are packed in another way.
_PACKING_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class AdapterShape:
    """num_blocks: of the pool, the most that any process of the group needs."""

    ranks: Ranks
    num_blocks: int


class AdapterShapes:
    """By content; those learned last. From any thread."""

    def __init__(self, packings: Sequence[AdapterPacking]) -> None:
        """packings: of all processes of the group, the own one first."""
        self._packings = packings
        self._shapes: OrderedDict[str, AdapterShape] = OrderedDict()  # by digest
        self._lock = threading.Lock()

    def get(self, digest: str) -> AdapterShape | None:
        """Return the shape; None: the adapter was not read yet, or long ago."""
        return self._shapes.get(digest)

    def learn(self, adapter: PeftAdapter) -> AdapterShape:
        """Know an adapter that was read and checked. Raises AdapterRefused: it does not fit into blocks."""
        for packing in self._packings:
            packing.check(adapter.path)
        ranks = ranks_of(adapter, self._packings[0].config)
        shape = AdapterShape(ranks, max(packing.num_blocks(ranks) for packing in self._packings))
        with self._lock:
            self._shapes[adapter.digest] = shape
            if len(self._shapes) > _MOST_SHAPES:
                self._shapes.popitem(last=False)
        return shape

    def read(self, path: Path, digest: str) -> AdapterShape:
        """Learn the adapter that ``digest`` names from its files. Raises AdapterRefused: they cannot be read,
        have another content by now, or do not fit into blocks."""
        return self.learn(PeftAdapter.read(path, digest, self._packings[0].config))


class AdapterKeys:
    """The keys of adapters' blocks in the store, chained as those of KV.

    A block of the store has the rows of all ranks, so the keys depend on how the ranks split them.
    """

    def __init__(self, config: ModelConfig, layout: KVLayout, dtype: str, shards: Sequence[Shard]) -> None:
        """layout: of whole blocks. dtype: of the rows. shards: of all ranks."""
        parts = [(one.layers, one.heads, one.kv_heads, one.inter) for one in shards]
        words = f"LoRA rows {_PACKING_VERSION} {dtype} {parts}"
        self._model = words.encode() + config.fingerprint() + layout.fingerprint
        self._layout = layout

    def chain(self, digest: str, num_blocks: int) -> list[BlockKey]:
        """Return the keys of the blocks of the adapter that ``digest`` names."""
        before = root_key(model=self._model, layout=self._layout, adapter=digest)
        keys: list[BlockKey] = []
        for number in range(num_blocks):
            before = extend(before, number.to_bytes(4, "little"))
            keys.append(BlockKey(before))
        return keys
