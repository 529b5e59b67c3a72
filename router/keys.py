"""Who may ask for what: API keys and the admin key, shown as ``Authorization: Bearer KEY``."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from ipaddress import ip_address

from core.config import RouterConfig
from core.errors import ConfigError, Forbidden, Unauthorized
from core.secret import read

_SCHEME = "bearer "
_CALLER_HEX = 16  # digits of a key's digest: names its holder, does not tell the key


class Keys:
    """Without keys everybody may ask, and operate where only this machine can connect."""

    def __init__(
        self, api: Sequence[str] = (), admin: Sequence[str] = (), *, local: bool = True
    ) -> None:
        """``local``: only this machine can connect."""
        self._api = tuple(map(_digest, api))
        self._admin = tuple(map(_digest, admin))
        self._local = local

    def caller(self, authorization: str | None) -> str:
        """Whose request it is, in a word that is not secret; empty where no key is needed.

        Raises Unauthorized.
        """
        if not self._api:
            return ""
        return self._known(authorization, self._api + self._admin)

    def holder(self, authorization: str | None) -> str:
        """The same word, for a request that ``caller`` has let pass."""
        shown = _shown(authorization) if self._api else None
        return "" if shown is None else _word(shown)

    def operator(self, authorization: str | None) -> None:
        """Pass whoever may change the cluster; raises Unauthorized and Forbidden."""
        if not self._admin:
            if not self._local:
                raise Forbidden(
                    "operations are closed: the router listens beyond this machine and has no "
                    "admin key; set router.admin_key=env:NAME"
                )
            self.caller(authorization)
        elif not _among(_shown(authorization), self._admin):
            self._known(authorization, self._api)
            raise Forbidden("this takes the admin key, and the key is one for requests only")

    def _known(self, authorization: str | None, known: tuple[bytes, ...]) -> str:
        shown = _shown(authorization)
        if shown is None:
            raise Unauthorized("no key was given: send the header Authorization: Bearer KEY")
        if not _among(shown, known):
            raise Unauthorized("the key is not known here")
        return _word(shown)


def read_keys(config: RouterConfig) -> Keys:
    """Resolve the references of the configuration; raises ConfigError."""
    api = [
        key
        for n, reference in enumerate(config.api_keys)
        for key in read(reference, f"router.api_keys[{n}]")
    ]
    admin = read(config.admin_key, "router.admin_key") if config.admin_key else ()
    if set(api) & set(admin):
        raise ConfigError("router.admin_key is one of router.api_keys: it must be another")
    return Keys(api, admin, local=is_loopback(config.host))


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to what is bound there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _shown(authorization: str | None) -> bytes | None:
    """The digest of the key in a header; None where there is none."""
    if authorization is None or not authorization.lower().startswith(_SCHEME):
        return None
    return _digest(authorization[len(_SCHEME) :].strip())


def _word(shown: bytes) -> str:
    return shown.hex()[:_CALLER_HEX]


def _digest(key: str) -> bytes:
    return sha256(key.encode("utf-8", "backslashreplace")).digest()


def _among(shown: bytes | None, known: tuple[bytes, ...]) -> bool:
    """Compares with all of them in constant time: how long it takes tells nothing."""
    return shown is not None and sum(hmac.compare_digest(shown, one) for one in known) > 0
