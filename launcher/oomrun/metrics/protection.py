"""Who may scrape: TLS, a bearer token, or a user with a password.

Covers: reading certificates and secrets, checking a request. Does not cover: serving
(``exporter.py``).

A secret is read when oomrun starts and is nowhere but in this process: neither the
journal nor a message nor the worker's environment has it.
"""

from __future__ import annotations

import base64
import hmac
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oomrun.core.errors import PlatformError
from oomrun.core.spec import BasicAuth, MetricsSpec, Secret, Tls

__all__ = ["OPEN", "Protection", "ProtectionError", "protection"]


class ProtectionError(PlatformError):
    """A certificate or a secret cannot be had, so nothing is served."""


@dataclass(frozen=True, slots=True)
class Protection:
    """What a request must bring.

    Attributes:
        tls: the server's side of TLS, None for plain HTTP.
        scheme: of HTTP's authentication, Bearer or Basic; "" where anyone may scrape.
    """

    tls: ssl.SSLContext | None = None
    scheme: str = ""
    _credentials: bytes = field(default=b"", repr=False)

    def admits(self, authorization: str) -> bool:
        """Whether the value of a request's ``Authorization`` is the right one."""
        if not self.scheme:
            return True
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != self.scheme.lower():
            return False
        # Takes as long for a guess that is nearly right as for any other.
        return hmac.compare_digest(given.strip().encode(), self._credentials)


#: Anyone who can reach the address may scrape it.
OPEN = Protection()


def protection(
    spec: MetricsSpec, *, folder: Path, environment: Mapping[str, str]
) -> Protection:
    """Reads what the job file names.

    Args:
        spec: the job file's settings.
        folder: what paths are relative to.
        environment: where variables are looked up.

    Raises:
        ProtectionError: something cannot be read or is empty.
    """
    tls = None if spec.tls is None else _context(spec.tls, folder)
    if spec.token is not None:
        token = _secret(spec.token, "metrics.token", folder, environment)
        return Protection(tls, "Bearer", token)
    if spec.basic_auth is not None:
        return Protection(
            tls, "Basic", _user_and_password(spec.basic_auth, folder, environment)
        )
    return Protection(tls)


def _user_and_password(
    auth: BasicAuth, folder: Path, environment: Mapping[str, str]
) -> bytes:
    name = "metrics.basic_auth.password"
    password = _secret(auth.password, name, folder, environment)
    return base64.b64encode(auth.user.encode() + b":" + password)


def _secret(
    secret: Secret, name: str, folder: Path, environment: Mapping[str, str]
) -> bytes:
    if secret.variable is not None:
        where = f"${secret.variable}"
        if secret.variable not in environment:
            raise ProtectionError(f"{name}: {where} is not set")
        content = environment[secret.variable].encode(errors="surrogateescape")
    else:
        path = folder / str(secret.file)
        where = str(path)
        try:
            content = path.read_bytes()
        except OSError as error:
            raise ProtectionError(f"{name}: {where}: {_why(error)}") from None
    if not content.strip():
        raise ProtectionError(f"{name}: {where} is empty")
    return content.strip()


def _context(tls: Tls, folder: Path) -> ssl.SSLContext:
    certificate, key = folder / tls.certificate, folder / tls.key
    for path in (certificate, key):
        # OpenSSL does not say which of the two is missing.
        if not path.is_file():
            raise ProtectionError(f"metrics.tls: {path}: there is no such file")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Else OpenSSL would ask on the terminal, and wait.
        context.load_cert_chain(certificate, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ProtectionError(
            f"metrics.tls: {certificate} and {key} cannot be used: {_why(error)}"
        ) from None
    if tls.client_ca is not None:
        root = folder / tls.client_ca
        try:
            context.load_verify_locations(root)
        except (ssl.SSLError, OSError) as error:
            raise ProtectionError(
                f"metrics.tls.client_ca: {root}: {_why(error)}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ValueError("the key has a password; write one without: openssl pkey -in KEY")


def _why(error: Exception) -> str:
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None)
    return str(reason or error).lower()
