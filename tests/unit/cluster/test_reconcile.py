from __future__ import annotations

from dataclasses import replace

from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.reconcile import (
    ACTIVE,
    HEALED_S,
    LONGEST_REST_S,
    Drain,
    Life,
    Phase,
    ReplicaState,
    Start,
    Stop,
    reconcile,
)
from core.wire import RankId

A0, A1 = RankId(group="a", replica=0), RankId(group="a", replica=1)


def serving(rank: RankId, since: float = 0.0) -> ReplicaState:
    return ReplicaState(rank, Phase.SERVING, since)


def test_missing_replicas_start_at_once_under_free_numbers():
    states, actions = reconcile({"a": 2}, {A1: serving(A1)}, 5.0, 60)
    assert actions == [Start(A0)]
    assert states[A0].phase is Phase.STARTING


def test_the_newest_serving_replica_is_drained_not_killed():
    states, actions = reconcile({"a": 1}, {A0: serving(A0), A1: serving(A1)}, 5.0, 60)
    assert actions == [Drain(A1)]
    assert states[A1].phase is Phase.DRAINING
    assert states[A0].phase is Phase.SERVING


def test_one_that_does_not_serve_yet_goes_before_one_that_does():
    starting = ReplicaState(A0, Phase.STARTING, 0.0)
    _, actions = reconcile({"a": 1}, {A0: starting, A1: serving(A1)}, 5.0, 60)
    assert actions == [Stop(A0)]


def test_a_life_tells_crashes_until_they_are_forgotten_and_how_long_a_rest_lasts():
    crashed = serving(A0).crashed(5.0, "boom").crashed(6.0, "bang")
    assert Life.at(crashed, 6.5, "") == Life(A0, Phase.RESTING, 2, "bang", crashed.due - 6.5, "")
    assert Life.at(crashed, 99.0, "").retry_s == 0.0
    again = crashed.enter(Phase.SERVING, 10.0)
    late = 10.0 + HEALED_S
    assert Life.at(again, late - 1, "quiet") == Life(A0, Phase.SERVING, 2, "bang", None, "quiet")
    assert Life.at(again, late, "") == Life(A0, Phase.SERVING, 0, "", None, "")


def test_draining_ends_after_its_limit():
    draining = ReplicaState(A0, Phase.DRAINING, 0.0)
    assert reconcile({"a": 0}, {A0: draining}, 59.0, 60)[1] == []
    states, actions = reconcile({"a": 0}, {A0: draining}, 60.0, 60)
    assert actions == [Stop(A0)]
    assert states[A0].phase is Phase.STOPPING


def test_scaling_up_while_another_drains_takes_a_new_number():
    draining = ReplicaState(A0, Phase.DRAINING, 0.0)
    _, actions = reconcile({"a": 1}, {A0: draining}, 1.0, 60)
    assert actions == [Start(A1)]


def test_crashes_in_a_row_rest_longer_and_serving_heals():
    state, rests = serving(A0), []
    for _ in range(8):
        state = state.crashed(100.0, "boom")
        rests.append(state.due - 100.0)
        state = state.enter(Phase.STARTING, 100.0)
    assert rests == sorted(rests)
    assert rests[0] < 1
    assert rests[-1] == LONGEST_REST_S
    healed = replace(state, phase=Phase.SERVING, since=100.0).crashed(161.0, "again")
    assert healed.crashes == 1


def test_a_resting_replica_waits_for_its_time():
    resting = serving(A0).crashed(10.0, "boom")
    assert reconcile({"a": 1}, {A0: resting}, 10.1, 60)[1] == []
    assert reconcile({"a": 1}, {A0: resting}, resting.due, 60)[1] == [Start(A0)]


class Cluster(RuleBasedStateMachine):
    """Random scaling, crashes and slow drains: the wanted number always comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.desired = {"a": 1, "b": 2}
        self.states: dict[RankId, ReplicaState] = {}
        self.now = 0.0
        self.pending: list[object] = []

    def round(self) -> None:
        self.states, actions = reconcile(self.desired, self.states, self.now, 30)
        self.pending += actions

    @rule(group=st.sampled_from("ab"), count=st.integers(0, 4))
    def scale(self, group: str, count: int) -> None:
        self.desired[group] = count
        self.round()

    @rule(seconds=st.floats(0, 70))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.round()

    @rule(data=st.data(), fails=st.booleans())
    def finish(self, data: st.DataObject, fails: bool) -> None:
        if self.pending:
            index = data.draw(st.integers(0, len(self.pending) - 1))
            self.carry_out(self.pending.pop(index), fails)

    def carry_out(self, action, fails: bool) -> None:
        state = self.states.get(action.rank)
        if state is None:
            return  # stopped meanwhile: the supervisor cancels what it had begun
        if isinstance(action, Start) and state.phase is Phase.STARTING:
            after = state.crashed(self.now, "x") if fails else state.enter(Phase.SERVING, self.now)
            self.states[action.rank] = after
        elif isinstance(action, Drain) and state.phase is Phase.DRAINING and not fails:
            self.states[action.rank] = state.enter(Phase.STOPPING, self.now)
            self.pending.append(Stop(action.rank))
        elif isinstance(action, Stop) and state.phase is Phase.STOPPING:
            del self.states[action.rank]

    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        up = sorted(r for r, s in self.states.items() if s.phase is Phase.SERVING)
        if up:
            rank = data.draw(st.sampled_from(up))
            self.states[rank] = self.states[rank].crashed(self.now, "boom")
            self.round()

    @invariant()
    def never_more_active_than_wanted_after_a_round(self) -> None:
        self.round()
        for group, wanted in self.desired.items():
            active = [s for r, s in self.states.items() if r.group == group and s.phase in ACTIVE]
            assert len(active) == wanted

    def teardown(self) -> None:
        for _ in range(200):
            self.now += 61
            self.round()
            while self.pending:
                self.carry_out(self.pending.pop(0), fails=False)
        for group, wanted in self.desired.items():
            mine = [s for r, s in self.states.items() if r.group == group]
            assert [s.phase for s in mine] == [Phase.SERVING] * wanted


Cluster.TestCase.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)
TestCluster = Cluster.TestCase
