"""What the host writes for the GPU sampler: for each row of a step a record, and the entries of its penalty window.

Nothing here may cost what a step is long: what stays the same from step to step is packed once a request, and a window
is counted and sorted by a compiled function.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..jit import njit
from ..params import GenParams
from ..rows import Draw, Float32, Int32
from .tables import COUNT_SHIFT, PACKING, RECORD, WINDOW_WORDS, WORDS, Shape, word

Bias = tuple[tuple[int, float], ...]
STEP, STEP_AT = struct.Struct("<Qii"), 4 * word("index")  # index, place, late: the fields that a step changes
KEPT_PARAMS = 64  # requests whose parameters are kept beyond one a row


class Memory(Protocol):
    """Device memory as far as bias lists need it."""

    def upload(self, values: NDArray) -> Any: ...  # has .address

    def free(self, buffer: Any) -> None: ...


def sorted_bias(bias: Bias) -> tuple[Int32, Float32]:
    """The ids of a bias list, ascending, and their values; entries of one id stay in their order."""
    ids = np.array([token for token, _ in bias], np.int32)
    order = np.argsort(ids, kind="stable")
    return ids[order], np.array([value for _, value in bias], np.float32)[order]


def is_plain(draws: Sequence[Draw]) -> bool:
    """True if the arg-max of the raw logits is all that these rows ask for."""
    return all(
        not (p.sampled or p.penalised or p.logit_bias or p.logprobs is not None) for p in (d.params for d in draws)
    )


def record_of(params: GenParams, bias_places: tuple[int, int] = (0, 0)) -> bytes:
    """A request's RECORD without what a step changes. ValueError if a sampled request has no seed."""
    if params.sampled and params.seed is None:
        raise ValueError("a sampled row needs a seed")
    min_p_log = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    adjusted = params.penalised or len(params.logit_bias) > 0
    alternatives = -1 if params.logprobs is None else params.logprobs
    keep = params.top_k if params.sampled else 1
    fields = (
        *(params.temperature, params.top_p, params.seed or 0, 0, 0, 0, *bias_places, min_p_log),
        *(params.penalty_repeat, params.penalty_freq, params.penalty_present),
        *(keep if adjusted else max(keep, alternatives), params.top_k, alternatives),
        *(len(params.logit_bias), 2 if adjusted and alternatives > 0 else 1),
    )
    return PACKING.pack(*fields).ljust(RECORD.itemsize, b"\0")


@njit(nogil=True, cache=True)
def sort_window(history, last_n, segment, counts, seen, words, starts, blocks, used):
    """Count the last `last_n` tokens of `history` and write the entries of each block from words[used] on.

    words[starts : starts + blocks + 1] take their bounds. Gives back (the word behind the last entry, the record's
    `late`); -1 for the latter where two tokens are unknown. counts [vocab] is zero before and after.
    """
    late, distinct = 0, 0
    words[starts : starts + blocks + 1] = 0
    for i in range(max(0, len(history) - last_n), len(history)):
        token = history[i]
        if token < 0:
            late = -token if late == 0 else -1
            continue
        if counts[token] == 0:
            seen[distinct] = token
            distinct += 1
            words[starts + token // segment] += 1
        counts[token] += 1
    end = used
    for block in range(blocks):
        end += words[starts + block]
        words[starts + block] = end
    words[starts + blocks] = end
    for i in range(distinct):
        token = seen[i]
        block = token // segment
        at = words[starts + block] - 1
        words[starts + block] = at
        words[at] = counts[token] << COUNT_SHIFT | token - block * segment
        counts[token] = 0
    return end, late


@dataclass(slots=True)
class _Kept:
    """What a request brings in every step."""

    params: GenParams
    row: bytes  # of `Requests`, without entries
    last_n: int  # 0 without penalties
    biases: tuple[Any, ...]  # buffers on the device


class Packer:
    """Writes the `Requests` of a step. `memory` takes bias lists. One thread at a time."""

    def __init__(self, vocab: int, max_rows: int, shape: Shape, memory: Memory) -> None:
        self.stride, self.max_rows = shape.stride(vocab), max_rows
        self._segment, self._blocks, self._memory = shape.segment, shape.blocks(vocab), memory
        self._counts, self._seen = np.zeros(vocab, np.uint16), np.empty(WINDOW_WORDS, np.int32)
        self._kept: dict[int, _Kept] = {}
        self._sort(np.empty(0, np.int32), 0, np.empty(self.stride, np.int32), 0, 0)  # compiles it

    def pack(self, draws: Sequence[Draw], rows: int, out: Int32, first_place: int = 0) -> int:
        """Write `rows` rows into `out`, as large as Shape.words says; those past the draws stand for no row.

        Gives back how many words it took. The choices go to the places from `first_place` on. ValueError if there are
        too many draws, a sampled one has no seed or a window has two tokens that are not known yet (below 0: -1 - their
        place among the step before's).
        """
        if not len(draws) <= rows <= self.max_rows:
            raise ValueError(f"{len(draws)} draws, but buffers for {rows} of {self.max_rows} rows")
        memory, stride, used = out.view(np.uint8).data, self.stride, rows * self.stride
        for row, draw in enumerate(draws):
            kept, at, late = self._find(draw.params), row * stride, 0
            memory[4 * at : 4 * (at + stride)] = kept.row
            if kept.last_n:
                used, late = self._sort(draw.history, kept.last_n, out, at + WORDS, used)
            STEP.pack_into(memory, 4 * at + STEP_AT, draw.index, first_place + row, late)
        out[len(draws) * stride : rows * stride] = 0
        return used

    def _sort(self, history: Int32, last_n: int, out: Int32, starts: int, used: int) -> tuple[int, int]:
        end, late = sort_window(
            history, last_n, self._segment, self._counts, self._seen, out, starts, self._blocks, used
        )
        if late < 0:
            raise ValueError("a penalty window has more than one token that is not known yet")
        return end, late

    def _find(self, params: GenParams) -> _Kept:
        """What is kept of a request; the one used last stands last."""
        kept = self._kept.pop(id(params), None) or self._keep(params)
        self._kept[id(params)] = kept
        return kept

    def _keep(self, params: GenParams) -> _Kept:
        while len(self._kept) >= self.max_rows + KEPT_PARAMS:
            self._drop(next(iter(self._kept)))
        record_of(params)  # refuses before anything is uploaded
        biases = tuple(self._memory.upload(v) for v in sorted_bias(params.logit_bias)) if params.logit_bias else ()
        record = record_of(params, (biases[0].address, biases[1].address) if biases else (0, 0))
        row = record.ljust(4 * self.stride, b"\0")
        return _Kept(params, row, params.penalty_last_n if params.penalised else 0, biases)

    def _drop(self, key: int) -> None:
        for buffer in self._kept.pop(key).biases:
            self._memory.free(buffer)

    def close(self) -> None:
        """Free the bias lists."""
        for key in list(self._kept):
            self._drop(key)
