"""Trace files on the command line."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from decodebench._core import Trace
from decodebench.cli.files import opened, shown
from decodebench.errors import TraceError

_FORMATS = ["mooncake", "bailian", "azure", "burstgpt", "weka", "token-ids"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how traces are read."""
    group = parser.add_argument_group("reading traces")
    group.add_argument(
        "--format", choices=_FORMATS, help="of all files (default: recognised from the first line)"
    )
    group.add_argument(
        "--trace-block-size",
        type=int,
        metavar="TOKENS",
        help="prompt tokens that a hash id covers (default: what the format or the file says)",
    )
    group.add_argument(
        "--time-unit", choices=["ms", "s"], help="of timestamps (default: that of the format)"
    )
    group.add_argument(
        "--limit", type=int, metavar="N", help="only the first N requests, in file order"
    )


def read(args: argparse.Namespace, names: list[str]) -> Trace:
    """Read files, and the files of folders, as the options say.

    Raises:
        DecodeBenchError: A file cannot be opened or read, or a row is refused.
    """
    if args.limit is not None and args.limit < 1:
        raise TraceError(f"--limit {args.limit} is not at least 1")
    if args.trace_block_size is not None and args.trace_block_size < 1:
        raise TraceError(f"--trace-block-size {args.trace_block_size} is not at least 1")
    return Trace.read(
        _files(names),
        format=args.format,
        hash_block_size=args.trace_block_size,
        time_unit=args.time_unit,
        limit=args.limit,
    )


def said(trace: Trace) -> dict[str, object]:
    """What a trace was read as, to be said in every output."""
    return {
        "format": trace.format or "built-in",
        "time_unit": trace.time_unit or "ms",
        "hash_block_size": trace.hash_block_size if trace.has_hashes else None,
    }


def _files(names: list[str]) -> Iterator[tuple[BinaryIO, str]]:
    for name in names:
        for path in _expanded(name):
            with opened(path) as file:
                yield file, "<stdin>" if path == "-" else shown(path)


def _expanded(name: str) -> list[str]:
    """Return the file, or the files of a folder in order of their names, hidden ones left out."""
    if not name or "\0" in name or not (folder := Path(name)).is_dir():
        return [name]
    files = sorted(str(f) for f in folder.iterdir() if f.is_file() and f.name[0] != ".")
    if not files:
        raise TraceError(f"{name}: no files in this folder")
    return files
