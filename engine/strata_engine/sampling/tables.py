"""The device buffers that the sampling kernels share: what each holds, and the shape of a launch.

A row of `Requests` is one RECORD, with FIELDS in their order, which the host writes before a replay; nothing about a
request is captured.
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
ENTRIES = 1 + LOGPROBS_MAX  # log-probabilities a row: the chosen token's, the alternatives'
HEAD = 4  # int32 a row of Outcome.heads: token, tokens kept, alternatives, unused

FIELDS = (
    ("temperature", "f8"),
    ("top_p", "f8"),
    ("seed", "u8"),
    ("index", "u8"),
    ("bias_ids", "u8"),  # device address; ids ascending
    ("bias_values", "u8"),  # device address
    ("min_p_log", "f4"),  # log(min_p), -inf where min_p is off
    ("repeat", "f4"),
    ("freq", "f4"),
    ("present", "f4"),
    ("keep", "i4"),  # candidates of list 0 to keep, at least: 1..64; 0: no such row
    ("k", "i4"),  # top_k
    ("alternatives", "i4"),  # log-probabilities beside the chosen token's; -1: none at all
    ("window", "i4"),  # where the penalty window starts in `windows`: a multiple of 4; filled up to one with -1
    ("length", "i4"),  # tokens in the penalty window
    ("biases", "i4"),
    ("lists", "i4"),  # 2 if the raw candidates are wanted and differ from the adjusted ones
)
RECORD_BYTES = 128
RECORD = np.dtype({"names": [n for n, _ in FIELDS], "formats": [f for _, f in FIELDS], "itemsize": RECORD_BYTES})
PACKING = struct.Struct("<" + "".join({"f8": "d", "u8": "Q", "f4": "f", "i4": "i"}[f] for _, f in FIELDS))
WORDS = RECORD.itemsize // 4  # 32


def word(field: str) -> int:
    """Where a field of a record stands, in 32-bit words."""
    fields: Any = RECORD.fields
    return fields[field][1] // 4


class Requests(NamedTuple):
    """The rows' parameters: RECORD [rows] under three types, and the penalty windows end to end, int32."""

    reals: Any  # float64*
    floats: Any  # float32*
    ints: Any  # int32*
    windows: Any  # int32*


class Scratch(NamedTuple):
    """What the candidate stage leaves for the merge stage."""

    candidates: Any  # uint64* [rows, LISTS, blocks, CAPACITY]: ordered logit in the upper half, 2^32 - 1 - id below
    counts: Any  # int32* [rows, LISTS, blocks]
    partials: Any  # float32* [rows, blocks, 2]: the largest raw logit, the sum of exp(logit - largest)
    tickets: Any  # int32* [rows]: arg_max's blocks that are done; 0 before and after a launch


class Outcome(NamedTuple):
    """The choices."""

    tokens: Any  # int32* [rows], for kernels that go on from here
    heads: Any  # int32* [rows, HEAD]
    ids: Any  # int32* [rows, LOGPROBS_MAX]: the alternatives, best first
    logprobs: Any  # float64* [rows, ENTRIES]: of the chosen token, of the alternatives


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

    @property
    def merging(self) -> Shape:
        """The same segments with twice the threads: what the merge stage runs with."""
        return Shape(2 * self.threads, self.vectors // 2, self.wide)

    @property
    def name(self) -> str:
        return f"{self.threads}_{self.vectors}_{'wide' if self.wide else 'narrow'}"


WINDOW_WORDS = PENALTY_LAST_N_MAX  # room a row of `windows`
KEEP_MAX = TOP_K_MAX
