"""The NumPy backend against ``ndarray.fill`` of equally many contiguous bytes, in the same run.

Each geometry is filled with ids in table order (``contiguous``), with the same ids in random order
(``shuffled``), and with a random half of the cache's ids (``scattered``); the last lines are a step
of a few blocks in many layers. What scattered blocks cost beyond shuffled ones is mostly the
memory's: ``ndarray.fill`` of the same blocks, one by one in ascending order, stands beside it.
"""

import argparse
import json
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from decodebench import Group, Planner, StepPlan
from decodebench.fill import Filler
from decodebench.layout import Layer
from decodebench.pattern import Constant, Normal, Pattern
from timing import medians

SPAN = 16
PATTERNS: dict[str, Pattern] = {"constant": Constant(0.015), "normal": Normal(0.015, 0.1)}


@dataclass(frozen=True)
class Geometry:
    """A cache's shape around its blocks."""

    name: str
    before: tuple[int, ...]
    after: tuple[int, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of bfloat16."""
        return prod(self.before) * prod(self.after) * 2


GEOMETRIES = (
    Geometry("slot-major, 64 KiB", (), (2, SPAN, 8, 128)),
    Geometry("head-major, 64 KiB", (), (2, 8, SPAN, 128)),
    Geometry("separate planes, 2 x 32 KiB", (2,), (SPAN, 8, 128)),
    Geometry("separate planes, head-major", (2,), (8, SPAN, 128)),
    Geometry("latent, 18 KiB", (), (SPAN, 576)),
    Geometry("tiny, 1 KiB", (), (SPAN, 32)),
)


def plan_of(planner: Planner, ids: NDArray[np.int32]) -> StepPlan:
    return planner.plan_step([("r", 0, len(ids) * SPAN, [ids.tolist()])])


def blocks_first(geometry: Geometry, cache: NDArray[Any]) -> NDArray[np.uint16]:
    return np.moveaxis(cache.view(np.uint16), len(geometry.before), 0)


def fill_each(blocks: list[NDArray[np.uint16]]) -> None:
    for block in blocks:
        block.fill(0x1234)


def check(
    geometry: Geometry, filler: Filler, pattern: Pattern, cache: NDArray[Any], plan: StepPlan
) -> None:
    """Compare a fill of a cache of zeros with the rule."""
    cache.fill(0)
    ids = plan.block_ids
    assert filler.fill(plan) == len(ids) * geometry.block_bytes
    blocks = blocks_first(geometry, cache)
    tile = pattern.tile("bfloat16").view(np.uint16)
    phases = pattern.phases(np.array([0]), ids.astype(np.int64), tile.nbytes) // 2
    offsets = np.arange(geometry.block_bytes // 2).reshape(blocks.shape[1:])
    for block, phase in zip(ids.tolist(), phases.tolist(), strict=True):
        assert np.array_equal(blocks[block], tile[(phase + offsets) % tile.size])
    untouched = np.ones(len(blocks), np.bool_)
    untouched[ids] = False
    assert not blocks[untouched].any()


def bench(geometry: Geometry, total: int, rounds: int) -> list[dict[str, Any]]:
    count = total // geometry.block_bytes
    num_blocks = 2 * count + 1
    planner = Planner([Group("positional", SPAN)], num_blocks)
    shape = (*geometry.before, num_blocks, *geometry.after)
    cache = np.zeros(shape, ml_dtypes.bfloat16)
    # Geometries leave no doubt about the token axis but for the sizes of toy caches.
    token_axis = len(geometry.before) + 1 + geometry.after.index(SPAN)
    layer = Layer(cache, planner, 0, token_axis=token_axis)
    fillers = {name: Filler([layer], pattern) for name, pattern in PATTERNS.items()}
    random = np.random.default_rng(0)
    ordered = np.arange(1, count + 1, dtype=np.int32)
    orders = {
        "contiguous": ordered,
        "shuffled": random.permutation(ordered),
        "scattered": random.permutation(num_blocks - 1)[:count].astype(np.int32) + 1,
    }
    flat = cache.view(np.uint64).reshape(-1)[: count * geometry.block_bytes // 8]
    views = list(blocks_first(geometry, cache).view())
    results: list[dict[str, Any]] = []
    for order, ids in orders.items():
        plan = plan_of(planner, ids)
        for name, filler in fillers.items():
            check(geometry, filler, PATTERNS[name], cache, plan)
        chosen = [views[block] for block in sorted(ids.tolist())]
        contiguous, by_block, constant, normal = medians(
            rounds,
            partial(flat.fill, 0x1234),
            partial(fill_each, chosen),
            partial(fillers["constant"].fill, plan),
            partial(fillers["normal"].fill, plan),
        )
        results.append(
            {
                "geometry": geometry.name,
                "ids": order,
                "bytes": flat.nbytes,
                "ndarray_fill_s": contiguous,
                "ndarray_fill_by_block_s": by_block,
                "constant_s": constant,
                "normal_s": normal,
            }
        )
    return results


def bench_small_step(rounds: int) -> dict[str, float]:
    """Return the seconds of a step of three blocks in each of 80 layers."""
    planner = Planner([Group("positional", SPAN)], 8)
    layers = [Layer(np.zeros((8, 2, SPAN, 8, 128), "f2"), planner, 0) for _ in range(80)]
    plan = planner.plan_step([("r", 0, 3 * SPAN, [[2, 7, 4]])])
    fillers = [Filler(layers, pattern) for pattern in PATTERNS.values()]
    steps = [partial(filler.fill, plan) for filler in fillers]
    return dict(zip(PATTERNS, medians(rounds, *steps), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="small caches, one round")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    args = parser.parse_args()
    total, rounds = (1 << 20, 1) if args.fast else (1 << 28, 9)
    results = [row for geometry in GEOMETRIES for row in bench(geometry, total, rounds)]
    small = bench_small_step(rounds)
    if args.json:
        print(json.dumps({"fills": results, "small_step_s": small}))
        return
    print(f"{total >> 20} MiB a fill, median of {rounds}; GB/s, and share of ndarray.fill")
    print(
        f"{'geometry':<28} {'ids':<11} {'fill':>6} {'by block':>9} {'constant':>15} {'normal':>15}"
    )
    for row in results:
        fill, by_block, constant, normal = (
            row["bytes"] / row[key] / 1e9
            for key in ("ndarray_fill_s", "ndarray_fill_by_block_s", "constant_s", "normal_s")
        )
        print(
            f"{row['geometry']:<28} {row['ids']:<11} {fill:6.1f} {by_block:9.1f}"
            f" {constant:7.1f} ({constant / fill:4.0%}) {normal:7.1f} ({normal / fill:4.0%})"
        )
    for name, seconds in small.items():
        print(f"3 blocks in each of 80 layers, {name}: {seconds * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
