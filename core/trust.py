"""Which certificates a client of ours believes."""

from __future__ import annotations

import ssl

from core.errors import ConfigError


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
