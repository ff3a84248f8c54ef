"""``moonpool fleet canary``: try a model beside another one under its name, promote it or roll it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.text import Text

from moonpool.client import Client
from moonpool.commands.options import console, json_option, plain_table, run_with_client, show, url_option

_NAME = click.option("--model", "name", required=True, metavar="NAME", help="The name that clients ask for.")


@click.group()
def canary() -> None:
    """Try a new revision of a model beside the old one, with a share of its requests.

    Both are models of the cluster (models.toml). They are compared on errors and on the SLOs of the old one.
    """


@canary.command("start")
@_NAME
@click.option("--candidate", required=True, metavar="OTHER", help="The model that is tried.")
@click.option("--share", type=float, help="Percent of the conversations. [default: 10; 100 with --tenant]")
@click.option("--tenant", "tenants", multiple=True, help="Take these tenants' requests alone; repeatable.")
@click.option("--auto", is_flag=True, help="Promote or roll back as soon as the counts say so.")
@click.option("--least", type=click.IntRange(min=1), help="Promote only after so many of its requests.")
@url_option
def start_command(
    name: str,
    candidate: str,
    share: float | None,
    tenants: tuple[str, ...],
    auto: bool,
    least: int | None,
    url: str,
) -> None:
    """Send a share of the requests for NAME to OTHER. All turns of a conversation go to one side."""
    chosen = share if share is not None else 100.0 if tenants else 10.0

    async def started(client: Client) -> dict[str, Any]:
        return await client.start_canary(name, candidate, chosen, tenants=tenants, least=least, auto=auto)

    console.print(canary_view([run_with_client(url, started)]))


@canary.command("share")
@_NAME
@click.option("--share", type=float, required=True, help="Percent of the conversations.")
@url_option
def share_command(name: str, share: float, url: str) -> None:
    """Change the candidate's share while it is tried. The counts begin anew; those before it are kept."""
    console.print(canary_view([run_with_client(url, lambda client: client.share_canary(name, share))]))


@canary.command("status")
@url_option
@json_option
def status_command(url: str, as_json: bool) -> None:
    """Show the latest canary of each model: its counts, and what they say."""
    found = run_with_client(url, Client.canaries)
    show(found, canary_view(found) if found else "no canary was started", as_json)


@canary.command("promote")
@_NAME
@url_option
def promote_command(name: str, url: str) -> None:
    """Have the candidate answer for NAME from now on."""
    console.print(canary_view([run_with_client(url, lambda client: client.promote_canary(name))]))


@canary.command("rollback")
@_NAME
@url_option
def rollback_command(name: str, url: str) -> None:
    """Have the model before it answer for NAME again, also after a promotion."""
    console.print(canary_view([run_with_client(url, lambda client: client.roll_back_canary(name))]))


def canary_view(found: Sequence[dict[str, Any]]) -> RenderableType:
    """For each canary a table with a row for each side, and the reasons."""
    parts: list[RenderableType] = []
    for one in found:
        of_them = f" of {', '.join(one['tenants'])}" if one["tenants"] else ""
        parts.append(
            Text(
                f"{one['name']}: {one['candidate']} with {one['share']:g} %{of_them} beside {one['stable']}: "
                f"{one['state']}{', automatic' if one['auto'] else ''}",
                style="bold",
            )
        )
        table = plain_table(("model",), ("requests", "errors", "TTFT kept", "mean", "TBT kept", "mean"))
        for side in ("stable", "candidate"):
            counts = one["sides"][side]
            served, decoded = counts["requests"] - counts["errors"], counts["decoded"]
            table.add_row(
                one[side],
                *(str(counts["requests"]), str(counts["errors"])),
                *_kept(counts["ttft_within"], counts["ttft_s"], served),
                *_kept(counts["tbt_within"], counts["tbt_s"], decoded),
            )
        parts.append(table)
        for before in one.get("former", ()):
            counts = ", ".join(
                f"{one[side]} {tally['errors']} errors of {tally['requests']}"
                for side, tally in before["sides"].items()
            )
            parts.append(Text(f"with {before['share']:g} % before: {counts}"))
        parts += [Text(reason) for reason in one.get("reasons", ())]
        said = f"the counts say: {one['verdict']}" if one["state"] == "running" else one["reason"]
        parts.append(Text(said, style="yellow"))
    return Group(*parts)


def _kept(within: int, total_s: float, count: int) -> tuple[str, str]:
    return (f"{within / count:.1%}", f"{1e3 * total_s / count:.1f} ms") if count else ("–", "–")
