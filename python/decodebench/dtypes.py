"""The element types whose values decodebench can encode."""

from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

__all__ = ["ENCODINGS", "encode"]

ENCODINGS: Final[dict[str, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
"""Every element type that has an encoding, by name."""

_LARGEST: Final = {
    "float32": 3.4028234663852886e38,
    "float16": 65504.0,
    "bfloat16": 3.3895313892515355e38,
    "float8_e4m3fn": 448.0,
    "float8_e5m2": 57344.0,
}


def encode(values: NDArray[np.float64], dtype: str) -> NDArray[np.uint8]:
    """Return the bytes of ``values`` as elements of ``dtype``, a name in :data:`ENCODINGS`.

    Values beyond the finite range of ``dtype`` become its largest finite value of the same sign.
    """
    largest = _LARGEST[dtype]
    # Two roundings, each to nearest even: float32 first is what torch does with a Python scalar,
    # and it leaves no choice of path to the library that casts to the narrow types.
    clamped = np.clip(values, -largest, largest).astype(np.float32)
    return clamped.astype(ENCODINGS[dtype]).view(np.uint8)
