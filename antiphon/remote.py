"""The router that a command asks: where it is, which key to show, which certificate to believe."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, NamedTuple

from core import env
from core.errors import ConfigError, PreflightError

DEFAULT_URL = "http://127.0.0.1:8000"
TIMEOUT_S = 15.0

_START = "start one with `antiphon serve`, or name another with --url"

Json = dict[str, Any]  # opaque: parsed JSON


class Remote(NamedTuple):
    """One router."""

    url: str
    key: str = ""
    ca: str = ""  # PEM file; empty: the certificates that everybody believes

    def ask(
        self, path: str, *, body: Json | None = None, params: Mapping[str, str] | None = None
    ) -> Json:
        """GET, or POST where there is a body; the JSON of the answer.

        Raises PreflightError where no router answers, ConfigError where it refuses.
        """
        import httpx  # not for --help

        from core.trust import ASK_FOR_KEY, address, remedy, trusting

        verify, base = trusting(self.ca), address(self.url)
        try:
            answer = httpx.request(
                "GET" if body is None else "POST",
                f"{base}{path}",
                json=body,
                params=params,
                headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
                timeout=TIMEOUT_S,
                trust_env=False,
                verify=verify,
            )
        except httpx.HTTPError as error:
            raise self._nobody(str(error), remedy(self.url, error, _START)) from error
        try:
            told: Json = answer.json()
            if answer.status_code == httpx.codes.OK:
                return told
            message = str(told["error"]["message"])
        except (ValueError, KeyError, TypeError) as error:
            raise self._nobody(f"something else answers {answer.status_code}", _START) from error
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            message += ASK_FOR_KEY
        raise ConfigError(message)

    def _nobody(self, reason: str, remedy: str) -> PreflightError:
        return PreflightError(f"no router answers on {self.url} ({reason}): {remedy}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``--url``, ``--key`` and ``--ca``."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the router")
    add_access(parser)


def add_access(parser: Any) -> None:  # opaque: a parser, or argparse's group
    """``--key`` and ``--ca``."""
    parser.add_argument(
        "--key", "--api-key", default="", help="where keys are asked for (default: ANTIPHON_KEY)"
    )
    parser.add_argument(
        "--ca", default="", metavar="FILE", help="the certificate to believe over https, as PEM"
    )


def key_of(args: argparse.Namespace) -> str:
    """The key to show; empty where there is none."""
    key: str = args.key or env.key()
    return key


def named(args: argparse.Namespace) -> Remote:
    """The router that the arguments name."""
    return Remote(args.url, key_of(args), args.ca)
