"""The command ``moonpool``: a table of commands, each imported when it is called."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import NamedTuple

import click

from moonpool.errors import exit_on_error, require_extra
from moonpool.runtime.redaction import hide_arguments, hide_in_tracebacks


class _Entry(NamedTuple):
    # MODULE:ATTRIBUTE of a click command; MODULE, maybe with arguments: a daemon, run as python -m
    target: str
    summary: str
    extra: str = ""  # the extra of pyproject.toml that the command needs


_COMMANDS = {
    "bench": _Entry("moonpool.bench.cli:bench", "Measure serving and its parts."),
    "certs": _Entry("moonpool.commands.certs:certs", "Make the keys and certificates of a cluster."),
    "chat": _Entry("moonpool.commands.chat:chat_command", "Talk to the model."),
    "conductor": _Entry("moonpool.conductor", "Run a conductor: the API and the scheduler.", "serve"),
    "config": _Entry("moonpool.commands.config:config_command", "Check a configuration."),
    "decode-node": _Entry("moonpool.node --role decode", "Run a decode node.", "serve"),
    "doctor": _Entry("moonpool.doctor.diagnosis:doctor_command", "Diagnose this machine and a cluster."),
    "experts": _Entry(
        "moonpool.commands.experts:experts_command", "Plan the placement of MoE experts.", "serve"
    ),
    "fleet": _Entry("moonpool.commands.fleet:fleet", "List nodes, change their number, drain one."),
    "index": _Entry("moonpool.commands.index:index", "Verify the index of KV blocks; follow other engines."),
    "node": _Entry("moonpool.node", "Run a node that prefills, decodes, or both (--role).", "serve"),
    "plan": _Entry("moonpool.simulator.plan_command:plan", "Size a cluster for a workload or a trace."),
    "prefill-node": _Entry("moonpool.node --role prefill", "Run a prefill node.", "serve"),
    "ranks": _Entry(
        "moonpool.engine.ranks.worker",
        "Run a rank of a node that leads from another machine (under torchrun).",
        "serve",
    ),
    "report": _Entry("moonpool.commands.run_report:report_command", "Write a run into one HTML file."),
    "router": _Entry("moonpool.conductor.cells", "Run a router in front of several clusters.", "serve"),
    "status": _Entry("moonpool.commands.status:status_command", "Print the cluster's nodes and their load."),
    "store": _Entry("moonpool.objects.command:store", "Put, get and verify objects on store nodes."),
    "store-node": _Entry("moonpool.kvstore.store_node", "Run a store node."),
    "top": _Entry("moonpool.commands.top:top_command", "Watch the cluster in the terminal."),
    "trace": _Entry("moonpool.commands.trace:trace_command", "Export a request's timeline for Perfetto."),
    "up": _Entry("moonpool.commands.up:up_command", "Run a whole cluster on this machine.", "serve"),
}


class _LazyGroup(click.Group):
    """Imports the module of a command only when the command is called: torch alone takes a second."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = _COMMANDS.get(cmd_name)
        if entry is None:
            return None
        if entry.extra:
            require_extra(f"moonpool {cmd_name}", entry.extra)
        module, _, name = entry.target.partition(":")
        if not name:
            return _daemon(cmd_name, module, entry.summary)
        command = getattr(import_module(module), name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name].summary) for name in self.list_commands(ctx)])


def _daemon(name: str, target: str, summary: str) -> click.Command:
    @click.command(
        name, help=summary, context_settings={"ignore_unknown_options": True, "help_option_names": []}
    )
    @click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
    def daemon(arguments: tuple[str, ...]) -> None:
        # Replace this process: signals and the exit code are the daemon's own.
        os.execv(sys.executable, [sys.executable, "-m", *target.split(), *arguments])

    return daemon


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="moonpool")
def cli() -> None:
    """Moonpool: KV-cache-centric, disaggregated LLM serving."""


def main() -> None:
    """Run the command line; every expected error is one sentence on stderr."""
    hide_arguments()
    hide_in_tracebacks()
    with exit_on_error(" ".join(["moonpool", *sys.argv[1:2]])):
        cli(prog_name="moonpool")


if __name__ == "__main__":
    main()
