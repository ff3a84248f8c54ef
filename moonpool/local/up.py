"""``moonpool up``: start a local cluster, hold a first conversation, serve until Ctrl-C."""

from __future__ import annotations

import asyncio
import os
import signal
import time

from rich.console import Console
from rich.markup import escape

from moonpool.errors import ApiError
from moonpool.local.cluster import LocalCluster
from moonpool.local.conversation import hold_conversation, turns_table
from moonpool.local.node_configs import models_to_start
from moonpool.runtime.config.options import Config
from moonpool.runtime.service.load_progress import LoadBars


async def up(config: Config, console: Console, *, once: bool, hosts: int = 1) -> int:
    """Run the cluster; returns the exit code. ``once``: stop after the conversation. ``hosts``: see
    ``LocalCluster``.

    Ctrl-C or SIGTERM stops every process in order, a second one at once.

    Raises:
        MoonpoolError: something did not start, the conductor died, or the conversation failed with ``once``.
    """
    began_s = time.perf_counter()

    def report(sentence: str) -> None:
        elapsed = f"[dim]{time.perf_counter() - began_s:6.1f} s[/]"
        console.print(f"{elapsed}  {escape(sentence)}", highlight=False, soft_wrap=True)

    task = asyncio.current_task()
    assert task is not None
    serving = False

    def interrupt() -> None:
        if task.cancelling() or task.done():
            os._exit(130)  # the kernel kills the children
        console.print()
        report("stopping (once more: at once)")
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)

    report("starting a conductor")
    for one in models_to_start(config):
        counts = one.config.cluster
        by_role = ((role, getattr(counts, role)) for role in ("prefill", "decode", "both", "store"))
        nodes = ", ".join(f"{count} {role}" for role, count in by_role if count)
        if once or one.config.planner.min_warm:
            report(f"starting nodes ({nodes}) with {one.config.model.directory}")
        else:
            report(f"the first request for {one.name} starts its nodes (planner.min_warm=0)")
    bars = LoadBars(console)
    try:
        async with LocalCluster(
            config,
            restart=not once,
            supervises=not once,
            hosts=hosts,
            report=report,
            loaded=bars.update,
        ) as cluster:
            bars.close()
            report("ready\n")
            async with cluster.client() as client:
                try:
                    turns = await hold_conversation(client, console)
                    console.print()
                    console.print(turns_table(turns))
                except ApiError as error:
                    console.print()
                    report(f"the conversation failed; the logs are in {cluster.directory}")
                    if once:
                        raise
                    # As any request may, while nodes are started again.
                    report(str(error))
            console.print()
            if once:
                return 0
            _print_urls(cluster, console)
            serving = True
            await cluster.wait_broken()
    except asyncio.CancelledError:
        report("stopped")
        return 0 if serving else 130
    finally:
        bars.close()
    return 0


def _print_urls(cluster: LocalCluster, console: Console) -> None:
    url = cluster.url
    lines = [
        ("API", f"{url}/v1"),
        ("dashboard", f"{url}/"),
        ("metrics", f"{url}/metrics"),
        *((child.name, child.ready.get("metrics_url", "not ready")) for child in cluster.nodes),
        ("logs", str(cluster.directory)),
    ]
    width = max(len(name) for name, _ in lines) + 2
    for name, where in lines:
        console.out(f"  {name:<{width}}{where}", highlight=False)
    console.print()
    console.out(
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        '    -d \'{"messages": [{"role": "user", "content": "Who was Solomon?"}], "stream": true}\'',
        highlight=False,
    )
    console.print("\nServing. Ctrl-C stops everything; `moonpool top` and `moonpool chat` talk to it.")
