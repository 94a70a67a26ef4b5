"""Arrays of any library as address, shape and strides; nothing is read or copied.

Looked for in this order: ``__array_interface__``, torch's own attributes, which are also there for
types that torch exports to nobody (bfloat16, float8), ``__cuda_array_interface__``, ``__dlpack__``.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Described", "describe"]


@dataclass(frozen=True, slots=True)
class Described:
    """A strided array. Strides are in bytes, ``device`` is None in host memory."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    native: bool
    device: int | None


def describe(cache: Any) -> Described:
    """Describe an array.

    Raises:
        TypeError: The object is no array that can be written, and why, without a subject.
    """
    if type(cache).__module__.partition(".")[0] == "torch" and hasattr(cache, "data_ptr"):
        return _torch(cache)
    if hasattr(cache, "__array_interface__"):
        return _host(np.asarray(cache))
    if hasattr(cache, "__cuda_array_interface__"):
        return _cuda(cache)
    if hasattr(cache, "__dlpack__"):
        if cache.__dlpack_device__()[0] == 1:
            return _host(np.from_dlpack(cache))
        return _cuda(_from_dlpack(cache))
    raise TypeError(f"expected an array with __array_interface__, got {type(cache).__name__}")


def _host(array: np.ndarray[Any, Any]) -> Described:
    kind = array.dtype
    if not array.flags.writeable:
        raise TypeError(f"the cache of shape {array.shape} is read-only")
    if kind.hasobject:
        raise TypeError("a cache of Python objects cannot be filled")
    address = array.__array_interface__["data"][0]
    return Described(
        address, array.shape, array.strides, kind.itemsize, _name(kind), kind.isnative, None
    )


def _name(kind: np.dtype[Any]) -> str:
    return kind.name if kind.isnative else str(kind)


def _torch(tensor: Any) -> Described:
    if tensor.device.type not in ("cpu", "cuda"):
        raise TypeError(f"the cache is on {tensor.device}, which there is no backend for")
    itemsize = tensor.element_size()
    return Described(
        tensor.data_ptr(),
        tuple(tensor.shape),
        tuple(stride * itemsize for stride in tensor.stride()),
        itemsize,
        str(tensor.dtype).removeprefix("torch."),
        True,
        tensor.device.index if tensor.device.type == "cuda" else None,
    )


def _cuda(array: Any) -> Described:
    interface = array.__cuda_array_interface__
    address, read_only = interface["data"]
    shape = tuple(interface["shape"])
    if read_only:
        raise TypeError(f"the cache of shape {shape} is read-only")
    # CuPy's own type tells bfloat16 and float8 apart; the interface has them as raw bytes.
    kind = np.dtype(getattr(array, "dtype", None) or interface["typestr"])
    strides = interface.get("strides")
    if strides is None:
        sizes = np.array([1, *shape[:0:-1]], np.int64)
        strides = tuple(np.cumprod(sizes)[::-1].tolist()) if shape else ()
        strides = tuple(stride * kind.itemsize for stride in strides)
    return Described(
        int(address),
        shape,
        tuple(strides),
        kind.itemsize,
        _name(kind),
        kind.isnative,
        _device_of(array, int(address)),
    )


def _device_of(array: Any, address: int) -> int:
    """Return the device of memory: the interface does not say it."""
    device = getattr(array, "device", None)
    number = getattr(device, "id", device)  # a number in Numba, an object in CuPy
    if isinstance(number, int):
        return number
    import cupy

    return int(cupy.cuda.runtime.pointerGetAttributes(address).device)


def _from_dlpack(array: object) -> Any:
    import cupy

    return cupy.from_dlpack(array)
