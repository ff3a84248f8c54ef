"""Nodes with blocks in the index that the nodes in use cannot read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from moonpool.kvstore.blocks.keys import KeyChain, RootedChain, root_key
from moonpool.kvstore.blocks.layout import BlockFormat, KVLayout
from moonpool.kvstore.index.mirror import IndexMirror
from moonpool.kvstore.index.redis.engine_facts import facts_of
from moonpool.kvstore.index.redis.node_record import NodeRecord, RecordCorrupt


class OtherLayouts:
    """They run another model, revision, dtype or block size, or other engines."""

    def __init__(self, mirror: IndexMirror, layouts: Mapping[str, BlockFormat]) -> None:
        """``layouts``: those that are known, by fingerprint in hex."""
        self._mirror = mirror
        self._layouts = layouts
        self._records: dict[str, NodeRecord] = {}

    def joined(self, record: NodeRecord, why: str) -> None:
        """``why`` it is not used; empty: it is."""
        if why and record.layout:
            self._records[record.node_id] = record
        else:
            self.left(record.node_id)

    def left(self, node_id: str) -> None:
        self._records.pop(node_id, None)

    def have(self, token_ids: npt.NDArray[np.int32], after: int, *, secret: bytes, salt: str) -> bool:
        """Whether one of them has more than the first ``after`` tokens of a prompt. ``secret``, ``salt``: of
        its tenant."""
        if not self._records:
            return False
        for record in {(each.model, each.layout): each for each in self._records.values()}.values():
            found = self._chain(record, secret, salt)
            if found is None:
                continue
            chain, block_size = found
            num_blocks = after // block_size + 1
            keys, _ = chain.extend(token_ids[: num_blocks * block_size], block_size, None)
            if len(keys) == num_blocks and num_blocks in self._mirror.longest_prefix(keys).values():
                return True
        return False

    def _chain(self, record: NodeRecord, secret: bytes, salt: str) -> tuple[KeyChain, int] | None:
        """How its blocks are named, and their tokens; None: it cannot be told."""
        try:
            facts = facts_of(record)
        except RecordCorrupt:
            return None
        if facts is not None:
            return facts.chain(salt), facts.block_size
        layout = self._layouts.get(record.layout)
        if not isinstance(layout, KVLayout):
            return None
        root = root_key(model=record.model.encode(), layout=layout, tenant=secret)
        return RootedChain(root), layout.block_size
