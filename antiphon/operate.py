"""``antiphon scale`` and ``antiphon drain``: ask a running router to change its cluster."""

from __future__ import annotations

from collections.abc import Sequence

from antiphon.remote import Remote
from core.errors import ConfigError


def scale(router: Remote, words: Sequence[str]) -> str:
    """``words`` like ``prefill=2``; what the cluster is to have from now on.

    Raises ConfigError for words that make no sense, and as ``Remote.ask`` does.
    """
    wanted = dict(map(_count, words))
    answer = router.ask("/admin/scale", body={"replicas": wanted})
    groups = " ".join(f"{group}={count}" for group, count in answer["replicas"].items())
    return f"wanted now: {groups}; watch it with `antiphon status`"


def drain(router: Remote, rank: str) -> str:
    """Take one rank out of service for good, after its last request."""
    router.ask("/admin/drain", body={"rank": rank})
    return f"{rank} gets no new requests and stops after its last one"


def _count(word: str) -> tuple[str, int]:
    group, _, count = word.partition("=")
    if not count.isdigit():
        raise ConfigError(f"{word!r} must look like group=replicas, e.g. prefill=2")
    return group, int(count)
