"""The command of a benchmark: common options, parts one after the other, table, JSON and picture."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from rich.console import Console

from moonpool.bench.harness.goals import with_goals, with_kinds
from moonpool.runtime.reports import report
from moonpool.runtime.reports.conditions import Conditions, load_average
from moonpool.runtime.reports.output import ResultFile, finish
from moonpool.runtime.reports.report import Curve, Report, Row

S = TypeVar("S")
C = TypeVar("C", bound=click.Command)
Rows = AsyncIterator[Row] | Iterator[Row] | Coroutine[object, object, list[Row]]

_QUICK_ROUNDS = 1


@dataclass
class Run:
    """One run of a benchmark. The command sets ``conditions``, and may change ``parts`` and ``machine``.
    Parts add ``curves``, and what they learn of the conditions.

    named: the user named the parts. say: prints a line about the progress. stack: closed after the last
    part. machine: put before the description of the machine.
    """

    parts: list[str]
    peers: tuple[str, ...]
    rounds: int
    quick: bool
    named: bool
    say: Callable[[str], None]
    failed: list[str] = field(default_factory=list)
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    machine: str = ""
    curves: list[Curve] = field(default_factory=list)
    conditions: Conditions | None = None


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's. A machine with a GPU may have nothing but torch: then the standard one."""
    if find_spec("uvloop") is None:
        return asyncio.new_event_loop()
    import uvloop

    return uvloop.new_event_loop()


class _Command(click.Command):
    """Keeps its arguments, which belong into the report, and its parts."""

    parts: Mapping[str, Callable[[Run, Any], Rows]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["arguments"] = list(args)
        return super().parse_args(ctx, args)


def shows_defaults(command: C) -> C:
    """The help of ``command`` then shows the defaults of all options but flags, 0 and nothing."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag and parameter.default:
            parameter.show_default = True
    return command


def benchmark(
    parts: Mapping[str, Callable[[Run, S], Rows]],
    *,
    packages: Sequence[str],
    peers: Mapping[str, Callable[[], object]] | None = None,
    rounds: int | None = 5,
    part_options: Sequence[str] = ("--part",),
    default: Sequence[str] | None = None,
) -> Callable[[Callable[..., S]], click.Command]:
    """Make a command of a function, which has ``run`` and its own options as parameters.

    The function checks the options, sets ``run.conditions``, and returns the settings that each part gets.
    Its docstring is the help.
    packages: the distributions that the report states the versions of. peers: name to a function that raises
    ``PeerAbsent``; called before anything is measured. rounds: the default; None: there is no such option.
    default: the parts without ``--part``; None: all.
    """
    known_peers = dict(peers or {})
    usual = "all" if default is None else ", ".join(default)
    common = [
        click.option(
            *part_options,
            "names",
            multiple=True,
            type=click.Choice(tuple(parts)),
            help=f"Repeatable; default: {usual}.",
        )
    ]
    if rounds is not None:
        common.append(click.option("--rounds", default=rounds, type=click.IntRange(1), help="Repetitions."))
    common += [
        click.option("--quick", is_flag=True, help="A few small cases, in seconds: to see that it works."),
        click.option(
            "--json", "json_path", type=ResultFile(), metavar="FILE", help="Write the report there."
        ),
        click.option(
            "--plot", "plot_path", type=ResultFile(), metavar="FILE", help="Draw it there (PNG, SVG)."
        ),
    ]
    if known_peers:
        help_text = "Also measure another system; repeatable."
        choice = click.Choice(tuple(known_peers))
        common.append(click.option("--peer", "peers", multiple=True, type=choice, help=help_text))

    def decorate(function: Callable[..., S]) -> click.Command:
        @wraps(function)
        def command(
            names: tuple[str, ...],
            quick: bool,
            json_path: Path | None,
            plot_path: Path | None,
            peers: tuple[str, ...] = (),
            rounds: int = 1,
            **options: Any,
        ) -> None:
            if plot_path is not None:
                from moonpool.runtime.reports.plot import check_ending

                check_ending(plot_path)
            for peer in peers:
                known_peers[peer]()
            context = click.get_current_context()
            if quick and context.get_parameter_source("rounds") is ParameterSource.DEFAULT:
                rounds = min(rounds, _QUICK_ROUNDS)
            console = Console(stderr=True, highlight=False)
            chosen = [part for part in parts if part in (names or default or parts)]
            say = lambda line: console.print(line, style="dim")  # noqa: E731
            run = Run(chosen, peers, rounds, quick, bool(names), say)
            began_load = load_average()
            settings = function(run, **options)
            line = shlex.join(["moonpool", "bench", context.command.name or "", *context.meta["arguments"]])
            recorded = {**options, "rounds": run.rounds, "quick": quick, "peers": peers, "parts": run.parts}
            found: list[Row] = []

            def result() -> Report:
                assert run.conditions is not None, "a benchmark's command sets run.conditions"
                load = (began_load, load_average())
                environment = report.measure_environment(
                    packages,
                    command=line,
                    options=recorded,
                    conditions=replace(run.conditions, rounds=run.rounds, load=load),
                )
                if run.machine:
                    environment = replace(environment, machine=f"{run.machine}; {environment.machine}")
                rows = with_kinds(with_goals(context.command.name or "", found))
                return Report(environment, rows, run.curves)

            async def measure() -> None:
                async with run.stack:
                    for part in run.parts:
                        run.say(part)
                        rows = parts[part](run, settings)
                        if isinstance(rows, AsyncIterator):
                            found.extend([row async for row in rows])
                        else:
                            found.extend(await rows if isinstance(rows, Coroutine) else rows)
                        if json_path is not None:
                            # What was measured is kept if a later part fails.
                            report.write(result(), json_path)

            with asyncio.Runner(loop_factory=_new_event_loop) as runner:
                runner.run(measure())
            finish(result(), json_path, plot_path)
            if run.failed:
                console.print(f"failed: {'; '.join(run.failed)}", style="bold red")
                context.exit(1)

        decorated: Callable[..., Any] = command
        for option in reversed(common):
            decorated = option(decorated)
        made = click.command(function.__name__, cls=_Command, help=function.__doc__)(decorated)
        made.parts = parts
        return shows_defaults(made)

    return decorate
