"""HTTPS: the certificate of a server, read again when it changes, and the authorities that clients trust."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.runtime.errors import ConfigError
from moonpool.runtime.security.tls import Reread

if TYPE_CHECKING:
    from moonpool.runtime.security.certificates import Certificate

CA_VARIABLE = "MOONPOOL_CA"
"""Environment variable: a file of authorities (PEM) that clients trust instead of the system's."""


class HttpsServer:
    """``context`` is for all connections of a server; new ones get the certificate that is there then.

    Clients prove who they are within HTTP, not by certificates. Raises ``ConfigError``: a file is missing or
    not valid.
    """

    def __init__(self, cert: str, key: str) -> None:
        self._files = Path(cert), Path(key)
        self._loaded = Reread(self._files, self._load)
        self.context = self._loaded.now()[0]
        self.context.sni_callback = self._choose

    @property
    def certificate(self) -> Certificate:
        """The one in use."""
        return self._loaded.now()[1]

    def _choose(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Called in each handshake, with or without a ``name``."""
        connection.context = self._loaded.now()[0]

    def _load(self) -> tuple[ssl.SSLContext, Certificate]:
        from moonpool.runtime.security.certificates import CertificateError, describe

        cert, key = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(cert, key)
            return context, describe(cert)
        except (OSError, CertificateError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(f"cannot use {cert} and {key} for HTTPS: {error}", "conductor.cert") from error


def client_context(ca: str = "") -> ssl.SSLContext:
    """Trusts the authorities in ``CA_VARIABLE``, else ``ca``, else the system's. Raises ``ConfigError``."""
    file = os.environ.get(CA_VARIABLE) or ca or None
    try:
        return ssl.create_default_context(cafile=file)
    except OSError as error:
        raise ConfigError(f"cannot read authorities from {file} ({CA_VARIABLE}, --ca): {error}") from error
