"""Scaling and draining while requests run, and a second router: nothing is lost."""

from __future__ import annotations

import asyncio
import subprocess

import pytest

from tests.support.eventually import eventually
from tests.support.served import ANTIPHON, Served, serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

STREAMS, TOKENS = 6, 120


@pytest.fixture(scope="module")
def moe():
    with serving("cpu", "--model", "tiny-moe", "cluster.runtime=local") as served:
        yield served


def antiphon(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ANTIPHON, *words], capture_output=True, text=True, timeout=60, check=False
    )


def change_cluster(*words: str) -> None:
    done = antiphon(*words)
    assert done.returncode == 0, done.stderr


def ranks(served: Served) -> set[str]:
    status = served.get("/status").json()
    return {rank["rank"] for rank in status["ranks"] if rank["state"] == "up"}


async def answer(client, served: Served, number: int) -> int:
    done = await client.completions.create(
        model=served.model,
        prompt=f"Once upon a time, number {number},",
        max_tokens=TOKENS,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert done.choices[0].finish_reason == "length"
    return done.usage.completion_tokens


async def under_load(served: Served, change) -> int:
    """Keep streams running until ``change`` has happened; how many were answered."""
    answered, over = [], asyncio.Event()

    async def stream(number: int) -> None:
        while not over.is_set():
            answered.append(await answer(client, served, number))

    async with served.async_client() as client, asyncio.TaskGroup() as tasks:
        for number in range(STREAMS):
            tasks.create_task(stream(number))
        await change()
        over.set()
    assert set(answered) == {TOKENS}, "a request was cut short"
    return len(answered)


async def become(served: Served, wanted: set[str]) -> None:
    await eventually(lambda: ranks(served) == wanted, timeout_s=60)


def test_scaling_up_and_down_and_draining_under_load_loses_no_request(moe):
    async def change() -> None:
        await asyncio.to_thread(change_cluster, "scale", "prefill=2", "decode=2", "--url", moe.url)
        await become(moe, {f"{group}/{i}/0" for group in ("prefill", "decode") for i in (0, 1)})
        await asyncio.to_thread(change_cluster, "drain", "prefill/0", "--url", moe.url)
        await become(moe, {"prefill/1/0", "decode/0/0", "decode/1/0"})
        await asyncio.to_thread(change_cluster, "scale", "decode=1", "--url", moe.url)
        await become(moe, {"prefill/1/0", "decode/0/0"})

    assert asyncio.run(under_load(moe, change)) >= STREAMS
    asyncio.run(eventually(moe.at_rest))
    losses = [line for line in moe.lines if " is lost" in line]
    # a rank may fall silent while another one loads in this process
    assert all("silent for" in line for line in losses), "what was ordered is no loss to warn of"


def test_a_second_router_fronts_the_same_ranks_and_leaves_without_a_trace(moe):
    joined = Served(["--join", moe.url], command="router")
    try:
        joined.wait_ready()
        joined.model = moe.model

        async def ask() -> list[int]:
            async with joined.async_client() as one, moe.async_client() as other:
                return await asyncio.gather(answer(one, joined, 1), answer(other, moe, 2))

        assert asyncio.run(ask()) == [TOKENS, TOKENS]
        assert ranks(joined) == ranks(moe)
        assert joined.stop() == 0
    finally:
        joined.close()
    asyncio.run(eventually(moe.at_rest))


def test_bad_operations_name_the_fix(moe):
    for words in (
        ("scale", "nobody=2"),
        ("scale", "prefill=0"),
        ("scale", "prefill"),
        ("drain", "decode/9"),
        ("drain", "what"),
    ):
        done = antiphon(*words, "--url", moe.url)
        assert done.returncode == 2
        assert done.stderr.startswith("antiphon: ")
        assert len(done.stderr.splitlines()) == 1
