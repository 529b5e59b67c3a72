"""TLS of both fronts: the files of the configuration, read and checked before anything starts."""

from __future__ import annotations

import ssl
from pathlib import Path

import msgspec

from core.config import RouterConfig
from core.errors import ConfigError


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """PEM texts that fit together, and where they came from."""

    cert_file: str
    key_file: str
    client_ca_file: str | None  # None: clients need no certificate
    cert: bytes
    key: bytes
    client_ca: bytes | None

    def context(self) -> ssl.SSLContext:
        """For a server over asyncio."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)  # TLS 1.2 and newer
        context.load_cert_chain(self.cert_file, self.key_file, password=_no_passphrase)
        if self.client_ca_file is not None:
            context.load_verify_locations(self.client_ca_file)
            context.verify_mode = ssl.CERT_REQUIRED
        return context


def read_tls(config: RouterConfig) -> Tls | None:
    """None where no certificate is named. Raises ConfigError naming the key at fault."""
    if not config.tls_cert:
        return None
    tls = Tls(
        cert_file=config.tls_cert,
        key_file=config.tls_key,
        client_ca_file=config.tls_client_ca or None,
        cert=_read("tls_cert", config.tls_cert),
        key=_read("tls_key", config.tls_key),
        client_ca=_read("tls_client_ca", config.tls_client_ca) if config.tls_client_ca else None,
    )
    _check_certificates("tls_cert", tls.cert_file)
    if tls.client_ca_file is not None:
        _check_certificates("tls_client_ca", tls.client_ca_file)
    try:
        tls.context()
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{tls.key_file} is not the key of {tls.cert_file}"
        else:
            problem = f"{tls.key_file} is not a private key in PEM form without a passphrase"
        raise ConfigError(f"router.tls_key: {problem}") from error
    return tls


def root_of(config: RouterConfig) -> str:
    """The file by which clients can believe this router where no public authority signed for it.

    The certificate's own where it signed itself; empty where another did, whose is not here.
    """
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        trust.load_verify_locations(config.tls_cert)
    except OSError:  # ssl.SSLError is one
        return ""
    roots = [root for root in trust.get_ca_certs() if root["issuer"] == root["subject"]]
    return config.tls_cert if roots else ""


def _read(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"router.{key}: cannot read {path}: {error.strerror}") from error


def _check_certificates(key: str, path: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise ConfigError(f"router.{key}: {path} has no certificate in PEM form") from error


def _no_passphrase() -> str:
    """Otherwise OpenSSL would ask the terminal."""
    return ""
