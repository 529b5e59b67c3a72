"""Ranks that stand still are replaced under a running stream; none outlives its supervisor."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from tests.support.eventually import eventually
from tests.support.served import Served, serving, started

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

TINY = ("--model", "tiny-moe", "model.dtype=float32")
PROCESSES = (*TINY, "cluster.runtime=process")
PROMPT = [100 + 7 * i % 3900 for i in range(40)]
TOKENS = 400
SHORT = ("cluster.lease.renew_s=0.2", "cluster.lease.lease_s=2", "cluster.lease.orphan_s=3")


class Stream:
    """A greedy answer that cannot end early."""

    def __init__(self) -> None:
        self.text = ""
        self.end = ""

    async def follow(self, served: Served) -> None:
        async with served.async_client() as client:
            chunks = await client.completions.create(
                model=served.model,
                prompt=PROMPT,
                max_tokens=TOKENS,
                temperature=0,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in chunks:
                self.text += chunk.choices[0].text
                self.end = chunk.choices[0].finish_reason or self.end


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ranks(served: Served) -> list[str]:
    return [line for line in served.processes() if "cluster.rank_process" in line]


def test_a_stream_outlives_the_decode_rank_that_stands_still():
    async def scenario(served: Served) -> None:
        undisturbed, disturbed = Stream(), Stream()
        await undisturbed.follow(served)
        before = served.rank("decode")["info"]
        following = asyncio.create_task(disturbed.follow(served))
        await eventually(lambda: len(disturbed.text) > 50)
        os.kill(before["pid"], signal.SIGSTOP)
        seen: set[str] = set()

        def told() -> bool:
            """Why there is no session is said before the rank is replaced."""
            rank = served.rank("decode")
            seen.add(f"{rank['state']}: {rank.get('reason')}")
            return any(words.startswith("no session: no answer for") for words in seen)

        await eventually(told, 30.0)
        async with asyncio.timeout(60):
            await following
        assert (disturbed.end, disturbed.text) == ("length", undisturbed.text)
        assert not alive(before["pid"])
        after = served.rank("decode")
        assert after["info"]["incarnation"] != before["incarnation"]
        assert after["life"]["crashes"] == 1
        assert after["life"]["problem"].startswith("no answer for 10 s")
        await eventually(served.at_rest)

    # the session ends well before the lease, so that one can look between
    with serving("cpu", *PROCESSES, "router.rank_timeout_s=5") as served:
        asyncio.run(scenario(served))


def test_an_actor_of_ray_that_stands_still_is_killed_and_replaced():
    """Ray itself does not mind: the process is there."""

    async def scenario(served: Served) -> None:
        undisturbed, disturbed = Stream(), Stream()
        await undisturbed.follow(served)
        before = served.rank("decode")["info"]
        assert before["pid"] in {int(line.split()[0]) for line in served.processes()}
        following = asyncio.create_task(disturbed.follow(served))
        await eventually(lambda: len(disturbed.text) > 50)
        os.kill(before["pid"], signal.SIGSTOP)
        async with asyncio.timeout(60):
            await following
        assert (disturbed.end, disturbed.text) == ("length", undisturbed.text)
        assert not alive(before["pid"])
        after = served.rank("decode")
        assert after["info"]["incarnation"] != before["incarnation"]
        assert after["life"]["crashes"] == 1
        assert after["life"]["problem"].startswith("no answer for 5 s")
        await eventually(served.at_rest)

    with serving("cpu", *TINY, "cluster.runtime=ray", "cluster.lease.lease_s=5") as served:
        asyncio.run(scenario(served))


def test_ranks_end_themselves_when_their_supervisor_no_longer_speaks():
    """It is stopped, not ended: no pipe and no connection is closed, as when a network is cut."""
    with started("cpu-unified", *PROCESSES, *SHORT) as served:
        served.wait_ready()
        assert len(ranks(served)) == 1
        served.process.send_signal(signal.SIGSTOP)
        served.gone(lambda: ranks(served), 30.0)
        assert "no supervisor has renewed this rank's lease for 3 s" in served.log
        served.process.send_signal(signal.SIGCONT)
        asyncio.run(eventually(served.at_rest, 90.0))  # it has started another
        assert served.stop() == 0, served.log


def test_no_rank_outlives_a_driver_that_is_killed():
    with started("cpu", *PROCESSES, *SHORT) as served:
        served.wait_ready()
        assert len(ranks(served)) == 2
        served.process.kill()
        served.process.wait()
        served.gone(served.processes, 30.0)
