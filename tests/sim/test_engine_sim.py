"""Random arrivals, aborts, evictions and retractions against the whole engine but the model.

After every step each page has exactly one place and serves one salt, and every finished request has
the tokens that the reference generates alone.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.rpc.events import Aborted, RouterLost, Submitted
from core.wire import FinishReason
from tests.support.fake_runner import FakeRunner, generate
from tests.support.requests import request
from tests.support.salts import check_salts
from worker.cache.prefix_cache import PrefixCache
from worker.engine import Engine
from worker.roles.unified import UnifiedRole
from worker.scheduler.admission import Limits
from worker.scheduler.scheduler import Scheduler
from worker.streams import Streams

CONTEXT = 40


def make_engine(pages: int, step_tokens: int, max_running: int) -> Engine:
    cache = PrefixCache(pages, max_running + 2, CONTEXT)
    limits = Limits(
        max_running=max_running, step_tokens=step_tokens, context_len=CONTEXT, conservativeness=0.3
    )
    scheduler, streams = Scheduler(cache, limits), Streams()
    role = UnifiedRole(scheduler, streams, frozenset())
    return Engine(role, scheduler, FakeRunner(cache.table, pages), streams, lambda peer: None)


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(CONTEXT, 90), step_tokens=st.integers(1, 32), running=st.integers(1, 6)
    )
    def build(self, pages: int, step_tokens: int, running: int) -> None:
        self.engine = make_engine(pages, step_tokens, running)
        self.wanted: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}
        self.ended: dict[str, FinishReason] = {}
        self.count = 0

    @rule(
        stem=st.integers(0, 2),
        prefix=st.integers(0, 20),
        own=st.lists(st.integers(0, 3), min_size=1, max_size=10),
        new=st.integers(1, 12),
        router=st.sampled_from(["a", "b"]),
        salt=st.sampled_from(["", "mine"]),
    )
    def submit(
        self, stem: int, prefix: int, own: list[int], new: int, router: str, salt: str
    ) -> None:
        prompt = [stem * 7 + i % 5 for i in range(prefix)] + own
        rid = f"{router}{self.count}"
        self.count += 1
        new = min(new, CONTEXT - len(prompt))
        self.wanted[rid] = generate(prompt, new)
        self.got[rid] = []
        self.engine.handle(Submitted(router, request(rid, prompt, new, salt=salt)))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.wanted)))
        self.engine.handle(Aborted(rid[0], rid))

    @rule(router=st.sampled_from(["a", "b"]))
    def lose_router(self, router: str) -> None:
        self.engine.handle(RouterLost(router))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            for router, report in self.engine.step(0.0).items():
                for chunk in report.chunks:
                    assert chunk.rid[0] == router
                    assert chunk.rid not in self.ended
                    assert chunk.offset == len(self.got[chunk.rid])
                    self.got[chunk.rid].extend(chunk.token_ids)
                    if chunk.finish is not None:
                        self.ended[chunk.rid] = chunk.finish
            self.engine.scheduler.cache.check()
            check_salts(self.engine)

    @rule()
    def flush(self) -> None:
        self.engine.scheduler.cache.flush()

    @invariant()
    def pages_are_whole(self) -> None:
        self.engine.scheduler.cache.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(3000):
            if self.engine.idle and not self.engine.streams._chunks:
                break
            self.step(1)
        assert self.engine.idle, "requests are stuck"
        self.step(1)
        assert self.ended.keys() == self.wanted.keys()
        for rid, finish in self.ended.items():
            wanted = self.wanted[rid]
            if finish is FinishReason.LENGTH:
                assert self.got[rid] == wanted
            else:
                assert finish is FinishReason.ABORT
                assert self.got[rid] == wanted[: len(self.got[rid])]
        assert len(self.engine.streams) == 0
        account = self.engine.scheduler.cache.account()
        assert account.owned == 0
        self.engine.scheduler.cache.flush()
        assert self.engine.scheduler.cache.slots.free == account.total


EngineMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngine = EngineMachine.TestCase
