from __future__ import annotations

import numpy as np
from hypothesis import given, strategies as st

from core.block_hash import BLOCK_TOKENS, block_hashes

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=5 * BLOCK_TOKENS).map(
    lambda ids: np.array(ids, dtype=np.int32)
)


def test_the_hash_is_stable():
    """Routers of different versions and caches on disk must agree."""
    ids = np.arange(2 * BLOCK_TOKENS, dtype=np.int32)
    assert list(block_hashes(ids)) == [1216237950307000921, 15748635035956623099]


@given(tokens, st.integers(0, 5 * BLOCK_TOKENS - 1))
def test_a_change_shows_from_its_block_on(ids, at):
    before = block_hashes(ids)
    assert len(before) == len(ids) // BLOCK_TOKENS
    if at < len(ids):
        ids[at] ^= 1
        after, block = block_hashes(ids), at // BLOCK_TOKENS
        assert after[:block] == before[:block]
        assert all(a != b for a, b in zip(after[block:], before[block:], strict=True))


@given(tokens, st.integers(0, 5))
def test_known_hashes_are_continued(ids, blocks):
    whole = block_hashes(ids)
    assert block_hashes(ids, known=whole[:blocks]) == whole


def test_a_salt_hides_every_block():
    ids = np.arange(10 * BLOCK_TOKENS, dtype=np.int32)
    plain, mine, other = (set(block_hashes(ids, salt)) for salt in ("", "mine", "other"))
    assert not plain & mine
    assert not plain & other
    assert not mine & other
    assert set(block_hashes(ids, "mine")) == mine


def test_views_and_other_integers_hash_alike():
    ids = np.arange(4 * BLOCK_TOKENS, dtype=np.int64)
    assert block_hashes(ids[::2]) == block_hashes(ids[::2].astype("<i4"))
