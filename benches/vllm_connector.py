"""The vLLM connector beside the in-tree one, without a model; run it where vLLM is installed.

Scheduler side: requests of 40,000 tokens at block size 16, admitted one or many in a step, from the
engine's question to unpickled metadata. Worker side: CPU caches, 64 requests of 2,500 blocks over 8
layers. Both are timed in turn in one run, and their answers compared first.
"""

import argparse
import logging
import pickle
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector as in_tree
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.forward_context import ForwardContext
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from decodebench import vllm as ours
from timing import medians

BLOCK_SIZE = 16
REQUESTS = 16
CLASSES = {"in-tree": in_tree.DecodeBenchConnector, "decodebench": ours.DecodeBenchConnector}
FORWARD = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})


def engine_config(std: float) -> Any:
    return SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="DecodeBenchConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"fill_std": std},
        ),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto"),
    )


def cache_config(groups: list[list[str]], num_blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    return KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(layers, spec) for layers in groups],
    )


def scheduler_side(num_groups: int, num_blocks: int, per_step: int, rounds: int) -> None:
    """Requests in turn, some per step, with blocks from all over a used pool."""
    total = REQUESTS * num_groups * num_blocks
    config = cache_config([[f"layer{g}"] for g in range(num_groups)], total + 1)
    pool = [KVCacheBlock(block_id=i + 1) for i in range(total)]
    random.Random(0).shuffle(pool)
    admitted = []
    for number in range(REQUESTS):
        request = Request(
            request_id=f"cmpl-{number}",
            prompt_token_ids=list(range(num_blocks * BLOCK_SIZE)),
            sampling_params=SamplingParams(max_tokens=8),
            pooling_params=None,
        )
        own = pool[number * num_groups * num_blocks :]
        tables = (own[g * num_blocks : (g + 1) * num_blocks] for g in range(num_groups))
        admitted.append((request, KVCacheBlocks(tuple(tables))))
    connectors = {
        name: cls(engine_config(0.0), KVConnectorRole.SCHEDULER, config)
        for name, cls in CLASSES.items()
    }

    def step(connector: Any, requests: list[tuple[Request, KVCacheBlocks]]) -> tuple[float, bytes]:
        """Seconds that the connector takes, and its metadata on the wire."""
        # Lists of block ids are in the engine's output, since its workers need them anyway.
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [
            SimpleNamespace(req_id=request.request_id, block_ids=blocks.get_block_ids())
            for request, blocks in requests
        ]
        start = time.perf_counter()
        for request, blocks in requests:
            external, _ = connector.get_num_new_matched_tokens(request, 0)
            connector.update_state_after_alloc(request, blocks, external)
        wire = pickle.dumps(connector.build_connector_meta(output), pickle.HIGHEST_PROTOCOL)
        # What arrives is let go of at once: that is work, too.
        pickle.loads(wire)
        seconds = time.perf_counter() - start
        for request, _ in requests:
            connector.request_finished(request, [])
        return seconds, wire

    times: dict[str, list[float]] = {name: [] for name in connectors}
    sizes: dict[str, float] = {}
    turn = list(connectors)
    for round_number in range(rounds):
        turn.reverse()
        for first in range(0, REQUESTS, per_step):
            arrived = []
            for name in turn:
                seconds, wire = step(connectors[name], admitted[first : first + per_step])
                times[name].append(seconds / per_step)
                sizes[name] = len(wire) / (per_step * num_groups * num_blocks)
                if not round_number:
                    arrived.append(pickle.loads(wire).reqs_to_fill)
            assert all(one == arrived[0] for one in arrived)
    print(f"scheduler side, a request of {num_groups} x {num_blocks} blocks, {per_step} per step")
    report({name: statistics.median(taken) for name, taken in times.items()}, 1e6, "us")
    print(
        "  metadata " + ", ".join(f"{name} {size:.2f}" for name, size in sizes.items()) + " B/block"
    )


def worker_side(std: float, requests: int, num_blocks: int, layers: int, rounds: int) -> None:
    total = requests * num_blocks + 1
    names = [f"layer{i}" for i in range(layers)]
    config = cache_config([names], total)
    order = torch.randperm(total - 1, generator=torch.Generator().manual_seed(0)) + 1
    reqs_to_fill = {
        f"r{i}": ((ids.tolist(),), num_blocks * BLOCK_SIZE)
        for i, ids in enumerate(order.split(num_blocks))
    }
    planner = CLASSES["decodebench"](engine_config(std), KVConnectorRole.SCHEDULER, config)
    for name, ((ids,), tokens) in reqs_to_fill.items():
        request = SimpleNamespace(request_id=name, num_tokens=tokens + 1, num_preemptions=0)
        blocks = SimpleNamespace(get_block_ids=lambda ids=ids: (ids,))
        planner.update_state_after_alloc(request, blocks, tokens)
    metadata = {
        "in-tree": in_tree.DecodeBenchConnectorMetadata(reqs_to_fill=reqs_to_fill),
        "decodebench": planner.build_connector_meta(SchedulerOutput.make_empty()),
    }
    assert metadata["decodebench"].reqs_to_fill == reqs_to_fill
    # One set of caches: [blocks, heads, slots, content], as vLLM registers them.
    caches = {name: torch.zeros(total, 2, BLOCK_SIZE, 32) for name in names}
    size = layers * (total - 1) * caches[names[0]][0].nbytes
    fills: dict[str, Callable[[], object]] = {}
    filled: dict[str, list[Any]] = {}
    for name, cls in CLASSES.items():
        connector = cls(engine_config(std), KVConnectorRole.WORKER, config)
        connector.register_kv_caches(caches)
        connector.bind_connector_metadata(metadata[name])
        fills[name] = lambda c=connector: c.start_load_kv(FORWARD)  # type: ignore[misc]
        for cache in caches.values():
            cache.zero_()
        fills[name]()
        cache = caches[names[0]]
        assert not cache[0].any()
        filled[name] = [cache[1:].mean().item(), cache[1:].std().item()]
        assert (cache[1:].flatten(1) != 0).any(1).all()
    for one, other in zip(filled["in-tree"], filled["decodebench"], strict=True):
        assert abs(one - other) <= 1e-6 + 0.02 * std, filled
    tracemalloc.start()
    fills["decodebench"]()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < max(size / 4, 1 << 22), f"a temporary of {peak} bytes for a fill of {size}"
    seconds = dict(zip(fills, medians(rounds, *fills.values()), strict=True))
    what = f"{f'normal, std {std}' if std else 'constant'}: {size / 1e9:.2f} GB"
    print(f"worker side, {requests} x {num_blocks} blocks, {layers} layers, {what}")
    report(seconds, 1e3, "ms")
    rates = ", ".join(f"{name} {size / taken / 1e9:.2f} GB/s" for name, taken in seconds.items())
    print(f"  {rates}; largest temporary {peak / 1e6:.1f} MB")


def report(seconds: dict[str, float], scale: float, unit: str) -> None:
    for name, taken in seconds.items():
        ratio = seconds["in-tree"] / taken
        print(f"  {name:<12} {taken * scale:10.1f} {unit}   {ratio:6.1f}x")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="little of everything, once")
    fast = parser.parse_args().fast
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for num_groups in (1, 4):
        for per_step in (1, REQUESTS):
            scheduler_side(num_groups, 25 if fast else 2500, per_step, 1 if fast else 26)
    for std in (0.0, 0.1):
        worker_side(std, *((2, 10, 2, 1) if fast else (64, 2500, 8, 3)))


if __name__ == "__main__":
    main()
