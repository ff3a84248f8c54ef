"""``moonpool top``: the dashboard in a terminal."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from moonpool.client import Client
from moonpool.commands.options import console, plain_table, run_with_client, url_option
from moonpool.commands.status import cluster_view
from moonpool.errors import ApiError

_RETRY_S = 2.0
_ROUTES, _REQUESTS, _EVENTS = 6, 8, 5
_STATES = {"done": "green", "running": "yellow", "cancelled": "dim"}
_EVENT_STYLES = {"left": "red", "joined": "green", "retry": "yellow", "unhealthy": "red", "healthy": "green"}


@click.command("top")
@url_option
def top_command(url: str) -> None:
    """Watch nodes, cache, transfers, requests and events, refreshed once a second."""
    with contextlib.suppress(KeyboardInterrupt):
        run_with_client(url, lambda client: show_top(client, console))


@dataclass(slots=True)
class Rates:
    """Rates per second of counters, between two snapshots."""

    before: dict[str, Any] | None = None

    def of(self, now: dict[str, Any], name: str) -> float:
        """Return the rate of a request-level metric."""
        past = self.before["metrics"].get(name, 0.0) if self.before else None
        return self._per_s(now, now["metrics"][name], past)

    def route(self, now: dict[str, Any], route: dict[str, Any]) -> float:
        """Return the bytes a second between two nodes."""
        pair = (route["source"], route["target"])
        known = {(r["source"], r["target"]): r["nbytes"] for r in (self.before or {}).get("routes", ())}
        return self._per_s(now, route["nbytes"], known.get(pair, 0) if self.before else None)

    def _per_s(self, now: dict[str, Any], value: float, past: float | None) -> float:
        span_s = now["unix_s"] - self.before["unix_s"] if self.before else 0.0
        return max(value - past, 0.0) / span_s if past is not None and span_s > 0 else 0.0


async def show_top(client: Client, console: Console) -> None:
    """Redraw until interrupted; retry a conductor that does not answer. Not on a terminal: print once.

    Raises:
        ApiError: not on a terminal, and the conductor did not answer.
    """
    rates = Rates()
    if not console.is_terminal:
        async with contextlib.aclosing(client.live()) as snapshots:
            console.print(top_view(client.url, await anext(snapshots), rates))
        return
    with Live(Text(f"waiting for {client.url}"), console=console, auto_refresh=False, screen=True) as view:
        while True:
            try:
                async for now in client.live():
                    view.update(top_view(client.url, now, rates), refresh=True)
                    rates.before = now
            except ApiError as error:
                view.update(Text(str(error), style="red"), refresh=True)
            await asyncio.sleep(_RETRY_S)


def top_view(url: str, now: dict[str, Any], rates: Rates) -> RenderableType:
    """Draw one screen from a snapshot of ``/v1/live``; with a tenant's key it has its own requests only."""
    if "tenant" in now:
        return Group(Text(f"{url}: tenant {now['tenant']}", style="bold"), Text(), _request_table(now))
    return Group(
        _figures(now, rates),
        Text(),
        cluster_view(url, now["cluster"]),
        Text(),
        _table("transfers", ("from", "to", "path", "now", "moved", "failed"), _routes(now, rates)),
        Text(),
        _request_table(now),
        Text(),
        *_events(now),
    )


def _figures(now: dict[str, Any], rates: Rates) -> Text:
    metrics = now["metrics"]
    queried = metrics["prefix_queried_tokens"]
    figures = {
        "running": f"{metrics['running_requests']:.0f}",
        "waiting": f"{metrics['waiting_requests']:.0f}",
        "tokens/s": f"{rates.of(now, 'output_tokens'):,.0f}",
        "from cache": f"{metrics['prefix_hit_tokens'] / queried:.1%}" if queried else "–",
        "blocks": f"{now['cluster']['index']['num_blocks']:,}",
        "rejected": str(sum(now["rejections"].values())),
    }
    line = Text()
    for name, value in figures.items():
        line.append(f"{value} ", "bold").append(f"{name}    ", "dim")
    return line


def _routes(now: dict[str, Any], rates: Rates) -> list[tuple[str | Text, ...]]:
    routes = sorted(now["routes"], key=lambda route: (-rates.route(now, route), -route["nbytes"]))
    return [
        (
            route["source"],
            route["target"],
            route["transport"] or "–",
            f"{rates.route(now, route) / 1e6:,.1f} MB/s",
            f"{route['nbytes'] / 1e6:,.1f} MB",
            str(route["failures"]),
        )
        for route in routes[:_ROUTES]
    ]


def _request_table(now: dict[str, Any]) -> RenderableType:
    headings = ("request", "status", "prompt", "cached", "output", "first token", "a token")
    return _table("requests", headings, _requests(now))


def _requests(now: dict[str, Any]) -> list[tuple[str | Text, ...]]:
    return [
        (
            request["id"],
            Text(request["status"], style=_STATES.get(request["status"], "red")),
            str(request["prompt_tokens"]),
            str(request["cached_tokens"]),
            str(request["output_tokens"]),
            f"{1e3 * request['ttft_s']:.1f} ms" if request["ttft_s"] else "–",
            f"{1e3 * request['tpot_s']:.2f} ms" if request["tpot_s"] else "–",
        )
        for request in now["requests"][:_REQUESTS]
    ]


def _events(now: dict[str, Any]) -> list[Text]:
    return [
        Text.assemble(
            (time.strftime("%H:%M:%S ", time.localtime(event["unix_s"])), "dim"),
            (f"{event['kind']} {event['node']} ", _EVENT_STYLES.get(event["kind"], "")),
            event["text"],
        )
        for event in reversed(now["events"][-_EVENTS:])
    ]


def _table(title: str, headings: Iterable[str], rows: list[tuple[str | Text, ...]]) -> RenderableType:
    table = plain_table(headings)
    for row in rows:
        table.add_row(*row)
    return table if rows else Text(f"no {title} yet", style="dim")
