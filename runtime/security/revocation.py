"""The list of a cluster's revoked certificates: ``crl.pem``, signed by the authority, beside ``ca.pem``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from moonpool.runtime.security.certificates import (
    CertificateError,
    authority,
    describe,
    file_of,
    replace_file,
)
from moonpool.runtime.security.roles import REVOKED_NAME, Caller

REASONS = {
    "key-compromise": x509.ReasonFlags.key_compromise,
    "superseded": x509.ReasonFlags.superseded,
    "cessation-of-operation": x509.ReasonFlags.cessation_of_operation,
}


def revoke(directory: Path, owner: Caller, reason: str) -> Path:
    """Add the certificate of ``owner`` in ``directory`` to the list of revoked ones, and return that list.

    reason: one of ``REASONS``. Revoking a certificate twice changes its reason.

    Raises:
        CertificateError: there is no such certificate or no authority, or the list cannot be read or written.
    """
    ca_key, ca = authority(directory)
    revoked = describe(file_of(directory, owner))
    file = directory / REVOKED_NAME
    now = datetime.now(UTC)
    # It is valid as long as the authority: a list that is not renewed must not stop a cluster.
    builder = (
        x509.CertificateRevocationListBuilder()
        .issuer_name(ca.subject)
        .last_update(now)
        .next_update(ca.not_valid_after_utc)
    )
    entries: list[x509.RevokedCertificate] = []
    if file.exists():
        entries = [each for each in _read_list(file.read_bytes()) if each.serial_number != revoked.serial]
    entries.append(
        x509.RevokedCertificateBuilder()
        .serial_number(revoked.serial)
        .revocation_date(now)
        .add_extension(x509.CRLReason(REASONS[reason]), critical=False)
        .build()
    )
    for entry in entries:
        builder = builder.add_revoked_certificate(entry)
    replace_file(file, builder.sign(ca_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    return file


def revoked_beside(ca: Path) -> dict[int, str]:
    """The reasons by serial number in the list beside ``ca``; empty without a list.

    Raises ``CertificateError``: it cannot be read, or no authority in ``ca`` has signed it.
    """
    file = ca.with_name(REVOKED_NAME)
    if not file.exists():
        return {}
    try:
        read = _read_list(file.read_bytes())
        keys = [each.public_key() for each in x509.load_pem_x509_certificates(ca.read_bytes())]
    except (OSError, ValueError) as error:
        raise CertificateError(f"{file} or {ca} cannot be read: {error}") from error
    if not any(read.is_signature_valid(key) for key in keys):  # type: ignore[arg-type]  # of an authority
        raise CertificateError(f"{REVOKED_NAME} is not signed by the authority beside it")
    return {each.serial_number: _reason(each) for each in read}


def _read_list(crl: bytes) -> x509.CertificateRevocationList:
    try:
        return x509.load_pem_x509_crl(crl)
    except ValueError as error:
        raise CertificateError(f"{REVOKED_NAME} is no list of certificates: {error}") from error


def _reason(entry: x509.RevokedCertificate) -> str:
    try:
        flag = entry.extensions.get_extension_for_class(x509.CRLReason).value.reason
    except x509.ExtensionNotFound:
        return "no reason was given"
    return next((words for words, each in REASONS.items() if each is flag), flag.value)
