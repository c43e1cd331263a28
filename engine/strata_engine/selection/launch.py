"""Run the selection kernels on a stream."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.core import EventOptions

from . import dispatch
from .ptx import THREADS, cuda
from .reference import Float32, Int32
from .sample import SPLITS, sample, window
from .steps import CANDIDATES
from .wide import wide


class BlockTopK:
    """Block top-k for calls of up to `queries` queries: its scratch memory and its launches.

    A launch reads everything from device memory (scores, records, active count), and its grid depends on nothing but
    the number of queries and the kernel: it can be captured in a graph and replayed over other contexts. Launches of
    one object must not overlap: they share scratch memory.
    """

    def __init__(self, queries: int, max_blocks: int) -> None:
        shared = min(queries, dispatch.MAX_WINDOW)
        self.queries, self.max_blocks = queries, max_blocks
        self.flags = cuda.to_device(np.zeros(queries, dtype=np.int32))  # 1: the last launch fell back to `wide`
        self._all_blocks = cuda.to_device(np.array([max_blocks], dtype=np.int32))
        self._parts = cuda.device_array((shared, SPLITS, 2 * CANDIDATES), dtype=np.uint32)
        self._counts = cuda.device_array((shared, SPLITS), dtype=np.int32)
        self._done = cuda.to_device(np.zeros((shared, 1), dtype=np.int32))
        cuda.synchronize()  # the stream of a launch may not wait for these copies

    def launch(
        self,
        scores: Any,
        records: Any,
        ids: Any,
        active: Any = None,
        active_blocks: int | None = None,
        kernel: str | None = None,
        stream: Any = 0,
    ) -> None:
        """Select; asynchronous.

        Args:
            scores: device float32 [queries, max_blocks], C order; max_blocks a multiple of 4.
            records: device int32 [queries, 4], see `reference.step_records`.
            ids: device int32 [queries, cap]; row q is written up to query q's width.
            active: device int32 [1], blocks of a row that hold scores; None is all.
            active_blocks: the host's guess of the longest context, in blocks, to choose the kernel by; it changes
                the speed alone. None is max_blocks.
            kernel: one of `dispatch.KERNELS` instead of the choice.
            stream: whatever numba launches on, a graph builder of cuda.core included. It may not wait for the default
                stream: copies into the buffers that ran there must be done.

        Raises:
            ValueError: a buffer does not fit.
        """
        self._check(scores, records, ids)
        queries = scores.shape[0]
        name = kernel or dispatch.choose(queries, active_blocks or self.max_blocks, self.max_blocks)
        active = self._all_blocks if active is None else active
        if name == "wide":
            wide[queries, THREADS, stream](scores, records, active, ids)
        elif name == "sample":
            sample[queries, THREADS, stream](scores, records, active, ids, self.flags)
        elif name == "window" and queries <= len(self._parts):
            scratch = (self._parts, self._counts, self._done)
            window[(SPLITS, queries), THREADS, stream](scores, records, active, ids, self.flags, *scratch)
        else:
            raise ValueError(f"no kernel {name!r} for {queries} queries")

    def _check(self, scores: Any, records: Any, ids: Any) -> None:
        queries = scores.shape[0]
        if scores.shape[1] != self.max_blocks or self.max_blocks % 4:
            raise ValueError(f"scores have {scores.shape[1]} blocks a row, expected {self.max_blocks}, a multiple of 4")
        if queries > self.queries or records.shape != (queries, 4) or ids.shape[0] != queries:
            raise ValueError(f"{queries} queries (at most {self.queries}), {len(records)} records, {len(ids)} id rows")


def capture(stream: Any, launches: Callable[[Any], None]) -> Any:
    """A graph of what `launches(stream)` launches; replay it with `graph.launch(stream)`.

    stream: a cuda.core Stream. Kernels must have run once before: compiling cannot be captured.
    """
    builder = stream.create_graph_builder()
    builder.begin_building()
    launches(builder)
    return builder.end_building().complete()


def replay_us(stream: Any, graph: Any, reps: int, before: Any = None) -> float:
    """The median time of a replay of `graph`, in us, by events around it; the graph `before` runs ahead of each."""
    options = EventOptions(timing_enabled=True)
    pairs = []
    for _ in range(reps + 3):
        if before is not None:
            before.launch(stream)
        start = stream.record(options=options)
        graph.launch(stream)
        pairs.append((start, stream.record(options=options)))
    stream.sync()
    return 1e3 * statistics.median(end - start for start, end in pairs[3:])


def select_rows(
    scores: Float32, records: Int32, ids: Int32, active: int | None = None, kernel: str | None = None
) -> Int32:
    """Select on the GPU from host arrays, as `reference.select_rows`; returns the flags, int32 [queries]."""
    queries, blocks = scores.shape
    padded = np.zeros((queries, -(-blocks // 4) * 4), dtype=np.float32)
    padded[:, :blocks] = scores
    topk = BlockTopK(queries, padded.shape[1])
    device_ids = cuda.to_device(ids)
    count = cuda.to_device(np.array([blocks if active is None else active], dtype=np.int32))
    topk.launch(cuda.to_device(padded), cuda.to_device(records), device_ids, count, kernel=kernel)
    device_ids.copy_to_host(ids)
    return topk.flags.copy_to_host()
