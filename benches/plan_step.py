"""Planning a step from Python, against the plain list comprehension of the same rule.

256 requests of 2,500 blocks. Both are timed in turn in one run, and their answers compared first.
"""

import argparse
import pickle

import numpy as np

from decodebench import Group, Planner
from timing import medians

BLOCK_SIZE = 16

IdLists = list[list[int]]


def comprehension(requests: list[tuple[str, int, int, IdLists]]) -> IdLists:
    """Select without checking anything."""
    selected = []
    for _, local, external, (table,) in requests:
        start = local // BLOCK_SIZE
        end = -(-(local + external) // BLOCK_SIZE)
        selected.append([block for block in table[start:end] if block != 0])
    return selected


def bench(name: str, ids: np.ndarray, num_requests: int, rounds: int) -> None:
    tables = np.split(ids.astype(np.int32), num_requests)
    tokens = len(tables[0]) * BLOCK_SIZE
    as_arrays = [(f"r{i}", 0, tokens, [table]) for i, table in enumerate(tables)]
    as_lists = [(f"r{i}", 0, tokens, [table.tolist()]) for i, table in enumerate(tables)]
    planner = Planner([Group("positional", BLOCK_SIZE)], len(ids) + 1)

    plan, lists = planner.plan_step(as_arrays), comprehension(as_lists)
    expected = [block for request in lists for block in request]
    assert plan.block_ids.tolist() == expected
    assert planner.plan_step(as_lists) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan

    plain, from_lists, from_arrays, copy = medians(
        rounds,
        lambda: comprehension(as_lists),
        lambda: planner.plan_step(as_lists),
        lambda: planner.plan_step(as_arrays),
        lambda: np.concatenate(tables),
    )
    print(f"{num_requests} requests of {len(tables[0])} blocks, {name} ids")
    print(f"  list comprehension, unchecked  {plain * 1e3:8.3f} ms")
    for what, seconds in (("int lists", from_lists), ("int32 arrays", from_arrays)):
        print(f"  plan_step from {what:<15} {seconds * 1e3:8.3f} ms   {plain / seconds:6.1f}x")
    print(f"  np.concatenate of the arrays   {copy * 1e3:8.3f} ms   {plain / copy:6.1f}x")
    pickled_lists, pickled_plan = medians(
        rounds,
        lambda: pickle.loads(pickle.dumps(lists, pickle.HIGHEST_PROTOCOL)),
        lambda: pickle.loads(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)),
    )
    size = len(pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)) / len(ids)
    print(f"  pickle and unpickle, as lists  {pickled_lists * 1e3:8.3f} ms")
    print(
        f"  pickle and unpickle, the plan  {pickled_plan * 1e3:8.3f} ms   "
        f"{pickled_lists / pickled_plan:6.1f}x   {size:.2f} bytes a block"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="a small step, once")
    num_requests, blocks, rounds = (4, 50, 1) if parser.parse_args().fast else (256, 2500, 31)
    contiguous = np.arange(1, num_requests * blocks + 1)
    shuffled = np.random.default_rng(0).permutation(contiguous)
    bench("contiguous", contiguous, num_requests, rounds)
    bench("shuffled", shuffled, num_requests, rounds)


if __name__ == "__main__":
    main()
