"""``decodebench plan``: JSON lines in, JSON lines out."""

import argparse
import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from decodebench import DecodeBenchError, Group, PlanError, Planner
from decodebench.cli.files import opened

# Refused rather than read into memory to its end, which there may not be.
_MAX_LINE = 1 << 26
_REQUIRED = {"id", "num_blocks", "local", "external", "groups", "tables"}
_OPTIONAL = {"null_block", "exact_tail"}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser of ``decodebench``."""
    parser = commands.add_parser(
        "plan",
        help="which blocks requests fill, from JSON lines",
        description="Read one request per line and write one answer per line, in the same order. "
        "A refused request is answered with its error; the exit code is then 1.",
    )
    parser.add_argument("file", nargs="?", default="-", help="JSON lines; - for standard input")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer every line of ``args.file``; 1 if a request was refused."""
    refused = False
    with opened(args.file) as file:
        for number, line in enumerate(_lines(file), start=1):
            if len(line) > _MAX_LINE:
                raise DecodeBenchError(
                    f"{args.file}:{number}: the line is longer than {_MAX_LINE} bytes"
                )
            if not line.strip():
                continue
            answer = _answer(_request(line, f"{args.file}:{number}"))
            refused = refused or "error" in answer
            # A scheduler at the other end of a pipe waits for this line.
            print(json.dumps(answer), flush=True)
    return int(refused)


def _lines(file: BinaryIO) -> Iterator[bytes]:
    while line := file.readline(_MAX_LINE + 1):
        yield line


def _request(line: bytes, where: str) -> dict[str, Any]:
    """The request of a line: an object with a string id. Anything less cannot be answered."""
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else error
        raise DecodeBenchError(f"{where}: not JSON: {reason}") from None
    if not isinstance(request, dict) or not isinstance(request.get("id"), str):
        raise DecodeBenchError(f'{where}: not an object with a string "id"')
    if not request["id"].isprintable():
        raise DecodeBenchError(f'{where}: the "id" holds unprintable characters')
    return request


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"id": request["id"]}
    try:
        planner = _planner_of(request)
        arguments = (request["id"], request["local"], request["external"], request["tables"])
        fills = planner.plan(arguments)
    except PlanError as error:
        return answer | {"error": {"kind": error.kind, "message": str(error)}}
    if planner.exact_tail:
        answer["exact_tail"] = True
    answer["groups"] = [
        {
            "start": fill.start,
            "end": fill.end,
            "block_ids": fill.block_ids.tolist(),
            "head_slot": fill.head_slot,
            "tail_slot": fill.tail_slot,
        }
        for fill in fills
    ]
    return answer


def _planner_of(request: Mapping[str, Any]) -> Planner:
    missing = sorted(_REQUIRED - request.keys())
    unknown = sorted(request.keys() - _REQUIRED - _OPTIONAL)
    if missing or unknown:
        what = f"no {missing[0]!r}" if missing else f"unknown key {unknown[0]!r}"
        raise _malformed(request, what)
    exact_tail = request.get("exact_tail", False)
    if not isinstance(exact_tail, bool):
        raise _malformed(request, "exact_tail must be true or false")
    if not isinstance(request["groups"], list):
        raise _malformed(request, "groups must be a list")
    groups = []
    for index, group in enumerate(request["groups"]):
        indexing = group.get("indexing") if isinstance(group, dict) else None
        if not isinstance(indexing, str) or group.keys() - {"indexing", "span"}:
            raise _malformed(
                request, f'group {index} must be {{"indexing": ..., "span": ...}} or without span'
            )
        with _naming(request, f"group {index}: "):
            groups.append(Group(indexing, group.get("span")))  # type: ignore[arg-type]
    num_blocks, null_block = request["num_blocks"], request.get("null_block", 0)
    if type(num_blocks) is not int:
        raise _malformed(request, "num_blocks must be an integer")
    if null_block is not None and type(null_block) is not int:
        raise _malformed(request, "null_block must be an integer or null")
    with _naming(request):
        return _planner(tuple(groups), num_blocks, null_block, exact_tail)


# Few: a planner keeps working memory of a few bytes per block of its pool.
@functools.lru_cache(maxsize=4)
def _planner(
    groups: tuple[Group, ...], num_blocks: int, null_block: int | None, exact_tail: bool
) -> Planner:
    return Planner(groups, num_blocks, null_block=null_block, exact_tail=exact_tail)


@contextmanager
def _naming(request: Mapping[str, Any], where: str = "") -> Iterator[None]:
    """Put the request's id before a refusal that does not know it."""
    try:
        yield
    except PlanError as error:
        message = f"request {request['id']}: {where}{error}"
        raise PlanError(message, error.kind, request["id"]) from None
    except UnicodeEncodeError:
        raise _malformed(request, f"{where}not valid Unicode") from None


def _malformed(request: Mapping[str, Any], what: str) -> PlanError:
    return PlanError(f"request {request['id']}: {what}", "bad_argument", request["id"])
