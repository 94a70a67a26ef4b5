"""Fills of every kind of cache, drawn by hypothesis."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from decodebench import Group
from decodebench.dtypes import ENCODINGS
from decodebench.pattern import Constant, Normal
from fill_oracle import Tensor, plan_of

GROUPS = (
    Group("positional", 6),
    Group("state", 4),
    Group("ring"),
    Group("excluded"),
    Group("positional", 4),
)
PATTERNS = (Constant(-0.37), Normal(0.5, 3.0, seed=11))
STORED = {4: "u4", 2: "i2", 1: "u1"}


@st.composite
def tensors(draw, num_blocks, group, pattern):
    """A tensor in poisoned memory of its own: (memory, oracle's tensor, arguments of Layer)."""
    indexing, span = GROUPS[group].indexing, GROUPS[group].span
    positional, ring = indexing == "positional", indexing == "ring"
    rows = draw(st.sampled_from([r for r in (1, 1, 1, 2, 3) if not positional or span % r == 0]))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=3))
    block_axis = 0 if num_blocks < 4 else draw(st.integers(0, len(sizes)))
    sizes.insert(block_axis, num_blocks * rows)
    token_axis = None
    if positional:
        slots = draw(st.sampled_from([n for n in (1, 2, 3, 4, 6) if span % (rows * n) == 0]))
        token_axis = draw(st.integers(0, len(sizes)))
        token_axis += num_blocks < 4 and token_axis == 0
        sizes.insert(token_axis, slots)
        block_axis += token_axis <= block_axis
    # In memory the axes stand in any order, each with steps and room to spare.
    order = draw(st.permutations(range(len(sizes))))
    dense = draw(st.booleans())
    steps = [1 if dense else draw(st.sampled_from([1, 1, 1, 2])) for _ in sizes]
    extra = [0 if dense else draw(st.sampled_from([0, 0, 0, 1])) for _ in sizes]
    dtype = draw(st.sampled_from(["i4", "u1", "float16"] if ring else list(ENCODINGS)))
    kind = ENCODINGS.get(dtype, np.dtype(dtype))
    hidden = not ring and draw(st.booleans())
    stored = np.dtype(STORED[kind.itemsize]) if hidden else kind
    shape = [sizes[axis] * steps[axis] + extra[axis] for axis in order]
    lead = draw(st.integers(0, 5)) * kind.itemsize
    memory = np.zeros(prod(shape) * kind.itemsize + lead + 16, np.uint8)
    memory[:] = 0xA0 | np.arange(memory.size) % 13
    whole = memory[lead : lead + prod(shape) * kind.itemsize].view(stored).reshape(shape)
    cut = tuple(slice(0, sizes[axis] * steps[axis], steps[axis]) for axis in order)
    array = whole[cut].transpose([order.index(axis) for axis in range(len(sizes))])
    tile = bytes(16) if ring else pattern.tile(dtype).tobytes()
    seed = pattern.seed if isinstance(pattern, Normal) and not ring else None
    tensor = Tensor(array, group, block_axis, rows, span, token_axis, tile, seed)
    options = {"dtype": dtype} if hidden else {}
    if positional:
        options["token_axis"] = token_axis - draw(st.sampled_from([0, len(sizes)]))
    return memory, tensor, options


@st.composite
def cases(draw):
    num_blocks = draw(st.sampled_from([1, 2, 3, 5, 7]))  # above 3, no other axis fits
    pattern = draw(st.sampled_from(PATTERNS))
    chosen = draw(st.lists(st.sampled_from([0, 4, 1, 2]), min_size=1, max_size=3))
    caches = [draw(tensors(num_blocks, group, pattern)) for group in chosen]
    blocks = st.lists(st.integers(0, num_blocks - 1), unique=True)
    ids = [draw(blocks) for _ in GROUPS]
    partials, place = [], 0
    for group, selected in zip(GROUPS, ids, strict=True):
        token = st.integers(0, group.span)
        window = st.lists(token, min_size=2, max_size=2, unique=True).map(sorted)
        for _ in selected:
            if group.indexing == "positional" and draw(st.booleans()):
                partials.append((place, *draw(window)))
            place += 1
    plan = plan_of(num_blocks, GROUPS, ids, partials)
    int64 = st.integers(-(2**63), 2**63 - 1)
    size = plan.block_ids.size
    keys = draw(st.one_of(st.none(), st.lists(int64, min_size=size, max_size=size)))
    return num_blocks, pattern, caches, plan, keys
