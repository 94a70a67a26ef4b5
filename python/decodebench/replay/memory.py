"""A real KV cache for a simulated engine, and tags beside it that show what a fill did.

There is one tag per token slot, addressed by the same block ids and written by the same backend
from the same selection as the cache. A tag names the admission that filled the slot. What a tag
must be is worked out here from the block tables alone, token by token, and compared with what the
memory holds: neither side knows of the planner. Of the cache itself, the first and the last block
of each prefix and of each fill are compared byte by byte.
"""

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from decodebench import Group, Planner
from decodebench._core import FillStep
from decodebench.fill import Filler
from decodebench.layout import Layer
from decodebench.pattern import Pattern

_Ints = npt.NDArray[np.integer]

_NULL_BLOCK = 0
_TOKENS_AT_ONCE = 1 << 20
_NEVER_WRITTEN = -1
# Slots after the last external token: filled or not, the engine writes them before it reads them.
_ANYTHING = -2
# Below all of these: written by the engine itself, for admission ``_ENGINE - tag``.
_ENGINE = -3


@dataclass(frozen=True, slots=True)
class Geometry:
    """One layer's share of the simulated KV cache, and how many layers each group has.

    Attributes:
        layers: Layers per KV-cache group. Groups share the memory of layer ``i``, as in vLLM: a
            block belongs to one group at a time.
        kv_heads: Key-value heads.
        head_dim: Elements per head.
        dtype: Element type.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype[np.generic]


@dataclass(slots=True)
class MemoryReport:
    """What the memory showed. Blocks are counted once per damage.

    Attributes:
        blocks_verified: Blocks compared, some of them many times.
        shared_blocks_overwritten: Blocks of a local prefix that no longer held their writer's bytes
            after the fill of the request that shares them.
        fresh_blocks_unfilled: Blocks with external tokens that did not hold their request's own
            bytes after its fill.
        other_blocks_damaged: Blocks whose tags were found damaged when their request ended or the
            replay did, or whose tags are right but not the bytes of the cache.
        fill_bytes: Bytes written into the KV cache, tags not counted.
        fill_seconds: Time spent writing them.
    """

    blocks_verified: int = 0
    shared_blocks_overwritten: int = 0
    fresh_blocks_unfilled: int = 0
    other_blocks_damaged: int = 0
    fill_bytes: int = 0
    fill_seconds: float = 0.0

    @property
    def violations(self) -> int:
        """All damage."""
        return (
            self.shared_blocks_overwritten + self.fresh_blocks_unfilled + self.other_blocks_damaged
        )


@dataclass(frozen=True, slots=True)
class Tags:
    """A pattern that writes a run of numbers into each block, starting where its key says.

    Slot ``s`` of a block filled for admission ``k`` gets ``(k * stride + s) % period``, so that
    every slot tells who wrote it.

    Attributes:
        stride: Numbers per admission, at least the slots of a block.
        period: Numbers in all; admissions that far apart share their tags.
    """

    stride: int
    period: int

    def tile(self, dtype: str) -> npt.NDArray[np.uint8]:
        """One period of int32 numbers, as bytes, whatever the element type is called."""
        del dtype
        return np.arange(self.period, dtype=np.int32).view(np.uint8)

    def phases(
        self, ordinals: npt.NDArray[np.int64], keys: npt.NDArray[np.int64], period: int
    ) -> npt.NDArray[np.int64]:
        """Byte offsets into the tile at which the blocks of admissions ``keys`` start."""
        return np.broadcast_arrays(ordinals, keys * (4 * self.stride) % period)[1]

    def expected(self, sequence: int, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """What admission ``sequence`` writes into ``slots``."""
        return (sequence * self.stride + slots) % self.period


@dataclass(slots=True)
class Memory:
    """The simulated engine's KV cache.

    Args:
        geometry: Shape of the cache.
        num_blocks: Blocks in the pool, the null block counted.
        block_size: Tokens per block.
        num_groups: KV-cache groups, all positional.
        pattern: What to fill with.
        num_requests: Requests to expect; decides after how many admissions tags repeat.
    """

    geometry: Geometry
    num_blocks: int
    block_size: int
    num_groups: int
    pattern: Pattern
    num_requests: int
    report: MemoryReport = field(default_factory=MemoryReport, init=False)
    _caches: list[npt.NDArray[np.uint8]] = field(init=False)
    _keys: npt.NDArray[np.int64] = field(init=False)
    _kv: Filler = field(init=False)
    _tag: Filler = field(init=False)
    _tile: npt.NDArray[np.uint8] = field(init=False)
    _tags: npt.NDArray[np.int32] = field(init=False)
    _expected: npt.NDArray[np.int32] = field(init=False)
    _pattern: Tags = field(init=False)

    def __post_init__(self) -> None:
        """Allocate the cache and the tags."""
        geometry, groups = self.geometry, range(self.num_groups)
        planner = Planner([Group("positional", self.block_size)] * self.num_groups, self.num_blocks)
        shape = (self.num_blocks, 2, self.block_size, geometry.kv_heads, geometry.head_dim)
        caches = [np.zeros(shape, geometry.dtype) for _ in range(geometry.layers)]
        self._caches = [cache.reshape(self.num_blocks, -1).view(np.uint8) for cache in caches]
        # The key that each block was last filled with, different for each block and admission.
        self._keys = np.zeros(self.num_blocks, np.int64)
        self._tile = self.pattern.tile(geometry.dtype.name)
        self._kv = Filler(
            [
                Layer(cache, planner, group, token_axis=2, name=f"layer {index}")
                for index, cache in enumerate(caches)
                for group in groups
            ],
            self.pattern,
        )
        # Phases are multiples of 16 bytes: four tags.
        stride = -(-self.block_size // 4) * 4
        admissions = min(max(2 * self.num_requests, 4096), max(2, (1 << 24) // stride))
        self._pattern = Tags(stride, stride * admissions)
        self._tags = np.full((self.num_blocks, self.block_size), _NEVER_WRITTEN, np.int32)
        self._expected = self._tags.copy()
        self._tag = Filler(
            [
                # Named after a type of the same size: the tags are no encoded values.
                Layer(self._tags, planner, group, token_axis=1, name="tags", dtype="float32")
                for group in groups
            ],
            self._pattern,
        )

    def apply(self, step: FillStep) -> None:
        """Write what an engine step writes, and check what it says can be checked."""
        for slots, sequences in step.engine_writes:
            tags = _ENGINE - sequences
            self._tags.reshape(-1)[slots] = tags
            self._expected.reshape(-1)[slots] = tags
        for _, tables in step.released:
            for table in tables:
                self.report.other_blocks_damaged += self._damaged(table)
        keys = step.block_sequences * self.num_blocks + step.block_ids
        start = time.perf_counter()
        self.report.fill_bytes += self._kv.fill(step, keys=keys)
        self.report.fill_seconds += time.perf_counter() - start
        self._tag.fill(step, keys=step.block_sequences)
        for sequence, local, external, tables in step.admitted:
            for table in tables:
                self._expect(sequence, local, external, table)
        for _, local, external, tables in step.admitted:
            for group, table in enumerate(tables):
                first_fresh = local // self.block_size
                end = -(-(local + external) // self.block_size) if external else first_fresh
                prefix, fresh = table[:first_fresh], table[first_fresh:end]
                self.report.shared_blocks_overwritten += self._damaged(prefix)
                self.report.fresh_blocks_unfilled += self._damaged(fresh)
                self._compare_bytes(group, prefix)
                self._compare_bytes(group, fresh)

    def finish(self) -> None:
        """Check every block, the null block and those that nobody holds included."""
        every_block = np.arange(self.num_blocks)
        self.report.other_blocks_damaged += self._damaged(every_block, skip_null=False)

    def _expect(self, sequence: int, local: int, external: int, table: _Ints) -> None:
        """What the slots of an admission's external tokens hold from now on."""
        for start in range(local, local + external, _TOKENS_AT_ONCE):
            end = min(start + _TOKENS_AT_ONCE, local + external)
            tokens = np.arange(start, end)
            blocks, slots = table[tokens // self.block_size], tokens % self.block_size
            real = blocks != _NULL_BLOCK
            blocks, slots = blocks[real], slots[real]
            self._expected[blocks, slots] = self._pattern.expected(sequence, slots)
            self._keys[blocks] = sequence * self.num_blocks + blocks.astype(np.int64)
            if end == local + external and real[-1]:
                self._expected[blocks[-1], slots[-1] + 1 :] = _ANYTHING

    def _damaged(self, table: _Ints, *, skip_null: bool = True) -> int:
        """Number of blocks that do not hold what they should. From then on they should."""
        blocks = table[table != _NULL_BLOCK] if skip_null else table
        held, expected = self._tags[blocks], self._expected[blocks]
        wrong = ((held != expected) & (expected != _ANYTHING)).any(axis=1)
        self.report.blocks_verified += len(blocks)
        self._expected[blocks[wrong]] = held[wrong]
        return int(wrong.sum())

    def _compare_bytes(self, group: int, table: _Ints) -> None:
        """Compare the cache under the first and the last block whose tags are one admission's."""
        blocks = table[table != _NULL_BLOCK]
        for block in blocks[[0, -1]] if len(blocks) > 1 else blocks:
            sequence = self._keys[block] // self.num_blocks
            tags = self._pattern.expected(sequence, np.arange(self.block_size))
            if (self._tags[block] != tags).any():
                continue
            for index, cache in enumerate(self._caches):
                # A filler numbers its tensors in the order they were given.
                ordinal = np.array([index * self.num_groups + group])
                phase = self.pattern.phases(ordinal, self._keys[[block]], self._tile.size)
                offsets = (phase + np.arange(cache.shape[1])) % self._tile.size
                self.report.blocks_verified += 1
                if (cache[block] != self._tile[offsets]).any():
                    self.report.other_blocks_damaged += 1
