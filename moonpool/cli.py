"""The command ``moonpool``."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console

from moonpool.runtime.config.loading import explain, load_config, to_toml
from moonpool.runtime.errors import ConfigError, MoonpoolError

T = TypeVar("T")

DEFAULT_URL = "http://127.0.0.1:8000"

# Into a file or a pipe, tables are as wide as they need.
console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)


class LazyGroup(click.Group):
    """A group whose commands are found in a module only when they are asked for: torch takes a second."""

    def __init__(self, *args: Any, target: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._target = target

    def _group(self) -> click.Group:
        module, _, name = self._target.partition(":")
        group = getattr(import_module(module), name)
        assert isinstance(group, click.Group)
        return group

    def list_commands(self, ctx: click.Context) -> list[str]:
        return self._group().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return self._group().get_command(ctx, cmd_name)


def config_options(command: Callable[..., None]) -> Callable[..., None]:
    command = click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Set one option.")(
        command
    )
    return click.option(
        "--config", "file", type=click.Path(path_type=Path), metavar="FILE", help="TOML file of options."
    )(command)


url_option = click.option(
    "--url", default=DEFAULT_URL, envvar="MOONPOOL_URL", show_default=True, help="The conductor's API."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moonpool")
def cli() -> None:
    """Moonpool: KV-cache-centric, disaggregated LLM serving."""


@cli.command("up")
@click.option(
    "--model", metavar="DIR", help="Hugging Face checkpoint directory (default: the one that ships)."
)
@click.option("--prefill", type=int, metavar="N", help="Prefill nodes (default: 2).")
@click.option("--decode", type=int, metavar="N", help="Decode nodes (default: 2).")
@click.option("--store", type=int, metavar="N", help="Store nodes (default: 0).")
@click.option("--port", type=int, metavar="P", help="Port of the API (default: 8000; 0: a free one).")
@click.option("--redis", metavar="URL", help="Use this Redis (default: start a private one).")
@click.option("--once", is_flag=True, help="Stop after the first conversation.")
@config_options
def up_command(file: Path | None, sets: Sequence[str], once: bool, **given: Any) -> None:
    """Run a whole cluster on this machine and talk to it."""
    from moonpool.local.up import up

    keys = {
        "model": "model.path",
        "prefill": "cluster.prefill",
        "decode": "cluster.decode",
        "store": "cluster.store",
        "port": "conductor.port",
        "redis": "index.redis_url",
    }
    options = [f"{keys[name]}={value}" for name, value in given.items() if value is not None]
    sys.exit(asyncio.run(up(load_config(file, [*sets, *options]), console, once=once)))


def _add_daemon(name: str, module: str, help_line: str) -> None:
    @cli.command(
        name,
        help=help_line,
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def daemon(arguments: tuple[str, ...]) -> None:
        # In place of this process: signals and the exit code are the daemon's own.
        os.execv(sys.executable, [sys.executable, "-m", module, *arguments])


_add_daemon(
    "conductor", "moonpool.conductor", "Run a conductor: the API, and the placement of requests on nodes."
)
_add_daemon("prefill-node", "moonpool.prefill_node", "Run a prefill node.")
_add_daemon("decode-node", "moonpool.decode_node", "Run a decode node.")
_add_daemon("ranks", "moonpool.engine.ranks.hosts.daemon", "Run ranks here for a node on another machine.")
_add_daemon(
    "store-node", "moonpool.kvstore.store_node", "Run a store node: lend memory and disk to the pool."
)


@cli.command("status")
@url_option
@click.option("--json", "as_json", is_flag=True, help="Print /v1/cluster, as JSON.")
def status_command(url: str, as_json: bool) -> None:
    """Print the cluster's nodes and their load."""
    from moonpool.client import Client
    from moonpool.commands.status import cluster_view

    async def run() -> None:
        async with Client(url) as client:
            cluster = await client.cluster()
        if as_json:
            click.echo(json.dumps(cluster, indent=2))
        else:
            console.print(cluster_view(url, cluster))

    _run(run())


@cli.command("experts")
@click.argument("node", metavar="NODE")
@click.option(
    "--copies",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Copies of hot experts, a layer.",
)
@click.option(
    "--ranks",
    type=click.IntRange(min=2),
    metavar="N",
    help="Ranks to plan for (engine.parallel.ep); default: as many as NODE has.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write the plan there.")
@url_option
def experts_command(node: str, copies: int, ranks: int | None, output: Path | None, url: str) -> None:
    """Say how evenly NODE's experts are used since it started, and plan where they and copies of the hot ones
    should lie.

    Nodes that are started with engine.parallel.expert_plan_path=FILE do so.
    """
    from moonpool.commands.experts import make_plan

    _run(make_plan(console, url, node, num_ranks=ranks, copies=copies, output=output))


@cli.command("top")
@url_option
def top_command(url: str) -> None:
    """Watch the cluster: nodes, cache, transfers, requests, events, once a second."""
    from moonpool.client import Client
    from moonpool.commands.top import show_top

    async def run() -> None:
        async with Client(url) as client:
            await show_top(client, console)

    with contextlib.suppress(KeyboardInterrupt):
        _run(run())


@cli.command("chat")
@url_option
@click.option("--system", default="", metavar="TEXT", help="A system message.")
@click.option("--max-tokens", default=256, show_default=True)
@click.option("--temperature", default=0.7, show_default=True)
@click.argument("message", nargs=-1)
def chat_command(url: str, message: tuple[str, ...], **options: Any) -> None:
    """Talk to the model; with MESSAGE, get one answer."""
    from moonpool.client import Client
    from moonpool.commands.chat import chat

    async def run() -> None:
        async with Client(url) as client:
            await chat(client, console, first=" ".join(message), **options)

    _run(run())


@cli.command("doctor")
@click.option("--url", envvar="MOONPOOL_URL", help="Diagnose the cluster of this conductor too.")
@click.option("--redis", metavar="URL", help="The cluster's index: look there too (index.redis_url).")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@config_options
def doctor_command(
    url: str | None, redis: str | None, as_json: bool, file: Path | None, sets: Sequence[str]
) -> None:
    """Say what is slow, missing or wrong on this machine, and in a cluster, and what to do about it.

    Of a cluster (--url): nodes that do not serve, why the cache is not hit, slow paths, clocks that differ,
    options that contradict each other. Exit code 1: something is missing or wrong.
    """
    from moonpool.doctor.diagnosis import doctor

    config = load_config(file, [*sets, *([f"index.redis_url={redis}"] if redis else [])])
    sys.exit(_run(doctor(config, url, console, as_json=as_json)))


@cli.command("config")
@click.option(
    "--explain", "all_options", is_flag=True, help="List every option with its default and meaning."
)
@config_options
def config_command(all_options: bool, file: Path | None, sets: Sequence[str]) -> None:
    """Check a configuration and print what it changes, as TOML."""
    click.echo(_annotated() if all_options else to_toml(load_config(file, sets)), nl=False)


def _annotated() -> str:
    """Every option at its default, as a TOML file to start from."""
    lines: list[str] = []
    section = ""
    for row in explain():
        parent, _, name = row.key.rpartition(".")
        if parent != section:
            section = parent
            lines += ["", f"[{section}]"]
        lines.append(f"{name} = {json.dumps(row.default)}  # {row.unit}: {row.meaning}")
    return "\n".join(lines[1:]) + "\n"


@cli.command(
    "plan",
    help="Find the cluster that serves most of a trace's requests a GPU, by simulating.",
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan_command(arguments: tuple[str, ...]) -> None:
    from moonpool.simulator.plan_command import plan

    plan.main(list(arguments), prog_name="moonpool plan", standalone_mode=False)


@cli.group("bench", cls=LazyGroup, target="moonpool.bench.cli:bench")
def bench_group() -> None:
    """Measure: serving, and the parts."""


@cli.group("index", cls=LazyGroup, target="moonpool.commands.index:index")
def index_group() -> None:
    """The index of KV blocks: verify it, follow engines that are not ours."""


@cli.group("store", cls=LazyGroup, target="moonpool.objects.command:store")
def store_group() -> None:
    """Objects on the store nodes: put, get, ls, stat, evict, verify."""


@asynccontextmanager
async def start_local_cluster(sets: Sequence[str]) -> AsyncIterator[str]:
    """A cluster on this machine with these options, around the block; yields the API's URL."""
    from moonpool.local.cluster import LocalCluster

    async with LocalCluster(load_config(None, sets)) as cluster:
        yield cluster.url


@cli.command("report")
@click.argument("results", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--url", envvar="MOONPOOL_URL", help=f"The conductor's API (default, without RESULTS: {DEFAULT_URL})."
)
@click.option("--seconds", default=3.0, show_default=True, help="Watch the cluster for so long.")
@click.option("--requests", default=20, show_default=True, help="Draw the timelines of so many, the latest.")
@click.option("--title", default="Moonpool report", show_default=True)
@click.option(
    "-o",
    "--output",
    default="report.html",
    show_default=True,
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
)
def report_command(
    results: tuple[Path, ...], url: str | None, seconds: float, requests: int, title: str, output: Path
) -> None:
    """Write a run into one HTML file, to keep and to share: nothing in it asks a network.

    A cluster's configuration (no secrets), versions, figures and timelines (no prompts, no answers), and the
    RESULTS, files of `moonpool bench ... --json`, drawn with their conditions, limits and peers.
    """
    from moonpool.client import Client
    from moonpool.commands.run_report import benchmark_facts, cluster_facts, report_data
    from moonpool.commands.single_page import single_page

    async def run() -> dict[str, Any] | None:
        if url is None and results:
            return None
        async with Client(url or DEFAULT_URL) as client:
            return await cluster_facts(client, seconds=seconds, num_requests=requests)

    benchmarks = benchmark_facts(results)
    page = single_page(title, report_data(title, _run(run()), benchmarks))
    output.write_text(page, encoding="utf-8")
    console.print(f"{output}: {len(page.encode()) / 1e3:.0f} KB, open it in a browser")


@cli.command("trace")
@url_option
@click.argument("request_id")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    help="File to write (default: trace-REQUEST_ID.json).",
)
def trace_command(url: str, request_id: str, output: Path | None) -> None:
    """Write a request's timeline for Perfetto (ui.perfetto.dev) or chrome://tracing.

    REQUEST_ID is the answer's id, or the x-request-id the client sent; the conductor keeps the latest ones.
    """
    from moonpool.client import Client
    from moonpool.commands.trace import chrome_trace

    async def run() -> None:
        async with Client(url) as client:
            trace = chrome_trace(await client.timeline(request_id))
        file = output or Path(f"trace-{request_id}.json")
        file.write_text(json.dumps(trace))
        console.print(f"{len(trace['traceEvents'])} events in {file}: open it at ui.perfetto.dev")

    _run(run())


def _run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(main)


def main() -> None:
    """Every error we raise on purpose is one sentence on stderr: 2 for a wrong option, 1 for all else."""
    try:
        # bench may not import upwards, so it is handed what starts a cluster.
        cli(prog_name="moonpool", obj=start_local_cluster)
    except ConfigError as error:
        click.echo(f"moonpool: {error}", err=True)
        sys.exit(2)
    except (MoonpoolError, OSError) as error:
        click.echo(f"moonpool: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
