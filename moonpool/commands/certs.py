"""``moonpool certs``: the keys and certificates of a cluster."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from moonpool.runtime.security import certificates
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.roles import ROLES, Caller

_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_SOON_DAYS = 30


@click.group()
def certs() -> None:
    """Make the keys and certificates of a cluster.

    \b
    moonpool certs init DIR                   the authority
    moonpool certs issue DIR node prefill-0   a certificate; also of a conductor, a client, an operator
    moonpool certs show DIR                   all of them, with their expiry
    moonpool certs key                        a new cluster key
    """


@certs.command()
@click.argument("directory", type=_DIRECTORY)
@click.option("--days", default=3650, show_default=True, type=click.IntRange(1), help="Valid for so long.")
def init(directory: Path, days: int) -> None:
    """Make a certificate authority in DIRECTORY. Keep its ca.key off the hosts of the cluster."""
    click.echo(f"{certificates.init(directory, days=days)} is the authority: security.ca on every host")


@certs.command()
@click.argument("directory", type=_DIRECTORY)
@click.argument("role", type=click.Choice(ROLES))
@click.argument("name")
@click.option("--address", "addresses", multiple=True, help="A further DNS name or IP address; repeatable.")
@click.option("--days", default=365, show_default=True, type=click.IntRange(1), help="Valid for so long.")
def issue(directory: Path, role: str, name: str, addresses: tuple[str, ...], days: int) -> None:
    """Issue a certificate to NAME. A running process uses the new files from its next connection on."""
    file = certificates.issue(directory, Caller(role, name), days=days, addresses=addresses)
    click.echo(
        f"security.cert={file} security.key={file.with_suffix('.key')} security.ca={directory / 'ca.pem'}"
    )


@certs.command()
@click.argument("directory", type=_DIRECTORY)
def show(directory: Path) -> None:
    """List the certificates in DIRECTORY. The exit status is 1 if one has expired or will within 30 days."""
    table = Table("file", "role", "name", "other names", "expires", "days left", box=None)
    fine = True
    for file in sorted(directory.glob("*.pem")):
        found = certificates.describe(file)
        left = (found.expires - datetime.now(UTC)).days
        fine &= left >= _SOON_DAYS
        owner = found.owner or Caller("authority" if file.name == "ca.pem" else "none", "")
        style = "" if left >= _SOON_DAYS else "bold red" if left < 0 else "yellow"
        names = ", ".join(found.addresses)
        table.add_row(
            file.name, owner.role, owner.name, names, f"{found.expires:%Y-%m-%d}", str(left), style=style
        )
    if not table.row_count:
        raise certificates.CertificateError(f"{directory} has no certificates: `moonpool certs init` begins")
    Console().print(table)
    if not fine:
        raise SystemExit(1)


@certs.command()
@click.option("--role", type=click.Choice(ROLES), help="Derive the key of this role from a cluster key.")
@click.option("--from", "cluster_key", envvar="MOONPOOL_CLUSTER_KEY", default="", help="That cluster key.")
def key(role: str | None, cluster_key: str) -> None:
    """Print a new cluster key, or with --role the key of one role: enough to make calls as that role."""
    if role is None:
        click.echo(secrets.token_hex(32))
        return
    click.echo(RoleKeys(cluster_key).text_of(role))
