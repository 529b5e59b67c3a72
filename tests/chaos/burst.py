"""Four times as many requests at once as decode ranks can run: some wait, the rest come later."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import httpx

from tests.chaos.cluster import MAX_RUNNING, QUEUE_LIMIT, REPLICAS, Cluster
from tests.chaos.load import Ask

CAPACITY = REPLICAS * MAX_RUNNING
REQUESTS = 4 * CAPACITY
TOKENS = 24
END_S = 60.0


async def burst(cluster: Cluster) -> tuple[dict[str, float], list[str]]:
    """Send them over HTTP and wait for all; what was measured, and the problems."""
    asks = [Ask.drawn("burst", 2 * i, 24, TOKENS) for i in range(REQUESTS)]
    started = cluster.clock.now()
    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(END_S),
        httpx.AsyncClient(
            base_url=cluster.url, timeout=END_S, limits=limits, trust_env=False
        ) as client,
    ):
        answers = await asyncio.gather(*(_ask(client, ask) for ask in asks))
    served = [a for a in answers if a.status_code == 200]
    refused = [a for a in answers if a.status_code == 429]
    notes = {
        "took": cluster.clock.now() - started,
        "served": float(len(served)),
        "refused": float(len(refused)),
    }
    return notes, list(_problems(answers, served, refused))


def _problems(
    answers: Sequence[httpx.Response],
    served: Sequence[httpx.Response],
    refused: Sequence[httpx.Response],
) -> Iterator[str]:
    if len(served) < CAPACITY:  # other streams have places, too
        yield f"only {len(served)} of {QUEUE_LIMIT} places were used"
    if not refused:
        yield "nobody was asked to come later"
    if others := {a.status_code for a in answers} - {200, 429}:
        yield f"answers with status {others}"
    if any(float(a.headers.get("retry-after", "0")) < 1 for a in refused):
        yield "a 429 does not say when to come back"
    if any(a.json()["usage"]["completion_tokens"] != TOKENS for a in served):
        yield "an answer is short"


async def _ask(client: httpx.AsyncClient, ask: Ask) -> httpx.Response:
    body = {
        "prompt": list(ask.prompt),
        "max_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    return await client.post("/v1/completions", json=body)
