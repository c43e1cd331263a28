"""Philox4x32-10 in plain Python: the uniform numbers of the sampling chain.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), and the known answers
published with its library Random123. The generator is a function of (key, counter) and holds no state, so a draw
depends on the seed and the token's position alone.
"""

from __future__ import annotations

import numpy as np

ROUNDS = 10
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85  # added to the key after each round
WORD = 0xFFFFFFFF

Counter = tuple[int, int, int, int]


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """The four 32-bit words that Philox4x32-10 gives for a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product_0, product_1 = MULTIPLIER_0 * c0, MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & WORD, (product_0 >> 32) ^ c3 ^ k1, product_0 & WORD
        k0, k1 = (k0 + WEYL_0) & WORD, (k1 + WEYL_1) & WORD
    return c0, c1, c2, c3


def uniform(seed: int, draw: int) -> np.float32:
    """The number in [0, 1) of draw index `draw` (0..2^64-1) under `seed` (0..2^64-1): a multiple of 2^-24."""
    words = philox4x32((draw & WORD, draw >> 32, 0, 0), (seed & WORD, seed >> 32))
    return np.float32((words[0] >> 8) * 2.0**-24)
