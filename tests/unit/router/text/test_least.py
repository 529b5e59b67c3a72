"""The lower bound for tokens is never above the truth, and not silly where it is known."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, strategies as st

from router.text.least import LeastTokens, read_least
from router.text.token_bytes import byte_characters, read_decoder
from router.text.tokenizer import BytesTokenizer, open_hf

TINY = open_hf(Path("models/tiny-moe"))
BYTES = sorted(byte_characters())


def byte_level(*longer: str, without: str = "", normalizer=None) -> tokenizers.Tokenizer:
    """Every byte but those of ``without``, and merges that make each of ``longer``."""
    entries = [c for c in BYTES if c not in without]
    merges = []
    for word in longer:
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            entries.append(word[:end])
    vocab = {word: i for i, word in enumerate(dict.fromkeys(entries))}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    if normalizer is not None:
        inner.normalizer = normalizer
    return inner


def least_of(inner: tokenizers.Tokenizer, **changes) -> LeastTokens:
    raw = inner.to_str()
    description = json.loads(raw) | changes
    return read_least(description, read_decoder(raw, Path("x")), inner.get_vocab())


@given(st.text())
def test_it_is_never_more_than_there_are(text):
    assert TINY.least_tokens(text) <= len(TINY.encode(text, add_special=False))
    assert BytesTokenizer().least_tokens(text) <= len(text.encode())
    for inner, least in KNOWN:
        assert least.of(text) <= len(inner.encode(text, add_special_tokens=False).ids)


KNOWN = [
    (inner, least_of(inner))
    for inner in (
        byte_level("abcabc"),
        byte_level("cdcd", without="a\u0104"),
        byte_level("Ã¡b", normalizer=tokenizers.normalizers.NFC()),
    )
]


def test_it_is_the_length_in_the_longest_tokens():
    assert [least for _, least in KNOWN] == [
        LeastTokens(6),
        LeastTokens(4, b"a\x04"),
        LeastTokens(9),
    ]
    assert least_of(byte_level("abcabc")).of("x" * 13) == 3
    assert TINY.least_tokens("x" * 15_000) == 1000


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_composing_shrinks_no_more_than_assumed(text):
    assert 3 * len(unicodedata.normalize("NFC", text).encode()) >= len(text.encode())


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFKC"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "ab"}, "content": "a"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "a"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}},
        {"added_tokens": [{"id": 1, "content": "<x>", "lstrip": False, "rstrip": True}]},
    ],
)
def test_nothing_is_known_where_a_step_drops_text(changes):
    assert least_of(byte_level("abc"), **changes) == LeastTokens()
    assert LeastTokens().of("x" * 1000) == 0


def test_nothing_is_known_where_characters_may_share_a_token():
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    assert least_of(words) == LeastTokens()
    composing = byte_level("cd", without="a", normalizer=tokenizers.normalizers.NFC())
    assert least_of(composing) == LeastTokens()
