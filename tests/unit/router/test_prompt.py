"""Where the tokens of an echoed prompt begin, and what is known of them."""

from __future__ import annotations

from typing import Any

import pytest

from core.wire import SamplingParams, TokenLogprob, TopLogprob
from router.prompt import PromptReader
from router.text.request import TextRequest
from router.text.tokenizer import BytesTokenizer

SCORE = TokenLogprob(logprob=-1.5, top=(TopLogprob(token_id=66, logprob=-0.5),))


class SpacedTokenizer(BytesTokenizer):
    """Bytes, but 256 is a special ``<s>``, and a text's first space is the encoding's."""

    strips_first_space = True

    def token_bytes(self, token_id: int) -> bytes:
        return b"<s>" if token_id == 256 else super().token_bytes(token_id)


def reader(prompt: Any, ids: list[int], tokenizer: Any = None, **fields: Any) -> PromptReader:
    request = TextRequest(
        rid="r", prompts=(prompt,), sampling=SamplingParams(max_new_tokens=0), **fields
    )
    return PromptReader(request, tokenizer or BytesTokenizer(), prompt, ids)


def offsets(read: PromptReader, count: int) -> list[int]:
    read.take([SCORE] * (count - 1))
    return [token.offset for token in read.read().rest]


def test_tokens_of_one_character_begin_where_it_begins():
    ids = list("aéb".encode())
    read = reader("aéb", ids, echo=True)
    assert offsets(read, len(ids)) == [1, 1, 2]
    assert read.read().text == "aéb"


@pytest.mark.parametrize(
    ("text", "ids", "expected"),
    [
        ("hi", [256, *b" hi"], [0, 0, 1]),  # <s> and the space are the tokenizer's
        ("<s>hi", [256, *b"hi"], [3, 4]),  # here the caller wrote it
        (" hi", [*b"  hi"], [0, 1, 2]),
    ],
)
def test_what_the_tokenizer_added_is_not_in_the_text(text, ids, expected):
    read = reader(text, ids, SpacedTokenizer(), echo=True)
    assert offsets(read, len(ids)) == expected
    assert read.read().text == text


@pytest.mark.parametrize(
    ("skip", "text", "expected"), [(True, "hi", [0, 0, 1]), (False, "<s> hi", [3, 4, 5])]
)
def test_token_ids_are_shown_as_output_would_be(skip, text, expected):
    ids = (256, *b" hi")
    read = reader(ids, list(ids), SpacedTokenizer(), echo=True, skip_special=skip)
    assert read.read().text == text
    assert offsets(read, len(ids)) == expected


def test_the_first_token_has_no_score_and_the_text_is_for_echo_alone():
    read = reader("ab", [97, 98])
    assert (read.read().text, read.read().first.data, read.read().rest) == ("", b"a", ())
    read.take([SCORE])
    (token,) = read.read().rest
    assert (token.token_id, token.data, token.logprob) == (98, b"b", -1.5)
    assert [(t.token_id, t.text, t.logprob) for t in token.top] == [(66, "B", -0.5)]
