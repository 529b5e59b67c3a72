"""Short ways to make requests in tests."""

from __future__ import annotations

from core.wire import Incarnation, RankId, Route, SamplingParams, TokenRequest, pack_ids


def incarnation(group: str = "unified", nonce: str = "n0", replica: int = 0) -> Incarnation:
    return Incarnation(
        rank=RankId(group=group, replica=replica), endpoint="127.0.0.1:1", nonce=nonce
    )


def request(
    rid: str,
    ids: list[int],
    max_new: int,
    *,
    prompt_len: int | None = None,
    route: Route | None = None,
    salt: str = "",
    priority: int = 0,
    **params: object,
) -> TokenRequest:
    one = incarnation()
    return TokenRequest(
        rid=rid,
        token_ids=pack_ids(ids),
        prompt_len=len(ids) if prompt_len is None else prompt_len,
        params=SamplingParams(max_new_tokens=max_new, temperature=0.0, **params),
        route=route or Route(room=abs(hash(rid)), prefill=one, decode=one),
        cache_salt=salt,
        priority=priority,
    )
