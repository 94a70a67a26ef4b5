"""``decodebench trace``: what a request trace holds."""

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from decodebench._core import Trace
from decodebench.cli import traces
from decodebench.cli.files import shown
from decodebench.cli.report import NOTES, print_table
from decodebench.errors import DecodeBenchError

_PERCENTILES = (0, 50, 90, 99, 100)
_BLOCK_SIZES = (16, 512)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser of ``decodebench``."""
    parser = commands.add_parser(
        "trace",
        help="say what a request trace holds, or convert it",
        description="Read a request trace of any known format and say what it holds: lengths, "
        "arrivals, and the prefix hits that an infinite cache would have.",
    )
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="a file, plain or gzip, a folder of files, or - for standard input",
    )
    traces.add_options(parser)
    parser.add_argument("--convert", metavar="OUT", help="write the trace as Mooncake JSONL")
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    trace = traces.read(args, args.traces)
    result = described(trace, [shown(name) for name in args.traces])
    if args.convert is not None:
        text = trace.to_mooncake()
        try:
            with open(args.convert, "w", encoding="ascii") as file:
                file.write(text)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DecodeBenchError(f"{args.convert}: cannot write: {reason}") from None
        result["converted"] = shown(args.convert)
    if args.json:
        print(json.dumps(result))
    else:
        print_table(f"trace {', '.join(result['traces'])}", [_rows(result)])
    return 0


def described(trace: Trace, names: list[str]) -> dict[str, Any]:
    """Return everything there is to say about a trace."""
    arrivals, inputs, outputs = np.array(trace.requests(), np.float64).T
    duration = float(arrivals[-1]) / 1000
    hits = {str(size): trace.ideal_hit_tokens(size) for size in _BLOCK_SIZES}
    return {
        "traces": names,
        **traces.said(trace),
        "requests": len(trace),
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "input_length": _percentiles(inputs),
        "output_length": _percentiles(outputs),
        "duration_seconds": duration,
        "arrivals_per_second": (len(trace) - 1) / duration if duration else None,
        "ideal_hit_tokens": hits,
        "ideal_hit_rate": {size: hit / trace.input_tokens for size, hit in hits.items()},
        "trace_notes": trace.notes,
    }


def _percentiles(lengths: "np.ndarray[Any, np.dtype[np.float64]]") -> dict[str, float]:
    """Lengths that occur: the smallest that at least so many percent do not exceed."""
    values = np.percentile(lengths, _PERCENTILES, method="inverted_cdf")
    found = {f"p{p}": int(v) for p, v in zip(_PERCENTILES, values, strict=True)}
    return {**found, "mean": float(lengths.mean())}


def _rows(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "format", result["format"]
    yield "time unit", result["time_unit"]
    block = result["hash_block_size"]
    yield "tokens per hash id", f"{block:,}" if block else "no hash ids"
    yield "requests", f"{result['requests']:,}"
    for what in ("input", "output"):
        yield f"{what} tokens", f"{result[f'{what}_tokens']:,}"
        for name, value in result[f"{what}_length"].items():
            yield f"{what} length, {name}", f"{value:,.1f}" if name == "mean" else f"{value:,}"
    yield "from first to last arrival", f"{result['duration_seconds']:,.1f} s"
    if (rate := result["arrivals_per_second"]) is not None:
        yield "arrivals", f"{rate:,.3f} / s"
    for size, tokens in result["ideal_hit_tokens"].items():
        share = result["ideal_hit_rate"][size]
        yield f"ideal prefix hits, blocks of {size}", f"{tokens:,} ({share:.1%})"
    for what, count in result["trace_notes"].items():
        if count:
            yield f"note: {NOTES[what]}", f"{count:,}"
    if "converted" in result:
        yield "written as Mooncake JSONL", result["converted"]
        if block not in (None, 512):
            yield "read it with", f"--trace-block-size {block}"
