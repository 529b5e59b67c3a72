"""A real model answers the same with pages of any size: sharing, aborts, retraction, overlap.

And random engines and pairs without a model, whose pages have several tokens.
"""

from __future__ import annotations

import pytest

from core.rpc.events import Aborted, Submitted
from tests.support.pd_world import PdWorld
from tests.support.real_engine import generate, rank_spec, tokens, unified_engine
from tests.support.requests import request
from tests.support.tiny_models import TINY_MOE
from worker.engine import Engine

SIZES = [1, 4, 16, 64]
STEM = [100 + 37 * i % 900 for i in range(70)]
PROMPTS = [[*STEM[:n], 7 * n, 5, n] for n in (3, 30, 37, 37, 64, 66)]
LONG = [[*STEM[:n], n] for n in (22, 30)]  # do not fit together
COUNT = 6  # tokens of an answer


def engine(size: int, **options) -> Engine:
    return unified_engine(TINY_MOE, page_size=size, **options)


def answers(one: Engine, prompts: list[list[int]], count: int = COUNT) -> list[list[int]]:
    return [tokens(chunks) for chunks in generate(one, prompts, count, ignore_eos=True)]


@pytest.fixture(scope="module")
def alone() -> list[list[int]]:
    """Each prompt's answer, of an engine that has seen nothing else."""
    return [answers(engine(1), [prompt])[0] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def second_turn(alone) -> list[list[int]]:
    return [answers(engine(1), [turn])[0] for turn in turns(alone)]


def turns(alone: list[list[int]]) -> list[list[int]]:
    """Each conversation, and what its user says next."""
    return [p + a + [3, 1, 4] for p, a in zip(PROMPTS, alone, strict=True)]


@pytest.mark.parametrize("size", SIZES)
def test_answers_do_not_depend_on_the_page_size(size, alone, second_turn):
    one = engine(size, overlap=size % 16 == 0, step_tokens=50)
    assert answers(one, PROMPTS) == alone
    before = one.load().cached_tokens
    assert answers(one, PROMPTS) == alone  # mostly copied and shared
    again = one.load().cached_tokens - before
    assert again == sum(len(prompt) - 1 for prompt in PROMPTS)
    assert answers(one, turns(alone)) == second_turn
    third = one.load().cached_tokens - before - again
    assert third >= sum(len(turn) - 4 for turn in turns(alone))
    assert one.facts().free_pages == one.scheduler.cache.account().free
    assert one.scheduler.cache.account().owned == 0


@pytest.fixture(scope="module")
def long_answers() -> list[list[int]]:
    return answers(engine(1), LONG, 45)


@pytest.mark.parametrize("size", SIZES)
def test_answers_do_not_depend_on_retractions(size, long_answers):
    options = {"conservativeness": 0.0, "step_tokens": 64, "overlap": True}
    one = engine(size, kv_tokens=96 if size < 64 else 128, **options)
    assert answers(one, LONG, 45) == long_answers
    assert one.scheduler.retractions


@pytest.mark.parametrize("size", SIZES)
def test_aborts_leave_the_others_answers_alone(size, alone):
    one = engine(size, overlap=True, step_tokens=40)
    got: dict[str, list[int]] = {}
    for turn in range(2):
        for i, prompt in enumerate(PROMPTS):
            rid = f"{turn}-{i}"
            got[rid] = []
            one.handle(Submitted("a", request(rid, prompt, COUNT, ignore_eos=True)))
        for count in range(200):
            for report in one.step(0.0).values():
                for chunk in report.chunks:
                    got[chunk.rid] += chunk.token_ids
            if count < 5:  # in every stage: waiting, in part computed, decoding
                one.handle(Aborted("a", f"{turn}-{(count * (turn + 2)) % len(PROMPTS)}"))
            if one.idle:
                break
        assert one.idle
        one.scheduler.cache.check()
    whole = 0
    for rid, ids in got.items():
        answer = alone[int(rid.split("-")[1])]
        assert ids == answer[: len(ids)]
        whole += len(ids) == len(answer)
    assert whole
    assert one.scheduler.cache.account().owned == 0


def test_a_copied_boundary_page_saves_computing():
    """Of a prompt that shares 63 tokens with another only the rest is computed, at any size."""
    taken = {}
    for size in SIZES:
        one = engine(size)
        answers(one, [[*STEM[:63], 1]], 1)
        one.handle(Submitted("a", request("b", [*STEM[:63], 2, 3], 1)))
        step = one.scheduler.next_plan(0.0)
        assert step is not None
        taken[size] = step.plan.tokens
        copied = sum(len(copy.source) for copy in step.plan.copies)
        assert copied == (63 % size if size > 1 else 0)
    assert set(taken.values()) == {2}


@pytest.mark.parametrize("size", [3, 4, 16])
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "trouble",
    [{}, {"aborts": 0.4}, {"late": 0.15, "link_losses": 3, "aborts": 0.2}],
    ids=["calm", "aborts", "losses"],
)
def test_pairs_with_pages_of_several_tokens_give_the_reference_tokens(size, seed, trouble):
    world = PdWorld(seed, page_size=size, **trouble)
    world.run(25)
    if not trouble:
        assert not any(asked.stopped for asked in world.asked.values())


def test_the_pairs_copy_in_steps_of_their_own_and_on_both_sides():
    copied = {"prefill": 0, "decode": 0, "alone": 0}

    def watch(one: Engine, name: str) -> None:
        launch = one.runner.launch

        def watched(plan):
            copied[name] += len(plan.copies)
            copied["alone"] += not plan.rows
            return launch(plan)

        one.runner.launch = watched

    for seed in range(4):
        world = PdWorld(seed, page_size=4)
        watch(world.prefill, "prefill")
        watch(world.decode, "decode")
        world.run(25)
    assert all(copied.values()), copied


def test_a_group_has_pages_of_one_token_unless_told_otherwise():
    assert rank_spec(TINY_MOE).group.page_size == 1
