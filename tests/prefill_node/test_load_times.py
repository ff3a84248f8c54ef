"""What a reply of a prefill node says of its cached blocks: how long each tier took, and what was missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moonpool.kvstore.blocks.keys import pack
from moonpool.prefill_node.node import PrefillNode, stale_seconds
from moonpool.protos import node_pb2
from moonpool.runtime.service.lifecycle import ServiceContext
from tests.prefill_node.test_life import config_of, serving

NUM_TOKENS = 320


def prefill_of(name: str, *, num_hit_blocks: int = 0) -> node_pb2.PrefillRequest:
    work = node_pb2.Work(
        request_id=name,
        token_ids=np.arange(1, NUM_TOKENS + 1, dtype="<i4").tobytes(),
        num_prompt_tokens=NUM_TOKENS,
        root_key=bytes(16),
        block_keys=pack([]),
        sampling=node_pb2.Sampling(max_tokens=4, ignore_eos=True),
        left_s=60,
    )
    return node_pb2.PrefillRequest(work=work, num_hit_blocks=num_hit_blocks)


async def test_blocks_that_the_index_named_and_that_were_gone_have_their_share_of_the_steps() -> None:
    node, context = PrefillNode(config_of()), ServiceContext("prefill")
    async with serving(node, context) as stub:
        stale = await stub.Prefill(prefill_of("stale", num_hit_blocks=4))
        assert (stale.num_stale_blocks, stale.num_cached_tokens) == (4, 0)
        assert 0 < stale.stale_s < sum(chunk.seconds for chunk in stale.chunks)
        # Now it has them.
        hit = await stub.Prefill(prefill_of("hit", num_hit_blocks=4))
        assert hit.num_cached_tokens >= 4 * node.engine.pool.block_size
        assert (hit.num_stale_blocks, hit.stale_s, hit.disk_s) == (0, 0.0, 0.0)
        context.draining.set()


async def test_a_prompt_found_whole_after_waiting_for_room_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    node, context = PrefillNode(config_of()), ServiceContext("prefill")
    async with serving(node, context) as stub:
        assert NUM_TOKENS % node.engine.pool.block_size == 0
        first = await stub.Prefill(prefill_of("first"))
        # As if the pool were full, and another request computed the prompt while this one waits.
        monkeypatch.setattr(node.store.loader, "lacks_room", lambda *arguments: True)
        again = await stub.Prefill(prefill_of("again"))
        assert again.token.token_id == first.token.token_id
        # The last block is computed again: its last row gives the logits.
        assert again.num_cached_tokens == NUM_TOKENS - node.engine.pool.block_size
        context.draining.set()


async def test_a_load_tells_its_time_on_the_disk(tmp_path: Path) -> None:
    config = config_of()
    ssd = replace(config.store.ssd, path=str(tmp_path), capacity_nbytes=256 << 20, deadline_s=30.0)
    # The disk may stand still for a while when the node ends.
    config = replace(config, store=replace(config.store, ssd=ssd, flush_s=30.0))
    context = ServiceContext("prefill")
    async with serving(PrefillNode(config), context) as stub:
        first = await stub.Prefill(prefill_of("first"))
        context.draining.set()  # it writes what only memory holds
    context = ServiceContext("prefill")
    async with serving(PrefillNode(config), context) as stub:
        again = await stub.Prefill(prefill_of("again"))
        assert again.token.token_id == first.token.token_id
        assert again.num_ssd_tokens > 0
        assert 0 < again.disk_s <= again.load_s
        # What is left is the way from host memory to the pool, and the pool has it now.
        hit = await stub.Prefill(prefill_of("hit"))
        assert (hit.disk_s, hit.load_s) == (0.0, 0.0)
        context.draining.set()


@pytest.mark.parametrize(
    ("num_stale", "seconds"), [(0, 0.0), (4, 0.5), (8, 1.0), (10, 2.0), (12, 3.0), (99, 3.0)]
)
def test_stale_tokens_are_the_first_that_were_computed(num_stale: int, seconds: float) -> None:
    chunks = [(0.0, 1.0, 8), (5.0, 7.0, 4)]
    assert stale_seconds(chunks, num_stale) == pytest.approx(seconds)
