"""``moonpool certs``: the keys and certificates of a cluster."""

from __future__ import annotations

import secrets
from datetime import UTC, datetime
from pathlib import Path

import click
from rich.table import Table

from moonpool.commands.options import console
from moonpool.kvstore.events.curve import CurveKeys
from moonpool.runtime.observing.metrics_server import metrics_key
from moonpool.runtime.redaction import hide
from moonpool.runtime.security import certificates, revocation
from moonpool.runtime.security.call_tokens import RoleKeys
from moonpool.runtime.security.roles import REVOKED_NAME, ROLES, Caller

_DIRECTORY = click.Path(file_okay=False, path_type=Path)


@click.group()
def certs() -> None:
    """Make the keys and certificates of a cluster.

    \b
    moonpool certs init DIR                   the authority
    moonpool certs issue DIR node prefill-0   a certificate; also of a conductor, a client, an operator
    moonpool certs show DIR                   all of them, with their expiry
    moonpool certs revoke DIR node prefill-0  refuse that certificate from now on
    moonpool certs key                        a new cluster key
    moonpool certs events                     the CURVE keys of KV events, for other tools
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
@click.argument("role", type=click.Choice(ROLES))
@click.argument("name")
@click.option(
    "--reason", default="key-compromise", show_default=True, type=click.Choice(list(revocation.REASONS))
)
def revoke(directory: Path, role: str, name: str, reason: str) -> None:
    """Refuse the present certificate of NAME. Running processes do once they have the new crl.pem."""
    click.echo(
        f"copy {revocation.revoke(directory, Caller(role, name), reason)} to every host, beside security.ca"
    )


@certs.command()
@click.argument("directory", type=_DIRECTORY)
def show(directory: Path) -> None:
    """List the certificates in DIRECTORY. The exit status is 1 if one has expired or will soon.

    Soon: within 30 days, or with less than a quarter of its life left.
    """
    table = Table("file", "role", "name", "other names", "expires", "days left", box=None)
    revoked = revocation.revoked_beside(directory / "ca.pem")
    fine = True
    for file in sorted(set(directory.glob("*.pem")) - {directory / REVOKED_NAME}):
        found = certificates.describe(file)
        now = datetime.now(UTC)
        left, soon = (found.expires - now).days, found.expires_soon(now)
        fine &= not soon
        owner = found.owner or Caller("authority" if file.name == "ca.pem" else "none", "")
        state = f"revoked: {revoked[found.serial]}" if found.serial in revoked else str(left)
        style = "" if not soon else "bold red" if left < 0 else "yellow"
        names = ", ".join(found.addresses)
        table.add_row(
            file.name, owner.role, owner.name, names, f"{found.expires:%Y-%m-%d}", state, style=style
        )
    if not table.row_count:
        raise certificates.CertificateError(f"{directory} has no certificates: `moonpool certs init` begins")
    console.print(table)
    if not fine:
        raise SystemExit(1)


@certs.command()
@click.option("--role", type=click.Choice(ROLES), help="Derive the key of this role from a cluster key.")
@click.option("--from", "cluster_key", envvar="MOONPOOL_CLUSTER_KEY", default="", help="That cluster key.")
def key(role: str | None, cluster_key: str) -> None:
    """Print a new cluster key, or with --role the key of one role: enough to make calls as that role."""
    hide(cluster_key)
    if role is None:
        click.echo(secrets.token_hex(32))
        return
    click.echo(RoleKeys(cluster_key).text_of(role))


@certs.command()
@click.option("--from", "cluster_key", envvar="MOONPOOL_CLUSTER_KEY", required=True, help="The cluster key.")
def events(cluster_key: str) -> None:
    """Print the CURVE keys with which a subscriber that is not Moonpool's reads KV events of its nodes."""
    keys = CurveKeys.derive(RoleKeys(cluster_key).derived)
    click.echo(f"server public key {keys.server_public.decode()}")
    click.echo(f"client public key {keys.client_public.decode()}")
    click.echo(f"client secret key {keys.client_secret.decode()}")


@certs.command()
@click.option("--from", "cluster_key", envvar="MOONPOOL_CLUSTER_KEY", required=True, help="The cluster key.")
def metrics(cluster_key: str) -> None:
    """Print the key with which Prometheus reads the metrics of nodes, as a bearer token."""
    click.echo(metrics_key(RoleKeys(cluster_key).derived))
