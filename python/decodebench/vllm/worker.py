"""The connector's side in a worker: it writes the scheduler's plan into the caches."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from decodebench import Group, LayoutError, Planner
from decodebench.fill import Filler, Selection
from decodebench.fill.filler import device_of
from decodebench.layout import Layer
from decodebench.vllm.caches import CacheReader
from decodebench.vllm.groups import layer_spec, planner_groups, startup_groups, step_planner
from decodebench.vllm.metadata import DecodeBenchConnectorMetadata, ReqsToFill
from decodebench.vllm.options import Options
from decodebench.vllm.stats import DecodeBenchConnectorStats

__all__ = ["FillWorker"]

# Named under vLLM, whose logging is set up for its own loggers only.
logger = init_logger(f"vllm.{__name__}")


class FillWorker:
    """Holds the caches of one worker between their registration and the engine's sleep."""

    def __init__(self, options: Options, config: KVCacheConfig, vllm_config: VllmConfig) -> None:
        parallel = vllm_config.parallel_config
        self._options = options
        self._config = config
        self._cache_dtype: str = vllm_config.cache_config.cache_dtype
        dcp_world_size = parallel.decode_context_parallel_size
        self._interleave = (
            getattr(parallel, "cp_kv_cache_interleave_size", 1) if dcp_world_size > 1 else 1
        )
        self._planner = step_planner(config, dcp_world_size, options)
        groups = planner_groups(config, dcp_world_size)
        self._startup = startup_groups(config, groups) if options.startup_fill else set()
        self._startup_planner = Planner(groups, config.num_blocks, null_block=None)
        self._kv_caches: Mapping[str, object] = {}
        self._filler: Filler | None = None
        self._device: int | None = None
        self._running: list[tuple[Any, Any]] = []
        self._stats = DecodeBenchConnectorStats()

    def register(self, kv_caches: Mapping[str, object]) -> None:
        """Take the caches, by layer, in place of those before, and fill them if so configured.

        Raises:
            LayoutError: A cache cannot be filled block by block.
        """
        self._kv_caches = kv_caches
        layers = self._layers(self._planner, set(range(len(self._planner.groups))) - self._startup)
        covered = self._layers(self._startup_planner, self._startup)
        self._device = device_of([*layers, *covered])
        pattern = self._options.pattern()
        self._filler = Filler(layers, pattern) if layers else None
        if covered:
            filler = Filler(covered, pattern)
            for group in sorted(self._startup):
                self._write(filler, _whole_group(self._startup_planner, group))
        self._announce(layers, covered)

    def unregister(self) -> None:
        """Let go of the caches' layout: the engine takes their memory away for a while."""
        self._filler = None

    def restore(self) -> None:
        """Register the same caches again, with what they held lost; without any, do nothing."""
        if self._kv_caches:
            self.register(self._kv_caches)

    def fill(self, metadata: DecodeBenchConnectorMetadata) -> None:
        """Write what the scheduler planned.

        Raises:
            LayoutError: No caches are registered, or the plan does not fit them.
        """
        plan: Selection | None = metadata.plan
        if plan is None:
            if not metadata.reqs_to_fill:
                return
            plan = _selection(metadata.reqs_to_fill, self._planner)
        if self._filler is None:
            if self._kv_caches or any(g.layer_names for g in self._config.kv_cache_groups):
                raise LayoutError("there are blocks to fill, but no KV caches are registered")
            return
        self._write(self._filler, plan)

    def take_stats(self) -> DecodeBenchConnectorStats | None:
        """Return what was counted since the last call, None if nothing was."""
        self._read_times()
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, DecodeBenchConnectorStats()
        return stats

    def _layers(self, planner: Planner, groups: set[int]) -> list[Layer]:
        reader = CacheReader(planner, self._cache_dtype, self._interleave)
        layers: list[Layer] = []
        for number in sorted(groups):
            if planner.groups[number].indexing == "excluded":
                continue
            group = self._config.kv_cache_groups[number]
            for name in group.layer_names:
                if name in self._kv_caches:
                    spec = layer_spec(group, name)
                    layers += reader.layers(name, number, spec, self._kv_caches[name])
                else:
                    logger.warning(
                        "Layer %s of KV cache group %d has no KV cache here", name, number
                    )
        return layers

    def _write(self, filler: Filler, plan: Selection) -> None:
        if self._device is not None:
            self._enqueue(filler, plan, self._device)
            return
        start = time.perf_counter()
        num_bytes = filler.fill(plan)
        self._stats.add(num_bytes=num_bytes, num_fills=1, fill_seconds=time.perf_counter() - start)

    def _enqueue(self, filler: Filler, plan: Selection, device: int) -> None:
        """Fill on torch's current stream, between events that are read once they have happened."""
        self._read_times()
        stream = torch.cuda.current_stream(device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record(stream)
        num_bytes = filler.fill(plan, stream=stream)
        end.record(stream)
        self._running.append((start, end))
        self._stats.add(num_bytes=num_bytes, num_fills=1)

    def _read_times(self) -> None:
        """Count the time of fills that the GPU has finished, without waiting for others."""
        while self._running and self._running[0][1].query():
            start, end = self._running.pop(0)
            self._stats.add(fill_seconds=start.elapsed_time(end) / 1000)

    def _announce(self, layers: list[Layer], covered: list[Layer]) -> None:
        options = self._options
        kinds: dict[tuple[int, str], int] = {}
        for layer in [*layers, *covered]:
            for tensor in layer.tensors:
                group = layer.planner.groups[layer.group]
                text = (
                    f"{group.indexing}"
                    + (f" of {group.span} tokens a block" if group.span else "")
                    + f", {tensor[0].dtype}"
                    + (" as zeros" if layer.zeros else "")
                    + f", {sum(segment.block_bytes for segment in tensor)} bytes a block"
                    + ("" if layer.by_token or group.indexing != "positional" else ", whole blocks")
                    + (", filled at start-up" if layer.group in self._startup else "")
                )
                kinds[layer.group, text] = kinds.get((layer.group, text), 0) + 1
        logger.info(
            "Filling KV caches of %d blocks with mean %g, std %g, seed %d: %s",
            self._config.num_blocks,
            options.fill_mean,
            options.fill_std,
            options.fill_seed,
            "; ".join(
                f"group {group}: {count} x ({text})" for (group, text), count in kinds.items()
            )
            or "no layers",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Blocks:
    """A selection of whole blocks."""

    num_blocks: int
    groups: tuple[Group, ...]
    block_ids: NDArray[np.int32]
    group_offsets: NDArray[np.int32]
    partials: NDArray[np.int32]


def _selection(reqs_to_fill: ReqsToFill, planner: Planner) -> _Blocks:
    """Return blocks that were chosen already, each once."""
    # A ring is a group whose whole table is taken.
    chosen = Planner(
        [Group("ring")] * len(planner.groups), planner.num_blocks, null_block=None
    ).plan_step(
        [(name, 0, num_tokens, tables) for name, (tables, num_tokens) in reqs_to_fill.items()]
    )
    return _Blocks(
        planner.num_blocks, planner.groups, chosen.block_ids, chosen.group_offsets, chosen.partials
    )


def _whole_group(planner: Planner, group: int) -> _Blocks:
    """Return every block of one group."""
    offsets = np.zeros(len(planner.groups) + 1, np.int32)
    offsets[group + 1 :] = planner.num_blocks
    return _Blocks(
        planner.num_blocks,
        planner.groups,
        np.arange(planner.num_blocks, dtype=np.int32),
        offsets,
        np.empty((0, 3), np.int32),
    )
