"""``moonpool store verify``: check every checksum on every node, with a progress bar a node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from moonpool.kvstore.remote.object_store import RemoteStore
from moonpool.runtime import rpc
from moonpool.runtime.errors import NodeUnavailable, RemoteError


async def verify_nodes(nodes: Mapping[str, RemoteStore], console: Console) -> int:
    """Verify all nodes at once. Returns the exit code: 1 if something was damaged or a node failed."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("blocks"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        answers = await asyncio.gather(
            *(
                _verify(node, progress, progress.add_task(node_id, total=None))
                for node_id, node in sorted(nodes.items())
            )
        )
    failures = [failure for _, _, failure in answers if failure]
    for failure in failures:
        console.print(failure, style="red", markup=False)
    num_blocks = sum(checked for checked, _, _ in answers)
    num_damaged = sum(damaged for _, damaged, _ in answers)
    console.print(f"{num_blocks} blocks checked, {num_damaged} damaged")
    return 1 if num_damaged or failures else 0


async def _verify(node: RemoteStore, progress: Progress, task: TaskID) -> tuple[int, int, str]:
    """Return blocks checked, blocks damaged, and the error that ended it early ("" for none)."""
    num_done = num_damaged = 0
    try:
        with rpc.node_errors(node.node_id):
            async for news in node.verify():
                num_done, num_damaged = news.num_done, news.num_damaged
                progress.update(task, completed=news.num_done, total=news.num_blocks)
                if news.damaged:
                    progress.console.print(
                        f"{node.node_id}: {news.damaged} is damaged and was dropped",
                        style="red",
                        markup=False,
                    )
    except (NodeUnavailable, RemoteError) as error:
        return num_done, num_damaged, str(error)
    return num_done, num_damaged, ""
