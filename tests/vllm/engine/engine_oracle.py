"""Which bytes a fill must write, worked out token by token from what the engine said.

Nothing here uses the planner, the layout or the fill of the package.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec, UniformTypeKVCacheSpecs

POISON = 0xA5

Caches = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Admission:
    """A request that the engine gave blocks for external tokens."""

    request_id: str
    preemptions: int
    local: int
    external: int
    tables: tuple[list[int], ...]


class FillCheck:
    """Compares the caches' memory after a fill with what it was before and what was to be written.

    Args:
        config: The engine's groups.
        caches: Its tensors, by layer.
        admissions: The requests to be filled for.
        value: What is to be written; None for anything else than what stood there.
        startup_fill: Whether whole caches were filled at the start.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        caches: Caches,
        admissions: list[Admission],
        value: float | None,
        startup_fill: bool,
    ) -> None:
        self._random = value is None
        self._memory = memory_of(caches)
        self._expected = {at: memory.clone() for at, memory in self._memory.items()}
        self._planned: dict[int, torch.Tensor] = {}
        if not admissions:
            return
        self._planned = {at: torch.zeros_like(memory) for at, memory in self._memory.items()}
        for number, name, spec in _layers(config):
            if startup_fill and _is_covered(config, spec):
                continue
            for admission in admissions:
                for block, slot in _blocks(spec.block_size, admission, number).items():
                    for part in _parts(spec, caches[name], config.num_blocks, block, slot):
                        _view(part, self._planned).fill_(1)
                        # What stands there might be right by chance.
                        _view(part, self._memory).fill_(POISON)
                        encoded = torch.full((1,), value or 0.0, dtype=part.dtype)
                        _view(part, self._expected).copy_(encoded.view(torch.uint8))

    @property
    def num_bytes(self) -> int:
        """How many bytes are to be written."""
        return sum(int(planned.sum()) for planned in self._planned.values())

    def problems(self) -> list[str]:
        """Return what is wrong now, nothing if all is right."""
        found = []
        for number, (at, memory) in enumerate(self._memory.items()):
            if torch.equal(memory, self._expected[at]):
                continue
            differs = memory != self._expected[at]
            planned = self._planned[at].bool() if self._planned else torch.zeros_like(differs)
            if touched := int((differs & ~planned).sum()):
                found.append(
                    f"tensor {number}: {touched} bytes changed that were not to be written"
                )
            missed, most = int((differs & planned).sum()), 0
            if self._random:
                # A random byte is the poison's once in 256 times.
                missed = int(((memory == POISON) & planned).sum())
                most = int(planned.sum()) // 64
            if missed > most:
                found.append(f"tensor {number}: {missed} bytes are not what was to be written")
        return found


def memory_of(caches: Caches) -> dict[int, torch.Tensor]:
    """Return the caches' memory as bytes, each storage once, by address."""
    storages = [cache.untyped_storage() for cache in caches.values()]
    return {
        storage.data_ptr(): torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages
    }


def filled_layers(config: KVCacheConfig, caches: Caches, value: float) -> list[str]:
    """Return the layers that a fill at start-up covers and that hold nothing but ``value``."""
    return [
        name
        for _, name, spec in _layers(config)
        if _is_covered(config, spec)
        and all(
            bool((part == value).all())
            for block in range(config.num_blocks)
            for part in _parts(spec, caches[name], config.num_blocks, block, 0)
        )
    ]


def _layers(config: KVCacheConfig) -> Iterator[tuple[int, str, Any]]:
    for number, group in enumerate(config.kv_cache_groups):
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            yield number, name, spec


def _is_covered(config: KVCacheConfig, spec: Any) -> bool:
    return isinstance(spec, MambaSpec) or not config.needs_kv_cache_zeroing


def _blocks(span: int, admission: Admission, group: int) -> dict[int, int]:
    """Return the blocks that hold external tokens: block id to its first slot that does."""
    first: dict[int, int] = {}
    for token in range(admission.local, admission.local + admission.external):
        block = admission.tables[group][token // span]
        if block != 0:
            first.setdefault(block, token % span)
    return first


def _parts(
    spec: Any, cache: torch.Tensor, num_blocks: int, block: int, slot: int
) -> Iterator[torch.Tensor]:
    """Return what of a block is written if its slots from one on are: typed, without padding."""
    rows, rest = divmod(cache.shape[0], num_blocks)
    assert not rest, f"a cache of shape {tuple(cache.shape)} for {num_blocks} blocks"
    page = cache[block * rows : (block + 1) * rows]
    if isinstance(spec, MambaSpec):
        # The states stand one after the other.
        raw, start = page.flatten().view(torch.uint8), 0
        assert raw.data_ptr() == page.data_ptr()
        for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
            end = start + prod(shape) * dtype.itemsize
            yield raw[start:end].view(dtype)
            start = end
    elif slot:
        assert page.shape[0] == 1
        assert page.shape[2] == spec.block_size
        yield page[:, :, slot:]
    else:
        yield page


def _view(part: torch.Tensor, copies: dict[int, torch.Tensor]) -> torch.Tensor:
    """Return the bytes ``[..., item size]`` of a tensor in copies of the memory."""
    size = part.element_size()
    return torch.as_strided(
        copies[part.untyped_storage().data_ptr()],
        (*part.shape, size),
        (*(stride * size for stride in part.stride()), 1),
        part.storage_offset() * size,
    )
