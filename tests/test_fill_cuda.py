"""What the CUDA backend asks of its driver."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cuda_fake import GXX, FakeDriver
from decodebench import Group, LayoutError, PatternError, Planner
from decodebench.fill.cuda import CudaFiller
from decodebench.fill.numpy import Filler
from decodebench.layout import Layer
from decodebench.pattern import Constant, Normal
from fill_oracle import plan_of

GROUPS = (Group("positional", 16), Group("state", 16), Group("ring"), Group("excluded"))
SIZES = {0: (2, 16, 3, 8), 1: (700,), 2: (5,)}


def caches_of(num_layers, num_blocks):
    planner = Planner(GROUPS, num_blocks)
    caches = [
        (group, np.zeros((num_blocks, *SIZES[group]), np.float32))
        for group in SIZES
        for _ in range(num_layers)
    ]
    layers = [
        Layer(cache, planner, group, **({"token_axis": 2} if group == 0 else {}))
        for group, cache in caches
    ]
    return planner, layers, [cache for _, cache in caches]


def requests(count, blocks_each):
    """Requests whose first block is partly local, in three groups."""
    free = iter(range(1, 4 * count * blocks_each + 1))

    def table():
        return [next(free) for _ in range(blocks_each)]

    return [
        (f"r{i}", 5, 16 * blocks_each - 5, [table(), table(), table(), table()])
        for i in range(count)
    ]


@pytest.mark.parametrize("num_layers", [1, 40])
@pytest.mark.parametrize("count", [1, 30])
@pytest.mark.parametrize("pattern", [Constant(0.5), Normal(0, 1, 3)])
def test_one_copy_and_one_launch_whatever_the_step(num_layers, count, pattern):
    planner, layers, _ = caches_of(num_layers, 1000)
    driver = FakeDriver()
    filler = CudaFiller(layers, pattern, driver)
    plan = planner.plan_step(requests(count, 4))
    driver.calls.clear()
    written = filler.fill(plan, stream=77)
    kinds = [call[0] for call in driver.calls]
    assert kinds == ["wait", "copy", "launch", "record"]
    assert [call[-1] for call in driver.calls[1:]] == [77, 77, 77]
    assert driver.calls[2][1] <= 8 * driver.multiprocessors
    expected = Filler(layers, pattern).fill(plan)
    assert written == expected > 0


def test_nothing_to_fill_asks_for_nothing():
    planner, layers, _ = caches_of(1, 8)
    driver = FakeDriver()
    filler = CudaFiller(layers, Constant(1), driver)
    driver.calls.clear()
    assert filler.fill(planner.plan_step([])) == 0
    assert filler.fill(plan_of(8, GROUPS, [[], [], [], [3]])) == 0
    assert driver.calls == []


def test_steps_in_flight_have_buffers_of_their_own():
    planner, layers, _ = caches_of(1, 1000)
    driver = FakeDriver()
    filler = CudaFiller(layers, Constant(1), driver)
    plan = planner.plan_step(requests(2, 4))
    driver.calls.clear()
    for _ in range(9):
        filler.fill(plan)
    copies = [call for call in driver.calls if call[0] == "copy"]
    waits = [call[1] for call in driver.calls if call[0] == "wait"]
    records = [call[1] for call in driver.calls if call[0] == "record"]
    for calls in (1, 2):  # on the device, and on the host
        buffers = [copy[calls] for copy in copies]
        assert len(set(buffers)) == 4
        assert buffers[:4] == buffers[4:8]
    assert waits == records  # each buffer waits for the event of its own last use
    assert len(set(records)) == 4
    assert not {"upload", "device", "pinned"} & {call[0] for call in driver.calls}


def test_a_captured_buffer_is_never_used_again():
    planner, layers, _ = caches_of(1, 1000)
    driver = FakeDriver()
    filler = CudaFiller(layers, Constant(1), driver)
    plan = planner.plan_step(requests(2, 4))
    driver.captures.add(5)
    driver.calls.clear()
    for _ in range(3):
        filler.fill(plan, stream=5)
    captured = {call[1] for call in driver.calls if call[0] == "copy"}
    assert len(captured) == 3
    assert "record" not in {call[0] for call in driver.calls}
    with pytest.raises(LayoutError, match="no buffer is left for a fill captured"):
        filler.fill(plan, stream=5)
    driver.calls.clear()
    for _ in range(3):
        filler.fill(plan, stream=6)
    assert captured.isdisjoint(call[1] for call in driver.calls if call[0] == "copy")


def test_a_larger_step_than_foreseen_gets_a_larger_buffer_once():
    _, layers, _ = caches_of(1, 100)
    driver = FakeDriver()
    filler = CudaFiller(layers, Constant(1), driver)
    ids = list(range(100))
    plan = plan_of(100, GROUPS, [ids, ids, ids, []])
    keys = np.arange(300)
    for _ in range(4):
        filler.fill(plan, keys=keys)
    driver.calls.clear()
    for _ in range(8):
        filler.fill(plan, keys=keys)
    assert not {"upload", "device", "pinned"} & {call[0] for call in driver.calls}


def test_a_plan_that_does_not_fit_asks_for_nothing():
    _, layers, _ = caches_of(1, 8)
    driver = FakeDriver()
    filler = CudaFiller(layers, Constant(1), driver)
    driver.calls.clear()
    for plan in (
        plan_of(8, GROUPS, [[8], [], [], []]),
        plan_of(8, GROUPS, [[1, 1], [], [], []]),
        plan_of(9, GROUPS, [[1], [], [], []]),
        Planner(GROUPS, 9).plan_step([]),
        Planner(GROUPS[:1], 8).plan_step([]),
    ):
        with pytest.raises(LayoutError):
            filler.fill(plan)
    assert driver.calls == []


def test_patterns_of_another_kind_are_refused():
    class Ramp(Constant):
        def tile(self, dtype):
            return np.arange(32, dtype=np.uint8)

    _, layers, _ = caches_of(1, 8)
    with pytest.raises(PatternError, match="writes Constant and Normal patterns, got"):
        CudaFiller(layers, Ramp(1), FakeDriver())


@pytest.mark.skipif(GXX is None, reason="there is no g++")
@pytest.mark.parametrize("pattern", [Constant(0.5), Normal(0, 1, 3)])
def test_steps_of_the_planner_are_written_as_numpy_does(pattern):
    planner, layers, caches = caches_of(3, 1000)
    plan = planner.plan_step(requests(20, 4))
    filler = CudaFiller(layers, pattern, FakeDriver(runs=True))
    assert filler.fill(plan) > 0
    got = [cache.copy() for cache in caches]
    for cache in caches:
        cache[:] = 0
    Filler(layers, pattern).fill(plan)
    for cache, expected in zip(got, caches, strict=True):
        np.testing.assert_array_equal(cache, expected)


def test_the_bench_for_a_gpu_runs_without_one(tmp_path):
    bench = Path(__file__).parents[1] / "benches" / "gpu_fill.py"
    output = tmp_path / "report.json"
    command = [sys.executable, str(bench), "--fake", "--output", str(output)]
    subprocess.run(command, capture_output=True, check=True)
    report = json.loads(output.read_text())
    assert len(report["checks"]) == (6 if GXX else 0)
    assert {row["pattern"] for row in report["fills"]} == {"constant", "normal"}
    assert len(report["fills"]) == 3 * 2 * 2 * 2 * 2
