"""What the host writes for the GPU sampler: a record and a penalty window for each row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ..rows import Draw, Float32, Int32
from .tables import PACKING, RECORD

Bias = tuple[tuple[int, float], ...]
BiasPlace = Callable[[Bias], tuple[int, int]]  # a bias list -> device addresses of its ids and values


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


def pack(draws: Sequence[Draw], records: NDArray, windows: Int32, bias_place: BiasPlace) -> int:
    """Write RECORD `records` [>= rows] and penalty windows (end to end, each filled up to a multiple of 4 with -1).

    Records past the draws stand for no row. How many words of `windows` are used. ValueError if a sampled row has no
    seed.
    """
    used, memory = 0, records.view(np.uint8).data
    for i, draw in enumerate(draws):
        params = draw.params
        window = draw.history[-params.penalty_last_n :] if params.penalised else draw.history[:0]
        end = used + len(window)
        windows[used:end] = window
        places = bias_place(params.logit_bias) if params.logit_bias else (0, 0)
        PACKING.pack_into(memory, i * RECORD.itemsize, *_fields(draw, places, used, len(window)))
        used = -(-end // 4) * 4
        windows[end:used] = -1
    records["keep"][len(draws) :] = 0
    return used


def _fields(draw: Draw, bias_places: tuple[int, int], start: int, length: int) -> tuple[float, ...]:
    """The fields of a record; `start` and `length` of the penalty window."""
    params = draw.params
    if params.sampled and params.seed is None:
        raise ValueError("a sampled row needs a seed")
    seed, index = (params.seed or 0, draw.index) if params.sampled else (0, 0)
    min_p_log = math.log(params.min_p) if params.min_p > 0.0 else -math.inf
    adjusted = length > 0 or len(params.logit_bias) > 0
    alternatives = -1 if params.logprobs is None else params.logprobs
    keep = params.top_k if params.sampled else 1
    return (
        *(params.temperature, params.top_p, seed, index, *bias_places, min_p_log),
        *(params.penalty_repeat, params.penalty_freq, params.penalty_present),
        *(keep if adjusted else max(keep, alternatives), params.top_k, alternatives),
        *(start, length, len(params.logit_bias), 2 if adjusted and alternatives > 0 else 1),
    )
