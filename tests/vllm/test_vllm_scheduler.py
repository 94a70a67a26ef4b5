"""The scheduler's side: which requests are filled, and with which blocks."""

import logging
import pickle
import subprocess
import sys
from collections import deque
from dataclasses import fields
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.version import __version_tuple__
from vllm_support import (
    BLOCK,
    Engine,
    admit,
    blocks,
    cache_config,
    full,
    plan,
    request,
    scheduler_side,
    window,
)

from decodebench import DecodeBenchError, LayoutError, PlanError
from decodebench.vllm import DecodeBenchConnectorMetadata
from decodebench.vllm.groups import planner_groups
from decodebench.vllm.options import Options

OURS = {
    "kv_connector": "DecodeBenchConnector",
    "kv_connector_module_path": "decodebench.vllm",
}
ATTENTION = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.float32}
RING = CircularBufferSpec(**ATTENTION)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fill_men": 1.0}, "unknown option 'fill_men', known are fill_mean (float), fill_std"),
        ({"fill_mean": "0.1"}, "option fill_mean cannot be '0.1'"),
        ({"fill_mean": True}, "option fill_mean cannot be True"),
        ({"startup_fill": 1}, "option startup_fill cannot be 1"),
        ({"fill_seed": 1.0}, "option fill_seed cannot be 1.0"),
        ({"fill_seed": -1}, "seed must be an integer in [0, 2**64)"),
        ({"fill_std": -0.5}, "std must not be negative"),
        ({"fill_mean": float("nan")}, "mean must be a finite number"),
        ({"on_preemption": "retry"}, "on_preemption must be 'refill' or 'recompute', got 'retry'"),
    ],
)
def test_bad_options_are_refused_at_start(options, message):
    with pytest.raises(DecodeBenchError) as caught:
        scheduler_side(cache_config(full()), **options)
    assert message in str(caught.value)


def test_options_have_the_in_tree_defaults():
    assert Options.parse({}) == Options(0.015, 0.0, 0, False, "refill")
    assert Options.parse({"fill_mean": 1, "fill_seed": 3}) == Options(1.0, fill_seed=3)


def test_blocks_after_the_local_prefix_are_filled():
    connector = scheduler_side(cache_config(full()))
    req = request(50)
    assert connector.get_num_new_matched_tokens(req, 32) == (17, False)
    metadata = admit(connector, req, 32, [1, 2, 3, 4])
    assert metadata.reqs_to_fill == {"r": (([3, 4],), 17)}
    assert plan(connector).reqs_to_fill == {}


def test_local_is_what_was_reported_when_the_external_tokens_are_capped():
    connector = scheduler_side(cache_config(full()))
    req = request(100)
    assert connector.get_num_new_matched_tokens(req, 16) == (83, False)
    connector.update_state_after_alloc(req, blocks([1, 2, 3, 4, 5, 6, 7]), 20)
    # Tokens [16, 36), not the 20 tokens before the last.
    assert plan(connector).reqs_to_fill == {"r": (([2, 3],), 20)}


def test_local_is_derived_where_it_was_never_asked_for():
    connector = scheduler_side(cache_config(full()))
    connector.update_state_after_alloc(request(100), blocks([1, 2, 3, 4, 5, 6, 7]), 20)
    assert plan(connector).reqs_to_fill == {"r": (([5, 6, 7],), 20)}


def test_without_external_tokens_nothing_changes():
    connector = scheduler_side(cache_config(full()))
    req = request(50)
    connector.get_num_new_matched_tokens(req, 16)
    connector.update_state_after_alloc(req, blocks([1, 2, 3, 4]), 0)
    assert plan(connector).reqs_to_fill == {}
    # Not filled yet, and the reported prefix still holds.
    assert connector.get_num_new_matched_tokens(req, 16) == (33, False)
    connector.update_state_after_alloc(req, blocks([1, 2, 3, 4]), 33)
    assert plan(connector).reqs_to_fill == {"r": (([2, 3, 4],), 33)}


@pytest.mark.parametrize("tokens", [1, 17])
def test_a_prompt_without_external_tokens_is_not_filled(tokens):
    connector = scheduler_side(cache_config(full()))
    assert connector.get_num_new_matched_tokens(request(tokens), tokens - 1) == (0, False)


def test_a_request_is_filled_once_per_admission():
    connector = scheduler_side(cache_config(full()))
    req = request(40)
    admit(connector, req, 0, [1, 2, 3])
    assert connector.get_num_new_matched_tokens(req, 0) == (0, False)
    req.append_output_token_ids([5, 6])
    req.num_preemptions = 1
    metadata = admit(connector, req, 16, [4, 5, 6])
    assert metadata.reqs_to_fill == {"r": (([5, 6],), 25)}
    assert connector.get_num_new_matched_tokens(req, 0) == (0, False)


@pytest.mark.parametrize(("policy", "answer"), [("refill", 39), ("recompute", 0)])
def test_preemption_of_a_request_that_was_never_filled(policy, answer):
    connector = scheduler_side(cache_config(full()), on_preemption=policy)
    req = request(40)
    assert connector.get_num_new_matched_tokens(req, 39) == (0, False)
    req.num_preemptions = 1
    assert connector.get_num_new_matched_tokens(req, 0) == (answer, False)


def test_no_kv_is_to_be_delivered():
    assert not scheduler_side(cache_config(full())).requires_kv_delivery


def test_recompute_leaves_a_preempted_request_to_the_engine():
    connector = scheduler_side(cache_config(full()), on_preemption="recompute")
    req = request(40)
    admit(connector, req, 0, [1, 2, 3])
    req.num_preemptions = 1
    assert connector.get_num_new_matched_tokens(req, 0) == (0, False)


@pytest.mark.parametrize("finished", ["request_finished", "request_finished_all_groups"])
def test_a_finished_request_is_forgotten(finished):
    connector = scheduler_side(cache_config(full()))
    req = request(40)
    admit(connector, req, 0, [1, 2, 3])
    assert getattr(connector, finished)(req, []) == (False, None)
    assert connector.get_num_new_matched_tokens(req, 0) == (39, False)


def test_groups_are_told_apart_by_their_specs():
    mamba = MambaSpec(block_size=64, shapes=((4,),), dtypes=(torch.float32,))
    specs = [full(), window(), mamba, RING]
    specs += [EncoderOnlyAttentionSpec(**ATTENTION), CrossAttentionSpec(**ATTENTION)]
    specs.append(UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"layer6": full()}))
    connector = scheduler_side(cache_config(*specs))
    tables = [1, 2, 3], [0, 4, 5], [6], [7], [8, 9, 10], [11, 12, 13], [14, 15, 16]
    metadata = admit(connector, request(48), 16, *tables)
    assert metadata.reqs_to_fill == {
        "r": (([2, 3], [4, 5], [6], [7], [], [], [15, 16]), 31),
    }
    assert connector.get_loaded_kv_cache_group_ids(request(2)) == tuple(range(7))


def test_groups_that_are_not_transferred_are_left_alone():
    for option in ({"enable_kv_transfer": False}, {"host_resident": True}):
        config = cache_config(full(), full())
        for name, value in option.items():
            setattr(config.kv_cache_groups[1], name, value)
        metadata = admit(scheduler_side(config), request(33), 0, [1, 2, 3], [4, 5, 6])
        assert metadata.reqs_to_fill == {"r": (([1, 2], []), 32)}


def test_a_group_of_different_kinds_is_refused():
    mixed = UniformTypeKVCacheSpecs(
        block_size=BLOCK, kv_cache_specs={"layer0": full(), "other": RING}
    )
    with pytest.raises(
        LayoutError, match=r"group 0 holds layers of kinds \['positional', 'ring'\]"
    ):
        scheduler_side(cache_config(mixed))


def test_context_parallel_blocks_span_the_tokens_of_all_ranks():
    connector = scheduler_side(cache_config(full()), dcp=2)
    metadata = admit(connector, request(50), 16, [1, 2])
    assert metadata.reqs_to_fill == {"r": (([1, 2],), 33)}


def test_context_parallel_spans_are_those_of_the_engines_managers():
    config = cache_config(full(), window())
    manager = KVCacheManager(config, 4096, 2 * BLOCK, BLOCK, enable_caching=False, dcp_world_size=2)
    spans = [one.block_size for one in manager.coordinator.single_type_managers]
    assert [group.span for group in planner_groups(config, 2)] == spans


@pytest.mark.skipif(
    "dcp_sharded" not in {field.name for field in fields(FullAttentionSpec)},
    reason="this vLLM shards every group",
)
def test_context_parallel_blocks_of_a_group_that_is_not_sharded():
    connector = scheduler_side(cache_config(full(), full(dcp_sharded=False)), dcp=2)
    metadata = admit(connector, request(50), 16, [1, 2], [3, 4, 5, 6])
    assert metadata.reqs_to_fill == {"r": (([1, 2], [4, 5, 6]), 33)}


def test_startup_fill_leaves_rings_and_zeroed_attention_blocks():
    connector = scheduler_side(cache_config(full(), RING), startup_fill=True)
    metadata = admit(connector, request(33), 0, [1, 2, 3], [4])
    assert metadata.reqs_to_fill == {"r": (([], [4]), 32)}
    mamba = MambaSpec(block_size=64, shapes=((4,),), dtypes=(torch.float32,))
    connector = scheduler_side(cache_config(full(), mamba), startup_fill=True)
    metadata = admit(connector, request(33), 0, [1, 2, 3], [4])
    assert metadata.reqs_to_fill == {"r": (([1, 2], []), 32)}
    connector = scheduler_side(cache_config(full()), startup_fill=True)
    assert admit(connector, request(33), 0, [1, 2, 3]).reqs_to_fill == {}
    assert connector.get_num_new_matched_tokens(request(33), 0) == (0, False)


def test_block_tables_come_from_the_steps_output():
    connector = scheduler_side(cache_config(full()))
    new, resumed = request(40, "new"), request(40, "resumed", preemptions=1)
    for req in (new, resumed):
        connector.get_num_new_matched_tokens(req, 0)
        connector.update_state_after_alloc(req, SimpleNamespace(), 39)
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = [SimpleNamespace(req_id="new", block_ids=([1, 2, 3],))]
    cached = output.scheduled_cached_reqs
    if hasattr(cached, "resumed_req_ids"):
        cached.req_ids += ["running", "resumed"]
        cached.new_block_ids += [None, ([4, 5, 6],)]
        cached.resumed_req_ids.add("resumed")
    else:  # as from 0.34 on
        output.scheduled_new_reqs.append(SimpleNamespace(req_id="resumed", block_ids=([4, 5, 6],)))
    assert plan(connector, output).reqs_to_fill == {
        "new": (([1, 2, 3],), 39),
        "resumed": (([4, 5, 6],), 39),
    }


def test_blocks_that_are_filled_whole_are_not_zeroed_first():
    connector = scheduler_side(cache_config(full(), RING))
    req = request(50)
    connector.get_num_new_matched_tokens(req, 20)
    connector.update_state_after_alloc(req, blocks([1, 2, 3, 4], [5]), 29)
    output = SchedulerOutput.make_empty()
    output.new_block_ids_to_zero = [2, 3, 4, 5, 6]
    plan(connector, output)
    if __version_tuple__[:2] < (0, 32):  # whose interface forbids it
        assert output.new_block_ids_to_zero == [2, 3, 4, 5, 6]
        return
    assert output.new_block_ids_to_zero == [2, 5, 6]  # 2 keeps its head, 5 is a ring's
    connector = scheduler_side(cache_config(full()))
    output.new_block_ids_to_zero = [3]
    connector.update_state_after_alloc(request(17, "s"), blocks([3]), 16)
    plan(connector, output)
    assert output.new_block_ids_to_zero is None


def test_what_contradicts_itself_is_an_error_that_names_the_request():
    connector = scheduler_side(cache_config(full()))
    connector.update_state_after_alloc(request(60, "short"), blocks([1, 2]), 59)
    with pytest.raises(PlanError, match="short") as caught:
        plan(connector)
    assert caught.value.kind == "range_outside_table"


def records(caplog):
    return [record for record in caplog.records if record.name.startswith("vllm.decodebench")]


def test_a_group_without_any_block_is_warned_of(caplog):
    admit(scheduler_side(cache_config(full(), window())), request(33), 0, [1, 2, 3], [0, 0, 3])
    (record,) = records(caplog)
    assert record.levelno == logging.WARNING
    assert "KV cache group 1 (positional) for the 32 external tokens of request r" in record.message


def test_a_block_that_another_request_of_the_step_fills_is_no_missing_one(caplog):
    connector = scheduler_side(cache_config(full(), window()))
    for name, windowed in ("r", [0, 0, 3]), ("s", [0, 5, 3]), ("t", [0, 6, 7]):
        req = request(33, name)
        connector.get_num_new_matched_tokens(req, 0)
        connector.update_state_after_alloc(req, blocks([1, 2, 3], windowed), 32)
    plan(connector)
    (record,) = records(caplog)
    assert "KV cache group 1 (positional) for the 32 external tokens of request r" in record.message


def test_counts_are_logged_for_debugging(caplog):
    connector = scheduler_side(cache_config(full(), RING))
    admit(connector, request(33), 0, [1, 2, 3], [4])
    assert not records(caplog)
    caplog.set_level(logging.DEBUG, "vllm.decodebench")
    admit(connector, request(33, "s"), 0, [5, 6, 7], [8])
    (record,) = records(caplog)
    assert record.message.endswith(
        "s: 32 external tokens, blocks to fill by KV cache group: (2, 1)"
    )


def test_metadata_travels_as_flat_buffers():
    connector = scheduler_side(cache_config(full(), num_blocks=4000))
    metadata = admit(connector, request(40001), 0, list(range(1, 2502)))
    wire = pickle.dumps(metadata, pickle.HIGHEST_PROTOCOL)
    assert len(wire) < 4.2 * 2500
    assert pickle.loads(wire).reqs_to_fill == metadata.reqs_to_fill
    assert metadata.reqs_to_fill["r"][0][0] == list(range(1, 2501))
    given = DecodeBenchConnectorMetadata(reqs_to_fill={"r": (([1], [2, 3]), 5)})
    assert pickle.loads(pickle.dumps(given)).reqs_to_fill == {"r": (([1], [2, 3]), 5)}
    assert "'r'" in repr(given)
    assert pickle.loads(pickle.dumps(plan(connector))).reqs_to_fill == {}


def test_statistics_of_a_step():
    connector = scheduler_side(cache_config(full(), RING))
    admit(connector, request(33), 0, [1, 2, 3], [4])
    stats = connector.get_kv_connector_stats()
    seconds = stats.data.pop("plan_seconds")
    assert 0 < seconds < 1
    assert stats.data == {
        "num_requests": 1, "num_tokens": 32, "num_blocks": 3, "num_repeats_merged": 0,
    }  # fmt: skip
    assert connector.get_kv_connector_stats() is None


@pytest.mark.parametrize("in_flight", [1, 2])
def test_the_engines_scheduler_never_prefills_after_a_preemption(tmp_path, in_flight):
    engine = Engine(tmp_path, OURS, num_blocks=12, async_scheduling=in_flight > 1)
    requests = [engine.add(f"r{i}", [100 * i + j for j in range(64)], 60) for i in range(2)]
    fills = []
    steps = deque()
    for _ in range(500):
        output = engine.schedule()
        assert all(count == 1 for count in output.num_scheduled_tokens.values())
        for name, (tables, external) in output.kv_connector_metadata.reqs_to_fill.items():
            fills.append((name, external))
            own = engine.scheduler.kv_cache_manager.get_block_ids(name)[0]
            assert set(tables[0]) <= set(own)
        steps.append(output)
        if len(steps) == in_flight:
            engine.finish_step(steps.popleft())
        if not engine.scheduler.running and not engine.scheduler.waiting:
            break
    assert all(req.is_finished() and req.num_output_tokens == 60 for req in requests)
    assert sum(req.num_preemptions for req in requests) > 0
    assert len(fills) > len(requests)
    assert all(external > 0 for _, external in fills)


def test_the_engines_prefix_hits_are_not_filled(tmp_path):
    engine = Engine(tmp_path, OURS, num_blocks=64)
    prefix = list(range(48))
    first = engine.add("first", [*prefix, 7], 1)
    engine.finish_step(engine.schedule())
    engine.add("second", [*prefix, *range(200, 232)])
    output = engine.schedule()
    (table,) = engine.scheduler.kv_cache_manager.get_block_ids("second")
    assert first.is_finished()
    assert output.kv_connector_metadata.reqs_to_fill == {"second": ((table[3:5],), 31)}


def test_the_plugin_name_and_a_multi_connector_find_the_class(tmp_path):
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from decodebench.vllm import DecodeBenchConnector
    from decodebench.vllm.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("DecodeBench") is DecodeBenchConnector
    nested = {"connectors": [{**OURS, "kv_role": "kv_both"}]}
    engine = Engine(
        tmp_path,
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": nested},
        num_blocks=64,
    )
    engine.add("r", list(range(40)))
    (metadata,) = engine.schedule().kv_connector_metadata.metadata
    assert metadata.reqs_to_fill["r"][1] == 39


def test_the_installed_package_announces_the_plugin():
    from importlib.metadata import entry_points

    from decodebench.vllm.plugin import register

    (found,) = entry_points(group="vllm.general_plugins", name="decodebench")
    assert found.load() is register


def test_an_older_vllm_is_refused_in_one_line():
    code = (
        "from vllm import version\n"
        "version.__version_tuple__, version.__version__ = (0, 29, 1), '0.29.1'\n"
        "import decodebench.vllm"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False
    )
    assert result.stderr.splitlines()[-1].endswith(
        "DecodeBenchError: decodebench.vllm needs vLLM 0.30 or later, found 0.29.1"
    )
