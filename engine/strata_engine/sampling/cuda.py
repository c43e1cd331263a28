"""The sampling chain on the GPU: `CudaSampler` hands a step's rows to the kernels of `kernels.py`.

One launch chooses for all rows, each with its own parameters, history and draw index, which `stage` writes to device
memory before each replay of a captured graph. The twin is `reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..backends.cuda.device import Buffer, Device, KernelSpec
from ..params import LOGPROBS_MAX
from ..rows import Choice, Draw, Float32
from .host import Bias, is_plain, pack, sorted_bias
from .kernels import KERNELS, kernel_spec
from .tables import (
    CAPACITY,
    ENTRIES,
    HEAD,
    LISTS,
    MAX_BLOCKS,
    RECORD,
    WINDOW_WORDS,
    WORDS,
    Outcome,
    Requests,
    Scratch,
    Shape,
)

BIAS_LISTS = 64  # bias lists kept on the device beyond one a row


def shape_of(vocab: int) -> Shape:
    """How rows of `vocab` logits are cut into blocks."""
    return Shape(wide=vocab % 4 == 0)


def sampler_specs(vocab: int) -> list[KernelSpec]:
    """Every kernel that a CudaSampler loads, for compiling them beside others."""
    return [kernel_spec(name, shape_of(vocab)) for name in KERNELS]


class CudaSampler:
    """Chooses a token for each row of a step on the GPU. One thread at a time.

    A backend uses it in three parts: `capture` inside `device.capture()`, once a number of rows; for each step `stage`
    with the step's draws, then the graph's launch, then `read`. `is_plain(draws)` says which of two graphs to replay:
    the one captured with plain=True runs the arg-max kernel alone and needs no `stage`. What `stage` writes is read by
    the replay after it, so it may be called while a forward pass of the same step is still running, but not before the
    step before has been read.

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
        self.kept = np.empty(0, np.int32)  # [m] tokens left to draw from in each row of the last `read`; 1 if greedy
        self._kernels = {name: self.device.load(kernel_spec(name, self.shape)) for name in KERNELS}
        self._biases: dict[int, tuple[Bias, Buffer, Buffer]] = {}
        self._draws: Sequence[Draw] = ()
        self._allocate()

    def _allocate(self) -> None:
        device, rows, blocks = self.device, self.max_rows, self.blocks
        words = rows * (WORDS + WINDOW_WORDS)
        self._staging, self._requests = device.pinned(words), device.allocate(4 * words)
        self._records = self._staging[: rows * WORDS].view(RECORD)
        self._windows = self._staging[rows * WORDS :]
        lists = rows * LISTS * blocks
        self._scratch = Scratch(
            device.allocate(8 * lists * CAPACITY), device.allocate(4 * lists), device.allocate(8 * rows * blocks),
            device.allocate(4 * rows),
        )  # fmt: skip
        self.tokens = device.allocate(4 * rows)  # int32 [rows] on the device, for kernels that go on from here
        self._heads, self._ids = device.pinned(rows * HEAD), device.pinned(rows * LOGPROBS_MAX)
        self._logprobs = device.pinned(rows * ENTRIES * 2).view(np.float64)
        self._logits: Buffer | None = None

    def _arguments(self, logits: int) -> tuple[object, ...]:
        address = self._requests.address
        requests = Requests(address, address, address, address + 4 * WORDS * self.max_rows)
        heads, ids, logprobs = (host.ctypes.data for host in (self._heads, self._ids, self._logprobs))
        return logits, self.vocab, requests, self._scratch, Outcome(self.tokens, heads, ids, logprobs)

    def capture(self, logits: Buffer | int, rows: int, plain: bool = False) -> None:
        """Queue the choice for `rows` rows of float32 logits [rows, vocab] on the device: captured, or run at once.

        Rows past the staged draws cost next to nothing.
        """
        address = logits.address if isinstance(logits, Buffer) else logits
        arguments = self._arguments(address)
        if plain:
            self.device.launch(self._kernels["arg_max"], (self.blocks, rows), *arguments)
            return
        self.device.launch(self._kernels["candidates"], (self.blocks, rows), *arguments)
        self.device.launch(self._kernels["merge"], (rows,), *arguments)

    def stage(self, draws: Sequence[Draw]) -> None:
        """Write what the chain reads about each row, and queue its copy to the device.

        ValueError if there are too many draws or a sampled one has no seed.
        """
        if len(draws) > self.max_rows:
            raise ValueError(f"{len(draws)} draws, but buffers for {self.max_rows} rows")
        self._draws = draws
        used = pack(draws, self._records, self._windows, self._place_bias)
        self.device.copy_in(self._requests, self._staging[: self.max_rows * WORDS + used])

    def _place_bias(self, bias: Bias) -> tuple[int, int]:
        """The device addresses of a bias list. Lists are kept, as a request brings the same one in every step."""
        entry = self._biases.pop(id(bias), None)
        if entry is None:
            ids, values = sorted_bias(bias)
            entry = bias, self.device.upload(ids), self.device.upload(values)
        self._biases[id(bias)] = entry
        while len(self._biases) > self.max_rows + BIAS_LISTS:
            _, *buffers = self._biases.pop(next(iter(self._biases)))
            for buffer in buffers:
                self.device.free(buffer)
        return entry[1].address, entry[2].address

    def read(self, draws: Sequence[Draw] | None = None) -> list[Choice]:
        """Wait for the device; one choice for each of `draws` (as staged, unless the graph was a plain one)."""
        self.device.synchronize()
        draws = self._draws if draws is None else draws
        heads = self._heads.reshape(-1, HEAD)[: len(draws)]
        self.kept = heads[:, 1].copy()
        return [
            Choice(token) if draw.params.logprobs is None else self._with_logprobs(row, token, filled)
            for row, (draw, (token, _, filled, _)) in enumerate(zip(draws, heads.tolist(), strict=True))
        ]

    def _with_logprobs(self, row: int, token: int, count: int) -> Choice:
        logprob, *others = self._logprobs[row * ENTRIES : row * ENTRIES + count + 1].tolist()
        ids = self._ids[row * LOGPROBS_MAX : row * LOGPROBS_MAX + count].tolist()
        return Choice(token, logprob, tuple(zip(ids, others, strict=True)))

    def choose(self, logits: Float32, draws: Sequence[Draw]) -> list[Choice]:
        """One choice a row of raw `logits` [m, vocab] float32 on the host. ValueError if they do not fit."""
        m = len(draws)
        if logits.shape != (m, self.vocab) or logits.dtype != np.float32:
            raise ValueError(f"{m} draws need float32 logits [{m}, {self.vocab}], got {logits.dtype} {logits.shape}")
        if m == 0:
            return []
        self._logits = self._logits or self.device.allocate(4 * self.vocab * self.max_rows)
        self.stage(draws)
        self.device.write(self._logits, logits)
        self.capture(self._logits, m, is_plain(draws))
        return self.read()

    def close(self) -> None:
        """Give the device's memory back. No call may follow, nor a replay of a graph that was captured with it."""
        self.device.synchronize()
        buffers = [
            self._requests,
            self.tokens,
            *self._scratch,
            *(b for _, *pair in self._biases.values() for b in pair),
        ]
        for buffer in buffers:
            self.device.free(buffer)
        self._biases.clear()
