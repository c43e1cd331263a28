"""Memory on a real GPU."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the cuda extra")

from cuda.bindings import driver


@pytest.mark.parametrize("words", [2**14, 2**17 + 3, 2**21])
def test_what_is_written_does_not_arrive_after_later_work(device, words: int) -> None:
    """A plain copy of more than the driver stages at once returned while its end was on its way."""
    values = np.full(words, np.nan, np.float32)
    buffer = device.upload(values)
    for _ in range(100):
        device.write(buffer, values)
        (error,) = driver.cuMemsetD32Async(buffer.address, 0, words, device.stream)
        assert error == driver.CUresult.CUDA_SUCCESS
        assert not device.read(buffer, words, np.float32).any()
    device.free(buffer)
