"""Segments and tiles as the tables that ``fill.cu`` reads; the types stand as in that file."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from decodebench.errors import PatternError
from decodebench.fill.common import Target
from decodebench.pattern import Normal, Pattern

__all__ = ["CHUNK_BYTES", "Tables", "tables_of"]

CHUNK_BYTES: Final = 8192
"""Bytes that a warp writes before it takes its next item of work: 16 words of 16 bytes a thread."""

_SEGMENT_FIELDS: Final = (
    *("address", "block_stride", "plane_stride", "slot_stride"),
    *("tile", "period", "constant", "hash"),
    *("first_offset", "plane_offset", "slots", "slot_bytes", "run_bytes"),
    *("first_slot", "tokens_per_slot", "interleave"),
)
_SEGMENT: Final = np.dtype([(name, np.uint64) for name in _SEGMENT_FIELDS])
_CHUNK: Final = np.dtype([(name, np.uint64) for name in ("segment", "plane", "first", "end")])
_GROUP: Final = np.dtype([("first_chunk", np.uint64), ("num_chunks", np.uint64)])


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What is uploaded once.

    ``block_bytes[g]`` is what a whole block of group ``g`` writes, and ``token_bytes[g][t]`` what
    its slots before token ``t`` do; the latter is empty in groups that are not addressed by token.
    """

    segments: NDArray[Any]
    chunks: NDArray[Any]
    groups: NDArray[Any]
    block_bytes: tuple[int, ...]
    token_bytes: tuple[NDArray[np.int64], ...]


def tables_of(
    targets: Sequence[Target], pattern: Pattern, upload: Callable[[NDArray[Any]], int]
) -> Tables:
    """Return the tables of targets.

    Args:
        targets: What is written where.
        pattern: The pattern that they were bound to.
        upload: Copies an array to the device and returns its address there, a multiple of 16.

    Raises:
        PatternError: Blocks start at phases that the kernel cannot compute.
    """
    spans = [group.span for group in targets[0].layer.planner.groups]
    uploaded: dict[int, int] = {}
    segments = np.zeros(len(targets), _SEGMENT)
    chunks: list[list[NDArray[Any]]] = [[] for _ in spans]
    block_bytes = [0] * len(spans)
    token_bytes = [np.zeros(span + 1, np.int64) for span in spans]
    for index, target in enumerate(targets):
        segment, tile, group = target.segment, target.tile, target.layer.group
        words = tile.reshape(-1, 16)
        constant = bool((words == words[0]).all())
        if not constant and not isinstance(pattern, Normal):
            raise PatternError(
                f"the CUDA backend writes Constant and Normal patterns, got {pattern!r}"
            )
        if id(tile) not in uploaded:
            # A copy may run on for a chunk, and reads whole words.
            uploaded[id(tile)] = upload(np.resize(tile, tile.size + CHUNK_BYTES + 32))
        plane_bytes = segment.slots * segment.slot_bytes
        segments[index] = (
            segment.address % 2**64,
            segment.block_stride,
            segment.plane_stride,
            segment.slot_stride,
            uploaded[id(tile)],
            tile.size,
            constant,
            0 if constant or not isinstance(pattern, Normal) else pattern.stream(target.ordinal),
            segment.offset(0, 0),
            segment.block_slots * segment.slot_bytes,
            segment.slots,
            segment.slot_bytes,
            plane_bytes if segment.plane_is_run else segment.slot_bytes,
            segment.first_slot,
            segment.tokens_per_slot,
            segment.interleave,
        )
        first = np.arange(0, plane_bytes, CHUNK_BYTES, dtype=np.uint64)
        rows = np.zeros((segment.planes, first.size), _CHUNK)
        rows["segment"] = index
        rows["plane"] = np.arange(segment.planes, dtype=np.uint64)[:, None]
        rows["first"] = first
        rows["end"] = np.minimum(first + np.uint64(CHUNK_BYTES), np.uint64(plane_bytes))
        chunks[group].append(rows.reshape(-1))
        block_bytes[group] += segment.block_bytes
        if spans[group]:
            ends = [segment.window(0, token)[1] for token in range(spans[group] + 1)]
            token_bytes[group] += np.array(ends) * (segment.planes * segment.slot_bytes)
    counts = [sum(part.size for part in parts) for parts in chunks]
    groups = np.zeros(len(spans), _GROUP)
    groups["num_chunks"] = counts
    groups["first_chunk"] = np.cumsum([0, *counts[:-1]])
    return Tables(
        segments,
        np.concatenate([part for parts in chunks for part in parts]),
        groups,
        tuple(block_bytes),
        tuple(token_bytes),
    )
