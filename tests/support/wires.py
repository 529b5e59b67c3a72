"""Small wire values for tests."""

from __future__ import annotations

from collections.abc import Sequence

from core import wire


def incarnation(
    group: str = "decode", replica: int = 0, *, endpoint: str = "127.0.0.1:1", nonce: str = "n0"
) -> wire.Incarnation:
    return wire.Incarnation(
        rank=wire.RankId(group=group, replica=replica), endpoint=endpoint, nonce=nonce
    )


def rank_info(life: wire.Incarnation, role: wire.Role = wire.Role.DECODE) -> wire.RankInfo:
    return wire.RankInfo(
        incarnation=life,
        role=role,
        model="tiny",
        context_len=1024,
        total_pages=64,
        page_size=16,
        kv_bytes_per_token=4,
        dtype="float32",
        attention="torch",
        threads=1,
        pid=1,
    )


def rank_status(info: wire.RankInfo) -> wire.RankStatus:
    return wire.RankStatus(
        info=info,
        load=wire.LoadReport(),
        pages=wire.PageAccount(total=64, free=60, cached=3, owned=1),
        handoffs={"sending": 2},
        uptime_s=1.5,
    )


def token_request(
    rid: str, life: wire.Incarnation, token_ids: Sequence[int] = (1, 2, 3), max_new: int = 3
) -> wire.TokenRequest:
    return wire.TokenRequest(
        rid=rid,
        token_ids=wire.pack_ids(token_ids),
        prompt_len=len(token_ids),
        params=wire.SamplingParams(max_new_tokens=max_new),
        route=wire.Route(room=7, prefill=life, decode=life),
    )
