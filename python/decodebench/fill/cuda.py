"""The CUDA backend: per step one copy of the plan, and one launch, on the caller's stream."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from decodebench._core import StepPlan
from decodebench.errors import LayoutError
from decodebench.fill.common import Selection, batches, bind, check_outline, whole_only
from decodebench.fill.tables import tables_of
from decodebench.layout import Layer
from decodebench.pattern import Pattern

__all__ = ["THREADS", "CudaFiller", "Driver"]

THREADS: Final = 256
"""Threads of a thread block, as the kernel's launch bounds say."""

_BLOCKS_PER_PROCESSOR: Final = 8  # of 256 threads each: all that a multiprocessor holds
_RING: Final = 4


class Driver(Protocol):
    """What the backend needs of a GPU. Addresses and stream handles are plain integers."""

    @property
    def multiprocessors(self) -> int:
        """Number of multiprocessors of the device."""
        ...

    def upload(self, array: NDArray[Any]) -> int:
        """Copy an array to device memory that lives as long as the driver."""
        ...

    def device(self, size: int) -> int:
        """Allocate device memory that lives as long as the driver."""
        ...

    def pinned(self, size: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory."""
        ...

    def stream(self, stream: object) -> int:
        """Return the handle of a stream, of the current one if None."""
        ...

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        """Copy from page-locked memory to the device, asynchronously."""
        ...

    def launch(self, blocks: int, arguments: tuple[int, ...], stream: int) -> None:
        """Launch the kernel with :data:`THREADS` threads a block; arguments have 64 bits."""
        ...

    def event(self) -> Any:
        """Make an event that has happened."""
        ...

    def record(self, event: Any, stream: int) -> None:
        """Let the event happen when the stream gets here."""
        ...

    def wait(self, event: Any) -> None:
        """Wait on the host until the event has happened."""
        ...

    def capturing(self, stream: int) -> bool:
        """Whether a CUDA graph is being captured on the stream."""
        ...


class _Slot:
    """A step's bytes on both sides, and the event after which they may be overwritten."""

    __slots__ = ("address", "device", "event", "host", "size")

    def __init__(self, driver: Driver, size: int) -> None:
        self.size = size
        self.host = driver.pinned(size)
        self.address = int(self.host.ctypes.data)
        self.device = driver.device(size)
        self.event = driver.event()


class CudaFiller:
    """Fills the selected blocks of caches in the memory of one GPU.

    Tables and tiles are uploaded here. A fill copies the step's ids into one of a few page-locked
    buffers in turn, and from there to the device, so that steps in flight do not meet; it waits for
    the device only if all buffers are in flight. A buffer that a graph has captured belongs to that
    graph from then on: each capture uses up one of them, and replays fill the blocks of its plan.

    Args:
        layers: Where to write.
        pattern: :class:`Constant` or :class:`Normal`; layers that want zeros get those instead.
        driver: The GPU.

    Raises:
        LayoutError: As for the NumPy backend.
        PatternError: As for the NumPy backend, or the pattern is of another kind.
    """

    __slots__ = (
        "_driver",
        "_fixed",
        "_geometry",
        "_lookup",
        "_next",
        "_num_chunks",
        "_slots",
        "_tables",
        "_whole_only",
    )

    def __init__(self, layers: Sequence[Layer], pattern: Pattern, driver: Driver) -> None:
        targets = bind(layers, pattern)
        tables = self._tables = tables_of(targets, pattern, driver.upload)
        self._driver = driver
        self._geometry = layers[0].planner
        self._whole_only = whole_only(layers)
        self._num_chunks = [int(count) for count in tables.groups["num_chunks"]]
        self._fixed = (
            driver.upload(tables.segments),
            driver.upload(tables.chunks),
            driver.upload(tables.groups),
            len(self._num_chunks),
        )
        lengths = [part.size for part in tables.token_bytes]
        self._lookup = (
            np.concatenate(tables.token_bytes),
            np.cumsum([0, *lengths[:-1]]),
            np.array(tables.block_bytes),
        )
        # Room for a plan of every block, each with a row of partials.
        size = self._layout(self._geometry.num_blocks, self._geometry.num_blocks, keys=False)[-1]
        self._slots = [_Slot(driver, size) for _ in range(_RING)]
        self._next = 0

    def fill(
        self,
        plan: Selection,
        *,
        keys: NDArray[np.int64] | None = None,
        stream: object = None,
    ) -> int:
        """Enqueue writing the pattern to the blocks of ``plan``.

        Args:
            plan: The blocks to fill.
            keys: Integers beside ``plan.block_ids``; by default, the ids.
            stream: Handle of a CUDA stream, or a CuPy or torch stream; None is the current one.

        Returns:
            Number of bytes that will be written.

        Raises:
            LayoutError: The plan is malformed or not for these caches, or a graph is being captured
                and no buffer is left for it; nothing is written.
        """
        ids, offsets, partials = plan.block_ids, plan.group_offsets, plan.partials
        if keys is None and type(plan) is StepPlan and not self._whole_only:
            check_outline(plan, self._geometry)  # all else was checked when it was planned
        else:
            batches(plan, self._geometry, keys, self._whole_only)
        bounds = offsets.tolist()
        items = [0]
        written = 0
        for group, chunks in enumerate(self._num_chunks):
            count = bounds[group + 1] - bounds[group]
            items.append(items[-1] + count * chunks)
            written += count * self._tables.block_bytes[group]
        if not items[-1]:
            return 0
        driver = self._driver
        handle = driver.stream(stream)
        at = self._layout(ids.size, len(partials), keys=keys is not None)
        slot = self._take(at[-1], handle)
        words = slot.host[: at[0]].view(np.uint64)
        words[:] = [len(partials), at[0], at[1], at[2] if keys is not None else 0, *items, *bounds]
        slot.host[at[0] : at[0] + 4 * ids.size].view(np.int32)[:] = ids
        if len(partials):
            slot.host[at[1] : at[1] + 12 * len(partials)].view(np.int32)[:] = partials.reshape(-1)
            written -= self._left_out(bounds, partials)
        if keys is not None:
            slot.host[at[2] : at[2] + 8 * ids.size].view(np.int64)[:] = keys
        driver.copy(slot.device, slot.address, at[-1], handle)
        most = driver.multiprocessors * _BLOCKS_PER_PROCESSOR
        blocks = min(most, -(-items[-1] * 32 // THREADS))
        driver.launch(blocks, (*self._fixed, slot.device), handle)
        if slot in self._slots:  # else a graph's: recording would be part of the graph
            driver.record(slot.event, handle)
        return written

    def _layout(self, num_ids: int, num_partials: int, *, keys: bool) -> tuple[int, int, int, int]:
        """Return where ids, partials and keys begin, and the end, in bytes."""
        ids = 8 * (4 + 2 * (len(self._num_chunks) + 1))
        partials = ids + 4 * num_ids
        beside = -(-(partials + 12 * num_partials) // 8) * 8
        return ids, partials, beside, beside + 8 * num_ids * keys

    def _take(self, size: int, stream: int) -> _Slot:
        """Return a buffer that nothing in flight reads."""
        if self._driver.capturing(stream):
            slot = self._slots[-1]
            if len(self._slots) == 1 or slot.size < size:
                raise LayoutError(
                    "no buffer is left for a fill captured in a CUDA graph: "
                    "fill as many blocks once before, and capture a filler's fill at most "
                    f"{_RING - 1} times"
                )
            self._driver.wait(slot.event)
            self._slots.pop()
            return slot
        self._next = (self._next + 1) % len(self._slots)
        slot = self._slots[self._next]
        self._driver.wait(slot.event)
        if slot.size < size:
            slot = self._slots[self._next] = _Slot(self._driver, 2 * size)
        return slot

    def _left_out(self, bounds: list[int], partials: NDArray[np.int32]) -> int:
        """Return the bytes of blocks in ``partials`` that are not written."""
        positions, first, end = partials.T
        groups = np.searchsorted(bounds, positions, side="right") - 1
        before, start, whole = self._lookup
        at = start[groups]
        return int((whole[groups] - before[at + end] + before[at + first]).sum())
