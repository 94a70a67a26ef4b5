"""A GPU for tests: host memory, and the kernel built by g++."""

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import decodebench.fill

TESTS = Path(__file__).parent
SOURCE = Path(decodebench.fill.__file__).with_name("fill.cu").read_text()
GXX = shutil.which("g++")


@functools.cache
def build(main: str, *options: str, source: str = SOURCE) -> Path:
    """Compile a file beside this one around the kernel, and return the product."""
    folder = Path(tempfile.mkdtemp(prefix="decodebench-"))
    kernel, product = folder / "fill.cu", folder / "product"
    kernel.write_text(source)
    warnings = ["-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = [str(GXX), "-std=c++17", *warnings, *options, f'-DFILL_CU="{kernel}"']
    subprocess.run([*command, str(TESTS / main), "-o", str(product)], check=True)
    return product


class FakeDriver:
    """Records what is asked of it. Without ``runs``, launches do nothing."""

    multiprocessors = 2

    def __init__(self, *, runs: bool = False) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.kept: list[NDArray[np.uint8]] = []
        self.captures: set[int] = set()
        self.events = 0
        self.library = None
        if runs:
            self.library = ctypes.CDLL(str(build("cuda_library.cpp", "-O1", "-shared", "-fPIC")))

    def _keep(self, array: NDArray[Any]) -> NDArray[np.uint8]:
        data = np.empty(max(array.nbytes, 1) + 16, np.uint8)
        data = data[-data.ctypes.data % 16 :][: array.nbytes]
        data[:] = np.ascontiguousarray(array).view(np.uint8).reshape(-1)
        self.kept.append(data)
        return data

    def upload(self, array: NDArray[Any]) -> int:
        self.calls.append(("upload", array.nbytes))
        return self._keep(array).ctypes.data

    def device(self, size: int) -> int:
        self.calls.append(("device", size))
        return self._keep(np.full(size, 0xCD, np.uint8)).ctypes.data

    def pinned(self, size: int) -> NDArray[np.uint8]:
        self.calls.append(("pinned", size))
        return self._keep(np.full(size, 0xAB, np.uint8))

    def stream(self, stream: object) -> int:
        return 1 if stream is None else int(stream)  # type: ignore[call-overload]

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        self.calls.append(("copy", target, source, size, stream))
        ctypes.memmove(target, source, size)

    def launch(self, blocks: int, arguments: tuple[int, ...], stream: int) -> None:
        self.calls.append(("launch", blocks, arguments, stream))
        if self.library is not None:
            self.library.launch(blocks, (ctypes.c_uint64 * 5)(*arguments))

    def event(self) -> int:
        self.events += 1
        return self.events

    def record(self, event: int, stream: int) -> None:
        self.calls.append(("record", event, stream))

    def wait(self, event: int) -> None:
        self.calls.append(("wait", event))

    def capturing(self, stream: int) -> bool:
        return stream in self.captures


class SanitizedDriver(FakeDriver):
    """Runs launches in a program of their own, under the address sanitizer.

    ``regions`` are the bytes that the segments lie in, and ``homes`` says in which each lies.
    """

    def __init__(self, source: str = SOURCE) -> None:
        super().__init__()
        self.source = source
        self.regions: Sequence[NDArray[np.uint8]] = ()
        self.homes: Sequence[int] = ()

    def launch(self, blocks: int, arguments: tuple[int, ...], stream: int) -> None:
        super().launch(blocks, arguments, stream)
        flags = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
        program = build("cuda_main.cpp", *flags, source=self.source)
        step = next(call[3] for call in reversed(self.calls) if call[0] == "copy")
        # Of what the driver allocated, only what this launch may read, and no more of it.
        kept = [array for array in self.kept if array.size and self._is_read(array, arguments)]
        kept = [a[:step] if a.ctypes.data == arguments[4] else a for a in kept]
        regions = [*self.regions, *kept]
        numbers = [blocks, len(regions), len(self.homes), *arguments]
        for region in regions:
            numbers += [region.ctypes.data, region.size]
        head = np.array([*numbers, *self.homes], np.uint64).tobytes()
        done = subprocess.run(
            [program],
            input=head + b"".join(region.tobytes() for region in regions),
            capture_output=True,
        )
        if done.returncode:
            raise AssertionError(done.stderr.decode()[:2000])
        output = np.frombuffer(done.stdout, np.uint8)
        for region in self.regions:
            region[:], output = output[: region.size], output[region.size :]

    def _is_read(self, array: NDArray[np.uint8], arguments: tuple[int, ...]) -> bool:
        pinned = {call[2] for call in self.calls if call[0] == "copy"}
        steps = {call[1] for call in self.calls if call[0] == "copy"}
        address = array.ctypes.data
        return address not in pinned and (address not in steps or address == arguments[4])
