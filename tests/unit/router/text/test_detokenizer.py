from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from router.text.detokenizer import Detokenizer
from router.text.tokenizer import BytesTokenizer, Tokenizer, decode, open_hf

TINY = Path("models/tiny-moe")
HF = open_hf(TINY)
TOKENIZERS: list[Tokenizer] = [HF, BytesTokenizer()]

kinds = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["hf", "bytes"])
texts = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


def cut(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """``ids`` in chunks of the given sizes, the rest at the end."""
    chunks = []
    for size in sizes:
        chunks.append(ids[:size])
        ids = ids[size:]
    return [*chunks, ids]


def pushed(tokenizer: Tokenizer, chunks: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


@kinds
@given(text=texts, sizes=st.lists(st.integers(0, 4), max_size=40))
def test_chunks_join_to_the_text_in_whole_characters(tokenizer, text, sizes):
    parts = pushed(tokenizer, cut(tokenizer.encode(text, add_special=False), sizes))
    assert "".join(parts) == text
    position = 0
    for part in parts:  # each part is a run of the text's own characters: none was broken
        assert text[position : position + len(part)] == part
        position += len(part)


@kinds
@given(data=st.data(), sizes=st.lists(st.integers(0, 4), max_size=40))
def test_random_ids_join_to_the_decoded_whole(tokenizer, data, sizes):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    assert "".join(pushed(tokenizer, cut(ids, sizes))) == decode(tokenizer, ids)


@given(ids=st.lists(st.integers(0, HF.vocab_size - 1), max_size=40), skip=st.booleans())
def test_decoding_is_what_the_tokenizers_library_does(ids, skip):
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(TINY / "tokenizer.json"))
    assert decode(HF, ids, skip_special=skip) == reference.decode(ids, skip_special_tokens=skip)


def test_a_character_is_shown_with_its_last_byte():
    detokenizer = Detokenizer(BytesTokenizer())
    shown = [detokenizer.push([byte]) for byte in "a🙂é".encode()]
    assert shown == ["a", "", "", "", "🙂", "", "é"]


def test_broken_bytes_do_not_stall_the_stream():
    detokenizer = Detokenizer(BytesTokenizer())
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.push([0x41]) == "\ufffdA"
    assert detokenizer.push([0xE6]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_shown_on_demand():
    ids = HF.encode("<|im_start|>hi", add_special=False)
    assert decode(HF, ids) == "hi"
    shown = Detokenizer(HF, skip_special=False)
    assert shown.push(ids) + shown.flush() == "<|im_start|>hi"
