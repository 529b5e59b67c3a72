"""Random arrivals, aborts, evictions and retractions against the whole engine but the model.

After every step each page has exactly one place and serves one salt, and every finished request has
the tokens that the reference generates alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.rpc.events import Aborted, RouterLost, Submitted
from core.wire import FinishReason
from tests.support.fake_runner import generate_until, runner_for
from tests.support.requests import request
from tests.support.salts import check_pages, check_salts
from worker.cache.prefix_cache import PrefixCache
from worker.engine import Engine
from worker.roles.unified import UnifiedRole
from worker.scheduler.admission import Limits
from worker.scheduler.scheduler import Scheduler
from worker.scheduler.waiting import ORDERS
from worker.streams import Streams

CONTEXT = 40


@dataclass(frozen=True)
class Setting:
    page_size: int
    pages: int  # of one token
    step_tokens: int
    max_running: int
    schedule: str
    overlap: bool


def make_engine(setting: Setting) -> Engine:
    pages, step_tokens, max_running = setting.pages, setting.step_tokens, setting.max_running
    slots, size = -(-pages // setting.page_size) * setting.page_size, setting.page_size
    cache = PrefixCache(slots, max_running + 2, CONTEXT, size)
    limits = Limits(
        max_running=max_running, step_tokens=step_tokens, context_len=CONTEXT, conservativeness=0.3
    )
    scheduler, streams = Scheduler(cache, limits, setting.schedule), Streams()
    runner = runner_for(cache, defers=setting.overlap)
    role = UnifiedRole(scheduler, streams, frozenset())
    engine = Engine(role, scheduler, runner, streams, lambda peer: None)
    engine.overlap = setting.overlap
    return engine


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        setting=st.builds(
            Setting,
            page_size=st.sampled_from([1, 1, 3, 4, 16]),
            pages=st.integers(CONTEXT, 90),
            step_tokens=st.integers(1, 32),
            max_running=st.integers(1, 6),
            schedule=st.sampled_from(list(ORDERS)),
            overlap=st.booleans(),
        )
    )
    def build(self, setting: Setting) -> None:
        self.engine = make_engine(setting)
        self.now = 0.0
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
        copies=st.sampled_from([1, 1, 3]),
        options=st.fixed_dictionaries(
            {
                "salt": st.sampled_from(["", "mine"]),
                "priority": st.sampled_from([0, 0, 1]),
                "stop_token_ids": st.sampled_from([(), tuple(range(10))]),
            }
        ),
    )
    def submit(
        self,
        stem: int,
        prefix: int,
        own: list[int],
        new: int,
        router: str,
        copies: int,
        options: dict[str, Any],
    ) -> None:
        prompt = [stem * 7 + i % 5 for i in range(prefix)] + own
        new = min(new, CONTEXT - len(prompt))
        for _ in range(copies):
            rid = f"{router}{self.count}"
            self.count += 1
            self.wanted[rid] = generate_until(prompt, new, options["stop_token_ids"])
            self.got[rid] = []
            self.engine.handle(Submitted(router, request(rid, prompt, new, **options)))

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
            self.now += 0.7
            for router, report in self.engine.step(self.now).items():
                for chunk in report.chunks:
                    assert chunk.rid[0] == router
                    assert chunk.rid not in self.ended
                    assert chunk.offset == len(self.got[chunk.rid])
                    self.got[chunk.rid].extend(chunk.token_ids)
                    if chunk.finish is not None:
                        self.ended[chunk.rid] = chunk.finish
            self.engine.scheduler.cache.check()
            check_salts(self.engine)
            check_pages(self.engine)

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
            if finish in (FinishReason.LENGTH, FinishReason.STOP):
                assert self.got[rid] == wanted
            else:
                assert finish is FinishReason.ABORT
                assert self.got[rid] == wanted[: len(self.got[rid])]
        assert len(self.engine.streams) == 0
        account = self.engine.scheduler.cache.account()
        assert account.owned == 0
        self.engine.scheduler.cache.flush()
        assert self.engine.scheduler.cache.account().free == account.total


EngineMachine.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestEngine = EngineMachine.TestCase
