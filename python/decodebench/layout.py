"""Where the blocks of a layer's cache lie in memory.

A :class:`Layer` turns one cache, whatever its shape and strides, into :class:`Segment` values:
plain addresses and byte strides, all that a backend sees.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from decodebench.arrays import describe
from decodebench.dtypes import ENCODINGS
from decodebench.errors import LayoutError

__all__ = ["BlockGroup", "Geometry", "Layer", "Segment"]


class BlockGroup(Protocol):
    """A KV-cache group, such as :class:`decodebench.Group`."""

    @property
    def indexing(self) -> str:
        """``"positional"``, ``"state"``, ``"ring"`` or ``"excluded"``."""
        ...

    @property
    def span(self) -> int:
        """Tokens per block; 0 where the group has none."""
        ...


class Geometry(Protocol):
    """A block pool and its groups, such as :class:`decodebench.Planner`."""

    @property
    def num_blocks(self) -> int:
        """Size of the block pool."""
        ...

    @property
    def groups(self) -> Sequence[BlockGroup]:
        """The KV-cache groups that share the pool."""
        ...


@dataclass(frozen=True, slots=True)
class Segment:
    """One regular part of a tensor, the same part of every block. All strides are in bytes.

    Block ``b`` of ``[0, num_blocks)`` lies at ``address + b * block_stride``. It consists of
    ``planes`` x ``slots`` runs of ``slot_bytes`` contiguous bytes, run ``(p, s)`` at
    ``p * plane_stride + s * slot_stride``; a stride that is never used is 0. A slot holds what the
    tensor stores for ``tokens_per_slot`` tokens; a tensor that is not addressed by token has one
    slot. Under context parallelism these tokens are not consecutive: ``interleave`` slots hold
    tokens of one rank before those of the next begin.

    Run ``(p, s)`` is run ``(first_plane + p, first_slot + s)`` of the whole tensor, whose blocks
    have ``block_slots`` slots. That gives every byte an offset in *packed order*, which is what
    patterns are addressed with: byte ``i`` of a run has the offset
    ``((first_plane + p) * block_slots + first_slot + s) * slot_bytes + i``. The planes of a slot
    are its contiguous runs, sorted by address; packed order stores the planes one after the other,
    each with its slots in token order. Offsets depend neither on padding between planes or slots
    nor on how the tensor was cut into segments.
    """

    address: int
    num_blocks: int
    block_stride: int
    planes: int
    plane_stride: int
    slots: int
    slot_stride: int
    slot_bytes: int
    first_plane: int
    first_slot: int
    block_slots: int
    tokens_per_slot: int
    dtype: str
    interleave: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in this segment, gaps not counted."""
        return self.planes * self.slots * self.slot_bytes

    @property
    def end(self) -> int:
        """One past the highest address of the last block."""
        return (
            self.address
            + (self.num_blocks - 1) * self.block_stride
            + (self.planes - 1) * self.plane_stride
            + (self.slots - 1) * self.slot_stride
            + self.slot_bytes
        )

    @property
    def plane_is_run(self) -> bool:
        """Whether the slots of a plane lie one after the other."""
        return self.slots == 1 or self.slot_stride == self.slot_bytes

    @property
    def block_is_run(self) -> bool:
        """Whether a block is one run of ``block_bytes`` contiguous bytes."""
        dense = self.planes == 1 or self.plane_stride == self.slots * self.slot_bytes
        return self.plane_is_run and dense

    @property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides the address, all strides and the runs."""
        return math.gcd(
            16,
            self.address,
            self.block_stride,
            self.plane_stride,
            self.slot_stride,
            self.slot_bytes,
        )

    def offset(self, plane: int, slot: int) -> int:
        """Return the packed offset of run ``(plane, slot)`` of this segment, in bytes."""
        row = (self.first_plane + plane) * self.block_slots + self.first_slot + slot
        return row * self.slot_bytes

    def window(self, first_token: int, end_token: int) -> tuple[int, int]:
        """Return the slots, half-open, that may be written for tokens of a block.

        The tokens are ``[first_token, end_token)``, counted from the start of the block. A slot
        that may hold a token before ``first_token``, on whichever rank, is left out: that token is
        somebody's.
        """
        stripe = self.interleave * self.tokens_per_slot
        bounds = (
            token // stripe * self.interleave + min(token % stripe, self.interleave)
            for token in (first_token, end_token)
        )
        first, end = (min(max(slot - self.first_slot, 0), self.slots) for slot in bounds)
        return first, end

    def array(self, dtype: DTypeLike, owner: object) -> NDArray[Any]:
        """Return the memory as an array ``[num_blocks, planes, slots, items]``.

        The array keeps ``owner`` alive. Nothing is read: it may stand for memory of another
        device, as long as no element of it is touched. The size of ``dtype`` divides
        :attr:`alignment`.
        """
        item = np.dtype(dtype)
        return np.asarray(
            _Pointer(
                {
                    "version": 3,
                    "data": (self.address, False),
                    "typestr": item.str,
                    "shape": (
                        self.num_blocks,
                        self.planes,
                        self.slots,
                        self.slot_bytes // item.itemsize,
                    ),
                    "strides": (
                        self.block_stride,
                        self.plane_stride,
                        self.slot_stride,
                        item.itemsize,
                    ),
                },
                owner,
            )
        )


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One layer's cache, addressable by block.

    The block axis is axis 0 if its length is ``num_blocks`` or a multiple ``r`` of it, otherwise
    the one other axis of such a length. With a multiple, block ``b`` covers rows
    ``[b * r, (b + 1) * r)``. In a positional group the token axis is the one other axis of
    ``span / r`` slots; where ``r`` is the span, the rows are the slots.

    Args:
        cache: NumPy, CuPy or torch array, or another with ``__array_interface__``,
            ``__cuda_array_interface__`` or DLPack, of any nested strides; or a tuple or list of
            them, each with blocks of its own. It is kept alive, not copied.
        planner: The block pool and the groups that the cache belongs to.
        group: Index of the group in ``planner.groups``.
        name: What errors call the layer.
        token_axis: Axis of the token slots in a positional group, where the shape leaves a choice
            or, under context parallelism, a slot stands for several tokens of the span.
        dtype: Name in :data:`decodebench.dtypes.ENCODINGS` of the values that the cache holds,
            where its own type does not tell, such as ``"float8_e4m3fn"`` for a cache of uint8.
        interleave: Slots that hold tokens of one context-parallel rank before those of the next
            rank begin.
        zeros: The cache gets zeros instead of the pattern, as it does in a ring group: its values
            need no encoding.
        whole_blocks: Where a positional group's token axis cannot be told, take the blocks for
            whole ones instead of refusing the cache. A fill that would write part of a block is
            then refused.

    Attributes:
        tensors: Segments of each tensor of the cache; empty in an excluded group.
        by_token: Whether part of a block can be written.
        device: Number of the CUDA device that the cache is on, None for host memory.

    Raises:
        LayoutError: The cache cannot be addressed without doubt, or its values have no encoding.
    """

    cache: object = field(repr=False)
    planner: Geometry
    group: int
    name: str = field(default="layer", kw_only=True)
    token_axis: int | None = field(default=None, kw_only=True)
    dtype: str | None = field(default=None, kw_only=True)
    interleave: int = field(default=1, kw_only=True)
    zeros: bool = field(default=False, kw_only=True)
    whole_blocks: bool = field(default=False, kw_only=True)
    tensors: tuple[tuple[Segment, ...], ...] = field(init=False, repr=False)
    by_token: bool = field(init=False, repr=False)
    device: int | None = field(init=False)

    def __post_init__(self) -> None:
        groups = self.planner.groups
        if not 0 <= operator.index(self.group) < len(groups):
            raise LayoutError(
                f"layer {self.name!r}: there is no group {self.group} among {len(groups)}"
            )
        group = groups[self.group]
        if self.token_axis is not None and group.indexing != "positional":
            raise LayoutError(
                f"layer {self.name!r}: a {group.indexing} group has no token axis, "
                f"got token_axis={self.token_axis}"
            )
        if self.dtype is not None and self.dtype not in ENCODINGS:
            raise LayoutError(
                f"layer {self.name!r}: unknown dtype {self.dtype!r}, expected {_names()}"
            )
        if operator.index(self.interleave) < 1:
            raise LayoutError(
                f"layer {self.name!r}: interleave must be at least 1, got {self.interleave}"
            )
        object.__setattr__(self, "zeros", self.zeros or group.indexing == "ring")
        tensors: list[tuple[Segment, ...]] = []
        devices: list[int | None] = []
        by_token = group.indexing == "positional"
        if group.indexing != "excluded":
            several = isinstance(self.cache, tuple | list)
            caches: Sequence[object] = self.cache if several else (self.cache,)  # type: ignore[assignment]
            if not caches:
                raise LayoutError(f"layer {self.name!r}: the cache holds no tensor")
            for index, cache in enumerate(caches):
                site = f"layer {self.name!r}" + (f", tensor {index}" if several else "")
                tensor = _Tensor.of(cache, site, self.dtype, zeros=self.zeros)
                devices.append(tensor.device)
                span = group.span if group.indexing == "positional" else None
                if (
                    span is not None
                    and self.whole_blocks
                    and self.token_axis is None
                    and not tensor.has_slots(self.planner.num_blocks, span)
                ):
                    span, by_token = None, False
                tensors.append(
                    tensor.segments(self.planner.num_blocks, span, self.token_axis, self.interleave)
                )
        object.__setattr__(self, "tensors", tuple(tensors))
        object.__setattr__(self, "by_token", by_token)
        if len(set(devices)) > 1:
            raise LayoutError(f"layer {self.name!r}: its tensors are on devices {devices}")
        object.__setattr__(self, "device", devices[0] if devices else None)


@dataclass(frozen=True, slots=True)
class _Pointer:
    __array_interface__: dict[str, Any]
    owner: object


@dataclass(frozen=True, slots=True)
class _Axis:
    size: int
    stride: int


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A strided array as numbers; nothing here depends on where the memory is."""

    site: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device: int | None

    @classmethod
    def of(cls, cache: object, site: str, dtype: str | None, *, zeros: bool) -> "_Tensor":
        try:
            array = describe(cache)
        except (TypeError, ImportError) as error:
            raise LayoutError(f"{site}: {error}") from None
        if dtype is not None and ENCODINGS[dtype].itemsize != array.itemsize:
            raise LayoutError(
                f"{site}: dtype {dtype} has {ENCODINGS[dtype].itemsize} bytes, "
                f"the elements of the cache ({array.dtype}) have {array.itemsize}"
            )
        name = dtype or array.dtype
        if not zeros and (name not in ENCODINGS or not array.native):
            raise LayoutError(
                f"{site}: values of a cache of {array.dtype} have no known encoding, "
                f"pass dtype, one of {_names()}"
            )
        return cls(
            site, array.address, array.shape, array.strides, array.itemsize, name, array.device
        )

    def refuse(self, what: str) -> NoReturn:
        raise LayoutError(f"{self.site}: {what}")

    def segments(
        self, num_blocks: int, span: int | None, token_axis: int | None, interleave: int
    ) -> tuple[Segment, ...]:
        """Cut the tensor into segments; ``span`` is None where it is not addressed by token."""
        self.check_strides()
        block_axis = self.block_axis(num_blocks)
        rows = _Axis(self.shape[block_axis] // num_blocks, self.strides[block_axis])
        others = [_Axis(*axis) for axis in zip(self.shape, self.strides, strict=True)]
        others[block_axis] = _Axis(1, 0)
        slots = _Axis(1, 0)
        tokens_per_slot = 1
        if span is not None:
            axis = self.slot_axis(block_axis, rows.size, span, token_axis)
            if axis is not None:
                slots, others[axis] = others[axis], slots
            tokens_per_slot = span // (rows.size * slots.size)
        # Kernel rows join the token slots if they can; a tensor without slots takes them as planes.
        parts = rows
        if span is None:
            others.append(rows)
            parts = _Axis(1, 0)
        elif slots.size == 1 or rows.size == 1 or rows.stride == slots.size * slots.stride:
            slots = _Axis(rows.size * slots.size, rows.stride if slots.size == 1 else slots.stride)
            parts = _Axis(1, 0)
        slot_bytes, planes = self.merge(others)
        inner = planes[0] if planes else _Axis(1, 0)
        outer = planes[:0:-1]
        return tuple(
            Segment(
                address=self.address
                + part * parts.stride
                + sum(i * axis.stride for i, axis in zip(index, outer, strict=True)),
                num_blocks=num_blocks,
                block_stride=rows.size * rows.stride if num_blocks > 1 else 0,
                planes=inner.size,
                plane_stride=inner.stride,
                slots=slots.size,
                slot_stride=slots.stride if slots.size > 1 else 0,
                slot_bytes=slot_bytes,
                first_plane=number * inner.size,
                first_slot=part * slots.size,
                block_slots=parts.size * slots.size,
                tokens_per_slot=tokens_per_slot,
                dtype=self.dtype,
                interleave=interleave,
            )
            for number, index in enumerate(product(*(range(axis.size) for axis in outer)))
            for part in range(parts.size)
        )

    def check_strides(self) -> None:
        """Refuse what is not a nest of disjoint, aligned, forward steps through memory."""
        described = f"cache of shape {self.shape} with byte strides {self.strides}"
        if 0 in self.shape or not self.shape or self.itemsize == 0:
            self.refuse(f"a {described} holds nothing")
        pairs = zip(self.shape, self.strides, strict=True)
        steps = sorted((stride, size) for size, stride in pairs if size > 1)
        if any(stride < 0 for stride, _ in steps):
            self.refuse(f"a {described} runs backwards")
        reach = self.itemsize
        for stride, size in steps:
            if stride < reach:
                self.refuse(f"elements of a {described} overlap or interleave")
            reach += (size - 1) * stride
        if any(value % self.itemsize for value in (self.address, *(step for step, _ in steps))):
            self.refuse(f"a {described} is not aligned to its elements of {self.itemsize} bytes")

    def block_axis(self, num_blocks: int) -> int:
        fits = [axis for axis, size in enumerate(self.shape) if size % num_blocks == 0]
        if not fits:
            self.refuse(f"no axis of shape {self.shape} fits num_blocks={num_blocks}")
        if fits[0] != 0 and len(fits) > 1:
            self.refuse(f"axes {fits} of shape {self.shape} all fit num_blocks={num_blocks}")
        return fits[0]

    def has_slots(self, num_blocks: int, span: int) -> bool:
        """Whether the slots of ``span`` tokens can be told from the shape."""
        block_axis = self.block_axis(num_blocks)
        rows = self.shape[block_axis] // num_blocks
        return rows == span or len(self.slot_axes(block_axis, rows, span)) == 1

    def slot_axes(self, block_axis: int, rows: int, span: int) -> list[int]:
        return [
            axis
            for axis, size in enumerate(self.shape)
            if axis != block_axis and size * rows == span
        ]

    def slot_axis(
        self, block_axis: int, rows: int, span: int, token_axis: int | None
    ) -> int | None:
        """Return the axis of the token slots, None if the rows of a block are the slots."""
        where = f"in shape {self.shape} with blocks along axis {block_axis}, {rows} rows each"
        if token_axis is not None:
            axis = token_axis + len(self.shape) if token_axis < 0 else token_axis
            if not 0 <= axis < len(self.shape) or axis == block_axis:
                self.refuse(f"token_axis={token_axis} is no axis of slots {where}")
            if span % (rows * self.shape[axis]):
                self.refuse(
                    f"token_axis={token_axis} has {self.shape[axis]} slots {where}, "
                    f"which do not divide the span of {span} tokens"
                )
            return axis
        if rows == span:
            return None
        fits = self.slot_axes(block_axis, rows, span)
        if len(fits) != 1:
            found = f"axes {fits} all have" if fits else "no axis has"
            self.refuse(f"{found} the slots of {span} tokens {where}, pass token_axis")
        return fits[0]

    def merge(self, axes: list[_Axis]) -> tuple[int, list[_Axis]]:
        """Join contiguous axes: the bytes that hang together, and what is left, innermost first."""
        run = self.itemsize
        left: list[_Axis] = []
        for axis in sorted((axis for axis in axes if axis.size > 1), key=lambda axis: axis.stride):
            if axis.stride == run:
                run *= axis.size
            elif left and axis.stride == left[-1].size * left[-1].stride:
                left[-1] = _Axis(left[-1].size * axis.size, left[-1].stride)
            else:
                left.append(axis)
        return run, left


def _names() -> str:
    return ", ".join(ENCODINGS)
