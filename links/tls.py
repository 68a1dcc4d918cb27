"""TLS contexts: identity is a certificate of the fleet's CA, never a host name.

Standard library only. Certificates that are not valid yet, or no longer, are ClockNotSet: a state to wait in.
"""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from pathlib import Path

from links.port import ClockNotSet
from protocol.errors import ConfigError, LinkError, LinkTimeout

_CLOCK_VERIFY_CODES = frozenset({9, 10})
"""OpenSSL's verify results X509_V_ERR_CERT_NOT_YET_VALID and X509_V_ERR_CERT_HAS_EXPIRED."""

_MAX_CHAIN = 8


def fingerprint(cert_pem: str | bytes) -> str:
    """sha256 of the first certificate's DER form, 64 hex digits. Raises ConfigError on anything but PEM."""
    text = cert_pem.decode("ascii", "replace") if isinstance(cert_pem, bytes) else cert_pem
    end = "-----END CERTIFICATE-----"
    try:
        first = text[text.index("-----BEGIN CERTIFICATE-----") : text.index(end) + len(end)]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first)).hexdigest()
    except ValueError as err:
        raise ConfigError("this is not a certificate in PEM form", next_step="give a file made by midstream") from err


def server_context(cert_path: Path, key_path: Path, ca_path: Path, require_client: bool) -> ssl.SSLContext:
    """Context of a server; `cert_path` holds its certificate and then the CA's, so that a joiner can compare it.

    Args:
        require_client: refuse clients without a certificate of the CA; otherwise it is verified if given.

    Raises:
        ConfigError: a file is missing or does not fit.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED if require_client else ssl.CERT_OPTIONAL
    context.set_alpn_protocols(["http/1.1"])
    _load(context, cert_path, key_path)
    try:
        context.load_verify_locations(cafile=str(ca_path))
    except (OSError, ssl.SSLError) as err:
        raise ConfigError(f"cannot use the CA certificate {ca_path}: {err}", next_step="run the set-up again") from err
    return context


def client_context(
    ca_pem: str, cert_path: Path | None = None, key_path: Path | None = None, check_hostname: bool = False
) -> ssl.SSLContext:
    """Context of a client that trusts `ca_pem` alone and shows its own certificate if it has one.

    Raises:
        ConfigError: a certificate or key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = check_hostname
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_verify_locations(cadata=ca_pem)
    except (ssl.SSLError, ValueError) as err:
        raise ConfigError("the fleet's CA certificate cannot be read", next_step="join the fleet again") from err
    if cert_path is not None and key_path is not None:
        _load(context, cert_path, key_path)
    return context


def _load(context: ssl.SSLContext, cert_path: Path, key_path: Path) -> None:
    try:
        context.load_cert_chain(str(cert_path), str(key_path))
    except (OSError, ssl.SSLError) as err:
        raise ConfigError(
            f"cannot use certificate {cert_path} with key {key_path}: {err}",
            next_step="check that both files exist and belong together",
        ) from err


async def fetch_peer_certificate(host: str, port: int, ca_fingerprint: str, timeout_s: float = 10.0) -> str:
    """The CA certificate (PEM) that the server shows in its chain, if its fingerprint is the one expected.

    Nothing secret is sent. The caller then connects again with client_context(ca_pem), which verifies the server's own
    certificate, before it sends anything.

    Raises:
        LinkTimeout, LinkError: no server, no TLS, or another CA.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        async with asyncio.timeout(timeout_s):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
    except TimeoutError as err:
        raise LinkTimeout(f"{host}:{port} did not answer in time", next_step="check the network") from err
    except (OSError, ssl.SSLError) as err:
        raise LinkError(f"cannot open TLS to {host}:{port}: {err}", next_step="check that it runs") from err
    try:
        chain = _chain(writer.get_extra_info("ssl_object"))
    finally:
        writer.transport.abort()
    for der in chain[:_MAX_CHAIN]:
        if hashlib.sha256(der).hexdigest() == ca_fingerprint.lower():
            return ssl.DER_cert_to_PEM_cert(der)
    raise LinkError(
        f"{host}:{port} is not the coordinator of this join token: it does not show the CA with that fingerprint",
        next_step="check the address, or make a new join token on the coordinator",
    )


def _chain(tls: ssl.SSLObject) -> list[bytes]:
    """DER certificates as the peer sent them."""
    if hasattr(tls, "get_unverified_chain"):  # public since Python 3.13
        return [bytes(der) for der in tls.get_unverified_chain()]
    inner = tls._sslobj  # type: ignore[attr-defined]
    encoded = [cert.public_bytes(2) for cert in inner.get_unverified_chain() or ()]  # 2: ENCODING_DER
    return [bytes(der) for der in encoded]


def tls_error(where: str, err: BaseException) -> LinkError:
    """A failed TLS handshake as a LinkError; ClockNotSet when a certificate's dates are what failed."""
    for cause in _causes(err):
        if getattr(cause, "verify_code", None) in _CLOCK_VERIFY_CODES:
            return ClockNotSet(
                f"the certificate of {where} is not valid at this machine's time",
                next_step="check the clock of both machines; it is tried again",
            )
    return LinkError(
        f"{where} did not pass the TLS identity check: {err}",
        next_step="check that both sides belong to the same fleet and that the right port is used",
    )


def _causes(err: BaseException) -> list[BaseException]:
    """The error, what aiohttp wrapped in it, and its causes."""
    found: list[BaseException] = []
    queue: list[BaseException | None] = [err]
    while queue:
        cause = queue.pop()
        if cause is None or cause in found:
            continue
        found.append(cause)
        queue += [getattr(cause, "certificate_error", None), getattr(cause, "os_error", None), cause.__cause__]
    return found
