"""The kernel, run on the CPU under sanitizers, against the NumPy backend; and its mutants."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cuda_fake import GXX, SOURCE, SanitizedDriver
from decodebench import Group, Planner
from decodebench.fill.cuda import CudaFiller
from decodebench.fill.numpy import Filler
from decodebench.fill.tables import CHUNK_BYTES
from decodebench.layout import Layer
from decodebench.pattern import Normal
from fill_cases import GROUPS, cases
from fill_oracle import plan_of

pytestmark = pytest.mark.skipif(GXX is None, reason="there is no g++")

NORMAL = Normal(0.5, 3.0, seed=11)


def compare(layers, memories, pattern, plan, keys=None, source=SOURCE):
    """Fill by both backends, and compare every byte from the first to the last of each tensor."""
    before = [memory.copy() for memory in memories]
    written = Filler(layers, pattern).fill(plan, keys=keys)
    expected = [memory.copy() for memory in memories]
    driver = SanitizedDriver(source)
    filler = CudaFiller(layers, pattern, driver)
    regions, homes = [], []
    for layer, memory in zip(layers, memories, strict=True):
        segments = [segment for tensor in layer.tensors for segment in tensor]
        first = min(segment.address for segment in segments) - memory.ctypes.data
        end = max(segment.end for segment in segments) - memory.ctypes.data
        homes += [len(regions)] * len(segments)
        regions.append(memory[first:end])  # exactly sized: a byte more is an error
    driver.regions, driver.homes = regions, homes
    for _ in range(2):  # from what was there, and over a fill
        for memory, old in zip(memories, before, strict=True):
            memory[:] = old
        assert filler.fill(plan, keys=keys) == written
        for memory, after in zip(memories, expected, strict=True):
            np.testing.assert_array_equal(memory, after)
        before = expected


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_kernel_and_numpy_write_the_same_bytes(case):
    num_blocks, pattern, caches, plan, keys = case
    planner = Planner(GROUPS, num_blocks)
    layers = [Layer(tensor.array, planner, tensor.group, **more) for _, tensor, more in caches]
    array = None if keys is None else np.array(keys, np.int64)
    compare(layers, [memory for memory, _, _ in caches], pattern, plan, array)


def strided(num_blocks, *shape, dtype=np.float16, lead=0):
    """A poisoned cache that begins ``lead`` bytes after a multiple of 16, and its memory."""
    size = num_blocks * int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 32, np.uint8)
    memory = memory[-memory.ctypes.data % 16 + lead :][:size]
    memory[:] = 0xA0 | np.arange(size) % 13
    return memory.view(dtype).reshape(num_blocks, *shape), memory


def mixed(source=SOURCE):
    """A step that meets every path: planes of several chunks, windows, odd bases, runs of slots."""
    groups = (Group("positional", 16), Group("state", 16), Group("ring"))
    planner = Planner(groups, 5)
    dense, first = strided(5, 2, 16, 5, 129)  # 2 planes of more than two chunks, odd lengths
    heads, second = strided(5, 2, 3, 16, 24, lead=6)  # head-major: planes of 16 slots
    kernel, third = strided(10, 8, 576, lead=2)  # two kernel blocks a block
    padded, fourth = strided(5, 3 * CHUNK_BYTES, dtype=np.uint8, lead=1)
    ring, fifth = strided(5, 40, dtype=np.int32, lead=4)
    layers = [
        Layer(dense, planner, 0, token_axis=2),
        Layer(heads, planner, 0, token_axis=3),
        Layer(kernel[:, :, 3:570], planner, 0, token_axis=1),
        Layer(padded[:, : 2 * CHUNK_BYTES + 7], planner, 1, dtype="float8_e5m2"),
        Layer(ring, planner, 2),
    ]
    ids = [[4, 0, 2], [3, 1], [2]]
    plan = plan_of(5, groups, ids, [(0, 5, 16), (2, 3, 11)])
    compare(layers, [first, second, third, fourth, fifth], NORMAL, plan, source=source)


def test_a_step_that_meets_every_path():
    mixed()


MUTANTS = {
    "off-by-one bound": ("words = (size - head) / 16;", "words = (size - head) / 16 + 1;"),
    "dropped tail": ("if (lane < tail)", "if (lane + 1 < tail)"),
    "dropped head": ("if (lane < head)", "if (lane + 1 < head)"),
    "phase error": ("+ first;\n    if (!s.constant)", "+ first + 16;\n    if (!s.constant)"),
    "wrong plane": ("chunk.plane * s.plane_stride", "(chunk.plane ^ 1) * s.plane_stride"),
    "window too early": ("if (first < from) first = from;", "(void)from;"),
    "window too late": ("end = smaller(end, to);", "(void)to;"),
    "wrong slot": ("plane + run * s.slot_stride", "plane + run * s.run_bytes"),
    "wrong shift": ("if (shift >= 8) {", "if (shift > 8) {"),
    "wrong key": ("keys[position] : block", "keys[position] : position"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_in_the_kernel_is_caught(mutant):
    old, new = MUTANTS[mutant]
    assert SOURCE.count(old) == 1
    with pytest.raises(AssertionError):
        mixed(SOURCE.replace(old, new))


def test_blocks_beyond_32_bits():
    """Only one block of a huge cache exists; the others are where nothing is."""
    stride, block = (1 << 33) + 48, (1 << 27) + 3
    planner = Planner([Group("state", 1)], 1 << 28)
    cache, memory = strided(1, 300, dtype=np.uint8, lead=3)

    near = Planner([Group("state", 1)], 1)
    layer = Layer(cache, near, 0, dtype="float8_e4m3fn")
    expected = memory.copy()
    tile = NORMAL.tile("float8_e4m3fn")
    phase = int(NORMAL.phases(np.array([0]), np.array([block]), tile.size)[0])
    expected[:] = tile[(phase + np.arange(300)) % tile.size]
    driver = SanitizedDriver()
    filler = CudaFiller([layer], NORMAL, driver)
    filler._geometry = planner
    # The tables as if block 0 lay far below.
    address = filler._fixed[0]
    table = next(array for array in driver.kept if array.ctypes.data == address).view(np.uint64)
    table[:1] -= np.uint64(block * stride % 2**64)
    table[1] = stride
    driver.regions, driver.homes = [memory], [0]
    assert filler.fill(plan_of(1 << 28, planner.groups, [[block]])) == 300
    np.testing.assert_array_equal(memory, expected)
