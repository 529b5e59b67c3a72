"""``antiphon scale`` and ``antiphon drain``: ask a running router to change its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx

from core.errors import ConfigError, PreflightError


def scale(url: str, words: Sequence[str]) -> str:
    """``words`` like ``prefill=2``; what the cluster is to have from now on.

    Raises ConfigError for words that make no sense, PreflightError when nobody answers.
    """
    wanted = dict(map(_count, words))
    answer = _post(url, "/admin/scale", {"replicas": wanted})
    groups = " ".join(f"{group}={count}" for group, count in answer["replicas"].items())
    return f"wanted now: {groups}; watch it with `antiphon status`"


def drain(url: str, rank: str) -> str:
    """Take one rank out of service for good, after its last request."""
    _post(url, "/admin/drain", {"rank": rank})
    return f"{rank} gets no new requests and stops after its last one"


def _count(word: str) -> tuple[str, int]:
    group, _, count = word.partition("=")
    if not count.isdigit():
        raise ConfigError(f"{word!r} must look like group=replicas, e.g. prefill=2")
    return group, int(count)


def _post(url: str, path: str, body: dict[str, Any]) -> Any:  # opaque: parsed JSON
    try:
        answer = httpx.post(f"{url.rstrip('/')}{path}", json=body, timeout=15, trust_env=False)
    except httpx.HTTPError as error:
        raise PreflightError(
            f"no router answers on {url} ({error}): name the one to ask with --url"
        ) from error
    if answer.status_code == httpx.codes.OK:
        return answer.json()
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"{url} answered {answer.status_code}"
    raise ConfigError(message)
