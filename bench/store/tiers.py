"""The tiers of one node: every case with its limit and its peers in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from moonpool.bench.harness.peer_environment import PeerFailed
from moonpool.bench.store.block_set import Shape, TierSettings
from moonpool.bench.store.disk_tier import disk_rows
from moonpool.bench.store.host_tier import host_rows, overhead_rows
from moonpool.bench.store.peers.peer_store import LIBRARIES, PeerStore
from moonpool.runtime.reports.report import Row


async def measure(
    settings: TierSettings,
    block_sizes: Sequence[int],
    tiers: Sequence[str],
    peers: Sequence[str],
    say: Callable[[str], None],
) -> list[Row]:
    """``tiers``: host, disk. A peer that is not there, or fails, is said and left out."""
    rows: list[Row] = []
    for block_nbytes in block_sizes:
        shape = Shape.of(block_nbytes, settings.total_nbytes)
        for tier in tiers:
            say(f"{tier}, blocks of {block_nbytes} bytes")
            async with AsyncExitStack() as stack:
                beside = await _start(stack, shape, settings, tier, peers, say)
                rows += await (host_rows if tier == "host" else disk_rows)(shape, settings, beside)
    if "host" in tiers:
        rows += await overhead_rows(settings)
    return rows


async def _start(
    stack: AsyncExitStack,
    shape: Shape,
    settings: TierSettings,
    tier: str,
    names: Sequence[str],
    say: Callable[[str], None],
) -> list[PeerStore]:
    started = []
    for name in names:
        library = LIBRARIES[name]
        if library.on_disk != (tier == "disk"):
            continue
        directory = settings.directory / name
        directory.mkdir(exist_ok=True)
        peer = PeerStore.started(library, shape, directory, settings.threads)
        try:
            started.append(await stack.enter_async_context(peer))
        except PeerFailed as error:
            say(str(error))
    return started
