"""vLLM's KV-cache groups in the planner's terms."""

from typing import Literal

from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
    iter_layer_specs,
)

from decodebench import Group, LayoutError, Planner
from decodebench.vllm.options import Options

__all__ = ["layer_spec", "planner_groups", "startup_groups", "step_planner"]


def planner_groups(config: KVCacheConfig, dcp_world_size: int) -> list[Group]:
    """Return one group per KV-cache group of the engine, in its order.

    Groups whose KV does not come from outside are excluded: those not transferred, those of a
    host's own pool, and those of encoders.

    Raises:
        LayoutError: A group holds layers of different kinds.
    """
    return [
        _group(number, group, dcp_world_size) for number, group in enumerate(config.kv_cache_groups)
    ]


def startup_groups(config: KVCacheConfig, groups: list[Group]) -> set[int]:
    """Return the groups that a fill at start-up covers.

    Rings are zeroed for each request. Attention blocks are not covered where the engine zeroes
    new ones, which would undo the fill.
    """
    return {
        number
        for number, group in enumerate(groups)
        if group.indexing in ("positional", "state")
        and not (config.needs_kv_cache_zeroing and group.indexing == "positional")
    }


def step_planner(config: KVCacheConfig, dcp_world_size: int, options: Options) -> Planner:
    """Return the planner of a step's fills, on which scheduler and workers agree.

    Groups that a fill at start-up covers are excluded.
    """
    groups = planner_groups(config, dcp_world_size)
    covered = startup_groups(config, groups) if options.startup_fill else ()
    return Planner(
        [Group("excluded") if i in covered else group for i, group in enumerate(groups)],
        config.num_blocks,
    )


def layer_spec(group: KVCacheGroupSpec, layer_name: str) -> KVCacheSpec:
    """Return the spec of one layer of a group."""
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return spec.kv_cache_specs[layer_name]
    return spec


def _group(number: int, group: KVCacheGroupSpec, dcp_world_size: int) -> Group:
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        return Group("excluded")
    kinds = {_indexing(spec) for spec in iter_layer_specs(group.kv_cache_spec)}
    if len(kinds) != 1:
        raise LayoutError(f"KV cache group {number} holds layers of kinds {sorted(kinds)}")
    (indexing,) = kinds
    if indexing in ("ring", "excluded"):
        return Group(indexing)
    return Group(indexing, _span(group.kv_cache_spec, dcp_world_size))


def _span(spec: KVCacheSpec, dcp_world_size: int) -> int:
    """Return the tokens of a block, over all ranks that share them, by the engine's own rule."""
    # Before 0.31 the engine asks apart which groups are sharded; since then, specs know.
    sharding = getattr(kv_cache_utils, "dcp_world_size_for_kv_cache_spec", None)
    if sharding is not None:
        dcp_world_size = sharding(spec, dcp_world_size)
    span: int = kv_cache_utils.resolve_dcp_kv_block_size(spec, dcp_world_size)
    return span


def _indexing(spec: KVCacheSpec) -> Literal["positional", "state", "ring", "excluded"]:
    if isinstance(spec, CircularBufferSpec):
        return "ring"
    if isinstance(spec, EncoderOnlyAttentionSpec | CrossAttentionSpec):
        return "excluded"
    if isinstance(spec, MambaSpec):
        return "state"
    return "positional"
