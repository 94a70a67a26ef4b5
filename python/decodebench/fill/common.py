"""What every backend shares: the segments to write, and the checks before the first byte."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from decodebench.errors import LayoutError, PatternError
from decodebench.layout import Geometry, Layer, Segment
from decodebench.pattern import PHASE_BYTES, Pattern

__all__ = ["Batch", "Selection", "Target", "batches", "bind", "check_outline", "whole_only"]


class Selection(Geometry, Protocol):
    """The blocks to fill, such as :class:`decodebench.StepPlan`."""

    @property
    def block_ids(self) -> NDArray[np.int32]:
        """Ids of all groups, shape ``[n]``, group by group; each at most once in its group."""
        ...

    @property
    def group_offsets(self) -> NDArray[np.int32]:
        """Shape ``[groups + 1]``: group g's ids are ``block_ids[offsets[g]:offsets[g + 1]]``."""
        ...

    @property
    def partials(self) -> NDArray[np.int32]:
        """Blocks not to be written whole, shape ``[p, 3]``, sorted by position.

        Rows are (position in ``block_ids``, first token, end token), the tokens half-open and
        counted from the start of the block.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A segment, and the pattern that is written there.

    ``ordinal`` numbers the distinct tensors of all layers in the order of registration, and selects
    the phases of the tensor's blocks.
    """

    layer: Layer
    ordinal: int
    segment: Segment
    tile: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Blocks of one group that are written alike.

    ``block_ids`` ascend and are distinct; ``keys`` stand beside them. ``tokens`` are those to
    write, half-open and counted from the start of each block, or None for whole blocks.
    """

    group: int
    tokens: tuple[int, int] | None
    block_ids: NDArray[np.intp]
    keys: NDArray[np.int64]


def bind(layers: Sequence[Layer], pattern: Pattern) -> tuple[Target, ...]:
    """Return what is to be written where, each piece of memory once per group.

    A tensor that several layers of a group share counts once. Layers that want zeros get them.

    Raises:
        LayoutError: There is no layer, the layers are of different planners, or tensors of one
            group overlap without being the same.
        PatternError: The pattern has no usable tile for a cache.
    """
    if not layers:
        raise LayoutError("there is no layer to fill")
    expected = _outline(layers[0].planner)
    for layer in layers:
        if _outline(layer.planner) != expected:
            raise LayoutError(
                f"layers {layers[0].name!r} and {layer.name!r} are not of the same planner"
            )
    zeros = np.zeros(PHASE_BYTES, np.uint8)
    tiles: dict[str, NDArray[np.uint8]] = {}
    seen: set[tuple[int, tuple[Segment, ...]]] = set()
    targets: list[Target] = []
    for layer in layers:
        for tensor in layer.tensors:
            if (layer.group, tensor) in seen:
                continue
            ordinal = len(seen)
            seen.add((layer.group, tensor))
            dtype = tensor[0].dtype
            if not layer.zeros and dtype not in tiles:
                tiles[dtype] = _tile(pattern, dtype)
            tile = zeros if layer.zeros else tiles[dtype]
            targets.extend(Target(layer, ordinal, segment, tile) for segment in tensor)
    _refuse_overlaps(targets)
    return tuple(targets)


def whole_only(layers: Sequence[Layer]) -> dict[int, str]:
    """Return the positional groups in which a layer is not addressed by token, and its name."""
    return {
        layer.group: layer.name
        for layer in layers
        if layer.planner.groups[layer.group].indexing == "positional" and not layer.by_token
    }


def batches(
    selection: Selection,
    geometry: Geometry,
    keys: NDArray[np.int64] | None,
    whole_only: Mapping[int, str],
) -> list[Batch]:
    """Check a selection and sort it into batches.

    Args:
        selection: The blocks to fill.
        geometry: The planner that the caches were registered with.
        keys: Integers beside ``selection.block_ids``; None means the ids.
        whole_only: Groups whose blocks cannot be written in part, and a layer that says so.

    Raises:
        LayoutError: The selection is malformed, is not for caches of this geometry, or would write
            part of a block where that cannot be done.
    """
    _check(selection, geometry)
    all_ids, partials = selection.block_ids, selection.partials
    all_keys = all_ids if keys is None else keys
    if all_keys.shape != all_ids.shape or not np.can_cast(all_keys.dtype, np.int64):
        raise LayoutError(
            f"keys must be {all_ids.size} integers, one per block id, "
            f"got {all_keys.dtype} of shape {all_keys.shape}"
        )
    offsets = selection.group_offsets
    cuts = np.searchsorted(partials[:, 0], offsets).tolist()
    found: list[Batch] = []
    for group, (start, end) in enumerate(pairwise(offsets.tolist())):
        if start == end:
            continue
        order = _ascending(all_ids[start:end], group, geometry.num_blocks)
        ids = all_ids[start:end][order].astype(np.intp)
        beside = ids if keys is None else all_keys[start:end][order].astype(np.int64)
        exact = partials[cuts[group] : cuts[group + 1]]
        if len(exact) and group in whole_only:
            position, first, stop = exact[0].tolist()
            raise LayoutError(
                f"layer {whole_only[group]!r} is not addressed by token: tokens [{first}, {stop}) "
                f"of block {all_ids[position]} in group {group} cannot be written alone"
            )
        if not len(exact):
            found.append(Batch(group, None, ids, beside))
            continue
        windows, inverse = np.unique(exact[:, 1:], axis=0, return_inverse=True)
        window = np.zeros(end - start, np.intp)  # 0 stands for the whole block
        window[exact[:, 0] - start] = inverse.reshape(-1) + 1
        window = window[order]
        for number, tokens in enumerate([None, *map(tuple, windows.tolist())]):
            chosen = window == number
            if chosen.any():
                found.append(Batch(group, tokens, ids[chosen], beside[chosen]))
    return found


def _ascending(ids: NDArray[np.int32], group: int, num_blocks: int) -> NDArray[np.intp] | slice:
    """Check the ids of a group and return the order in which they ascend."""
    for bad in (ids.min(), ids.max()):
        if not 0 <= bad < num_blocks:
            raise LayoutError(f"block {bad} in group {group} is outside [0, {num_blocks})")
    if (ids[:-1] < ids[1:]).all():
        return slice(None)
    if ids.size < num_blocks // 32:
        order = np.argsort(ids)
        repeated = (ids[order[:-1]] == ids[order[1:]]).any()
    else:  # in linear time: looking up each block's place beats sorting hundreds of thousands
        places = np.full(num_blocks, -1, np.intp)
        places[ids] = np.arange(ids.size)
        order = places[places >= 0]
        repeated = order.size != ids.size
    if repeated:
        values, counts = np.unique(ids, return_counts=True)
        raise LayoutError(f"block {values[counts > 1][0]} is selected twice in group {group}")
    return order


def _check(selection: Selection, geometry: Geometry) -> None:
    """Check everything about a selection but its ids."""
    check_outline(selection, geometry)
    ids, offsets, partials = selection.block_ids, selection.group_offsets, selection.partials
    if ids.ndim != 1 or ids.dtype.kind != "i":
        raise LayoutError(
            f"block_ids must be one-dimensional integers, got {ids.dtype} of shape {ids.shape}"
        )
    bounds = offsets.tolist()
    if len(bounds) != len(geometry.groups) + 1 or bounds != sorted([0, *bounds[1:-1], ids.size]):
        raise LayoutError(
            f"group_offsets {bounds} do not cut {ids.size} block ids into "
            f"{len(geometry.groups)} groups"
        )
    if partials.ndim != 2 or partials.shape[1] != 3:
        raise LayoutError(f"partials must have shape (n, 3), got {partials.shape}")
    positions, first, end = partials.T
    groups = np.searchsorted(offsets, positions, side="right") - 1
    spans = np.array(
        [group.span if group.indexing == "positional" else 0 for group in geometry.groups] + [0]
    )
    wrong = (positions < 0) | (first < 0) | (first >= end) | (end > spans[groups])
    wrong[1:] |= np.diff(positions) <= 0
    if wrong.any():
        row = int(np.argmax(wrong))
        raise LayoutError(
            f"partials[{row}] = {partials[row].tolist()} is not (position, first, end) of tokens "
            f"in one of the {ids.size} blocks, in ascending order"
        )


def check_outline(selection: Geometry, geometry: Geometry) -> None:
    """Refuse a selection for another block pool or other groups."""
    if _outline(selection) != _outline(geometry):
        raise LayoutError(
            f"the plan is for {_describe(selection)}, the caches are of {_describe(geometry)}"
        )


def _refuse_overlaps(targets: Sequence[Target]) -> None:
    """Refuse tensors of one group that share some bytes: one would overwrite the other."""
    ordered = sorted(targets, key=lambda target: (target.layer.group, target.segment.address))
    for index, one in enumerate(ordered):
        for other in islice(ordered, index + 1, None):
            if other.layer.group != one.layer.group or other.segment.address >= one.segment.end:
                break
            if other.ordinal != one.ordinal and np.shares_memory(_bytes(one), _bytes(other)):
                raise LayoutError(
                    f"layers {one.layer.name!r} and {other.layer.name!r} of group "
                    f"{one.layer.group} overlap in memory without being the same"
                )


def _bytes(target: Target) -> NDArray[np.uint8]:
    return target.segment.array(np.uint8, target.layer)


def _describe(geometry: Geometry) -> str:
    num_blocks, groups = _outline(geometry)
    spans = ", ".join(f"{indexing} {span}" if span else indexing for indexing, span in groups)
    return f"{num_blocks} blocks in groups ({spans})"


def _outline(geometry: Geometry) -> tuple[int, tuple[tuple[str, int], ...]]:
    return geometry.num_blocks, tuple((group.indexing, group.span) for group in geometry.groups)


def _tile(pattern: Pattern, dtype: str) -> NDArray[np.uint8]:
    tile = pattern.tile(dtype)
    if tile.size == 0 or tile.size % PHASE_BYTES:
        raise PatternError(
            f"the tile of {dtype} has {tile.size} bytes, "
            f"expected a positive multiple of {PHASE_BYTES}"
        )
    return tile
