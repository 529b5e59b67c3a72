"""SelfTest: readiness is shown, not assumed: two tokens travel the whole way, KV included."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Set as AbstractSet
from contextlib import aclosing

from core.errors import AntiphonError
from core.ports import TokenStreams
from core.wire import FinishReason, Incarnation, RankId, Role, SamplingParams
from router.dispatch import Routes
from router.failures import plain
from router.readiness import Readiness
from router.replicas import MemberState, Replica, Replicas

log = logging.getLogger(__name__)

PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)
NOT_FINITE = (
    "the model's logits are not finite: its weights are damaged, or overflow (try model.dtype)"
)


class SelfTest:
    """Ready once a complete set of sessions has answered a request; asked again when it changes.

    Two tokens, because the first one comes from the prefill rank and only the second proves that
    the KV arrived at the decode rank. A decode rank has every first prompt of a pair sent over.
    """

    def __init__(
        self,
        replicas: Replicas,
        streams: TokenStreams,
        dispatch: Callable[[Routes], TokenStreams],
        timeout_s: float = 10.0,
    ) -> None:
        self._replicas = replicas
        self._streams = streams
        self._dispatch = dispatch
        self._timeout_s = timeout_s
        self._passed: frozenset[str] = frozenset()
        self._problem = ""  # of the latest test
        self._lock = asyncio.Lock()

    async def ready(self) -> Readiness:
        """Whether requests can be served now; runs the test where sessions have changed."""
        async with self._lock:
            if not self._replicas.complete:
                return Readiness(ready=False, reason=self._missing())
            up = frozenset(str(r.client.incarnation) for r in self._live())
            if up == self._passed:
                return Readiness(ready=True)
            problem = await self._try(self._streams)
            self._passed = frozenset() if problem else up
            self._note(problem)
            shown = plain(problem, "the self-test failed")
            return Readiness(ready=not problem, reason=problem, told=shown)

    async def through(self, rank: RankId) -> str:
        """Let ``rank`` answer a request, with a partner where it needs one.

        Waits until both are there. The problem in words, empty when there is none.
        """
        routes = _Through(self._replicas, rank)
        while not routes.complete:
            await routes.change().wait()
        return await self._try(self._dispatch(routes))

    def _note(self, problem: str) -> None:
        """Say it once: probes ask every second."""
        if problem and problem != self._problem:
            log.warning("not ready: %s", problem)
        self._problem = problem

    def _live(self) -> list[Replica]:
        return [replica for role in Role for replica in self._replicas.routable(role)]

    def _missing(self) -> str:
        waiting = [str(m.incarnation.rank) for m, up in self._replicas.members() if up is None]
        gone = [
            role.value for role in (Role.PREFILL, Role.DECODE) if not self._replicas.routable(role)
        ]
        if waiting:
            return f"no session yet with {', '.join(waiting)}"
        return f"no {' and no '.join(gone)} worker is there"

    async def _try(self, streams: TokenStreams) -> str:
        """Run one small greedy request; the problem in words, empty when there is none."""
        # with log-probabilities: tokens come of NaN too
        params = SamplingParams(max_new_tokens=2, temperature=0.0, ignore_eos=True, logprobs=True)
        got, error = 0, "the self-test's stream ended early"
        try:
            async with asyncio.timeout(self._timeout_s):
                rid = f"selftest-{secrets.token_hex(4)}"
                salt = rid  # so that nothing of it is cached, and the KV has to cross
                async with aclosing(streams.stream(rid, PROMPT, params, salt)) as chunks:
                    async for chunk in chunks:
                        got += len(chunk.token_ids)
                        if not all(math.isfinite(each.logprob) for each in chunk.logprobs):
                            return NOT_FINITE
                        if chunk.error is not None:
                            error = chunk.error.message
                        if chunk.finish is FinishReason.LENGTH and got == params.max_new_tokens:
                            return ""
        except TimeoutError:
            return f"the self-test did not answer within {self._timeout_s:g} s"
        except AntiphonError as problem:
            return str(problem)
        return error


class _Through:
    """The replicas as if one rank were alone in its role. Its partner serves, or joins as well."""

    def __init__(self, replicas: Replicas, rank: RankId) -> None:
        self._replicas = replicas
        self._rank = rank
        self.any_member = True

    @property
    def complete(self) -> bool:
        there = {role: bool(self.routable(role, frozenset())) for role in Role}
        return there[Role.UNIFIED] or (there[Role.PREFILL] and there[Role.DECODE])

    def routable(self, role: Role, avoid: AbstractSet[RankId]) -> list[Replica]:
        serving = self._replicas.live(role, MemberState.SERVING)
        joining = self._replicas.live(role, MemberState.JOINING)
        if role.value == self._rank.group:
            return [r for r in (*serving, *joining) if r.rank == self._rank]
        return serving or joining

    def change(self) -> asyncio.Event:
        return self._replicas.change()

    def when_gone(self, tell: Callable[[Incarnation], None]) -> None:
        """One request is over before anybody could be gone."""
