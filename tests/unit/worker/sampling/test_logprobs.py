from __future__ import annotations

import pytest
import torch

from core.wire import SamplingParams
from worker.plan import SampleRow
from worker.sampling.logprobs import logprobs

LOGITS = torch.randn(3, 30, generator=torch.Generator().manual_seed(3)) * 5


def rows(*tops: int | None) -> tuple[SampleRow, ...]:
    """One row per number of alternatives; None asks for no log-probabilities."""
    return tuple(
        SampleRow(
            i,
            0,
            SamplingParams(
                max_new_tokens=1,
                temperature=0.5,  # of no influence: the model's own distribution is reported
                logprobs=top is not None,
                top_logprobs=top or 0,
            ),
        )
        for i, top in enumerate(tops)
    )


def test_chosen_tokens_have_the_log_softmax_of_their_logits():
    tokens = torch.tensor([4, 0, 29])
    found = logprobs(LOGITS, tokens, rows(0, 0, 0))
    wanted = LOGITS.log_softmax(-1)
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(float(wanted[i, tokens[i]]), abs=1e-5)
        assert one.top == ()


def test_alternatives_are_the_best_ones_best_first():
    (one,) = logprobs(LOGITS[:1], torch.tensor([4]), rows(20))
    values, ids = LOGITS[0].log_softmax(-1).topk(20)
    assert [top.token_id for top in one.top] == ids.tolist()
    assert [top.logprob for top in one.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_who_did_not_ask_gets_none():
    found = logprobs(LOGITS, torch.tensor([1, 2, 3]), rows(0, None, 2))
    assert [one is None for one in found] == [False, True, False]
    assert len(found[2].top) == 2
