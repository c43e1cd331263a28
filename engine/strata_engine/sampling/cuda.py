"""The sampling chain on the GPU: `CudaSampler` hands a step's rows to the kernels of `kernels.py`.

Two launches choose for all rows, each with its own parameters, history and draw index, which are written to device
memory before each replay of a captured graph. The twin is `reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..gpu.compiled import KernelSpec
from ..gpu.device import Buffer, Device
from ..params import LOGPROBS_MAX
from ..rows import Choice, Draw, Float32, Int32
from .host import Packer
from .kernels import KERNELS, kernel_spec
from .tables import CAPACITY, ENTRIES, HEAD, LISTS, MAX_BLOCKS, Outcome, Requests, Scratch, Shape

TURNS = 2  # steps whose choices are kept apart


def shape_of(vocab: int) -> Shape:
    """How rows of `vocab` logits are cut into blocks."""
    return Shape(wide=vocab % 4 == 0)


def sampler_specs(vocab: int) -> list[KernelSpec]:
    """Every kernel that a CudaSampler loads, for compiling them beside others."""
    return [kernel_spec(name, shape_of(vocab)) for name in KERNELS]


def request_words(vocab: int, rows: int) -> int:
    """The most 32-bit words that `CudaSampler.pack` writes for `rows` rows."""
    return shape_of(vocab).words(vocab, rows)


class CudaSampler:
    """Chooses a token for each row of a step on the GPU. One thread at a time.

    A backend captures the chain once a number of rows with `capture`; for each step it packs the draws (`pack`, into
    page-locked memory that it copies to the device itself, or `stage`), launches the graph, waits and takes the choices
    (`read`). A step may be queued before the one ahead of it is read if their `turn` differs, 0 or 1. Its penalty
    windows may then hold a token that is not known yet, as -1 - its row in the step ahead, from `chosen`.

    `choose` does it all for logits that lie on the host.
    """

    def __init__(self, vocab: int, max_rows: int, device: Device | None = None, shape: Shape | None = None) -> None:
        """Buffers for up to `max_rows` rows of `vocab` logits. Compiles the kernels unless they are on disk.

        ValueError if the vocabulary is too large; DeviceError without a GPU.
        """
        self.vocab, self.max_rows = vocab, max_rows
        self.shape = shape or shape_of(vocab)
        self.blocks = self.shape.blocks(vocab)
        if self.blocks > MAX_BLOCKS or vocab * max_rows >= 2**31:
            raise ValueError(f"{max_rows} rows of {vocab} logits are more than the sampler can number")
        self.device = device or Device()
        self._kernels = {name: self.device.load(kernel_spec(name, self.shape)) for name in KERNELS}
        self._packer = Packer(vocab, max_rows, self.shape, self.device)
        self._read: list[list[int]] = []  # what the last `read` found in Outcome.heads
        self._allocate()

    def _allocate(self) -> None:
        device, rows, blocks = self.device, self.max_rows, self.blocks
        lists, places = rows * LISTS * blocks, TURNS * rows
        self._scratch = Scratch(
            device.allocate(8 * lists * CAPACITY), device.allocate(4 * lists), device.allocate(8 * rows * blocks)
        )
        self._heads, self._ids = device.pinned(places * HEAD), device.pinned(places * LOGPROBS_MAX)
        self._logprobs = device.pinned(places * ENTRIES * 2).view(np.float64)
        self._staging: list[Int32] = []
        self._own: dict[str, Buffer] = {}

    def words(self, rows: int) -> int:
        """The most 32-bit words that the parameters of `rows` rows take."""
        return self.shape.words(self.vocab, rows)

    def pack(self, draws: Sequence[Draw], rows: int, out: Int32, turn: int = 0) -> int:
        """Write what the chain captured for `rows` rows reads about each, to the front of `out` [words(rows)].

        How many words have to reach the device. Rows past the draws cost next to nothing. ValueError if there are too
        many draws, a sampled one has no seed or a window has two unknown tokens.
        """
        return self._packer.pack(draws, rows, out, turn * self.max_rows)

    def capture(self, logits: int | Buffer, rows: int, requests: int | Buffer, chosen: int | Buffer) -> None:
        """Queue the choice for `rows` rows of float32 logits [rows, vocab] on the device: captured, or run at once.

        requests: what `pack` wrote, on the device, at a multiple of 16 bytes. chosen: int32 [rows], the tokens chosen
        in the step ahead, which this step's replace at its end. What writes the two must be done before the kernel
        ahead of the chain starts; nothing else in the graph may write `chosen` before.
        """
        heads, ids, logprobs = (host.ctypes.data for host in (self._heads, self._ids, self._logprobs))
        arguments = (
            *(logits, self.vocab),
            Requests(requests, requests, requests, self._packer.stride, chosen),
            *(self._scratch, Outcome(heads, ids, logprobs)),
        )
        self.device.launch(self._kernels["candidates"], (self.blocks, rows), *arguments)
        self.device.launch(self._kernels["merge"], (rows,), *arguments)

    def read(self, draws: Sequence[Draw], turn: int = 0) -> list[Choice]:
        """One choice for each of `draws`, which a step of this `turn` was packed with and which is done."""
        first = turn * self.max_rows
        heads = self._heads[first * HEAD : (first + len(draws)) * HEAD].reshape(-1, HEAD)
        self._read = heads.tolist()
        return [
            Choice(token) if draw.params.logprobs is None else self._with_logprobs(first + row, token, filled)
            for row, (draw, (token, _, filled, _)) in enumerate(zip(draws, self._read, strict=True))
        ]

    @property
    def kept(self) -> NDArray[np.int32]:
        """[m] tokens that were left to draw from in each row of the last `read`; 1 if greedy."""
        return np.array([left for _, left, _, _ in self._read], np.int32)

    def _with_logprobs(self, place: int, token: int, count: int) -> Choice:
        logprob, *others = self._logprobs[place * ENTRIES : place * ENTRIES + count + 1].tolist()
        ids = self._ids[place * LOGPROBS_MAX : place * LOGPROBS_MAX + count].tolist()
        return Choice(token, logprob, tuple(zip(ids, others, strict=True)))

    # -- with buffers of its own

    def own(self, name: str, size: int) -> Buffer:
        """A buffer of the sampler's, made when it is first asked for."""
        if name not in self._own:
            self._own[name] = self.device.allocate(size)
        return self._own[name]

    @property
    def requests(self) -> Buffer:
        """Where `stage` puts the parameters."""
        return self.own("requests", 4 * self.words(self.max_rows))

    @property
    def chosen(self) -> Buffer:
        """int32 [max_rows], for callers without a buffer for the tokens."""
        return self.own("chosen", 4 * self.max_rows)

    def stage(self, draws: Sequence[Draw], rows: int, turn: int = 0) -> None:
        """`pack` into memory of the sampler's, and queue the copy to `requests`."""
        if not self._staging:
            self._staging = [self.device.pinned(self.words(self.max_rows)) for _ in range(TURNS)]
        used = self.pack(draws, rows, self._staging[turn], turn)
        self.device.copy_in(self.requests, self._staging[turn][:used])

    def choose(self, logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
        """One choice a row of raw `logits` [m, vocab] float32 on the host. ValueError if they do not fit."""
        m = len(draws)
        if logits.shape != (m, self.vocab) or logits.dtype != np.float32:
            raise ValueError(f"{m} draws need float32 logits [{m}, {self.vocab}], got {logits.dtype} {logits.shape}")
        if m == 0:
            return []
        self.stage(draws, m)
        place = self.own("logits", 4 * self.vocab * self.max_rows)
        self.device.write(place, logits)
        self.capture(place, m, self.requests, self.chosen)
        self.device.synchronize()
        return self.read(draws)

    def close(self) -> None:
        """Give the device's memory back. No call may follow, nor a replay of a graph that was captured with it."""
        self.device.synchronize()
        self._packer.close()
        for buffer in (*self._scratch, *self._own.values()):
            self.device.free(buffer)
