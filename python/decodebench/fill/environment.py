"""What there is of CUDA here; a broken installation is an answer, not an error."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

__all__ = ["Device", "Environment", "look"]

_EXTRAS: Final = "the extras cuda12 and cuda13 bring it"


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU; ``compute_capability`` as compilers have it, such as ``"90"``."""

    name: str
    compute_capability: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Environment:
    """What was found.

    Attributes:
        cupy: Its version; this and others are None if ``problems`` says why.
        driver: Version of CUDA that the driver supports.
        nvrtc: Version of the run-time compiler.
        devices: GPUs, by number.
        problems: Why ``cupy``, ``driver``, ``nvrtc`` or ``devices`` is missing.
    """

    cupy: str | None
    driver: str | None
    nvrtc: str | None
    devices: tuple[Device, ...]
    problems: Mapping[str, str]

    @property
    def not_cuda(self) -> str | None:
        """Why the CUDA backend cannot be used, None if it can."""
        return next((self.problems[what] for what in _NEEDED if what in self.problems), None)

    @property
    def auto(self) -> Literal["cuda", "numpy"]:
        """The backend taken where caches are still to be made."""
        return "cuda" if self.not_cuda is None else "numpy"


# What lies deepest comes first: without a driver, devices are missing for no reason of their own.
_NEEDED: Final = ("cupy", "driver", "devices", "nvrtc")


def look() -> Environment:
    """Look for CuPy, a driver, NVRTC and devices."""
    problems: dict[str, str] = {}
    driver = _driver()
    if driver is None:
        problems["driver"] = "there is no NVIDIA driver (libcuda.so.1)"
    try:
        import cupy

        version = str(cupy.__version__)
    except Exception as error:  # whatever a broken installation raises
        problems["cupy"] = f"CuPy cannot be imported ({_line(error)}); {_EXTRAS}"
        problems["nvrtc"] = problems["devices"] = "looked for through CuPy"
        return Environment(None, driver, None, (), problems)
    nvrtc: str | None = None
    devices: tuple[Device, ...] = ()
    try:
        nvrtc = "{}.{}".format(*cupy.cuda.nvrtc.getVersion())
    except Exception as error:
        problems["nvrtc"] = f"CuPy finds no NVRTC ({_line(error)}); {_EXTRAS}"
    try:
        devices = tuple(_device(cupy, i) for i in range(cupy.cuda.runtime.getDeviceCount()))
        if not devices:
            problems["devices"] = "CuPy finds no device"
    except Exception as error:
        problems["devices"] = f"CuPy finds no usable device ({_line(error)})"
    return Environment(version, driver, nvrtc, devices, problems)


def _device(cupy: Any, number: int) -> Device:
    found = cupy.cuda.runtime.getDeviceProperties(number)
    return Device(
        found["name"].decode(errors="replace"),
        f"{found['major']}{found['minor']}",
        int(found["totalGlobalMem"]),
    )


def _driver() -> str | None:
    """Return the version of CUDA that the driver supports, which takes no CuPy."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (OSError, AttributeError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
