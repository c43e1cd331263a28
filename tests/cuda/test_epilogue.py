"""What the device functions behind a matmul do to memory, run as plain Python."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba.cuda", reason="needs the cuda extra")

from strata_engine.backends.cuda import epilogue
from strata_engine.backends.cuda.shapes import CELLS, Heads

HEADS, KV_HEADS, DIM = 2, 1, 10  # 40 features: the third tile holds 8 that do not exist


@pytest.fixture
def store(monkeypatch):
    """`store_head_pair` on NumPy arrays; the low halves are zero."""

    def halves(a: float, b: float) -> tuple[int, int]:
        low, high = np.array([a, b], np.float16).view(np.uint16)
        return int(low) | int(high) << 16, 0

    for name, twin in {"fma": lambda a, b, c: a * b + c, "mul": lambda a, b: a * b, "split_pair": halves}.items():
        monkeypatch.setattr(epilogue, name, twin)
    return epilogue.store_head_pair.py_func


def heads_of_one_page() -> Heads:
    queries, keys = np.zeros(64, np.uint32), np.zeros(CELLS * DIM // 2, np.uint32)
    values, none = np.zeros(CELLS * DIM, np.uint16), np.zeros(1)
    return Heads(queries, keys, values, none, none, none, HEADS, KV_HEADS, DIM, DIM, DIM, 0, 1, 1.0)


def test_each_feature_goes_to_its_place_and_padding_nowhere(store) -> None:
    out, cell = heads_of_one_page(), 7
    for feature in range(0, 48, 2):
        store(out, (0, cell, 1.0, 0.0), feature + 1, feature + 2, feature, 0)
    queries, keys = out.queries.view(np.float16), out.keys.view(np.float16).reshape(CELLS, DIM)
    values = out.values.view(np.float16).reshape(DIM, CELLS)
    assert queries[: HEADS * DIM].tolist() == list(range(1, 21))
    assert keys[cell].tolist() == list(range(21, 31)) and values[:, cell].tolist() == list(range(31, 41))
    assert np.count_nonzero(keys) == np.count_nonzero(values) == DIM
