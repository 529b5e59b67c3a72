"""How a client of ours reaches a server: its address, whom it believes, and what to try else."""

from __future__ import annotations

import ssl

import httpx

from core.errors import ConfigError

ASK_FOR_KEY = "; here: --key KEY, or the variable ANTIPHON_KEY"  # what a 401 ends with


def address(url: str, option: str = "--url") -> httpx.URL:
    """What ``option`` names. Raises ConfigError where it is no address of HTTP."""
    try:
        found = httpx.URL(url.rstrip("/"))
    except httpx.InvalidURL as error:
        raise ConfigError(f"{option} {url}: {error}") from error
    if found.scheme not in ("http", "https") or not found.host:
        raise ConfigError(f"{option} {url}: an address begins with http:// or https:// and a host")
    return found


def remedy(url: str, error: Exception, otherwise: str) -> str:
    """What to do about an error of httpx; ``otherwise`` where it is not about TLS."""
    words, host = str(error), url.partition("://")[2]
    if "CERTIFICATE_VERIFY_FAILED" in words and "mismatch" not in words:
        return "name the certificate to believe, or that of who signed it, with --ca FILE"
    if "WRONG_VERSION_NUMBER" in words:
        return f"it may speak no TLS: try http://{host}"
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError) and url.startswith("http:"):
        return f"it may speak TLS alone: try https://{host}"
    return otherwise


def trusting(ca: str) -> ssl.SSLContext | bool:
    """For httpx's ``verify``: the PEM file ``ca`` alone, or what httpx believes where it is empty.

    Raises ConfigError.
    """
    if not ca:
        return True
    try:
        return ssl.create_default_context(cafile=ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--ca: {ca} has no certificate in PEM form") from error
    except OSError as error:
        raise ConfigError(f"--ca: cannot read {ca}: {error.strerror}") from error
