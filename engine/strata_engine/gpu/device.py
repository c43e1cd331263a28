"""The GPU as this engine uses it: memory, launches, graphs, events."""

from __future__ import annotations

import ctypes
import logging
import pathlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from .compiled import ARGUMENTS, KernelSpec, build_to_disk, cubin_path

log = logging.getLogger(__name__)


class DeviceError(RuntimeError):
    """The GPU or its driver refused something."""


class OutOfMemoryError(DeviceError):
    """An allocation did not fit."""


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or DeviceError."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        name = getattr(error, "name", str(error))
        kind = OutOfMemoryError if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY else DeviceError
        raise kind(f"CUDA: {name}")
    return values[0] if len(values) == 1 else values or None


def why_unavailable() -> str | None:
    """None if a GPU answers, else why not."""
    try:
        check(driver.cuInit(0))
        count = check(driver.cuDeviceGetCount())
    except DeviceError as error:
        return str(error)
    except Exception as error:  # a missing driver library raises whatever its loader raises
        log.debug("loading the driver: %s", error)
        return "the NVIDIA driver library (libcuda) cannot be loaded"
    return None if count else "the driver knows of none"


@dataclass(slots=True)
class Buffer:
    """Device memory. `address` goes to kernels."""

    address: int
    size: int

    def at(self, offset: int) -> int:
        return self.address + offset


@dataclass(slots=True)
class Kernel:
    """A loaded kernel and the types of its flattened arguments."""

    function: Any
    kinds: list[Any]
    threads: int
    shared_bytes: int
    name: str = ""


def flatten_values(values: Sequence[Any]) -> list[Any]:
    """Launch arguments: tuples opened, buffers as addresses."""
    out: list[Any] = []
    for value in values:
        if isinstance(value, tuple):
            out += flatten_values(value)
        else:
            out.append(
                value.address if isinstance(value, Buffer) else value.item() if isinstance(value, np.generic) else value
            )
    return out


@dataclass
class Device:
    """One GPU: a context, a stream, loaded kernels. Used from one thread at a time; see `use`."""

    ordinal: int = 0
    dependent_launch: bool = True  # overlap a kernel's start with the end of the one before (Hopper and later)
    cc: tuple[int, int] = field(init=False)
    name: str = field(init=False)
    multiprocessors: int = field(init=False)
    block_bytes: int = field(init=False)  # shared memory that a block can have
    shared_bytes: int = field(init=False)  # shared memory of a multiprocessor
    reserved_bytes: int = field(init=False)  # of that, what a block costs besides its own
    resident_threads: int = field(init=False)  # threads that a multiprocessor can hold
    _loaded: dict[str, Kernel] = field(init=False, default_factory=dict)
    _pinned: list[int] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        check(driver.cuInit(0))
        self._device = check(driver.cuDeviceGet(self.ordinal))
        self._context = check(driver.cuDevicePrimaryCtxRetain(self._device))
        self.use()
        self.cc = self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")
        self.multiprocessors = self._attribute("MULTIPROCESSOR_COUNT")
        self.block_bytes = self._attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.shared_bytes = self._attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR")
        self.reserved_bytes = self._attribute("RESERVED_SHARED_MEMORY_PER_BLOCK")
        self.resident_threads = self._attribute("MAX_THREADS_PER_MULTIPROCESSOR")
        self.dependent_launch = self.dependent_launch and self.cc >= (9, 0)
        raw = check(driver.cuDeviceGetName(256, self._device))
        self.name = raw.split(b"\0")[0].decode()
        self.stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def _attribute(self, name: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return check(driver.cuDeviceGetAttribute(attribute, self._device))

    def use(self) -> None:
        """Make the device current on the calling thread."""
        check(driver.cuCtxSetCurrent(self._context))

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        free, total = check(driver.cuMemGetInfo())
        return free, total

    # -- memory

    def allocate(self, size: int, zero: bool = True) -> Buffer:
        """Device memory, rounded up to 256 bytes, zeroed unless told otherwise."""
        size = max(256, -(-size // 256) * 256)
        buffer = Buffer(int(check(driver.cuMemAlloc(size))), size)
        if zero:
            check(driver.cuMemsetD8Async(buffer.address, 0, size, self.stream))
        return buffer

    def upload(self, values: NDArray) -> Buffer:
        """A new buffer with a copy of an array."""
        values = np.ascontiguousarray(values)
        buffer = self.allocate(values.nbytes, zero=False)
        self.write(buffer, values)
        return buffer

    def write(self, buffer: Buffer, values: NDArray, offset: int = 0) -> None:
        """Copy an array into a buffer; done when this returns.

        On the stream itself: a plain cuMemcpyHtoD may return while the end of an array is still on its way, and kernels
        of this stream, which does not wait for the default one, would overtake it.
        """
        values = np.ascontiguousarray(values)
        check(driver.cuMemcpyHtoDAsync(buffer.at(offset), values.ctypes.data, values.nbytes, self.stream))
        self.synchronize()

    def read(self, buffer: Buffer, shape: Sequence[int] | int, dtype: Any, offset: int = 0) -> NDArray:
        """A copy of a buffer's contents, after all work launched so far."""
        out = np.empty(shape, dtype)
        self.synchronize()
        if out.nbytes:
            check(driver.cuMemcpyDtoH(out.ctypes.data, buffer.at(offset), out.nbytes))
        return out

    def free(self, buffer: Buffer) -> None:
        check(driver.cuMemFree(buffer.address))

    def pinned(self, words: int) -> NDArray[np.int32]:
        """Zeroed page-locked host memory: copies start from it, kernels write to it."""
        size = 4 * max(words, 1)
        address = int(check(driver.cuMemHostAlloc(size, 0)))
        self._pinned.append(address)
        ctypes.memset(address, 0, size)
        return np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_int32)), (max(words, 1),))

    def copy_in(self, buffer: Buffer, source: NDArray, offset: int = 0) -> None:
        """Queue a copy from page-locked memory; captured if a graph is being captured."""
        check(driver.cuMemcpyHtoDAsync(buffer.at(offset), source.ctypes.data, source.nbytes, self.stream))

    # -- kernels

    def load(self, spec: KernelSpec) -> Kernel:
        """The kernel of a spec: from memory, from the cache, or compiled now."""
        if spec.name in self._loaded:
            return self._loaded[spec.name]
        path = cubin_path(spec, self.cc)
        if not path.exists():
            build_to_disk(spec, self.cc)
        try:
            codes, module = self._module(path)
        except OutOfMemoryError:
            raise
        except DeviceError as error:  # a damaged file, as after a power cut
            log.warning("%s cannot be loaded (%s): it is compiled anew", path, error)
            build_to_disk(spec, self.cc)
            codes, module = self._module(path)
        functions = check(driver.cuModuleEnumerateFunctions(1, module))
        function = functions[0] if isinstance(functions, (list, tuple)) else functions
        if spec.shared_bytes > 48 * 1024:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver.cuFuncSetAttribute(function, attribute, spec.shared_bytes))
        kinds = [ARGUMENTS[letter] for letter in codes]
        self._loaded[spec.name] = Kernel(function, kinds, spec.threads, spec.shared_bytes, spec.name)
        return self._loaded[spec.name]

    @staticmethod
    def _module(path: pathlib.Path) -> tuple[str, Any]:
        """The argument letters of a kernel on disk and its loaded code. DeviceError if the driver does not take it."""
        codes, _, code = path.read_bytes().partition(b"\n")
        if not set(codes.decode(errors="replace")) <= set(ARGUMENTS) or not code:
            raise DeviceError("no kernel")
        return codes.decode(), check(driver.cuModuleLoadData(code))

    def launch(self, kernel: Kernel, grid: tuple[int, ...], *args: Any, dependent: bool = True) -> None:
        """Queue a kernel. `dependent`: it may start while the one before ends (it waits itself)."""
        values = [kind(value) for kind, value in zip(kernel.kinds, flatten_values(args), strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
        config.blockDimX, config.blockDimY, config.blockDimZ = kernel.threads, 1, 1
        config.sharedMemBytes = kernel.shared_bytes
        config.hStream = self.stream
        if dependent and self.dependent_launch:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        try:
            check(driver.cuLaunchKernelEx(config, kernel.function, ctypes.addressof(pointers), 0))
        except DeviceError as error:
            raise DeviceError(f"{error} at the launch of {kernel.name}, grid {grid}") from None

    # -- graphs and time

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Collect what is queued inside into a graph, which can be replayed afterwards."""
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(driver.cuStreamBeginCapture(self.stream, mode))
        graph = Graph(self)
        try:
            yield graph
        except BaseException:
            driver.cuStreamEndCapture(self.stream)
            raise
        captured = check(driver.cuStreamEndCapture(self.stream))
        graph.instance = check(driver.cuGraphInstantiate(captured, 0))
        check(driver.cuGraphDestroy(captured))

    def synchronize(self) -> None:
        """Wait for all queued work."""
        check(driver.cuStreamSynchronize(self.stream))

    def event(self) -> Any:
        """Record a point in time on the stream."""
        event = check(driver.cuEventCreate(0))
        check(driver.cuEventRecord(event, self.stream))
        return event

    def flag(self) -> Any:
        """An event for `raise_flag` and `wait_for`; raised until it is first used."""
        return check(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def raise_flag(self, flag: Any) -> None:
        """Have `flag` raised once all that is queued so far is done."""
        check(driver.cuEventRecord(flag, self.stream))

    def wait_for(self, flag: Any) -> None:
        check(driver.cuEventSynchronize(flag))

    def elapsed_ms(self, start: Any, end: Any) -> float:
        check(driver.cuEventSynchronize(end))
        return float(check(driver.cuEventElapsedTime(start, end)))

    def copy_bandwidth(self, size: int = 1 << 30, repeats: int = 5) -> float:
        """Bytes a second read and written by a copy of `size` bytes within the device: the median."""
        source, target, rates = self.allocate(size), self.allocate(size), []
        for _ in range(repeats + 1):
            start = self.event()
            check(driver.cuMemcpyDtoDAsync(target.address, source.address, size, self.stream))
            rates.append(2 * size / self.elapsed_ms(start, self.event()) * 1e3)
        self.free(source)
        self.free(target)
        return sorted(rates[1:])[repeats // 2]

    def close(self) -> None:
        """Give everything back. Any thread, once no other uses the device."""
        self.use()
        self.synchronize()
        for address in self._pinned:
            check(driver.cuMemFreeHost(address))
        self._pinned.clear()
        check(driver.cuStreamDestroy(self.stream))
        check(driver.cuDevicePrimaryCtxRelease(self._device))


@dataclass(slots=True)
class Graph:
    """Captured work."""

    device: Device
    instance: Any = None

    def launch(self) -> None:
        """Queue the whole graph."""
        check(driver.cuGraphLaunch(self.instance, self.device.stream))
