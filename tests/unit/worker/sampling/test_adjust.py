"""Bias, penalties and minimum length against a slow reference, and against transformers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from hypothesis import given, strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from core.wire import SamplingParams
from worker.plan import SampleRow
from worker.sampling.adjust import adjust

VOCAB = 12
EOS = frozenset({3})
ids = st.lists(st.integers(0, VOCAB - 1), max_size=20)


def row(prompt: list[int], output: list[int], **params) -> SampleRow:
    return SampleRow(
        0,
        len(output),
        SamplingParams(max_new_tokens=99, **params),
        np.array(prompt, np.int32),
        np.array(output, np.int32),
    )


def slow(logits: list[float], sample: SampleRow) -> list[float]:
    params, out = sample.params, list(logits)
    for token, amount in params.logit_bias:
        out[token] += amount
    for token in {*sample.prompt.tolist(), *sample.output.tolist()}:
        penalty = params.repetition_penalty
        out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in Counter(sample.output.tolist()).items():
        out[token] -= params.presence_penalty + params.frequency_penalty * count
    if sample.position < params.min_new_tokens:
        for token in {*EOS, *params.stop_token_ids}:
            out[token] = -np.inf
    return out


@given(
    logits=st.lists(st.floats(-8, 8, width=32), min_size=VOCAB, max_size=VOCAB),
    prompt=ids,
    output=ids,
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, 0.7, -1.0]),
    frequency=st.sampled_from([0.0, 0.25]),
    bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.floats(-5, 5, width=32)), max_size=4),
    least=st.integers(0, 25),
)
def test_adjusted_logits_equal_the_slow_reference(
    logits, prompt, output, repetition, presence, frequency, bias, least
):
    sample = row(
        prompt,
        output,
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(bias),
        min_new_tokens=least,
        stop_token_ids=(5,),
    )
    before = torch.tensor([logits])
    after = adjust(before, (sample,), EOS)
    assert torch.equal(before, torch.tensor([logits])), "the model's own logits stay as they are"
    np.testing.assert_allclose(after[0].numpy(), slow(logits, sample), rtol=1e-4, atol=1e-4)


def test_repetition_penalty_is_transformers():
    logits = torch.linspace(-3, 3, VOCAB).unsqueeze(0)
    sample = row([1, 2, 9], [9, 11], repetition_penalty=1.7)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[1, 2, 9, 9, 11]]), logits.clone())
    assert torch.allclose(adjust(logits, (sample,), EOS), wanted)


def test_rows_that_ask_for_nothing_cost_nothing():
    logits = torch.zeros(2, VOCAB)
    assert adjust(logits, (row([1], [2]), row([], [])), EOS) is logits


def test_only_the_asking_row_changes():
    logits = torch.zeros(2, VOCAB)
    out = adjust(logits, (row([], []), row([], [4], presence_penalty=1.0)), EOS)
    assert torch.equal(out[0], logits[0])
    assert out[1, 4] == -1
