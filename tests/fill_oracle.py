"""What a fill must leave in memory, byte by byte: slow, and written without the code under test.

Only the rules are shared: which elements belong to which block and slot, packed order, and where a
block starts in its pattern. Nothing here merges axes, makes views or writes through strides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decodebench import Group

MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Plan:
    """A selection that no planner has made."""

    num_blocks: int
    groups: tuple[Group, ...]
    block_ids: NDArray[np.int32]
    group_offsets: NDArray[np.int32]
    partials: NDArray[np.int32]


@dataclass(frozen=True)
class Tensor:
    """An array whose axes are known: nothing is to be found out.

    ``rows`` kernel rows make a block, ``span`` tokens long. ``token_axis`` is the axis of the
    slots; None where the tensor is not addressed by token.
    """

    array: NDArray[Any]
    group: int
    block_axis: int
    rows: int
    span: int
    token_axis: int | None
    tile: bytes
    seed: int | None


def plan_of(
    num_blocks: int,
    groups: tuple[Group, ...],
    ids: Sequence[Sequence[int]],
    partials: Sequence[tuple[int, int, int]] = (),
) -> Plan:
    """Return a plan of the ids of each group."""
    return Plan(
        num_blocks,
        groups,
        np.array([block for group in ids for block in group], np.int32),
        np.cumsum([0, *map(len, ids)]).astype(np.int32),
        np.array(partials, np.int32).reshape(-1, 3),
    )


def mix(state: int) -> int:
    """Return one step of SplitMix64."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def phase_of(seed: int | None, ordinal: int, key: int, period: int) -> int:
    """Return where a block starts in its tile; patterns without a seed start at 0."""
    if seed is None:
        return 0
    return 16 * (mix((mix((mix(seed) + ordinal) & MASK) + key & MASK) & MASK) % (period // 16))


def runs_of(addresses: Sequence[int]) -> list[list[int]]:
    """Return the addresses in ascending order, cut where one does not follow the other."""
    runs: list[list[int]] = []
    for address in sorted(addresses):
        if runs and runs[-1][-1] == address - 1:
            runs[-1].append(address)
        else:
            runs.append([address])
    return runs


def filled(
    memory: NDArray[np.uint8], tensor: Tensor, ordinal: int, plan: Plan, keys: Sequence[int]
) -> tuple[NDArray[np.uint8], int]:
    """Return a copy of ``memory`` after the fill of the tensor in it, and the bytes written.

    ``ordinal`` is the tensor's number in the order of registration.
    """
    result = memory.copy()
    base = memory.ctypes.data
    windows = {position: (first, end) for position, first, end in plan.partials.tolist()}
    start, end = plan.group_offsets[tensor.group : tensor.group + 2].tolist()
    places = {int(plan.block_ids[place]): place for place in range(start, end)}
    num_slots = tensor_slots(tensor)
    written = 0
    for (block, slot), addresses in slots_of(tensor).items():
        if block not in places:
            continue
        place = places[block]
        if place in windows:
            first_token, end_token = windows[place]
            if not first_token <= slot * tensor.span // num_slots < end_token:
                continue
        phase = phase_of(tensor.seed, ordinal, keys[place], len(tensor.tile))
        for plane, run in enumerate(runs_of(addresses)):
            for byte, address in enumerate(run):
                offset = (plane * num_slots + slot) * len(run) + byte
                result[address - base] = tensor.tile[(phase + offset) % len(tensor.tile)]
                written += 1
    return result, written


def tensor_slots(tensor: Tensor) -> int:
    """Return how many slots a block of the tensor has."""
    if tensor.token_axis is None:
        return 1
    return tensor.rows * int(tensor.array.shape[tensor.token_axis])


def slots_of(tensor: Tensor) -> dict[tuple[int, int], list[int]]:
    """Return the addresses of all bytes of every (block, slot)."""
    array = tensor.array
    slots: dict[tuple[int, int], list[int]] = {}
    for index in np.ndindex(array.shape):
        address = array.ctypes.data
        for i, stride in zip(index, array.strides, strict=True):
            address += i * stride
        block, row = divmod(index[tensor.block_axis], tensor.rows)
        slot = 0
        if tensor.token_axis is not None:
            slot = row * array.shape[tensor.token_axis] + index[tensor.token_axis]
        slots.setdefault((block, slot), []).extend(range(address, address + array.itemsize))
    return slots
