"""The NumPy backend against the byte-by-byte oracle, and what it refuses."""

import json
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings

from decodebench import Group, LayoutError, PatternError, Planner
from decodebench.fill import Filler
from decodebench.layout import Layer
from decodebench.pattern import Constant, Normal
from fill_cases import GROUPS, PATTERNS, cases
from fill_oracle import filled, plan_of


@settings(max_examples=200, deadline=None)
@given(cases())
def test_every_byte_is_as_the_oracle_says(case):
    num_blocks, pattern, caches, plan, keys = case
    planner = Planner(GROUPS, num_blocks)
    layers = [
        Layer(tensor.array, planner, tensor.group, **options) for _, tensor, options in caches
    ]
    filler = Filler(layers, pattern)
    expected, total = [], 0
    beside = plan.block_ids.tolist() if keys is None else keys
    for ordinal, (memory, tensor, _) in enumerate(caches):
        after, count = filled(memory, tensor, ordinal, plan, beside)
        expected.append(after)
        total += count
    array = None if keys is None else np.array(keys, np.int64)
    for _ in range(2):  # a second fill finds the same state
        assert filler.fill(plan, keys=array) == total
        for (memory, _, _), after in zip(caches, expected, strict=True):
            np.testing.assert_array_equal(memory, after)


KV = Group("positional", 16)


def planner_of(*groups, num_blocks=8):
    return Planner(groups or (KV,), num_blocks)


def kv_cache(num_blocks=8, dtype=np.float16):
    return np.full((num_blocks, 2, 16, 3, 4), 7, dtype)


def test_plan_of_the_real_planner_keeps_the_local_head_and_the_exact_tail():
    planner = Planner([KV], 8, exact_tail=True)
    cache = kv_cache()
    plan = planner.plan_step([("r", 20, 37, [[5, 1, 4, 2]])])
    written = Filler([Layer(cache, planner, 0)], Constant(1.5)).fill(plan)
    slots = (cache == 1.5).all(axis=(1, 3, 4))
    assert np.flatnonzero(slots[1]).tolist() == list(range(4, 16))
    assert slots[4].all()
    assert np.flatnonzero(slots[2]).tolist() == list(range(9))
    assert (cache == 1.5).sum() == 37 * 2 * 3 * 4
    assert written == 37 * 2 * 3 * 4 * 2


def test_normal_blocks_differ_by_key_and_layer_and_repeat_by_seed():
    planner = planner_of()
    plan = plan_of(8, planner.groups, [[3, 1, 2]])
    fills = {}
    for seed in (1, 1, 2):
        caches = [kv_cache(), kv_cache()]
        filler = Filler([Layer(cache, planner, 0) for cache in caches], Normal(0, 1, seed))
        filler.fill(plan, keys=np.array([10, 20, 10]))
        blocks = [cache[block].tobytes() for cache in caches for block in (3, 1, 2)]
        assert blocks[0] == blocks[2]
        assert len(set(blocks)) == 4
        assert fills.setdefault(seed, blocks) == blocks
    assert not set(fills[1]) & set(fills[2])


def test_blocks_longer_than_the_tile_continue_with_its_start():
    planner = planner_of(Group("state", 16), num_blocks=2)
    cache = np.zeros((2, 3 << 19), np.float32)
    filler = Filler([Layer(cache, planner, 0)], Normal(0, 1))
    filler.fill(plan_of(2, planner.groups, [[1]]))
    period = 1 << 18
    assert not cache[0].any()
    assert np.array_equal(cache[1, :period], cache[1, period : 2 * period])
    assert len(np.unique(cache[1])) > period * 0.99


@pytest.mark.parametrize("pattern", PATTERNS)
def test_many_blocks_in_many_chunks(pattern):
    planner = planner_of(Group("state", 1), num_blocks=9000)
    cache = np.zeros((9000, 16), np.float32)
    other = np.zeros((9000, 48), np.float32)
    ids = np.random.default_rng(5).permutation(9000)[:8500]
    filler = Filler([Layer(cache, planner, 0), Layer(other, planner, 0)], pattern)
    assert filler.fill(plan_of(9000, planner.groups, [ids.tolist()])) == 8500 * 64 * 4
    chosen = np.zeros(9000, bool)
    chosen[ids] = True
    assert not cache[~chosen].any()
    assert not other[~chosen].any()
    tile = pattern.tile("float32").view(np.float32)
    for ordinal, array in enumerate((cache, other)):
        phases = pattern.phases(np.array([ordinal]), ids, tile.nbytes) // 4
        rows = np.arange(array.shape[1])
        np.testing.assert_array_equal(array[ids], tile[(phases[:, None] + rows) % tile.size])


def test_a_few_blocks_of_many_keep_their_keys():
    planner = planner_of(Group("state", 16), num_blocks=1000)
    cache = np.zeros((1000, 64), np.float32)
    filler = Filler([Layer(cache, planner, 0)], Normal(0, 1))
    filler.fill(plan_of(1000, planner.groups, [[700, 3, 500]]), keys=np.array([7, 8, 9]))
    tile = Normal(0, 1).tile("float32").view(np.float32)
    phases = Normal(0, 1).phases(np.array([0]), np.array([7, 8, 9]), tile.nbytes) // 4
    for block, phase in zip((700, 3, 500), phases.tolist(), strict=True):
        assert np.array_equal(cache[block], tile[(phase + np.arange(64)) % tile.size])
    assert (cache.any(axis=1)).sum() == 3
    with pytest.raises(LayoutError, match="block 3 is selected twice in group 0"):
        filler.fill(plan_of(1000, planner.groups, [[3, 500, 3]]))


def test_a_cache_shared_by_layers_is_written_once():
    planner = planner_of()
    cache, own = kv_cache(), kv_cache()
    layers = [Layer(array, planner, 0) for array in (cache, cache, own)]
    filler = Filler(layers, Normal(0, 1))
    assert filler.fill(plan_of(8, planner.groups, [[2]])) == 2 * cache[2].nbytes
    assert not np.array_equal(cache[2], own[2])
    alone = kv_cache(), kv_cache()
    apart = Filler([Layer(array, planner, 0) for array in alone], Normal(0, 1))
    apart.fill(plan_of(8, planner.groups, [[2]]))
    assert np.array_equal(alone[1], own)


def test_groups_may_share_memory_and_ring_gets_zeros():
    planner = planner_of(KV, Group("ring"))
    cache = kv_cache()
    filler = Filler([Layer(cache, planner, 0), Layer(cache, planner, 1)], Constant(2))
    filler.fill(plan_of(8, planner.groups, [[1, 6], [3]]))
    assert (cache[[1, 6]] == 2).all()
    assert (cache[3] == 0).all()
    assert (cache[[0, 2, 4, 5, 7]] == 7).all()


def test_layers_that_want_zeros_get_them():
    packed, plain = np.full((4, 2), 7, np.uint8), np.full((4, 2), 7, np.float32)
    planner = Planner([Group("positional", 2)], 4)
    layers = [Layer(packed, planner, 0, zeros=True), Layer(plain, planner, 0)]
    Filler(layers, Constant(1.5)).fill(planner.plan_step([("r", 0, 3, [[1, 2]])]))
    assert packed.tolist() == [[7, 7], [0, 0], [0, 0], [7, 7]]
    assert plain.tolist() == [[7, 7], [1.5, 1.5], [1.5, 1.5], [7, 7]]


def test_part_of_a_block_is_refused_where_slots_are_unknown():
    known, unknown = np.zeros((4, 2), np.float32), np.zeros((4, 3), np.float32)
    planner = Planner([Group("positional", 2)], 4)
    layers = [
        Layer(known, planner, 0),
        Layer(unknown, planner, 0, name="odd", whole_blocks=True),
    ]
    filler = Filler(layers, Constant(1.0))
    with pytest.raises(LayoutError, match=r"'odd' is not addressed .* tokens \[1, 2\) of block 3"):
        filler.fill(planner.plan_step([("r", 1, 3, [[3, 2]])]))
    assert not known.any()
    assert not unknown.any()
    filler.fill(planner.plan_step([("r", 2, 1, [[3, 2]])]))
    assert known[2].all()
    assert unknown[2].all()


def test_groups_without_layers_and_excluded_groups_write_nothing():
    planner = planner_of(KV, Group("ring"), Group("excluded"))
    cache = kv_cache()
    filler = Filler([Layer(cache, planner, 2)], Constant(2))
    assert filler.fill(plan_of(8, planner.groups, [[1], [2], [3]])) == 0
    assert (cache == 7).all()


def test_the_filler_keeps_the_cache_alive():
    planner = planner_of()
    cache = kv_cache()
    alive = weakref.ref(cache)
    filler = Filler([Layer(cache, planner, 0)], Constant(2))
    del cache
    assert alive() is not None
    filler.fill(plan_of(8, planner.groups, [[2]]))
    assert (alive()[2] == 2).all()
    del filler
    assert alive() is None


PLAN = plan_of(8, (KV, Group("state", 16)), [[1, 2], [3]], [(0, 4, 16)])


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(PLAN, num_blocks=9), "plan is for 9 blocks in groups .*caches are of 8 blocks"),
        (replace(PLAN, groups=(KV, Group("state", 8))), r"\(positional 16, state 8\)"),
        (plan_of(8, PLAN.groups, [[1, 8], [3]]), r"block 8 in group 0 is outside \[0, 8\)"),
        (plan_of(8, PLAN.groups, [[1], [-1]]), r"block -1 in group 1 is outside \[0, 8\)"),
        (plan_of(8, PLAN.groups, [[1, 5, 1], []]), "block 1 is selected twice in group 0"),
        (replace(PLAN, block_ids=np.ones((3, 1), np.int32)), "block_ids must be one-dimensional"),
        (replace(PLAN, block_ids=np.ones(3)), "block_ids must be one-dimensional integers, got fl"),
        (replace(PLAN, group_offsets=np.array([0, 2])), r"group_offsets \[0, 2\] do not cut 3 bl"),
        (replace(PLAN, group_offsets=np.array([0, 2, 2])), "group_offsets"),
        (replace(PLAN, group_offsets=np.array([1, 2, 3])), "group_offsets"),
        (replace(PLAN, group_offsets=np.array([0, 4, 3])), "group_offsets"),
        (replace(PLAN, partials=np.zeros((1, 2), np.int32)), r"partials must have shape \(n, 3\)"),
        *(
            (replace(PLAN, partials=np.array(rows, np.int32)), rf"partials\[{len(rows) - 1}\] = ")
            for rows in (
                [(0, 0, 17)],
                [(0, 5, 5)],
                [(0, -1, 5)],
                [(-1, 0, 5)],
                [(3, 0, 5)],
                [(2, 0, 5)],
                [(1, 0, 5), (0, 0, 5)],
                [(1, 0, 5), (1, 5, 9)],
            )
        ),
    ],
)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_plan_that_does_not_fit_writes_nothing(plan, message, pattern):
    planner = planner_of(*PLAN.groups)
    cache, state = kv_cache(), kv_cache()
    filler = Filler([Layer(cache, planner, 0), Layer(state, planner, 1)], pattern)
    with pytest.raises(LayoutError, match=message):
        filler.fill(plan)
    assert (cache == 7).all()
    assert (state == 7).all()
    assert filler.fill(PLAN) > 0


@pytest.mark.parametrize("keys", [np.zeros(2, np.int64), np.zeros((3, 1), int), np.zeros(3)])
def test_keys_that_do_not_fit_write_nothing(keys):
    planner = planner_of(*PLAN.groups)
    cache = kv_cache()
    with pytest.raises(LayoutError, match="keys must be 3 integers, one per block id, got"):
        Filler([Layer(cache, planner, 0)], Normal(0, 1)).fill(PLAN, keys=keys)
    assert (cache == 7).all()


def test_no_layers_are_refused():
    with pytest.raises(LayoutError, match="there is no layer to fill"):
        Filler([], Constant(1))


def test_layers_of_different_planners_are_refused():
    layers = [
        Layer(kv_cache(blocks), planner_of(num_blocks=blocks), 0, name=f"of{blocks}")
        for blocks in (8, 9)
    ]
    with pytest.raises(LayoutError, match="layers 'of8' and 'of9' are not of the same planner"):
        Filler(layers, Constant(1))


def test_tensors_of_a_group_that_overlap_are_refused():
    planner = planner_of()
    cache = kv_cache()
    whole = Layer(cache, planner, 0, name="whole")
    keys, values = (Layer(cache[:, i], planner, 0, name=f"part{i}") for i in (0, 1))
    typed = Layer(cache.view(np.uint16), planner, 0, name="typed", dtype="bfloat16")
    Filler([keys, values], Constant(1))
    for other in (keys, values, typed):
        with pytest.raises(LayoutError, match=rf"'{other.name}'.* of group 0 overlap in memory"):
            Filler([other, whole], Constant(1))


def test_a_pattern_with_an_odd_tile_is_refused():
    class Odd(Constant):
        def tile(self, dtype):
            return super().tile(dtype)[:-1]

    with pytest.raises(PatternError, match="tile of float16 has 15 bytes, expected a positive mu"):
        Filler([Layer(kv_cache(), planner_of(), 0)], Odd(1.0))


def test_a_short_tile_of_different_elements_repeats():
    class Ramp(Constant):
        def tile(self, dtype):
            return np.arange(8, dtype=np.float16).view(np.uint8)

    planner = planner_of()
    cache = kv_cache()
    Filler([Layer(cache, planner, 0)], Ramp(0)).fill(plan_of(8, planner.groups, [[4]]))
    assert np.array_equal(cache[4].ravel(), np.arange(cache[4].size) % 8)


def test_the_bench_checks_itself_and_reports():
    bench = Path(__file__).parents[1] / "benches" / "numpy_fill.py"
    done = subprocess.run(
        [sys.executable, str(bench), "--fast", "--json"], capture_output=True, check=True, text=True
    )
    report = json.loads(done.stdout)
    assert {row["ids"] for row in report["fills"]} == {"contiguous", "shuffled", "scattered"}
    assert all(row["constant_s"] > 0 and row["normal_s"] > 0 for row in report["fills"])
    assert report["small_step_s"].keys() == {"constant", "normal"}
