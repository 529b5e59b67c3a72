"""Ranks as plain child processes: one real one, and small programs that go wrong in their ways."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE

import msgspec
import pytest

from cluster import tiny_model
from cluster.actors import ORPHANED
from cluster.keeper import LeaseKeeper
from cluster.plan import Cpu, Plan
from cluster.process_launcher import STOP_S, ProcessLauncher
from cluster.rank_process import framed
from core import presets
from core.clock import RealClock
from core.config import LeaseConfig, RankSpec, RuntimeConfig
from core.errors import PreflightError, RankLost
from core.rpc.client import RankClient
from core.rpc.link import in_order
from core.wire import Role
from tests.support.eventually import eventually
from worker.architectures import read_spec

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def spec(tmp_path_factory) -> RankSpec:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model.make(folder, "llama")
    words = ("unified.kv_tokens=4096", "unified.threads=1", "model.dtype=float32")
    plan = Plan(presets.read("cpu-unified", words), folder, read_spec(folder), Cpu(2, bf16=False))
    (rank,) = plan.ranks()
    return rank


def launcher(*python: str, start_timeout_s: float = 60.0) -> ProcessLauncher:
    """With ``python``: of processes that run this instead of a rank."""
    config = RuntimeConfig(runtime="process", start_timeout_s=start_timeout_s)
    if not python:
        return ProcessLauncher(config)
    return ProcessLauncher(config, lambda _: (sys.executable, "-c", *python))


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_rank_serves_in_a_process_of_its_own_and_stops_in_order(spec):
    async def main() -> None:
        ranks = launcher()
        info = await ranks.start(spec)
        assert info.role is Role.UNIFIED
        assert info.pid != os.getpid()
        client = await RankClient.connect(info.incarnation, "r1")
        assert (await client.status()).pages.whole
        gone = asyncio.create_task(ranks.gone(spec.rank))
        await client.close()
        await ranks.stop(spec.rank)
        assert await gone == "its process ended with code 0"
        assert not alive(info.pid)
        await ranks.stop(spec.rank)  # unknown by now

    asyncio.run(main())


def test_a_rank_that_is_killed_is_gone_and_one_that_stands_still_can_be_stopped(spec):
    async def main() -> None:
        ranks = launcher()
        first = await ranks.start(spec)
        os.kill(first.pid, signal.SIGKILL)
        assert await ranks.gone(spec.rank) == "its process was ended by SIGKILL"
        second = await ranks.start(spec)
        assert second.incarnation.nonce != first.incarnation.nonce
        os.kill(second.pid, signal.SIGSTOP)
        await ranks.stop(spec.rank)
        assert not alive(second.pid)

    asyncio.run(main())


def test_a_rank_that_stands_still_can_be_killed_at_once(spec):
    async def main() -> None:
        ranks = launcher()
        info = await ranks.start(spec)
        os.kill(info.pid, signal.SIGSTOP)
        async with asyncio.timeout(STOP_S / 2):
            await ranks.kill(spec.rank)
        assert not alive(info.pid)
        await ranks.kill(spec.rank)  # unknown by now

    asyncio.run(main())


def test_a_rank_whose_lease_nobody_renews_ends_its_sessions_and_itself(spec):
    """Its stdin stays open: that is not what tells it."""
    lease = LeaseConfig(renew_s=0.1, lease_s=0.5, orphan_s=2.0)
    left_alone = msgspec.structs.replace(spec, lease=lease)

    async def main() -> None:
        ranks, keeper = launcher(), LeaseKeeper(lease, RealClock())
        life = (await ranks.start(left_alone)).incarnation
        lost: list[str] = []
        client = await RankClient.connect(life, "r1", on_lost=lambda: lost.append(client.lost))
        gone = asyncio.create_task(ranks.gone(spec.rank))
        holding = asyncio.create_task(keeper.hold(life))
        await asyncio.wait([gone, holding], timeout=2 * lease.orphan_s)
        assert not gone.done(), "its lease was renewed"
        assert not holding.done()
        holding.cancel()
        async with asyncio.timeout(20):
            assert await gone == f"its process ended with code {ORPHANED}: nobody renewed its lease"
        assert len(lost) == 1
        assert in_order(lost[0])
        await client.close()

    asyncio.run(main())


def test_a_rank_ends_with_the_one_who_started_it(spec):
    program = f"""
import asyncio, os
from cluster.process_launcher import ProcessLauncher
from core.codec import Codec
from core.config import RankSpec, RuntimeConfig
spec = Codec(RankSpec).decode({msgspec.msgpack.encode(spec)!r})
async def main():
    info = await ProcessLauncher(RuntimeConfig(runtime="process")).start(spec)
    print(info.pid, flush=True)
    os._exit(1)
asyncio.run(main())
"""

    async def main() -> None:
        parent = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE
        )
        out, _ = await parent.communicate()
        await eventually(lambda: not alive(int(out)), 15.0)

    asyncio.run(main())


def test_a_rank_that_still_loads_ends_with_the_one_who_started_it():
    program = """
import sys, threading
from cluster.rank_process import main
class Loading:
    def __init__(self, spec):
        assert spec == b"spec"
    def describe(self):
        sys.stderr.write("loading")
        threading.Event().wait()
    def stop(self):
        pass
main(Loading)
"""

    async def main() -> None:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdin=PIPE, stderr=PIPE
        )
        try:
            child.stdin.write(framed(b"spec"))
            assert await child.stderr.readexactly(7) == b"loading"
            child.stdin.close()
            async with asyncio.timeout(10):
                assert await child.wait() == 0
        finally:
            if child.returncode is None:
                child.kill()

    asyncio.run(main())


def test_what_a_rank_says_of_a_bad_model_reaches_the_operator(spec, tmp_path):
    lost = msgspec.structs.replace(spec, folder=str(tmp_path))

    async def main() -> None:
        with pytest.raises(PreflightError, match=r"config\.json"):
            await launcher().start(lost)

    asyncio.run(main())


def test_a_process_that_dies_or_says_nothing_while_it_starts(spec):
    async def main() -> None:
        with pytest.raises(RankLost, match="ended with code 3"):
            await launcher("raise SystemExit(3)").start(spec)
        mute = launcher("import threading; threading.Event().wait()", start_timeout_s=0.5)
        with pytest.raises(PreflightError, match="start_timeout_s"):
            await mute.start(spec)

    asyncio.run(main())
