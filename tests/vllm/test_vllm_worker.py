"""The worker's side: which bytes of which tensors are written."""

import logging
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from prometheus_client import Counter
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVQuantMode, MambaSpec
from vllm_support import (
    BLOCK,
    CONSTANT,
    admit,
    cache_config,
    engine_config,
    fill,
    full,
    request,
    scheduler_side,
    worker_side,
)

from decodebench import LayoutError
from decodebench.vllm import DecodeBenchConnector, DecodeBenchConnectorMetadata

RING = CircularBufferSpec(block_size=4, num_kv_heads=1, head_size=4, dtype=torch.float32)


def chosen(*ids):
    """Metadata that fills these blocks of each group whole."""
    return DecodeBenchConnectorMetadata(reqs_to_fill={"r": (ids, BLOCK)})


def view(*, num_blocks=32, heads=2, slots=BLOCK, content=8, order="BHNC"):
    """A ``[B, H, N, C]`` view as vLLM makes them, its memory in another order."""
    sizes = dict(zip("BHNC", (num_blocks, heads, slots, content), strict=True))
    memory = torch.full([sizes[axis] for axis in order], -1.0)
    return memory.permute([order.index(axis) for axis in "BHNC"])


@pytest.mark.parametrize("order", ["BHNC", "BNHC", "HBNC", "NBHC"])
def test_a_local_head_is_kept_in_every_memory_order(order):
    config = cache_config(full())
    cache = view(order=order)
    before = cache.clone()
    metadata = admit(scheduler_side(config), request(60), 20, [1, 2, 3, 4])
    connector = worker_side(config, {"layer0": cache})
    fill(connector, metadata)
    expected = before.clone()
    expected[2, :, 4:] = CONSTANT
    expected[[3, 4]] = CONSTANT
    assert torch.equal(cache, expected)
    stats = connector.get_kv_connector_stats()
    assert stats.data.pop("fill_seconds") > 0
    assert stats.data == {"num_bytes": (12 + 16 + 16) * 2 * 8 * 4, "num_fills": 1}
    assert connector.get_kv_connector_stats() is None


def test_manager_blocks_cover_their_kernel_blocks():
    config = cache_config(full(block_size=32), num_blocks=8)
    cache = view(num_blocks=16)  # two kernel blocks of 16 tokens each
    metadata = admit(scheduler_side(config), request(80), 40, [1, 2, 5])
    fill(worker_side(config, {"layer0": cache}), metadata)
    expected = torch.full_like(cache, -1.0)
    expected[4, :, 8:] = CONSTANT  # token 40 is slot 8 of the second block, rows 4 and 5
    expected[[5, 10, 11]] = CONSTANT
    assert torch.equal(cache, expected)


def test_as_many_heads_as_slots_are_no_doubt_in_a_view():
    config = cache_config(full(num_kv_heads=BLOCK))
    cache = view(heads=BLOCK)
    metadata = admit(scheduler_side(config), request(60), 40, [1, 2, 3, 4])
    fill(worker_side(config, {"layer0": cache}), metadata)
    assert (cache[3, :, 8:] == CONSTANT).all()
    assert (cache[3, :, :8] == -1).all()


def test_the_block_axis_may_be_the_second():
    config = cache_config(full())
    cache = torch.full((2, 32, BLOCK, 3, 4), -1.0)
    config.num_blocks = 32
    metadata = admit(scheduler_side(config), request(60), 20, [1, 2, 3, 4])
    fill(worker_side(config, {"layer0": cache}), metadata)
    assert (cache[:, 2, 4:] == CONSTANT).all()
    assert (cache[:, 2, :4] == -1).all()
    assert (cache[:, [3, 4]] == CONSTANT).all()
    assert (cache[:, [0, 1, 5]] == -1).all()


def test_a_shape_that_has_no_blocks_is_refused():
    with pytest.raises(LayoutError, match=r"'layer0': no axis of shape \(31, 5\) fits"):
        worker_side(cache_config(full()), {"layer0": torch.zeros(31, 5)})


def test_context_parallel_ranks_keep_their_local_slots():
    config = cache_config(full())
    cache = view()
    # Blocks of 32 tokens over two ranks, four tokens to each in turn. Token 13 is the second of a
    # rank's third run of four, at most its slots [0, 8) hold local tokens.
    metadata = admit(scheduler_side(config, dcp=2), request(40), 13, [1, 2])
    fill(worker_side(config, {"layer0": cache}, dcp=2, interleave=4), metadata)
    assert (cache[1, :, :8] == -1).all()
    assert (cache[1, :, 8:] == CONSTANT).all()
    assert (cache[2] == CONSTANT).all()


def test_a_block_id_outside_the_cache_is_an_error():
    config = cache_config(full())
    cache = view()
    connector = worker_side(config, {"layer0": cache})
    with pytest.raises(ValueError, match="32"):
        fill(connector, chosen([1, 32]))
    assert (cache == -1).all()


def test_only_whole_blocks_of_a_cache_without_token_slots():
    config = cache_config(full())
    cache = torch.zeros(32, 5)
    connector = worker_side(config, {"layer0": cache})
    fill(connector, admit(scheduler_side(config), request(33), 16, [1, 2, 3]))
    assert (cache[2] == CONSTANT).all()
    assert cache.count_nonzero() == 5
    with pytest.raises(LayoutError, match="'layer0' is not addressed by token"):
        fill(connector, admit(scheduler_side(config), request(33), 20, [1, 2, 3]))


@pytest.mark.parametrize(
    ("dtype", "stored", "option"),
    [
        (torch.float32, torch.float32, "auto"),
        (torch.float16, torch.float16, "auto"),
        (torch.bfloat16, torch.bfloat16, "auto"),
        (torch.float8_e4m3fn, torch.float8_e4m3fn, "auto"),
        (torch.float8_e4m3fn, torch.uint8, "fp8"),
        (torch.float8_e4m3fn, torch.uint8, "fp8_e4m3"),
        (torch.float8_e5m2, torch.uint8, "fp8_e5m2"),
    ],
)
def test_values_are_encoded_in_the_caches_own_type(dtype, stored, option):
    mode = KVQuantMode.NONE if option == "auto" else KVQuantMode.FP8_PER_TENSOR
    config = cache_config(full(dtype=stored, kv_quant_mode=mode))
    cache = torch.zeros(32, 2, BLOCK, 8, dtype=stored)
    fill(worker_side(config, {"layer0": cache}, cache_dtype=option), chosen([1, 3]))
    values = cache.view(dtype).float()
    assert (values[[1, 3]] == CONSTANT.to(dtype).float()).all()
    assert values.count_nonzero() == 2 * values[0].numel()


@pytest.mark.parametrize("mode", [KVQuantMode.NVFP4, KVQuantMode.INT8_PER_TOKEN_HEAD])
def test_packed_pages_are_zeroed_with_one_warning(mode, caplog):
    from vllm.logger import _print_warning_once

    _print_warning_once.cache_clear()
    dtype = torch.int8 if mode == KVQuantMode.INT8_PER_TOKEN_HEAD else torch.uint8
    config = cache_config(full(dtype=dtype, kv_quant_mode=mode))
    cache = torch.full((32, 2, BLOCK, 8), 7, dtype=dtype)
    for _ in range(2):
        fill(worker_side(config, {"layer0": cache}, cache_dtype="fp8"), chosen([1]))
    assert not cache[1].any()
    assert (cache[2:] == 7).all()
    warnings = [r for r in caplog.records if "filled with zeros" in r.message]
    assert len(warnings) == 1


def test_raw_state_pages_are_filled_state_by_state():
    spec = MambaSpec(
        block_size=64,
        shapes=((3, 4), (5,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=64,
    )
    config = cache_config(spec)
    pages = torch.full((32, 1, 1, 64), 0x55, dtype=torch.int8)
    fill(worker_side(config, {"layer0": pages}), chosen([3]))
    page = pages[3].flatten()
    assert (page[:24].view(torch.bfloat16) == CONSTANT.to(torch.bfloat16)).all()
    assert (page[24:44].view(torch.float32) == CONSTANT).all()
    assert (page[44:] == 0x55).all()
    pages[3] = 0x55
    assert (pages == 0x55).all()


@pytest.mark.skipif(
    "state_alignment" not in {field.name for field in fields(MambaSpec)},
    reason="this vLLM does not align states",
)
def test_states_may_be_aligned_within_a_page():
    spec = MambaSpec(
        block_size=64,
        shapes=((3,), (2,)),
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=32,
        state_alignment=16,
    )
    pages = torch.zeros((32, 1, 1, 32), dtype=torch.int8)
    fill(worker_side(cache_config(spec), {"layer0": pages}), chosen([3]))
    page = pages[3].flatten()
    assert (page[:6].view(torch.bfloat16) == CONSTANT.to(torch.bfloat16)).all()
    assert not page[6:16].any()
    assert (page[16:24].view(torch.float32) == CONSTANT).all()
    assert not page[24:].any()


def test_a_state_that_is_longer_than_its_page_is_refused():
    spec = MambaSpec(block_size=64, shapes=((5,),), dtypes=(torch.float32,))
    with pytest.raises(LayoutError, match="state 0 ends at byte 20 of a page of 16"):
        worker_side(cache_config(spec), {"layer0": torch.zeros(32, 1, 1, 16, dtype=torch.int8)})


@pytest.mark.parametrize("kind", [list, tuple])
def test_lists_of_states_are_filled_by_row(kind):
    spec = MambaSpec(block_size=64, shapes=((3,), (5,)), dtypes=(torch.float32, torch.bfloat16))
    states = kind([torch.zeros(32, 3), torch.zeros(32, 5, dtype=torch.bfloat16)])
    config = cache_config(spec)
    metadata = admit(scheduler_side(config), request(40), 0, [7])
    fill(worker_side(config, {"layer0": states}), metadata)
    for state in states:
        assert (state[7] == CONSTANT.to(state.dtype)).all()
        assert state.count_nonzero() == state[7].numel()


def test_rings_are_zeroed_whatever_they_hold():
    ring = torch.full((32, 4, 9), 7, dtype=torch.uint8)
    config = cache_config(full(), RING)
    metadata = admit(scheduler_side(config), request(33), 20, [1, 2, 3], [5])
    fill(worker_side(config, {"layer0": view(), "layer1": ring}), metadata)
    assert not ring[5].any()
    assert (ring[:5] == 7).all()


def test_layers_that_share_a_cache_and_repeated_blocks_are_written_once():
    config = cache_config(full())
    config.kv_cache_groups[0].layer_names.append("shared")
    cache = view()
    connector = worker_side(config, {"layer0": cache, "shared": cache, "unknown": cache})
    twice = {"a": (([1, 2],), 32), "b": (([2, 3],), 32)}
    fill(connector, DecodeBenchConnectorMetadata(reqs_to_fill=twice))
    assert connector.get_kv_connector_stats().data["num_bytes"] == 3 * cache[0].nbytes
    assert (cache[1:4] == CONSTANT).all()


def test_normal_values_repeat_by_seed_and_differ_by_block():
    config = cache_config(full())
    caches = [view() for _ in range(3)]
    for cache, seed in zip(caches, (0, 0, 1), strict=True):
        connector = worker_side(config, {"layer0": cache}, fill_std=0.5, fill_seed=seed)
        fill(connector, chosen([1, 2]))
    assert torch.equal(caches[0], caches[1])
    assert not torch.equal(caches[0], caches[2])
    assert not torch.equal(caches[0][1], caches[0][2])


def test_caches_may_be_registered_again_and_rest_while_the_engine_sleeps():
    config = cache_config(full())
    first, second = view(), view()
    connector = worker_side(config, {"layer0": first})
    connector.register_kv_caches({"layer0": second})
    fill(connector, chosen([1]))
    assert (first == -1).all()
    assert (second[1] == CONSTANT).all()
    connector.unregister_kv_caches()
    with pytest.raises(LayoutError, match="no KV caches are registered"):
        fill(connector, chosen([2]))
    fill(connector, DecodeBenchConnectorMetadata(reqs_to_fill={}))
    connector.restore_kv_caches()
    fill(connector, chosen([2]))
    assert (second[2] == CONSTANT).all()


def test_a_wake_without_caches_does_nothing(caplog):
    connector = worker_side(cache_config(full()), {})
    caplog.clear()
    connector.restore_kv_caches()
    assert not caplog.records


def test_startup_fill_covers_whole_caches_and_is_redone_on_wake():
    config = cache_config(full(), RING)
    cache, ring = view(), torch.full((32, 4), 7.0)
    connector = worker_side(config, {"layer0": cache, "layer1": ring}, startup_fill=True)
    assert (cache == CONSTANT).all()
    assert (ring == 7).all()
    connector.unregister_kv_caches()
    cache.fill_(-1)
    connector.restore_kv_caches()
    assert (cache == CONSTANT).all()
    cache.fill_(-1)
    metadata = admit(scheduler_side(config, startup_fill=True), request(33), 0, [1, 2, 3], [5])
    fill(connector, metadata)
    assert (cache == -1).all()
    assert not ring[5].any()


def test_startup_fill_leaves_what_the_engine_zeroes():
    mamba = MambaSpec(block_size=64, shapes=((4,),), dtypes=(torch.float32,))
    config = cache_config(full(), mamba)
    cache, state = view(), torch.zeros(32, 4)
    connector = worker_side(config, {"layer0": cache, "layer1": [state]}, startup_fill=True)
    assert (cache == -1).all()
    assert (state == CONSTANT).all()
    metadata = admit(scheduler_side(config, startup_fill=True), request(33), 0, [1, 2, 3], [4])
    fill(connector, metadata)
    assert (cache[1:3] == CONSTANT).all()


def test_other_devices_are_refused_in_one_line():
    with pytest.raises(LayoutError, match="'layer0': its KV cache is on meta, which there is"):
        worker_side(cache_config(full()), {"layer0": torch.zeros(32, 4, device="meta")})


def test_layers_without_a_cache_are_named(caplog):
    worker_side(cache_config(full(), full()), {"layer0": view()})
    assert "Layer layer1 of KV cache group 1 has no KV cache here" in caplog.text


def test_one_line_says_what_will_be_filled(caplog):
    caplog.set_level(logging.INFO, "vllm.decodebench")
    worker_side(cache_config(full(), RING), {"layer0": view(), "layer1": torch.zeros(32, 4)})
    (record,) = [r for r in caplog.records if r.levelno == logging.INFO and "decodebench" in r.name]
    assert record.message == (
        "Filling KV caches of 32 blocks with mean 0.015, std 0, seed 0: "
        "group 0: 1 x (positional of 16 tokens a block, float32, 1024 bytes a block); "
        "group 1: 1 x (ring, float32 as zeros, 16 bytes a block)"
    )


def test_statistics_add_up_over_ranks_and_reach_prometheus():
    build = DecodeBenchConnector.build_kv_connector_stats
    total = build({"num_bytes": 8, "num_fills": 1}).aggregate(build({"num_bytes": 4}))
    total = total.aggregate(build({"num_requests": 2, "plan_seconds": 0.25}))
    assert total.reduce()["num_bytes"] == 12
    assert total.reduce()["num_repeats_merged"] == 0
    assert not total.is_empty()
    assert build().is_empty()
    assert build(total.to_dict()).data == total.data

    seen = {}

    class FakeCounter:
        def __init__(self, name, documentation, labelnames):
            self.name = name

        def labels(self, *values):
            return self

        def inc(self, count):
            seen[self.name] = seen.get(self.name, 0) + count

    metrics = DecodeBenchConnector.build_prom_metrics(
        engine_config({}),
        {Counter: FakeCounter, **dict.fromkeys(_other_metrics(), FakeCounter)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    metrics.observe(total.to_dict(), 0)
    metrics.observe({"num_bytes": 1}, 0)
    assert seen == {
        "vllm:decodebench_num_bytes": 13,
        "vllm:decodebench_num_fills": 1,
        "vllm:decodebench_num_requests": 2,
        "vllm:decodebench_plan_seconds": 0.25,
    }


def _other_metrics():
    from prometheus_client import Gauge, Histogram

    return Gauge, Histogram


def test_nothing_but_this_package_imports_torch():
    code = "import sys, decodebench.fill, decodebench.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_arrays_keep_their_tensors_alive():
    config = cache_config(full())
    connector = worker_side(config, {"layer0": view()})
    connector._worker._kv_caches = {}
    junk = [np.zeros(32 * 2 * BLOCK * 8, np.float32) for _ in range(4)]
    fill(connector, chosen([1]))
    assert not any(array.any() for array in junk)


class OnGpu(torch.Tensor):
    """Host memory that says it is on a GPU."""

    device = torch.device("cuda", 0)


OnGpu.__module__ = "torch"


def test_caches_on_a_gpu_are_filled_on_the_current_stream_and_timed_later(monkeypatch):
    from decodebench.fill import filler

    calls, finished = [], set()

    class FakeDriver:
        multiprocessors = 2

        def __init__(self, device):
            self.kept = []

        def pinned(self, size):
            self.kept.append(np.zeros(size, np.uint8))
            return self.kept[-1]

        def device(self, size):
            return self.pinned(size).ctypes.data

        def upload(self, array):
            self.kept.append(array)
            return array.ctypes.data

        def stream(self, stream):
            return stream

        def capturing(self, stream):
            return False

        def copy(self, target, source, size, stream):
            calls.append(("copy", stream))

        def launch(self, blocks, arguments, stream):
            calls.append(("launch", stream))

        def event(self):
            return None

        def record(self, event, stream):
            pass

        wait = record

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            calls.append(("event", stream))

        def query(self):
            return self in finished

        def elapsed_time(self, other):
            return 250.0

    monkeypatch.setattr(filler, "CupyDriver", FakeDriver)
    monkeypatch.setattr(FakeDriver, "wait", lambda self, event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: 77 + device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    config = cache_config(full(), full())
    memory = view().as_subclass(OnGpu)
    connector = worker_side(config, {"layer0": memory, "layer1": memory})
    fill(connector, chosen([1, 2], []))
    assert calls == [("event", 77), ("copy", 77), ("launch", 77), ("event", 77)]
    stats = connector.get_kv_connector_stats()
    assert stats.data == {"num_bytes": 2 * 2 * BLOCK * 8 * 4, "num_fills": 1}
    assert connector.get_kv_connector_stats() is None
    finished.update(end for _, end in connector._worker._running)
    assert connector.get_kv_connector_stats().data == {"fill_seconds": 0.25}
    with pytest.raises(LayoutError, match="are in CUDA device 0 and host memory"):
        worker_side(config, {"layer0": memory, "layer1": view()})
