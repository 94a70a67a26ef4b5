"""How caches are cut into segments, and which caches are refused."""

import ml_dtypes
import numpy as np
import pytest

from decodebench import DecodeBenchError, Group, LayoutError, Planner
from decodebench.layout import Layer

B, N, H, D = 10, 16, 3, 8  # blocks, slots, heads, elements of 2 bytes
PLANNER = Planner([Group("positional", N), Group("state", N), Group("ring"), Group("excluded")], B)


def cut(cache, group=0, **options):
    """The segments of a single tensor, as distances from its first byte."""
    (tensor,) = Layer(cache, PLANNER, group, **options).tensors
    first = cache.__array_interface__["data"][0]
    return [
        {
            "at": segment.address - first,
            "block": segment.block_stride,
            "planes": (segment.planes, segment.plane_stride, segment.first_plane),
            "slots": (segment.slots, segment.slot_stride, segment.first_slot, segment.block_slots),
            "bytes": segment.slot_bytes,
            "run": (segment.plane_is_run, segment.block_is_run),
        }
        for segment in tensor
    ]


def zeros(*shape, dtype=np.float16):
    return np.zeros(shape, dtype)


def one(at=0, *, planes=(1, 0, 0), slots, **rest):
    slots = slots if len(slots) == 4 else (*slots, 0, slots[0])
    return {"at": at, "planes": planes, "slots": slots, **rest}


def strided(shape, strides, dtype=np.float16):
    return np.lib.stride_tricks.as_strided(np.zeros(4096, dtype), shape, strides)


TOKEN = H * D * 2
PLANE = N * TOKEN
DENSE = (True, True)

LAYOUTS = {
    "slot-major": (
        zeros(B, 2, N, H, D),
        [one(block=2 * PLANE, planes=(2, PLANE, 0), slots=(N, TOKEN), bytes=TOKEN, run=DENSE)],
    ),
    "head-major": (
        zeros(B, 2, H, N, D),
        [one(block=2 * PLANE, planes=(2 * H, N * 16, 0), slots=(N, 16), bytes=16, run=DENSE)],
    ),
    "slot-major shape, head-major memory": (
        zeros(B, 2, H, N, D).transpose(0, 1, 3, 2, 4),
        [one(block=2 * PLANE, planes=(2 * H, N * 16, 0), slots=(N, 16), bytes=16, run=DENSE)],
    ),
    "head-major shape, slot-major memory": (
        zeros(B, 2, N, H, D).transpose(0, 1, 3, 2, 4),
        [one(block=2 * PLANE, planes=(2, PLANE, 0), slots=(N, TOKEN), bytes=TOKEN, run=DENSE)],
    ),
    "separate planes": (
        zeros(2, B, N, H, D),
        [
            one(
                block=PLANE,
                planes=(2, B * PLANE, 0),
                slots=(N, TOKEN),
                bytes=TOKEN,
                run=(True, False),
            )
        ],
    ),
    "separate planes in shape only": (
        zeros(B, 2, N, H, D).transpose(1, 0, 2, 3, 4),
        [one(block=2 * PLANE, planes=(2, PLANE, 0), slots=(N, TOKEN), bytes=TOKEN, run=DENSE)],
    ),
    "separate planes, head-major": (
        zeros(2, B, H, N, D),
        [
            one(
                i * B * PLANE,
                block=PLANE,
                planes=(H, N * 16, i * H),
                slots=(N, 16),
                bytes=16,
                run=DENSE,
            )
            for i in range(2)
        ],
    ),
    "latent": (
        zeros(B, N, 9),
        [one(block=N * 18, slots=(N, 18), bytes=18, run=DENSE)],
    ),
    "head, part, slot, x": (
        zeros(B, H, D // 4, N, 4),
        [one(block=PLANE, planes=(H * 2, N * 8, 0), slots=(N, 8), bytes=8, run=DENSE)],
    ),
    "kernel blocks with planes": (
        zeros(B * 4, 2, N // 4, H, D),
        [
            one(
                i * PLANE // 2,
                block=2 * PLANE,
                planes=(2, PLANE // 4, 0),
                slots=(4, TOKEN, 4 * i, N),
                bytes=TOKEN,
                run=DENSE,
            )
            for i in range(4)
        ],
    ),
    "kernel blocks without planes": (
        zeros(B * 4, N // 4, 9),
        [one(block=N * 18, slots=(N, 18), bytes=18, run=DENSE)],
    ),
    "kernel blocks behind planes": (
        zeros(2, B * 4, N // 4, H, D),
        [
            one(
                block=PLANE,
                planes=(2, B * PLANE, 0),
                slots=(N, TOKEN),
                bytes=TOKEN,
                run=(True, False),
            )
        ],
    ),
    "one row per slot": (
        zeros(B * N, H, D),
        [one(block=PLANE, slots=(N, TOKEN), bytes=TOKEN, run=DENSE)],
    ),
    "keys of keys and values": (
        zeros(B, 2, N, H, D)[:, 0],
        [one(block=2 * PLANE, slots=(N, TOKEN), bytes=TOKEN, run=DENSE)],
    ),
    "padded heads": (
        zeros(B, N, H, D + 2)[..., :D],
        [
            one(
                block=N * H * 20,
                planes=(H, 20, 0),
                slots=(N, H * 20),
                bytes=16,
                run=(False, False),
            )
        ],
    ),
    "planes that do not merge": (
        zeros(3, 3, B, H + 1, N, D)[:, :2, :, :H],
        [
            one(
                (3 * i + j) * B * (H + 1) * N * 16,
                block=(H + 1) * N * 16,
                planes=(H, N * 16, (2 * i + j) * H),
                slots=(N, 16),
                bytes=16,
                run=DENSE,
            )
            for i in range(3)
            for j in range(2)
        ],
    ),
    "padded blocks": (
        zeros(B, N + 1, 9)[:, :N],
        [one(block=(N + 1) * 18, slots=(N, 18), bytes=18, run=DENSE)],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_positional_caches(layout):
    cache, expected = LAYOUTS[layout]
    assert cut(cache) == expected


def test_caches_without_slots_merge_whatever_is_contiguous():
    whole = (1, 0)
    dense = [one(block=640, slots=whole, bytes=640, run=DENSE)]
    assert cut(zeros(B, 20, 16), 1) == dense
    assert cut(zeros(B * 4, 5, 16), 1) == dense
    assert cut(zeros(B, 20, 16, dtype="V2"), 2) == dense
    assert cut(zeros(B, 20, 20)[..., :16], 1) == [
        one(block=800, planes=(20, 40, 0), slots=whole, bytes=32, run=(True, False))
    ]
    assert cut(zeros(3, B, 2, 20)[..., :16], 2) == [
        one(
            i * B * 80,
            block=80,
            planes=(2, 40, 2 * i),
            slots=whole,
            bytes=32,
            run=(True, False),
        )
        for i in range(3)
    ]


def test_the_first_axis_wins_and_size_one_axes_do_not_matter():
    planner = Planner([Group("positional", 2)], 4)
    (tensor,) = Layer(zeros(4, 1, 8, 2, 1), planner, 0, token_axis=-2).tensors
    assert (tensor[0].block_stride, tensor[0].planes, tensor[0].slots) == (32, 8, 2)
    (tensor,) = Layer(zeros(1, 2, 3), Planner([Group("positional", 2)], 1), 0).tensors
    assert (tensor[0].block_stride, tensor[0].slots, tensor[0].slot_bytes) == (0, 2, 6)


def test_several_tensors_keep_their_types():
    conv, ssm = zeros(B, 3, 4, dtype=ml_dtypes.bfloat16), zeros(B, 2, 8, dtype=np.float32)
    for cache in ((conv, ssm), [conv, ssm]):
        tensors = Layer(cache, PLANNER, 1).tensors
        assert [[s.dtype for s in tensor] for tensor in tensors] == [["bfloat16"], ["float32"]]
        assert [tensor[0].slot_bytes for tensor in tensors] == [24, 64]


def test_types_may_be_hidden():
    for dtype, stored in (("float8_e4m3fn", "u1"), ("bfloat16", "i2"), ("bfloat16", "V2")):
        (tensor,) = Layer(zeros(B, N, 9, dtype=stored), PLANNER, 0, dtype=dtype).tensors
        assert tensor[0].dtype == dtype

    class Foreign:
        array = zeros(B, N, 9, dtype=ml_dtypes.bfloat16)
        __array_interface__ = array.__array_interface__

    (tensor,) = Layer(Foreign(), PLANNER, 0, dtype="bfloat16").tensors
    assert tensor[0].address == Foreign.array.ctypes.data


def test_context_parallel_slots_stand_for_several_tokens():
    planner = Planner([Group("positional", 2 * N)], B)
    (tensor,) = Layer(zeros(B, N, 9), planner, 0, token_axis=1).tensors
    (segment,) = tensor
    assert segment.tokens_per_slot == 2
    assert segment.window(0, 32) == (0, 16)
    assert segment.window(5, 9) == (3, 5)
    assert segment.window(4, 8) == (2, 4)
    assert segment.window(5, 6) == (3, 3)


def test_windows_of_kernel_rows_stay_inside():
    (tensor,) = Layer(zeros(B * 4, 2, 4, 9), PLANNER, 0, token_axis=2).tensors
    assert [segment.window(5, 10) for segment in tensor] == [(4, 4), (1, 4), (0, 2), (0, 0)]


def test_excluded_caches_are_not_looked_at():
    assert Layer(object(), PLANNER, 3).tensors == ()


@pytest.mark.parametrize(
    ("alignment", "cache"),
    [
        (16, zeros(B, N, 16)),
        (2, zeros(B, N, 9)),
        (8, zeros(B, N, 16)[:, :, 4:12]),
        (4, zeros(B, N, 18)[..., :16]),
        (4, strided((B, N, 2, 8), (544, 16, 260, 2))),
        (1, zeros(B, N, 3, dtype=ml_dtypes.float8_e5m2)),
    ],
)
def test_alignment(alignment, cache):
    (tensor,) = Layer(cache, PLANNER, 0, token_axis=1).tensors
    shift = cache.ctypes.data % 16 or 16
    assert tensor[0].alignment == min(alignment, shift)


def test_segments_end_where_the_cache_does():
    for cache, _ in LAYOUTS.values():
        (tensor,) = Layer(cache, PLANNER, 0).tensors
        low = cache.ctypes.data
        last = sum((n - 1) * step for n, step in zip(cache.shape, cache.strides, strict=True))
        high = low + last + cache.itemsize
        assert min(segment.address for segment in tensor) == low
        assert max(segment.end for segment in tensor) == high
        assert sum(segment.block_bytes for segment in tensor) * B == cache.nbytes


def read_only(cache):
    cache.flags.writeable = False
    return cache


@pytest.mark.parametrize(
    ("cache", "options", "message"),
    [
        (zeros(7, N, 9), {}, "layer 'L': no axis of shape (7, 16, 9) fits num_blocks=10"),
        (zeros(B - 1, N), {}, "layer 'L': no axis of shape (9, 16) fits num_blocks=10"),
        (zeros(2, B, N, 20), {}, "axes [1, 3] of shape (2, 10, 16, 20) all fit num_blocks=10"),
        (zeros(B, 2, 8, H, D), {}, "no axis has the slots of 16 tokens in shape (10, 2, 8, 3, 8) "),
        (zeros(B, 2, N, N, D), {}, "axes [2, 3] all have the slots of 16 tokens in shape"),
        (zeros(B, 2, N, N, D), {}, "with blocks along axis 0, 1 rows each, pass token_axis"),
        (zeros(B, N, 9), {"token_axis": 0}, "token_axis=0 is no axis of slots in shape"),
        (zeros(B, N, 9), {"token_axis": 3}, "token_axis=3 is no axis of slots in shape"),
        (zeros(B, N, 9), {"token_axis": -4}, "token_axis=-4 is no axis of slots in shape"),
        (zeros(B, N, 9), {"token_axis": 2}, "token_axis=2 has 9 slots in shape (10, 16, 9)"),
        (zeros(B, N, 9), {"token_axis": 2}, "which do not divide the span of 16 tokens"),
        (zeros(B, N, 9), {"token_axis": 1, "group": 1}, "a state group has no token axis, got to"),
        (zeros(B, N, 9), {"group": 4}, "layer 'L': there is no group 4 among 4"),
        (zeros(B, N, 9), {"group": -1}, "layer 'L': there is no group -1 among 4"),
        (zeros(B, N, 9), {"dtype": "fp8"}, "layer 'L': unknown dtype 'fp8', expected float32, "),
        (zeros(B, N, 9), {"dtype": "float32"}, "dtype float32 has 4 bytes, the elements of the "),
        (
            zeros(B, N, dtype=np.uint8),
            {},
            "values of a cache of uint8 have no known encoding, pa",
        ),
        (zeros(B, N, dtype=np.int8), {"group": 1}, "values of a cache of int8 have no known"),
        (zeros(B, N, dtype=">f4"), {}, "values of a cache of >f4 have no known encoding"),
        (zeros(B, N, dtype=object), {"group": 2}, "a cache of Python objects cannot be"),
        (zeros(B, 0, N), {}, "a cache of shape (10, 0, 16) with byte strides"),
        (zeros(), {"group": 2}, "a cache of shape () with byte strides () holds nothing"),
        (read_only(zeros(B, N)), {}, "the cache of shape (10, 16) is read-only"),
        (zeros(B, N)[::-1], {}, "with byte strides (-32, 2) runs backwards"),
        (np.broadcast_to(zeros(B, N, 1), (B, N, 3)), {}, "the cache of shape (10, 16, 3) is read"),
        (strided((B, N, 3), (32, 2, 0)), {}, "byte strides (32, 2, 0) overlap or interleave"),
        (strided((B, N), (30, 2)), {}, "byte strides (30, 2) overlap or interleave"),
        (strided((B, N, 3), (200, 4, 6)), {}, "byte strides (200, 4, 6) overlap or interleave"),
        (strided((B, N), (33, 2)), {}, "is not aligned to its elements of 2 bytes"),
        (np.zeros(2 * B * N + 1, np.uint8)[1:].view(np.float16).reshape(B, N), {}, "not aligned"),
        (
            [[0.0] * N] * B,
            {},
            "layer 'L', tensor 0: expected an array with __array_interface__, go",
        ),
        ((zeros(B, 2), zeros(7, 2)), {"group": 1}, "layer 'L', tensor 1: no axis of shape (7, 2)"),
        ((), {"group": 1}, "layer 'L': the cache holds no tensor"),
        (None, {}, "layer 'L': expected an array with __array_interface__, got NoneType"),
    ],
)
def test_refusals_say_what_and_where(cache, options, message):
    options = {"group": 0, **options}
    with pytest.raises(LayoutError) as caught:
        Layer(cache, PLANNER, name="L", **options)
    text = str(caught.value)
    assert message in text
    assert text.startswith("layer 'L'")
    assert "\n" not in text
    assert isinstance(caught.value, DecodeBenchError)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_no_rank_loses_a_local_token_under_context_parallelism(world, interleave):
    slots = 8
    planner = Planner([Group("positional", slots * world)], B)
    layer = Layer(zeros(B, slots, D), planner, 0, token_axis=1, interleave=interleave)
    ((segment,),) = layer.tensors
    # The slot of a token, on its rank.
    slot_of = {
        token: token // (interleave * world) * interleave + token % interleave
        for token in range(slots * world)
    }
    for local in range(slots * world + 1):
        kept = {slot for token, slot in slot_of.items() if token < local}
        first, end = segment.window(local, slots * world)
        assert set(range(first)) == kept
        assert end == slots


def test_whole_blocks_are_for_caches_without_an_axis_of_tokens():
    ambiguous, without = zeros(B, N, N), zeros(B, 5)
    for cache in (ambiguous, without):
        with pytest.raises(LayoutError, match="pass token_axis"):
            Layer(cache, PLANNER, 0)
        layer = Layer(cache, PLANNER, 0, whole_blocks=True)
        assert not layer.by_token
        ((segment,),) = layer.tensors
        assert (segment.slots, segment.block_bytes) == (1, cache[0].nbytes)
    told = Layer(ambiguous, PLANNER, 0, whole_blocks=True, token_axis=2)
    assert told.by_token
    assert told.tensors == Layer(ambiguous, PLANNER, 0, token_axis=2).tensors
    assert Layer(zeros(B, N, D), PLANNER, 0, whole_blocks=True).by_token


def test_zeros_need_no_encoding():
    assert Layer(zeros(B, N, dtype=np.int8), PLANNER, 0, zeros=True).zeros
    assert Layer(zeros(B, 4), PLANNER, 2).zeros
    assert not Layer(zeros(B, N), PLANNER, 0).zeros
