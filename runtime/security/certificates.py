"""The certificate authority of a cluster, and the certificates that it issues.

    DIR/ca.pem  DIR/ca.key              the authority; only ``ca.pem`` goes to the hosts of the cluster
    DIR/ROLE-NAME.pem  DIR/ROLE-NAME.key
    DIR/crl.pem         the certificates that were revoked, once there is one; goes where ``ca.pem`` goes

A certificate names its role and its owner as the URI ``spiffe://moonpool/ROLE/NAME``. Certificates of
conductors and nodes are also valid for the DNS name ``SERVER_NAME``, which every process expects of the
servers it calls, because nodes change their addresses.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import quote

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from moonpool.runtime.errors import MoonpoolError
from moonpool.runtime.failures import FailureClass
from moonpool.runtime.security.roles import (
    CONDUCTOR,
    NODE,
    SERVER_NAME,
    Caller,
    Unauthenticated,
    owner_of,
)

_CA_NAME = "Moonpool cluster authority"
# Certificates are valid at once on hosts with a clock that is behind.
_BACKDATED = timedelta(hours=1)
# A month is time to renew by hand. Short-lived certificates are usually renewed when a third of their life is
# left: with less than a quarter, that has failed.
_SOON = timedelta(days=30)
_SOON_FRACTION = 0.25


class CertificateError(MoonpoolError):
    """A certificate cannot be made or read. No file has changed."""

    failure = FailureClass.WORKER


@dataclass(frozen=True, slots=True)
class Certificate:
    """owner: None for the authority, and for certificates that are not a cluster's."""

    file: Path
    owner: Caller | None
    addresses: tuple[str, ...]
    begins: datetime
    expires: datetime
    serial: int

    def expires_soon(self, now: datetime) -> bool:
        """Whether it has expired, or should have been renewed by now."""
        return self.expires - now < min(_SOON, _SOON_FRACTION * (self.expires - self.begins))


def init(directory: Path, *, days: int) -> Path:
    """Make the authority. Returns its certificate. Raises ``CertificateError``: there is one already."""
    directory.mkdir(parents=True, exist_ok=True)
    certificate, key_file = directory / "ca.pem", directory / "ca.key"
    if certificate.exists() or key_file.exists():
        raise CertificateError(f"{directory} has an authority already; its certificates depend on it")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, _CA_NAME)])
    built = (
        _builder(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, certificate, key, built)
    return certificate


def issue(directory: Path, owner: Caller, *, days: int, addresses: Sequence[str] = ()) -> Path:
    """Issue a certificate, in place of an earlier one of the same owner. Returns it; its key is beside it.

    addresses: further DNS names and IP addresses, for clients that check them, such as browsers.

    Raises:
        CertificateError: there is no authority, or ``directory`` cannot be written.
    """
    ca_key, ca = authority(directory)
    key = ec.generate_private_key(ec.SECP256R1())
    names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(owner.uri)]
    is_server = owner.role in (CONDUCTOR, NODE)
    if is_server:
        names.append(x509.DNSName(SERVER_NAME))
    names += [_general_name(address) for address in addresses]
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if is_server else [])]
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{owner.role} {owner.name}"[:64])])
    built = (
        _builder(subject, ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    file = file_of(directory, owner)
    _write(file.with_suffix(".key"), file, key, built)
    return file


def describe(file: Path) -> Certificate:
    """Read a certificate (PEM). Raises ``CertificateError``."""
    try:
        read = x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as error:
        raise CertificateError(f"{file} is not a certificate that can be read: {error}") from error
    names = _alternative_names(read)
    uris = names.get_values_for_type(x509.UniformResourceIdentifier) if names else []
    addresses = []
    if names:
        addresses += names.get_values_for_type(x509.DNSName)
        addresses += map(str, names.get_values_for_type(x509.IPAddress))
    try:
        owner = owner_of(uris)
    except Unauthenticated:
        owner = None
    return Certificate(
        file,
        owner,
        tuple(addresses),
        read.not_valid_before_utc,
        read.not_valid_after_utc,
        read.serial_number,
    )


def file_of(directory: Path, owner: Caller) -> Path:
    """The certificate of ``owner``; its key is beside it."""
    return directory / f"{owner.role}-{quote(owner.name, safe='')}.pem"


def authority(directory: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Its key and its certificate. Raises ``CertificateError``: there is none that can be read."""
    try:
        key: PrivateKeyTypes = serialization.load_pem_private_key((directory / "ca.key").read_bytes(), None)
        certificate = x509.load_pem_x509_certificate((directory / "ca.pem").read_bytes())
    except (OSError, ValueError, TypeError) as error:
        raise CertificateError(
            f"{directory} has no authority that can be read ({error}): `moonpool certs init` makes one"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"{directory}/ca.key is not a key on an elliptic curve")
    return key, certificate


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _alternative_names(certificate: x509.Certificate) -> x509.SubjectAlternativeName | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None


def _write(
    key_file: Path, certificate_file: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate
) -> None:
    """The key first, each by a rename: a reader that finds a new certificate finds its key."""
    pem = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    replace_file(key_file, pem)
    replace_file(certificate_file, certificate.public_bytes(serialization.Encoding.PEM))


def replace_file(file: Path, data: bytes) -> None:
    """Write ``file`` for its owner alone, by a rename. Raises ``CertificateError``."""
    partial = file.with_name(f".{file.name}-{os.getpid()}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(data)
        os.replace(partial, file)
    except OSError as error:
        raise CertificateError(f"{file} cannot be written: {error.strerror}") from error
    finally:
        # After a failure: it may have a private key.
        with suppress(OSError):
            partial.unlink()
