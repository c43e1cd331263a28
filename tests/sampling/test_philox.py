"""Philox4x32-10 against the answers published with Random123, and the uniform numbers built on it."""

import numpy as np
import pytest

from strata_engine.sampling import cpu, philox

ONES = 0xFFFFFFFF
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS_AND_DRAWS = [(0, 0), (2**64 - 1, 2**64 - 1), (1 << 40, 2**32 + 7), (0x299F31D0A4093822, 3)]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words):
    assert philox.philox4x32(counter, key) == words


def test_uniform_is_the_top_24_bits_of_word_0():
    assert philox.uniform(0, 0) == np.float32((0x6627E8D5 >> 8) / 2**24)


def test_high_words_of_seed_and_draw_count():
    low = philox.uniform(1, 1)
    assert philox.uniform(1 + 2**32, 1) != low
    assert philox.uniform(1, 1 + 2**32) != low


@pytest.mark.parametrize(("seed", "draw"), SEEDS_AND_DRAWS)
def test_the_kernel_draws_the_same(seed, draw):
    assert cpu.uniform(np.uint64(seed), np.uint64(draw)) == philox.uniform(seed, draw)


def test_draws_are_spread_evenly():
    counts = np.bincount([int(philox.uniform(7, i) * 16) for i in range(16_000)], minlength=16)
    assert ((counts - 1000.0) ** 2 / 1000.0).sum() < 37.7  # chi-square, 15 degrees of freedom, p = 0.001
