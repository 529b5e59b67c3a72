"""The same logits as transformers, however a sequence is cut into steps."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.support.steps import Row, advance, make_step, scattered
from worker.cache.kv_pool import KVPool
from worker.models.weights import load_model

# fp32, logits of order 4 (random) to 14 (trained): measured at most 2e-5
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}


def close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, **TOLERANCE)


def test_whole_prompt_in_one_forward(case):
    ids = case.ids(150)
    [logits] = advance(case.model, case.pool(200), [(Row(ids, scattered(200)), 150)])
    close(logits, case.checkpoint.logits(ids))
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_prompt_in_chunks(case, chunk):
    ids = case.ids(75, seed=chunk)
    row, pool = Row(ids, scattered(80, seed=chunk)), case.pool(80)
    parts = []
    while row.done < len(ids):
        parts += advance(case.model, pool, [(row, min(chunk, len(ids) - row.done))])
    close(torch.cat(parts), case.checkpoint.logits(ids))


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chunks=st.lists(st.integers(1, 40), min_size=1, max_size=6), seed=st.integers(0, 99))
def test_prompt_in_any_chunks(case, chunks, seed):
    ids = case.ids(sum(chunks), seed)
    row, pool = Row(ids, scattered(len(ids), seed)), case.pool(len(ids))
    parts = [logits for n in chunks for logits in advance(case.model, pool, [(row, n)])]
    close(torch.cat(parts), case.checkpoint.logits(ids))


@pytest.mark.parametrize("rest", [1, 2, 30])
def test_a_prefix_hit_reuses_the_slots_of_another_sequence(case, rest):
    first, slots, pool = case.ids(60), scattered(100), case.pool(100)
    advance(case.model, pool, [(Row(first, slots[:60]), 60)])
    second = first[:41] + case.ids(rest, seed=1)
    row = Row(second, slots[:41] + slots[60:], done=41)
    [logits] = advance(case.model, pool, [(row, rest)])
    close(logits, case.checkpoint.logits(second)[41:])


def test_a_step_of_prompts_chunks_and_decodes(case):
    """Decode rows of very different lengths, a prefix hit, a chunk and a whole prompt."""
    slots, pool = scattered(600), case.pool(600)
    lens = [3, 20, 200, 65, 40, 140]
    starts = [sum(lens[:i]) for i in range(len(lens))]
    rows = [
        Row(case.ids(n, seed=n), slots[start : start + n])
        for n, start in zip(lens, starts, strict=True)
    ]
    before = [2, 19, 199, 0, 11, 0]
    advance(case.model, pool, [(row, n) for row, n in zip(rows, before, strict=True) if n])
    step = [1, 1, 1, 65, 29, 135]
    order = [3, 0, 4, 1, 5, 2]  # decodes lie between extends
    logits = advance(case.model, pool, [(rows[i], step[i]) for i in order])
    for i, ours in zip(order, logits, strict=True):
        close(ours, case.checkpoint.logits(rows[i].ids)[before[i] : before[i] + step[i]])


def test_only_the_wanted_rows_get_logits(case):
    ids = case.ids(9)
    step = make_step([(Row(ids, scattered(9)), 9)])
    logits = case.model.forward(replace(step, logit_rows=torch.tensor([8, 2])), case.pool(9))
    close(logits, case.checkpoint.logits(ids)[[8, 2]])
    none = case.model.forward(replace(step, logit_rows=torch.tensor([]).long()), case.pool(9))
    assert none.shape == (0, case.spec.vocab)


@pytest.mark.parametrize("scored", [False, True])
def test_a_last_layer_answers_those_whose_results_are_read(case, scored):
    """A prompt, a decode row, a chunk that is not the last, another prompt; perhaps with scores."""
    lens, slots, pool = [40, 7, 101, 25], scattered(200), case.pool(200)
    starts = [sum(lens[:i]) for i in range(4)]
    rows = [
        Row(case.ids(n, seed=n), slots[at : at + n]) for n, at in zip(lens, starts, strict=True)
    ]
    advance(case.model, pool, [(rows[1], 6)])
    step = make_step([(rows[0], 40), (rows[1], 1), (rows[2], 100), (rows[3], 25)])
    wanted = [165, 40, *(range(40) if scored else [39])]
    logits = case.model.forward(replace(step, logit_rows=torch.tensor(wanted)), pool)
    close(logits[0], case.checkpoint.logits(rows[3].ids)[-1])
    close(logits[1], case.checkpoint.logits(rows[1].ids)[-1])
    close(logits[2:], case.checkpoint.logits(rows[0].ids)[-len(logits[2:]) :])
    rows[2].done = 100  # its keys and values are all there
    [logits] = advance(case.model, pool, [(rows[2], 1)])
    close(logits[-1], case.checkpoint.logits(rows[2].ids)[-1])


def test_a_step_of_which_no_result_is_read_still_writes_keys_and_values(case):
    row, pool = Row(case.ids(30), scattered(40)), case.pool(40)
    step = make_step([(row, 29)])
    none = case.model.forward(replace(step, logit_rows=torch.tensor([]).long()), pool)
    assert none.shape == (0, case.spec.vocab)
    row.done = 29
    [logits] = advance(case.model, pool, [(row, 1)])
    close(logits[-1], case.checkpoint.logits(row.ids)[-1])


def test_greedy_continuation(case):
    prompt = case.ids(12)
    row, pool = Row(prompt, scattered(32)), case.pool(32)
    [logits] = advance(case.model, pool, [(row, 12)])
    expected = list(prompt)
    for _ in range(16):
        row.ids.append(int(logits[-1].argmax()))
        expected.append(int(case.checkpoint.logits(expected)[-1].argmax()))
        [logits] = advance(case.model, pool, [(row, 1)])
    assert row.ids == expected


def test_bfloat16_follows_fp32(case):
    model = load_model(case.checkpoint.folder, case.spec, torch.bfloat16)
    ids, pool = case.ids(60), KVPool(case.spec, 60, torch.bfloat16)
    row = Row(ids, scattered(60))
    logits = torch.cat(advance(model, pool, [(row, 50)]) + advance(model, pool, [(row, 9)]))
    reference = case.checkpoint.logits(ids)[:59]
    assert logits.dtype == torch.float32
    # rounding may flip an expert now and then: judged on the median, relative to the spread
    assert ((logits - reference).abs().median() / reference.std()) < 0.03
