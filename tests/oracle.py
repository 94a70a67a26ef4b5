"""What a plan must be, token by token: the slow second opinion that the core is compared with.

It knows nothing of ranges or ceilings. It walks every external token, asks which block holds it,
and collects the answers. ``python tests/oracle.py`` prints the golden file.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any

U64 = 2**64


def blocks_of(group: dict[str, Any], tokens: range) -> list[int]:
    """Table indices of the blocks that hold ``tokens``, each once, in order."""
    return sorted({token // group["span"] for token in tokens})


def selection(request: dict[str, Any]) -> list[list[int]]:
    """Per group, the table indices that a fill writes, null blocks included."""
    external = range(request["local"], request["local"] + request["external"])
    selected = []
    for group, table in zip(request["groups"], request["tables"], strict=True):
        match group["indexing"]:
            case "positional" | "state":
                selected.append(blocks_of(group, external))
            case "ring":
                selected.append(list(range(len(table))) if external else [])
            case "excluded":
                selected.append([])
    return selected


def prefix(request: dict[str, Any]) -> list[list[int]]:
    """Per group, the table indices of the blocks that hold nothing but local tokens."""
    local, first = range(request["local"]), range(request["local"], request["local"] + 1)
    return [
        [index for index in blocks_of(group, local) if index not in blocks_of(group, first)]
        if "span" in group
        else []
        for group in request["groups"]
    ]


def broken_rules(request: dict[str, Any]) -> set[str]:
    """Kinds of all the rules that the request breaks on its own."""
    if len(request["groups"]) != len(request["tables"]):
        return {"table_count"}
    if request["local"] + request["external"] >= U64:
        return {"interval_overflow"}
    null, num_blocks = request["null_block"], request["num_blocks"]
    selected, kept = selection(request), prefix(request)
    broken = set()
    if any(
        index >= len(table)
        for table, indices in zip(request["tables"], selected, strict=True)
        for index in indices
    ):
        broken.add("range_outside_table")

    def entries(chosen: list[list[int]]) -> list[list[int]]:
        return [
            [table[index] for index in indices if index < len(table) and table[index] != null]
            for table, indices in zip(request["tables"], chosen, strict=True)
        ]

    written, local = entries(selected), entries(kept)
    read = written + (local if any(written) else [])
    if any(not 0 <= block < num_blocks for block in itertools.chain(*read)):
        broken.add("block_outside_pool")
    if set(itertools.chain(*written)) & set(itertools.chain(*local)):
        broken.add("prefix_block_selected")
    if any(len(set(blocks)) < len(blocks) for blocks in written):
        broken.add("block_repeated")
    for one, other in itertools.combinations(written, 2):
        if set(one) & set(other):
            broken.add("block_in_two_groups")
    return broken


def plan(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of the answer to a request that breaks no rule."""
    groups = []
    for group, table, indices in zip(
        request["groups"], request["tables"], selection(request), strict=True
    ):
        start = end = request["local"] // group["span"] if "span" in group else 0
        head = tail = 0
        if indices:
            start, end = indices[0], indices[-1] + 1
        if indices and group["indexing"] == "positional":
            span = group["span"]
            inside = [
                token
                for token in range(start * span, end * span)
                if request["local"] <= token < request["local"] + request["external"]
            ]
            head = inside[0] - start * span
            tail = (inside[-1] + 1 - (end - 1) * span) % span
        block_ids = [table[index] for index in indices if table[index] != request["null_block"]]
        groups.append(
            {
                "start": start,
                "end": end,
                "block_ids": block_ids,
                "head_slot": head,
                "tail_slot": tail,
            }
        )
    return groups


def writes(
    request: dict[str, Any], *, exact_tail: bool = False
) -> dict[tuple[int, int], set[int] | None]:
    """Slots written in each (group, block) of a request without nulls: ``None`` for all of them."""
    written: dict[tuple[int, int], set[int] | None] = {}
    end = request["local"] + request["external"]
    for number, (group, table, indices) in enumerate(
        zip(request["groups"], request["tables"], selection(request), strict=True)
    ):
        for index in indices:
            block = table[index]
            if block == request["null_block"]:
                continue
            if group["indexing"] != "positional":
                written[number, block] = None
                continue
            span = group["span"]
            slots = {
                token % span
                for token in range(index * span, (index + 1) * span)
                if request["local"] <= token and (token < end or not exact_tail)
            }
            before = written.get((number, block), set())
            written[number, block] = before if before is None else before | slots
    return written


def golden_requests() -> Iterator[dict[str, Any]]:
    """Requests at the edges: 0, 1, span - 1, span, span + 1, the largest."""
    common: dict[str, Any] = {"num_blocks": 64, "null_block": 0}
    positional = {"indexing": "positional", "span": 16}
    state = {"indexing": "state", "span": 16}
    table = list(range(1, 9))
    edges = (0, 1, 15, 16, 17, 31, 32, 33, 48)
    for local, external in itertools.product(edges, edges):
        yield common | {
            "local": local,
            "external": external,
            "groups": [positional, state, {"indexing": "ring"}, {"indexing": "excluded"}],
            "tables": [table, [block + 10 for block in table], [30, 31], [1, 2]],
        }
    for span in (1, 2, 7, 48):
        group = {"indexing": "positional", "span": span}
        for local, external in ((0, 1), (span - 1, 1), (span, span), (span + 1, 2 * span)):
            yield common | {
                "local": local,
                "external": external,
                "groups": [group],
                "tables": [list(range(10, 20))],
            }
    window = [0, 0, 0, 4, 5, 6]
    for local, external in ((0, 96), (16, 80), (40, 56), (64, 32), (70, 10), (95, 1)):
        yield common | {
            "local": local,
            "external": external,
            "groups": [positional],
            "tables": [window],
        }
    hostile: list[dict[str, Any]] = [
        {"local": 0, "external": 17, "groups": [positional], "tables": [[1]]},
        {"local": 0, "external": 1, "groups": [positional], "tables": [[]]},
        {"local": U64 - 1, "external": 1, "groups": [positional], "tables": [[1]]},
        {"local": 0, "external": 16, "groups": [positional], "tables": [[64]]},
        {"local": 0, "external": 16, "groups": [positional], "tables": [[-1]]},
        {"local": 16, "external": 16, "groups": [positional], "tables": [[99, 1]]},
        {"local": 16, "external": 16, "groups": [positional], "tables": [[5, 5]]},
        {
            "local": 32,
            "external": 16,
            "groups": [positional, state],
            "tables": [[1, 2, 3], [4, 3, 5]],
        },
        {
            "local": 0,
            "external": 16,
            "groups": [positional, {"indexing": "ring"}],
            "tables": [[7], [7]],
        },
        {"local": 0, "external": 16, "groups": [positional], "tables": [[1], [2]]},
    ]
    for request in hostile:
        yield common | request


def golden_lines() -> Iterator[str]:
    """The golden file, a line per request."""
    for number, case in enumerate(golden_requests()):
        request = {"id": f"g{number}"} | case
        broken = sorted(broken_rules(request))
        answer = {"kinds": broken} if broken else {"groups": plan(request)}
        yield json.dumps({"request": request, "answer": answer}, separators=(",", ":"))


if __name__ == "__main__":
    print(*golden_lines(), sep="\n")
