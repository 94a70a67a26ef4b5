"""What a fill writes: a periodic pattern of bytes, and the phase at which each block starts in it.

Byte ``o`` of a block is ``tile[(phase + o) % len(tile)]``. The offset ``o`` counts the bytes of the
block in packed order (see :class:`decodebench.layout.Segment`), so that neither strides nor padding
change what is written, and every backend that follows the rule writes the same bytes.
"""

import math
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decodebench.dtypes import encode
from decodebench.errors import PatternError

__all__ = ["PHASE_BYTES", "TILE_BYTES", "Constant", "Normal", "Pattern"]

PHASE_BYTES: Final = 16
"""Every phase and every tile length is a multiple of this many bytes."""

TILE_BYTES: Final = 1 << 20
"""Length of a tile of random samples: it has 65536 phases, and stays in a second-level cache."""

_MASK: Final = (1 << 64) - 1
_UNIFORM_BITS: Final = 35


class Pattern(Protocol):
    """A periodic byte pattern for each element type, and a phase for each block."""

    def tile(self, dtype: str) -> NDArray[np.uint8]:
        """Return one period of the pattern for elements of ``dtype``.

        Args:
            dtype: A name in :data:`decodebench.dtypes.ENCODINGS`.

        Returns:
            One-dimensional array whose length is a positive multiple of :data:`PHASE_BYTES`.
        """
        ...

    def phases(
        self, ordinals: NDArray[np.int64], keys: NDArray[np.int64], period: int
    ) -> NDArray[np.int64]:
        """Return the byte offset in the tile at which each block starts.

        Args:
            ordinals: Numbers of the tensors that the blocks belong to.
            keys: Keys of the blocks, which broadcast with ``ordinals``; in one tensor, blocks with
                equal keys are equal.
            period: Length of the tile in bytes.

        Returns:
            Multiples of :data:`PHASE_BYTES` in ``[0, period)``, of the broadcast shape.
        """
        ...


@dataclass(frozen=True, slots=True)
class Constant:
    """Every element is ``value``, rounded to its type and clamped to the type's finite range.

    Raises:
        PatternError: ``value`` is not a finite number.
    """

    value: float

    def __post_init__(self) -> None:
        """Check the value."""
        object.__setattr__(self, "value", _finite("value", self.value))

    def tile(self, dtype: str) -> NDArray[np.uint8]:
        """Return :data:`PHASE_BYTES` bytes of the encoded value."""
        encoded = encode(np.array([self.value]), dtype)
        return np.tile(encoded, PHASE_BYTES // encoded.size)

    def phases(
        self, ordinals: NDArray[np.int64], keys: NDArray[np.int64], period: int
    ) -> NDArray[np.int64]:
        """Return zeros: every phase gives the same bytes."""
        return np.zeros(np.broadcast_shapes(ordinals.shape, keys.shape), np.int64)


@dataclass(frozen=True, slots=True)
class Normal:
    """Elements are samples of a normal distribution; each block has its own, every run the same.

    The tile of a type holds ``TILE_BYTES`` of encoded samples, clamped to the type's finite range.
    Sample ``i`` is ``mean + std * q(u)``, where ``q`` is the normal quantile function and ``u`` is
    ``(h + 0.5) / 2**35`` of the top 35 bits ``h`` of ``mix(mix(seed) + i)``. A block of tensor
    ``t`` with key ``k`` starts at phase ``16 * (mix(mix(mix(seed) + t) + k) % (period / 16))``.
    ``mix`` is one step of SplitMix64, and all sums are modulo 2**64. Samples lie within 6.6
    standard deviations of the mean.

    A ``std`` of zero is :class:`Constant` of the mean.

    Raises:
        PatternError: ``mean`` or ``std`` is not a finite number, ``std`` is negative, or ``seed``
            is not an integer in ``[0, 2**64)``.
    """

    mean: float
    std: float
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the parameters."""
        object.__setattr__(self, "mean", _finite("mean", self.mean))
        object.__setattr__(self, "std", _finite("std", self.std))
        if self.std < 0:
            raise PatternError(f"std must not be negative, got {self.std!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed <= _MASK:
            raise PatternError(f"seed must be an integer in [0, 2**64), got {self.seed!r}")

    def tile(self, dtype: str) -> NDArray[np.uint8]:
        """Return the encoded samples, or those of :class:`Constant` where ``std`` is zero."""
        constant = Constant(self.mean).tile(dtype)
        if self.std == 0:
            return constant
        itemsize = encode(np.zeros(1), dtype).size
        index = np.arange(TILE_BYTES // itemsize, dtype=np.uint64)
        bits = _mix(index + _mix(np.array([self.seed], np.uint64))) >> np.uint64(64 - _UNIFORM_BITS)
        uniform = (bits.astype(np.float64) + 0.5) * 2.0**-_UNIFORM_BITS
        with np.errstate(over="ignore"):  # an infinity is clamped like any other large sample
            return encode(self.mean + self.std * _normal_quantile(uniform), dtype)

    def phases(
        self, ordinals: NDArray[np.int64], keys: NDArray[np.int64], period: int
    ) -> NDArray[np.int64]:
        """Return the hash of (seed, ordinal, key), reduced to the tile's phases."""
        hashes = _mix(keys.astype(np.uint64) + self._tensors(ordinals))
        return (hashes % np.uint64(period // PHASE_BYTES)).astype(np.int64) * PHASE_BYTES

    def stream(self, ordinal: int) -> int:
        """Return ``mix(mix(seed) + ordinal)``: the hash that keys of one tensor are added to."""
        return int(self._tensors(np.array([ordinal]))[0])

    def _tensors(self, ordinals: NDArray[np.int64]) -> NDArray[np.uint64]:
        return _mix(ordinals.astype(np.uint64) + _mix(np.array([self.seed], np.uint64)))


def _finite(what: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise PatternError(f"{what} must be a finite number, got {value!r}")
    return number


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return one SplitMix64 output for each state (Steele, Lea and Flood, OOPSLA 2014)."""
    z = state + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


# Wichura, Algorithm AS 241 (Applied Statistics 37, 1988), PPND16: coefficients of the central
# region and of the tails, highest power first. The far tails, below 1.4e-11, are out of reach of
# uniforms of 35 bits, so their third pair of polynomials is not needed.
_CENTRE: Final = (
    (
        2.5090809287301226727e3,
        3.3430575583588128105e4,
        6.7265770927008700853e4,
        4.5921953931549871457e4,
        1.3731693765509461125e4,
        1.9715909503065514427e3,
        1.3314166789178437745e2,
        3.3871328727963666080e0,
    ),
    (
        5.2264952788528545610e3,
        2.8729085735721942674e4,
        3.9307895800092710610e4,
        2.1213794301586595867e4,
        5.3941960214247511077e3,
        6.8718700749205790830e2,
        4.2313330701600911252e1,
        1.0,
    ),
)
_TAIL: Final = (
    (
        7.74545014278341407640e-4,
        2.27238449892691845833e-2,
        2.41780725177450611770e-1,
        1.27045825245236838258e0,
        3.64784832476320460504e0,
        5.76949722146069140550e0,
        4.63033784615654529590e0,
        1.42343711074968357734e0,
    ),
    (
        1.05075007164441684324e-9,
        5.47593808499534494600e-4,
        1.51986665636164571966e-2,
        1.48103976427480074590e-1,
        6.89767334985100004550e-1,
        1.67638483018380384940e0,
        2.05319162663775882187e0,
        1.0,
    ),
)


def _normal_quantile(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the standard normal quantiles of ``p``, each in ``[2**-36, 1 - 2**-36]``.

    Only operations that IEEE 754 rounds exactly are used, each a NumPy call of its own that no
    compiler can contract: the bits do not depend on the machine.
    """
    q = p - 0.5
    centre = q * _ratio(0.180625 - q * q, _CENTRE)
    root = np.sqrt(-_log(np.minimum(p, 1.0 - p)))
    tail = np.copysign(_ratio(root - 1.6, _TAIL), q)
    return np.where(np.abs(q) <= 0.425, centre, tail)


def _log(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return natural logarithms; libraries differ in the last bit of theirs."""
    mantissa, exponent = np.frexp(x)
    small = mantissa < 0.7071067811865476
    mantissa = np.where(small, mantissa * 2.0, mantissa)
    s = (mantissa - 1.0) / (mantissa + 1.0)  # |s| < 0.172: s**22 / 23 is far below a last bit
    series = _polynomial(s * s, tuple(1.0 / k for k in range(21, 0, -2)))
    return (exponent - small) * 0.6931471805599453 + 2.0 * s * series


def _ratio(
    x: NDArray[np.float64], terms: tuple[tuple[float, ...], tuple[float, ...]]
) -> NDArray[np.float64]:
    numerator, denominator = terms
    return _polynomial(x, numerator) / _polynomial(x, denominator)


def _polynomial(x: NDArray[np.float64], coefficients: tuple[float, ...]) -> NDArray[np.float64]:
    total = np.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total
