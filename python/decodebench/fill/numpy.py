"""The NumPy backend: the reference for all others, and what caches in host memory use."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decodebench.fill.common import Selection, Target, batches, bind, whole_only
from decodebench.layout import Layer, Segment
from decodebench.pattern import Pattern

__all__ = ["Filler"]

_CHUNK_BYTES: Final = 1 << 19
"""Copied at a time through a temporary: small enough for a second-level cache."""

_CHUNK_BLOCKS: Final = 4096
"""Blocks whose phases are computed at a time."""

_Bytes = NDArray[np.uint8]
_Words = NDArray[np.unsignedinteger[Any]]


class Filler:
    """Fills the selected blocks of the caches of all layers of one planner.

    Views of the caches and the pattern's tiles are made once, here. A filler holds no state between
    fills.

    Args:
        layers: Where to write. Groups without a layer are allowed, and nothing is written for them.
        pattern: What to write; layers that want zeros get those instead.

    Raises:
        LayoutError: There is no layer, the layers are of different planners, or tensors of one
            group overlap without being the same.
        PatternError: The pattern has no usable tile for a cache.
    """

    __slots__ = ("_constant", "_geometry", "_pattern", "_tiled", "_whole_only")

    def __init__(self, layers: Sequence[Layer], pattern: Pattern) -> None:
        targets = bind(layers, pattern)
        longest: defaultdict[int, int] = defaultdict(int)
        for target in targets:
            tile = id(target.tile)
            longest[tile] = max(longest[tile], target.segment.block_bytes)
        unrolled: dict[int, _Bytes] = {}
        constant: defaultdict[int, list[_Constant]] = defaultdict(list)
        tiled: defaultdict[tuple[int, int], list[_Tiled]] = defaultdict(list)
        for target in targets:
            group, tile, period = target.layer.group, id(target.tile), target.tile.size
            words = target.tile.view(_word_type(target.segment))
            if (words == words[0]).all():
                constant[group].append(_Constant(target, words[0]))
                continue
            if tile not in unrolled:
                unrolled[tile] = np.resize(target.tile, period + longest[tile])
            tiled[group, period].append(_Tiled(target, unrolled[tile]))
        self._geometry = layers[0].planner
        self._pattern = pattern
        self._whole_only = whole_only(layers)
        self._constant = dict(constant)
        self._tiled = [
            (*key, np.array([[writer.ordinal] for writer in writers]), writers)
            for key, writers in tiled.items()
        ]

    def fill(self, plan: Selection, *, keys: NDArray[np.int64] | None = None) -> int:
        """Write the pattern to the blocks of ``plan``, whole or the tokens that it names.

        Args:
            plan: The blocks to fill, such as a :class:`decodebench.StepPlan`.
            keys: Integers beside ``plan.block_ids``: in one tensor, equal keys get equal bytes.
                By default, the ids.

        Returns:
            Number of bytes written.

        Raises:
            LayoutError: The plan is malformed or not for these caches; nothing is written.
        """
        written = 0
        for batch in batches(plan, self._geometry, keys, self._whole_only):
            for constant in self._constant.get(batch.group, ()):
                written += constant.write(batch.block_ids, batch.tokens)
            for group, period, ordinals, writers in self._tiled:
                if group != batch.group:
                    continue
                for start in range(0, batch.block_ids.size, _CHUNK_BLOCKS):
                    part = slice(start, start + _CHUNK_BLOCKS)
                    phases = self._pattern.phases(ordinals, batch.keys[None, part], period)
                    for writer, row in zip(writers, phases, strict=True):
                        written += writer.write(batch.block_ids[part], batch.tokens, row)
        return written


class _Writer:
    """A segment as arrays of the widest words that it is aligned to."""

    __slots__ = ("_per_slot", "_planes", "_segment", "_whole")

    def __init__(self, target: Target) -> None:
        segment = self._segment = target.segment
        array = segment.array(_word_type(segment), target.layer)
        self._per_slot = 1
        if segment.plane_is_run:
            self._per_slot = array.shape[3]
            array = array.reshape(*array.shape[:2], -1)
        self._planes = array
        self._whole = array.reshape(len(array), -1) if segment.block_is_run else array

    def window(self, tokens: tuple[int, int] | None) -> tuple[int, int]:
        """Return the slots of the segment to write, half-open."""
        return (0, self._segment.slots) if tokens is None else self._segment.window(*tokens)

    def view(self, first: int, end: int) -> _Words:
        """Return the slots ``[first, end)`` of all blocks; the first axis is the block."""
        if (first, end) == (0, self._segment.slots):
            return self._whole
        return self._planes[:, :, first * self._per_slot : end * self._per_slot]

    def block_bytes(self, first: int, end: int) -> int:
        """Return the bytes of the slots ``[first, end)`` of one block."""
        return self._segment.planes * (end - first) * self._segment.slot_bytes


class _Constant(_Writer):
    """Writes the same word everywhere."""

    __slots__ = ("_word",)

    def __init__(self, target: Target, word: np.unsignedinteger[Any]) -> None:
        super().__init__(target)
        self._word = word

    def write(self, block_ids: NDArray[np.intp], tokens: tuple[int, int] | None) -> int:
        window = self.window(tokens)
        view = self.view(*window)
        first, end = int(block_ids[0]), int(block_ids[-1]) + 1
        if end - first == block_ids.size:
            view[first:end] = self._word
        else:
            view[block_ids] = self._word
        return block_ids.size * self.block_bytes(*window)


class _Tiled(_Writer):
    """Copies from a tile, which is followed by as much of itself as a block can reach."""

    __slots__ = ("_period", "_tile", "ordinal")

    def __init__(self, target: Target, unrolled: _Bytes) -> None:
        super().__init__(target)
        self._tile = unrolled
        self._period = target.tile.size
        self.ordinal = target.ordinal

    def write(
        self,
        block_ids: NDArray[np.intp],
        tokens: tuple[int, int] | None,
        phases: NDArray[np.int64],
    ) -> int:
        segment = self._segment
        first, end = self.window(tokens)
        if first == end:
            return 0
        view = self.view(first, end)
        block_bytes = self.block_bytes(first, end)
        # In packed order a block is one piece if all its slots are written, else a piece per plane.
        pieces = 1 if end - first == segment.block_slots else segment.planes
        plane_bytes = segment.block_slots * segment.slot_bytes
        offsets = segment.offset(0, first) + plane_bytes * np.arange(pieces)
        itemsize = view.itemsize
        starts = (phases[:, None] + offsets) % self._period // itemsize
        shape = (self._period // itemsize, block_bytes // pieces // itemsize)
        windows = np.ndarray(shape, view.dtype, self._tile, strides=(itemsize, itemsize))
        step = max(1, _CHUNK_BYTES // block_bytes)
        for start in range(0, block_ids.size, step):
            part = slice(start, start + step)
            data = windows[starts[part]]
            view[block_ids[part]] = data.reshape(-1, *view.shape[1:])
        return block_ids.size * block_bytes


def _word_type(segment: Segment) -> np.dtype[np.unsignedinteger[Any]]:
    return np.dtype(f"u{min(8, segment.alignment)}")
