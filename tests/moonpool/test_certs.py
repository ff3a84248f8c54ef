"""``moonpool certs``: an authority, certificates, and the list of those that were revoked."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from moonpool.commands.certs import certs
from moonpool.runtime.config.security_options import SecurityOptions
from moonpool.runtime.security.tls import peer_tls


def run(*arguments: str) -> Result:
    return CliRunner().invoke(certs, arguments)


def test_a_revoked_certificate_is_shown_and_a_new_one_of_the_same_owner_is_good(tmp_path: Path) -> None:
    where = str(tmp_path)
    assert run("init", where).exit_code == 0
    written = run("issue", where, "node", "a").output.split()
    options = SecurityOptions(
        **{part.removeprefix("security.").partition("=")[0]: part.partition("=")[2] for part in written}
    )
    assert run("show", where).exit_code == 0
    assert not peer_tls(options).now().revoked
    done = run("revoke", where, "node", "a", "--reason", "superseded")
    assert done.exit_code == 0 and "crl.pem" in done.output
    assert run("revoke", where, "node", "a").exit_code == 0  # again, with another reason
    (reason,) = peer_tls(options).now().revoked.values()
    assert reason == "key-compromise"
    assert "revoked: key-compromise" in run("show", where).output
    run("issue", where, "node", "a")
    assert "revoked" not in run("show", where).output
    assert len(peer_tls(options).now().revoked) == 1


def test_what_was_never_issued_cannot_be_revoked(tmp_path: Path) -> None:
    run("init", str(tmp_path))
    assert "node-b.pem" in str(run("revoke", str(tmp_path), "node", "b").exception)
    assert not (tmp_path / "crl.pem").exists()
