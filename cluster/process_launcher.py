"""Ranks as child processes of this one: one machine, without Ray.

Each child gets its spec on stdin and answers once on stdout (cluster/rank_process.py). It ends when
its stdin ends, so that none outlives us, however we go.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Sequence

from cluster.actors import CRASHED, ORPHANED, Described, described_codec
from cluster.rank_process import LENGTH_BYTES, framed
from core.codec import Codec
from core.config import RankSpec, RuntimeConfig
from core.errors import PreflightError, RankLost
from core.wire import RankId, RankInfo

log = logging.getLogger(__name__)

STOP_S = 5.0

_CODES = {CRASHED: ": its step loop died", ORPHANED: ": nobody renewed its lease"}

Command = Callable[[RankSpec], Sequence[str]]


def rank_command(_: RankSpec) -> Sequence[str]:
    """What runs a rank; the spec follows on stdin."""
    return (sys.executable, "-m", "cluster.rank_process")


class ProcessLauncher:
    """Implements Launcher. Made and used on one event loop."""

    def __init__(self, config: RuntimeConfig, command: Command = rank_command) -> None:
        self._config = config
        self._command = command
        self._children: dict[RankId, Process] = {}

    async def open(self) -> None:
        """Nothing to start."""

    async def start(self, spec: RankSpec) -> RankInfo:
        """See Launcher."""
        # A group of its own: Ctrl-C is for us, and we end the ranks in order.
        child = self._children[spec.rank] = await asyncio.create_subprocess_exec(
            *self._command(spec), stdin=PIPE, stdout=PIPE, process_group=0
        )
        limit_s = self._config.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                described = await _describe(child, spec)
            if described.info is None:
                raise PreflightError(described.problem)
        except TimeoutError:
            await self._kill(spec.rank)
            raise PreflightError(
                f"not ready after {limit_s:g} s: raise cluster.start_timeout_s"
            ) from None
        except (EOFError, ConnectionError) as error:
            await self._leave(spec.rank)
            raise RankLost(f"died while it started: {_end(child.returncode)}") from error
        except (asyncio.CancelledError, PreflightError):
            await self._kill(spec.rank)
            raise
        return described.info

    async def gone(self, rank: RankId) -> str:
        """See Launcher."""
        code = await self._children[rank].wait()
        self._children.pop(rank, None)
        return _end(code)

    async def stop(self, rank: RankId) -> None:
        """See Launcher."""
        child = self._children.get(rank)
        if child is None:
            return
        assert child.stdin is not None
        child.stdin.close()
        await self._leave(rank)

    async def kill(self, rank: RankId) -> None:
        """See Launcher. SIGKILL ends a process that is stopped, too."""
        await self._kill(rank)

    async def close(self) -> None:
        """Nothing is left."""

    async def _leave(self, rank: RankId) -> None:
        """Let a process end by itself that is about to."""
        child = self._children[rank]
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            log.info("rank %s did not end by itself", rank)
        await self._kill(rank)

    async def _kill(self, rank: RankId) -> None:
        if child := self._children.pop(rank, None):
            if child.returncode is None:
                child.kill()
            await child.wait()


async def _describe(child: Process, spec: RankSpec) -> Described:
    """Raises EOFError or ConnectionError where the child ends first."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(framed(Codec[RankSpec](RankSpec).encode(spec)))
    await child.stdin.drain()
    size = int.from_bytes(await child.stdout.readexactly(LENGTH_BYTES), "big")
    return described_codec().decode(await child.stdout.readexactly(size))


def _end(code: int | None) -> str:
    """How a process went, in words."""
    if code is None or code >= 0:
        why = _CODES.get(code or 0, "")
        return f"its process ended with code {code}{why}"
    return f"its process was ended by {signal.Signals(-code).name}"
