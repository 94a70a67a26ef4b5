import array
import itertools
import json
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import decodebench
import oracle
from decodebench import (
    DecodeBenchError,
    Group,
    LayoutError,
    Ledger,
    PatternError,
    PlanError,
    Planner,
    StepPlan,
    TraceError,
)

GOLDEN = Path(__file__).parent / "golden" / "plans.jsonl"


def planner_of(request: dict[str, Any], **options: bool) -> Planner:
    groups = [Group(**group) for group in request["groups"]]
    return Planner(groups, request["num_blocks"], null_block=request["null_block"], **options)


def facts(request: dict[str, Any]) -> tuple[str, int, int, list[list[int]]]:
    return request["id"], request["local"], request["external"], request["tables"]


def answer(request: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "start": fill.start,
            "end": fill.end,
            "block_ids": fill.block_ids.tolist(),
            "head_slot": fill.head_slot,
            "tail_slot": fill.tail_slot,
        }
        for fill in planner_of(request).plan(facts(request))
    ]


def slots_written(plan: StepPlan) -> dict[tuple[int, int], set[int] | None]:
    """Slots per (group, block), from the flat arrays alone: ``None`` where tokens do not count."""
    written: dict[tuple[int, int], set[int] | None] = {}
    offsets = plan.group_offsets
    partials = {position: range(first, end) for position, first, end in plan.partials.tolist()}
    for number, group in enumerate(plan.groups):
        for position in range(offsets[number], offsets[number + 1]):
            slots = set(partials.get(position, range(group.span)))
            key = number, int(plan.block_ids[position])
            assert key not in written
            written[key] = slots if group.indexing == "positional" else None
    return written


def refusal(planner: Planner, *requests: Any, ledger: Ledger | None = None) -> PlanError:
    with pytest.raises(PlanError) as caught:
        planner.plan_step(requests, ledger)
    assert "\n" not in str(caught.value)
    return caught.value


# --- against the oracle


def test_the_golden_file_is_the_oracles() -> None:
    assert GOLDEN.read_text().splitlines() == list(oracle.golden_lines())


def test_golden_answers() -> None:
    for line in GOLDEN.read_text().splitlines():
        case = json.loads(line)
        if "kinds" in case["answer"]:
            with pytest.raises(PlanError) as caught:
                answer(case["request"])
            assert caught.value.kind in case["answer"]["kinds"]
            assert caught.value.request == case["request"]["id"]
        else:
            assert answer(case["request"]) == case["answer"]["groups"]


@st.composite
def hostile_requests(draw: st.DrawFn) -> dict[str, Any]:
    """Requests near every edge, many of them refused."""
    span = draw(st.sampled_from([1, 2, 3, 16]))
    edges = st.sampled_from([0, 1, span - 1, span, span + 1, 3 * span, 5 * span + 1])
    group = st.sampled_from(
        [
            {"indexing": "positional", "span": span},
            {"indexing": "positional", "span": 2 * span},
            {"indexing": "state", "span": span},
            {"indexing": "ring"},
            {"indexing": "excluded"},
        ]
    )
    groups = draw(st.lists(group, min_size=1, max_size=3))
    block = st.integers(-1, 40) | st.just(0) | st.integers(1, 30)
    table = st.lists(block, max_size=12, unique=draw(st.booleans()))
    return {
        "id": "r",
        "num_blocks": 32,
        "null_block": 0,
        "local": draw(edges),
        "external": draw(edges),
        "groups": groups,
        "tables": [draw(table) for _ in groups],
    }


@given(hostile_requests())
def test_any_request_is_planned_or_refused_as_the_oracle_says(request_: dict[str, Any]) -> None:
    broken = oracle.broken_rules(request_)
    try:
        planned = answer(request_)
    except PlanError as error:
        assert error.kind in broken
    else:
        assert not broken
        assert planned == oracle.plan(request_)


@given(hostile_requests(), st.booleans())
def test_a_step_of_one_writes_the_slots_that_the_oracle_names(
    request_: dict[str, Any], exact_tail: bool
) -> None:
    if oracle.broken_rules(request_):
        return
    plan = planner_of(request_, exact_tail=exact_tail).plan_step([facts(request_)])
    assert slots_written(plan) == oracle.writes(request_, exact_tail=exact_tail)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(1, 2**32 - 1))
@example(2**64 - 1, 0, 1)
@example(2**64 - 1, 1, 1)
@example(0, 2**64 - 1, 2**32 - 1)
def test_numbers_as_large_as_they_come(local: int, external: int, span: int) -> None:
    planner = Planner([Group("positional", span), Group("state", span)], 2**28)
    try:
        planner.plan_step([("r", local, external, [[1], [2]])])
    except PlanError as error:
        assert error.kind in {"interval_overflow", "range_outside_table"}
    else:
        assert external == 0 or local + external <= span


# --- steps


def test_a_step_stands_group_by_group_and_request_by_request() -> None:
    planner = Planner([Group("positional", 16), Group("ring")], 64)
    plan = planner.plan_step(
        [("a", 0, 32, [[1, 2], [9]]), ("b", 24, 20, [[3, 4, 5], [10]]), ("c", 5, 0, [[6], [11]])]
    )
    assert plan.request_ids == ("a", "b", "c")
    assert plan.block_ids.tolist() == [1, 2, 4, 5, 9, 10]
    assert plan.block_ids.dtype == np.int32
    assert not plan.block_ids.flags.writeable
    assert plan.group_offsets.tolist() == [0, 4, 6]
    assert plan.partials.tolist() == [[2, 8, 16]]
    assert plan.group_block_ids(0).tolist() == [1, 2, 4, 5]
    assert plan.block_counts == ((2, 1), (2, 1), (0, 0))
    assert plan.request_block_ids(0, 1).tolist() == [4, 5]
    assert plan.request_block_ids(1, 2).tolist() == []
    assert (plan.num_blocks, plan.groups) == (64, planner.groups)
    assert (plan.heads_preserved, plan.null_blocks_skipped, plan.repeats_merged) == (1, 0, 0)
    for group, request in ((2, 0), (0, 3), (-1, 0), (0, -1)):
        with pytest.raises(PlanError):
            plan.request_block_ids(group, request)


def test_an_empty_step() -> None:
    plan = Planner([Group("positional", 16), Group("ring")], 64).plan_step([])
    assert plan.block_ids.tolist() == []
    assert plan.group_offsets.tolist() == [0, 0, 0]
    assert plan.block_counts == ()
    assert plan.partials.shape == (0, 3)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_zero_external_tokens_select_nothing() -> None:
    planner = Planner([Group("positional", 16), Group("state", 16), Group("ring")], 64)
    plan = planner.plan_step([("r", 20, 0, [[1, 2], [3, 4], [5]])])
    assert plan.block_ids.tolist() == []


def test_a_repeat_is_merged_and_the_slots_are_united() -> None:
    requests = [("a", 20, 2, [[1, 8]]), ("b", 20, 12, [[2, 8]]), ("c", 16, 4, [[3, 9]])]
    for exact_tail in (False, True):
        plan = Planner([Group("positional", 16)], 64, exact_tail=exact_tail).plan_step(requests)
        assert plan.repeats_merged == 1
        last = {0, 1, 2, 3} if exact_tail else set(range(16))
        assert slots_written(plan) == {(0, 8): set(range(4, 16)), (0, 9): last}
    error = refusal(Planner([Group("positional", 16)], 64, strict=True), *requests)
    assert (error.kind, error.request) == ("block_repeated", "b")


def test_local_slots_of_one_request_are_not_filled_for_another() -> None:
    planner = Planner([Group("positional", 16)], 64)
    head, whole = ("a", 8, 8, [[5]]), ("b", 0, 16, [[5]])
    for requests in ((head, whole), (whole, head)):
        assert refusal(planner, *requests).kind == "block_repeated"


def test_exact_tail_leaves_the_slots_after_the_interval_alone() -> None:
    for exact_tail, slots in ((False, 16), (True, 1)):
        planner = Planner([Group("positional", 16)], 64, exact_tail=exact_tail)
        plan = planner.plan_step([("r", 0, 17, [[1, 2]])])
        assert slots_written(plan)[0, 2] == set(range(slots))


# --- tables


@pytest.mark.parametrize(
    "make",
    [
        list,
        tuple,
        lambda ids: np.array(ids, np.int32),
        lambda ids: np.array(ids, np.int64),
        lambda ids: np.array(ids, np.uint32),
        lambda ids: np.array(ids, np.uint64),
        lambda ids: np.array([ids, ids], np.int32).T[:, 0],
        lambda ids: array.array("i", ids),
        lambda ids: memoryview(array.array("q", ids)),
        lambda ids: [np.int64(block) for block in ids],
    ],
)
def test_tables_come_in_many_kinds(make: Any) -> None:
    planner = Planner([Group("positional", 16)], 64)
    plan = planner.plan_step([("r", 16, 32, [make([1, 2, 3])])])
    assert plan.block_ids.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("12", "table 0 must be a list, a tuple or a one-dimensional buffer"),
        (b"12", "table 0 must be"),
        (None, "table 0 must be"),
        (7, "table 0 must be"),
        (np.zeros((2, 2), np.int32), "table 0 has 2 dimensions"),
        (np.ones(2, ">i4"), "table 0 holds integers of the other byte order"),
        (np.broadcast_to(np.int32(1), 2**40), "table 0 has 1099511627776 entries, more than"),
        (np.broadcast_to(np.int64(1), 2**40), "table 0 has 1099511627776 entries, more than"),
        (np.array(1, np.int32), "table 0 must be"),
        (np.zeros(2, np.float32), "table 0 must be"),
        (np.zeros(2, bool), "table 0 must be"),
        ([1.0], "table 0 holds a float"),
        ([True], "table 0 holds a bool"),
        (["1"], "table 0 holds a str"),
        ([None], "table 0 holds a NoneType"),
        ([2**31], "table 0 holds 2147483648, which is no 32-bit block id"),
        ([-(2**40)], "no 32-bit block id"),
        ([10**5000], "table 0 holds a number"),
        (np.array([2**40]), "no 32-bit block id"),
        (np.array([2**64 - 1], np.uint64), "no 32-bit block id"),
    ],
)
def test_what_is_no_table_is_refused_by_name(table: Any, message: str) -> None:
    error = refusal(Planner([Group("positional", 16)], 64), ("r", 0, 1, [table]))
    assert error.kind == "bad_argument"
    assert error.request == "r"
    assert str(error).startswith("request r: ")
    assert message in str(error)


class Evil:
    """An entry that shortens the list while it is being read."""

    def __init__(self, victim: list[Any]) -> None:
        self.victim = victim

    def __index__(self) -> int:
        self.victim.clear()
        return 1


def test_a_list_that_changes_while_it_is_read() -> None:
    table: list[Any] = [1, 2, 3]
    table.insert(0, Evil(table))
    error = refusal(Planner([Group("positional", 16)], 64), ("r", 0, 64, [table]))
    assert error.kind == "bad_argument"


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (("r", 0, 1), "request 0 must be a tuple"),
        ("abcd", "request 0 must be a tuple"),
        (None, "request 0 must be a tuple"),
        ((1, 0, 1, [[1]]), "request 0 has an id that is a int"),
        (("\ud800", 0, 1, [[1]]), "valid Unicode"),
        (("r", -1, 1, [[1]]), "request r: local must lie in"),
        (("r", 0, -1, [[1]]), "request r: external must lie in"),
        (("r", 0, 2**64, [[1]]), "request r: external must lie in"),
        (("r", 0.0, 1, [[1]]), "request r: local must be an integer, not float"),
        (("r", True, 1, [[1]]), "request r: local must be an integer, not bool"),
        (("r", 0, None, [[1]]), "request r: external must be an integer"),
        (("r", 0, 1, None), "request r: tables must be"),
        (("r", 0, 1, "1"), "request r: tables must be"),
    ],
)
def test_what_is_no_request_is_refused_by_name(request_: Any, message: str) -> None:
    error = refusal(Planner([Group("positional", 16)], 64), request_)
    assert error.kind == "bad_argument"
    assert message in str(error)


def test_what_is_no_planner_is_refused() -> None:
    group = Group("positional", 16)
    for make, kind in (
        (lambda: Group("linear", 16), "bad_argument"),  # type: ignore[arg-type]
        (lambda: Group("positional"), "bad_argument"),
        (lambda: Group("ring", 16), "bad_argument"),
        (lambda: Group("positional", 0), "zero_span"),
        (lambda: Group("state", -1), "bad_argument"),
        (lambda: Group("state", 2**32), "bad_argument"),
        (lambda: Planner([], 64), "no_groups"),
        (lambda: Planner([group], 0), "num_blocks"),
        (lambda: Planner([group], 2**28 + 1), "num_blocks"),
        (lambda: Planner([group], 10**30), "bad_argument"),
        (lambda: Planner([16], 64), "bad_argument"),  # type: ignore[list-item]
        (lambda: Planner([group], 64, null_block=2**31), "bad_argument"),
    ):
        with pytest.raises(PlanError) as caught:
            make()
        assert caught.value.kind == kind


def test_the_null_block_may_be_any_number_or_none() -> None:
    group = Group("positional", 16)
    requests = [("r", 0, 48, [[0, -1, 2]])]
    plan = Planner([group], 64, null_block=-1).plan_step(requests)
    assert plan.block_ids.tolist() == [0, 2]
    assert refusal(Planner([group], 64, null_block=None), *requests).kind == "block_outside_pool"


# --- the ledger


def test_the_ledger_bears_witness() -> None:
    planner = Planner([Group("positional", 16)], 64)
    ledger = Ledger(planner)
    ledger.admit("a", [[1, 2]], [0])
    planner.plan_step([("a", 0, 32, [[1, 2]])], ledger)
    assert refusal(planner, ("a", 0, 32, [[1, 2]]), ledger=ledger).kind == "already_filled"
    ledger.admit("b", [[1, 2, 3]], [2])
    error = refusal(planner, ("b", 0, 32, [[1, 2, 3]]), ledger=ledger)
    assert (error.kind, error.request) == ("not_owned", "b")
    planner.plan_step([("b", 32, 16, [[1, 2, 3]])], ledger)
    ledger.grow("a", 0, [4])
    ledger.release("a", 0, [1])
    ledger.finish("a")
    for call in (
        lambda: ledger.finish("a"),
        lambda: ledger.admit("b", [[1]], [0]),
        lambda: ledger.admit("c", [[1]], [2]),
        lambda: ledger.admit("c", [[1]], [-1]),
        lambda: ledger.admit("c", [[64]], [0]),
        lambda: ledger.grow("b", 1, [5]),
        lambda: ledger.grow("b", 0, [2**40]),
        lambda: ledger.release("b", 0, [60]),
    ):
        with pytest.raises(PlanError):
            call()


def test_a_block_that_left_the_table_is_no_longer_owned() -> None:
    planner = Planner([Group("positional", 16)] * 2, 64)
    ledger = Ledger(planner)
    ledger.admit("a", [[1, 2], [3, 4]], [0, 0])
    swapped = ("a", 0, 32, [[3, 4], [1, 2]])
    assert refusal(planner, swapped, ledger=ledger).kind == "not_owned"
    ledger.release("a", 0, [1])
    ledger.admit("b", [[1], [5]], [1, 0])
    error = refusal(planner, ("a", 0, 32, [[1, 2], [3, 4]]), ledger=ledger)
    assert error.kind == "not_owned"
    assert "block 1" in str(error)


def test_many_blocks_leave_at_once() -> None:
    planner = Planner([Group("positional", 16)], 200_000)
    ledger = Ledger(planner)
    table = list(range(1, 100_001))
    ledger.admit("a", [table], [0])
    with pytest.raises(PlanError) as caught:
        ledger.release("a", 0, [*table, 5])
    assert caught.value.kind == "not_held"
    ledger.release("a", 0, table[::-1])
    ledger.admit("b", [table], [0])
    planner.plan_step([("b", 0, 1_600_000, [table])], ledger)


def test_endless_iterators_end() -> None:
    planner = Planner([Group("positional", 16)], 64)
    assert refusal(planner, ("r", 0, 1, itertools.repeat([1]))).kind == "table_count"
    with pytest.raises(PlanError, match="groups"):
        Planner(itertools.repeat(Group("ring")), 64)
    with pytest.raises(PlanError):
        Ledger(planner).admit("r", [[1]], itertools.repeat(0))


def test_a_foreign_ledger_is_refused() -> None:
    group = Group("positional", 16)
    ledger = Ledger(Planner([group], 2))
    ledger.admit("a", [[1]], [0])
    error = refusal(Planner([group], 64), ("a", 0, 16, [[60]]), ledger=ledger)
    assert error.kind == "foreign_ledger"


# --- threads, pickling, errors, imports


def test_threads_plan_at_once() -> None:
    planner = Planner([Group("positional", 16)], 8192)
    threads, rounds = 8, 50
    together = threading.Barrier(threads)

    def work(number: int) -> None:
        ids = np.arange(1, 1001, dtype=np.int32) + number * 1000
        together.wait()
        for round_ in range(rounds):
            local = 16 * round_
            plan = planner.plan_step([(f"t{number}", local, 16_000 - local, [ids])])
            assert np.array_equal(plan.block_ids, ids[round_:])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, range(threads)))


def test_threads_share_a_ledger() -> None:
    planner = Planner([Group("positional", 16)], 8192)
    ledger = Ledger(planner)

    def work(number: int) -> None:
        for round_ in range(100):
            id_, table = f"t{number}-{round_}", [[number + 1]]
            ledger.admit(id_, table, [0])
            planner.plan_step([(id_, 0, 16, table)], ledger)
            ledger.finish(id_)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_a_plan_pickles_as_buffers() -> None:
    ids = np.random.default_rng(0).permutation(np.arange(1, 5001, dtype=np.int32))
    planner = Planner([Group("positional", 16), Group("ring")], 8192)
    plan = planner.plan_step([("a", 8, 80_000 - 8, [ids, []]), ("b", 0, 16, [[6000], [6001]])])
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(plan, protocol)
        again = pickle.loads(data)
        assert again == plan
        assert again.partials.tolist() == plan.partials.tolist()
        assert again.groups == plan.groups
    assert len(data) < 4.2 * len(plan.block_ids)
    assert plan != planner.plan_step([])
    assert plan != "plan"


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, 0),
        (0, 2),
        (1, 2),
        (2, (("positional", 0),)),
        (2, (("linear", 16),)),
        (2, (("excluded", 0),)),
        (2, ()),
        (3, ("a", "b")),
        (3, (1,)),
        (4, b"\0\0\0"),
        (4, np.array([1, 64], np.int32).tobytes()),
        (4, np.array([1, -1], np.int32).tobytes()),
        (4, np.array([1, 1], np.int32).tobytes()),
        (4, np.array([1, 0], np.int32).tobytes()),
        (5, np.array([0, 3], np.int32).tobytes()),
        (5, np.array([2, 0], np.int32).tobytes()),
        (5, b""),
        (6, np.array([0, 8], np.int32).tobytes()),
        (6, np.array([0, 8, 17], np.int32).tobytes()),
        (6, np.array([0, 8, 8], np.int32).tobytes()),
        (6, np.array([2, 8, 16], np.int32).tobytes()),
        (6, np.array([0, -1, 16], np.int32).tobytes()),
    ],
)
def test_a_damaged_pickle_is_refused(place: int, value: Any) -> None:
    plan = Planner([Group("positional", 16)], 64).plan_step([("a", 8, 24, [[1, 2]])])
    restore, arguments = plan.__reduce__()
    assert restore(*arguments) == plan
    with pytest.raises(PlanError) as caught:
        restore(*arguments[:place], value, *arguments[place + 1 :])
    assert caught.value.kind in {"corrupt", "num_blocks"}


def test_groups_and_errors_pickle() -> None:
    for group in (Group("positional", 16), Group("state", 7), Group("ring"), Group("excluded")):
        assert pickle.loads(pickle.dumps(group)) == group
        assert hash(pickle.loads(pickle.dumps(group))) == hash(group)
    error = refusal(Planner([Group("positional", 16)], 64), ("r", 0, 17, [[1]]))
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.kind, again.request) == (str(error), error.kind, error.request)
    for kind in (DecodeBenchError, LayoutError, PatternError, PlanError, TraceError):
        assert issubclass(kind, DecodeBenchError)
        assert issubclass(kind, ValueError)
        assert str(pickle.loads(pickle.dumps(kind("why")))) == "why"
        assert getattr(decodebench, kind.__name__) is kind


def test_importing_brings_no_framework() -> None:
    code = (
        "import sys, decodebench, decodebench.replay, decodebench.cli; "
        "print(*sorted({'cupy', 'torch', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
