"""Ranks that are killed and callers that go away, under load: no stream hangs, no page is lost."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import aclosing
from dataclasses import dataclass

import openai
import pytest

from core.clock import RealClock
from tests.support.eventually import eventually
from tests.support.served import serving

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

STREAMS = 8
TOKENS = 600
RECOVERY_S = 10.0


@dataclass
class Answer:
    """What one stream brought."""

    text: str = ""
    end: str = ""  # finish reason, or the error in words


@pytest.fixture(scope="module")
def moe():
    """The trained mixture of experts on Ray; fp32, so that a moved stream keeps its tokens."""
    with serving("cpu", "--model", "tiny-moe", "model.dtype=float32") as served:
        yield served


@pytest.fixture(scope="module")
def undisturbed(moe):
    """What the streams say when nothing happens to them."""
    answers = asyncio.run(undisturbed_answers(moe))
    assert {answer.end for answer in answers} == {"length"}
    return [answer.text for answer in answers]


async def undisturbed_answers(served):
    async with served.async_client() as client:
        answers, tasks = load(client, served)
        await asyncio.gather(*tasks)
    return answers


def load(client, served, tokens=TOKENS):
    """Start the streams: what they bring, and the tasks that fill it in."""
    answers = [Answer() for _ in range(STREAMS)]
    tasks = [
        asyncio.create_task(follow(client, served, prompt(i), answers[i], tokens))
        for i in range(STREAMS)
    ]
    return answers, tasks


def prompt(index, length=40):
    return [100 + (37 * index + 5 * i) % 3900 for i in range(length)]


async def follow(client, served, token_ids, answer, tokens):
    try:
        stream = await client.completions.create(
            model=served.model,
            prompt=token_ids,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async with aclosing(stream.__aiter__()) as chunks:
            async for chunk in chunks:
                answer.text += chunk.choices[0].text
                answer.end = chunk.choices[0].finish_reason or answer.end
    except openai.APIError as error:
        answer.end = f"error: {error}"


async def rest(served):
    """Return when the service is ready and every page of every rank is accounted for."""
    try:
        await eventually(lambda: served.get("/ready").status_code == 200 and served.at_rest(), 30.0)
    except TimeoutError:
        raise AssertionError(served.get("/status").json()) from None


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_a_killed_rank_comes_back_and_no_stream_hangs(moe, undisturbed, victim):
    async def scenario():
        clock = RealClock()
        before = moe.rank(victim)["info"]
        async with moe.async_client() as client:
            answers, tasks = load(client, moe)
            await eventually(lambda: all(len(answer.text) > 50 for answer in answers), 30.0)
            os.kill(before["pid"], signal.SIGKILL)
            killed = clock.now()
            fresh = Answer()
            await follow(client, moe, prompt(99), fresh, 8)
            took = clock.now() - killed
            async with asyncio.timeout(60):
                await asyncio.gather(*tasks)
        await rest(moe)
        return before, answers, fresh, took

    before, answers, fresh, took = asyncio.run(scenario())
    sys.stderr.write(f"a new request was answered {took:.1f} s after the {victim} rank died\n")
    assert fresh.end == "length", fresh
    assert took < RECOVERY_S
    assert moe.rank(victim)["info"]["incarnation"] != before["incarnation"]
    for answer, text in zip(answers, undisturbed, strict=True):
        assert answer.end == "length", answer.end
        assert answer.text == text


def test_streams_that_their_callers_leave_give_everything_back(moe):
    async def scenario():
        async with moe.async_client() as client:
            answers, tasks = load(client, moe, tokens=3000)
            await eventually(lambda: all(answer.text for answer in answers), 30.0)
            assert not any(answer.end for answer in answers)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await rest(moe)

    asyncio.run(scenario())


def test_callers_that_leave_before_the_first_token_give_everything_back(moe):
    """Long prompts: one is being computed while the others wait."""

    async def scenario():
        async with moe.async_client() as client:
            answers = [Answer() for _ in range(STREAMS)]
            tasks = [
                asyncio.create_task(follow(client, moe, prompt(200 + i, 3000), answer, 100))
                for i, answer in enumerate(answers)
            ]
            await eventually(lambda: moe.rank("prefill")["load"]["waiting_requests"] > 1, 30.0)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        await rest(moe)
        return answers

    answers = asyncio.run(scenario())
    assert not all(answer.text for answer in answers), "nothing was left waiting"
