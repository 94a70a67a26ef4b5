"""The GPU through CuPy, which is imported when a driver is made."""

from importlib.resources import files
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decodebench.errors import BackendError
from decodebench.fill.cuda import THREADS
from decodebench.fill.environment import look

__all__ = ["OPTIONS", "CupyDriver"]

OPTIONS: Final = ("--std=c++17", "--restrict")


class CupyDriver:
    """One device.

    Args:
        device: Its number.

    Raises:
        BackendError: CuPy or the device is missing, or the kernel does not compile.
    """

    __slots__ = ("_cupy", "_device", "_kept", "_kernel", "_runtime", "multiprocessors")

    def __init__(self, device: int) -> None:
        reason = look().not_cuda
        if reason is not None:
            raise BackendError(f"the CUDA backend is not available: {reason}")
        import cupy

        self._cupy = cupy
        self._runtime = cupy.cuda.runtime
        self._kept: list[object] = []
        source = files("decodebench.fill").joinpath("fill.cu").read_text("utf-8")
        try:
            self._device = cupy.cuda.Device(device)
            self.multiprocessors = int(self._device.attributes["MultiProcessorCount"])
            with self._device:
                module = cupy.RawModule(code=source, options=OPTIONS, backend="nvrtc")
                self._kernel = module.get_function("fill")
        except (RuntimeError, cupy.cuda.compiler.CompileException) as error:
            raise BackendError(
                f"the CUDA backend cannot start on device {device}: {error}"
            ) from None

    def upload(self, array: NDArray[Any]) -> int:
        """Copy an array to device memory that lives as long as the driver."""
        data = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        address = self.device(data.size)
        with self._device:
            self._runtime.memcpy(
                address, data.ctypes.data, data.size, self._runtime.memcpyHostToDevice
            )
        return address

    def device(self, size: int) -> int:
        """Allocate device memory that lives as long as the driver."""
        with self._device:
            memory = self._cupy.cuda.Memory(max(size, 16))  # not of a pool: it is never given back
        self._kept.append(memory)
        return int(memory.ptr)

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory."""
        with self._device:
            memory = self._cupy.cuda.alloc_pinned_memory(size)
        self._kept.append(memory)
        return np.frombuffer(memory, np.uint8, size)

    def stream(self, stream: object) -> int:
        """Return the handle of a stream, of CuPy's current one if None."""
        if stream is None:
            return int(self._cupy.cuda.get_current_stream(self._device.id).ptr)
        if isinstance(stream, int):
            return stream
        for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
            handle = getattr(stream, attribute, None)
            if isinstance(handle, int):
                return handle
        raise BackendError(
            f"expected a stream's handle, a torch or a CuPy stream, got {type(stream).__name__}"
        )

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy from page-locked memory to the device, asynchronously."""
        self._runtime.memcpyAsync(target, source, size, self._runtime.memcpyHostToDevice, stream)

    def launch(self, blocks: int, arguments: tuple[int, ...], stream: int) -> None:
        """Launch the kernel."""
        with self._device, self._cupy.cuda.ExternalStream(stream, self._device.id):
            self._kernel((blocks,), (THREADS,), arguments)

    def event(self) -> Any:
        """Make an event that has happened."""
        with self._device:
            return self._cupy.cuda.Event(disable_timing=True)

    def record(self, event: Any, stream: int) -> None:
        """Let the event happen when the stream gets here."""
        self._runtime.eventRecord(event.ptr, stream)

    def wait(self, event: Any) -> None:
        """Wait on the host until the event has happened."""
        self._runtime.eventSynchronize(event.ptr)

    def capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being captured on the stream."""
        return bool(self._runtime.streamIsCapturing(stream))
