"""The device buffers that the sampling kernels share: what each holds, and the shape of a launch.

A row of `Requests` is one RECORD, with FIELDS in their order, and where the entries of each of its blocks begin and the
last one's end, blocks + 1 int32. The host writes them before a replay; nothing about a request is captured. An *entry*
is a token of the row's penalty window: its index in its block's segment, and how often it came from bit COUNT_SHIFT on.
The entries of all rows stand behind the last row.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..params import LOGPROBS_MAX, PENALTY_LAST_N_MAX, TOP_K_MAX

CAPACITY = 256  # candidates that a block of threads may leave
MAX_BLOCKS = 128  # blocks a row
LISTS = 2  # candidate lists a row: by adjusted logits, by raw logits
ENTRIES = 1 + LOGPROBS_MAX  # log-probabilities a place: the chosen token's, the alternatives'
HEAD = 4  # int32 a place of Outcome.heads: token, tokens kept, alternatives, unused

FIELDS = (
    ("temperature", "f8"),
    ("top_p", "f8"),
    ("seed", "u8"),
    ("index", "u8"),
    ("place", "i4"),  # the row of Outcome that takes the choice
    ("late", "i4"),  # 1 + the place in `chosen` of a token of the window that the host does not know yet; 0: none
    ("bias_ids", "u8"),  # device address; ids ascending
    ("bias_values", "u8"),  # device address
    ("min_p_log", "f4"),  # log(min_p), -inf where min_p is off
    ("repeat", "f4"),
    ("freq", "f4"),
    ("present", "f4"),
    ("keep", "i4"),  # candidates of list 0 to keep, at least: 1..64; 0: no such row
    ("k", "i4"),  # top_k
    ("alternatives", "i4"),  # log-probabilities beside the chosen token's; -1: none at all
    ("biases", "i4"),
    ("lists", "i4"),  # 2 if the raw candidates are wanted and differ from the adjusted ones
)
RECORD_BYTES = 128
RECORD = np.dtype({"names": [n for n, _ in FIELDS], "formats": [f for _, f in FIELDS], "itemsize": RECORD_BYTES})
PACKING = struct.Struct("<" + "".join({"f8": "d", "u8": "Q", "f4": "f", "i4": "i"}[f] for _, f in FIELDS))
WORDS = RECORD.itemsize // 4  # 32
COUNT_SHIFT = 16


def word(field: str) -> int:
    """Where a field of a record stands, in 32-bit words."""
    fields: Any = RECORD.fields
    return fields[field][1] // 4


class Requests(NamedTuple):
    """The rows' parameters under three types, and the last step's tokens."""

    reals: Any  # float64*
    floats: Any  # float32*
    ints: Any  # int32*
    stride: Any  # words from a row to the next
    chosen: Any  # int32* [rows]: the tokens of the step before, which this step's replace


class Scratch(NamedTuple):
    """What the candidate stage leaves for the merge stage."""

    candidates: Any  # uint64* [rows, LISTS, blocks, CAPACITY]: ordered logit in the upper half, 2^32 - 1 - id below
    counts: Any  # int32* [rows, LISTS, blocks]
    partials: Any  # float32* [rows, blocks, 2]: the largest raw logit, the sum of exp(logit - largest)


class Outcome(NamedTuple):
    """The choices, where the host reads them."""

    heads: Any  # int32* [places, HEAD]
    ids: Any  # int32* [places, LOGPROBS_MAX]: the alternatives, best first
    logprobs: Any  # float64* [places, ENTRIES]: of the chosen token, of the alternatives


@dataclass(frozen=True, slots=True)
class Shape:
    """How a row is cut into blocks: each has `threads` threads, which hold 4 * `vectors` logits each."""

    threads: int = 256
    vectors: int = 8
    wide: bool = True  # rows start at multiples of 16 bytes: vocab % 4 == 0

    @property
    def segment(self) -> int:
        """Logits a block."""
        return 4 * self.threads * self.vectors

    def blocks(self, vocab: int) -> int:
        return -(-vocab // self.segment)

    def stride(self, vocab: int) -> int:
        """Words of a row of `Requests`."""
        return WORDS + -(-(self.blocks(vocab) + 1) // 4) * 4

    def words(self, vocab: int, rows: int) -> int:
        """The most 32-bit words that `Requests` of `rows` rows take, windows included."""
        return rows * (self.stride(vocab) + WINDOW_WORDS)

    @property
    def merging(self) -> Shape:
        """The same segments with twice the threads: what the merge stage runs with."""
        return Shape(2 * self.threads, self.vectors // 2, self.wide)

    @property
    def name(self) -> str:
        return f"{self.threads}_{self.vectors}_{'wide' if self.wide else 'narrow'}"


WINDOW_WORDS = PENALTY_LAST_N_MAX  # most entries a row
KEEP_MAX = TOP_K_MAX
