"""The commands under ``moonpool bench``; a module is imported only when its command is asked for."""

from __future__ import annotations

from importlib import import_module

import click

_COMMANDS = {
    "conductor": "moonpool.bench.conductor.command:conductor",
    "engine": "moonpool.bench.engine.command:engine",
    "eviction": "moonpool.bench.eviction.command:eviction",
    "index": "moonpool.bench.index.command:index",
    "parallel": "moonpool.bench.parallel.command:parallel",
    "kernels": "moonpool.bench.kernels.command:kernels",
    "serve": "moonpool.bench.serve.command:serve",
    "simulate": "moonpool.bench.simulation.command:simulate",
    "store": "moonpool.bench.store.command:store",
    "transfer": "moonpool.bench.transfer.command:transfer",
}


class _Group(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, name = _COMMANDS[cmd_name].partition(":")
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command


@click.group(cls=_Group)
def bench() -> None:
    """Measure: serving, and the parts."""
