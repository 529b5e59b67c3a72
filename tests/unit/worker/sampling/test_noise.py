"""The random numbers: Random123's own answers, and what the sampler needs of them."""

from __future__ import annotations

import pytest
import torch

from worker.sampling.noise import philox, uniform

ONES = 2**32 - 1
# counter, key, words: the file kat_vectors of Random123
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_philox_gives_the_published_words(counter, key, words):
    found = philox(tuple(torch.tensor([word, word]) for word in counter), key)
    assert [word.tolist() for word in found] == [[word, word] for word in words]


def test_each_token_has_a_word_of_its_own():
    words = philox(tuple(torch.tensor([word]) for word in (16 + 5, 7, 3, 0)), (9, 2))
    numbers = uniform(seed=9 + 2 * 2**32, position=7 + 3 * 2**32, vocab=128)
    for word in range(4):
        assert numbers[64 + 16 * word + 5] == (int(words[word]) + 0.5) / 2**32


def test_numbers_are_uniform():
    numbers = uniform(seed=1, position=2, vocab=200_000)
    assert 0 < float(numbers.min()) < 1e-4 < 1 - 1e-4 < float(numbers.max()) < 1
    counts = torch.histc(numbers, bins=100, min=0, max=1)
    assert float(((counts - 2000) ** 2 / 2000).sum()) < 161  # one in ten thousand for 99 degrees


def test_a_longer_vocabulary_adds_numbers():
    assert torch.equal(uniform(3, 1, 1000)[:70], uniform(3, 1, 70))


@pytest.mark.parametrize("other", [(4, 5), (3, 6), (3 + 2**32, 5), (3, 5 + 2**32), (-3, 5)])
def test_seeds_and_positions_share_no_number(other):
    here, there = uniform(3, 5, 256), uniform(*other, 256)
    assert not set(here.tolist()) & set(there.tolist())


def test_seeds_are_the_same_modulo_two_to_the_64():
    assert torch.equal(uniform(-1, 0, 100), uniform(2**64 - 1, 0, 100))
