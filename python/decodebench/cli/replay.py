"""``decodebench replay``: a request trace through a simulated engine."""

import argparse
import json
import sys
import time
from typing import Any

from decodebench.cli import model_options, traces
from decodebench.cli.files import shown
from decodebench.cli.report import print_report, progress_of
from decodebench.dtypes import ENCODINGS
from decodebench.errors import TraceError
from decodebench.pattern import Constant, Normal, Pattern
from decodebench.replay import Geometry, Memory, Replay, Trace, run

# A deliberately tight pool for the built-in workload, so that it evicts and preempts; room for a
# prompt of 128k tokens in two groups, and for others beside it, for a trace.
_BUILT_IN_BLOCKS, _TRACE_BLOCKS = 4096, 16384
_BUILT_IN_REQUESTS = 400
_GROUPS = "full,window:4096"
# Values as they occur in real caches; the same as those of vLLM's connector, whose deviation is 0.
_MEAN, _STD = 0.015, 0.01
# Refused rather than left to the machine's out-of-memory killer.
_MAX_CACHE_BYTES = 1 << 36


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser of ``decodebench``."""
    parser = commands.add_parser(
        "replay",
        help="run a request trace through a simulated engine and prove its fills in memory",
        description="Run a request trace through a simulated decode engine: block pool, prefix "
        "cache, continuous batching, preemption. Every prompt but its last token counts as "
        "externally computed; its blocks are planned, filled in a real buffer, and checked there.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "traces",
        nargs="*",
        metavar="TRACE",
        default=argparse.SUPPRESS,
        help="a file of any known format, plain or gzip, a folder of files, - for standard input; "
        "without it, a built-in seeded multi-turn workload",
    )
    traces.add_options(parser)
    engine = parser.add_argument_group("engine")
    engine.add_argument("--block-size", type=int, default=16, metavar="TOKENS", help="per block")
    engine.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="size of the block pool, the null block counted "
        f"(default: {_TRACE_BLOCKS} for a trace, {_BUILT_IN_BLOCKS} for the built-in workload)",
    )
    engine.add_argument(
        "--groups",
        metavar="LIST",
        help="KV-cache groups that share the pool: full, window:TOKENS "
        f"(default: those of --model, else {_GROUPS})",
    )
    model_options.add_options(parser)
    engine.add_argument(
        "--max-num-seqs", type=int, default=256, metavar="N", help="requests that run at once"
    )
    engine.add_argument(
        "--step-ms",
        type=float,
        default=20.0,
        metavar="MS",
        help="virtual time of an engine step; an assumption, not a prediction",
    )
    engine.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help="a closed loop of N clients in place of the trace's arrivals: each sends the next "
        "request when its last one has finished",
    )
    engine.add_argument(
        "--speed",
        type=float,
        default=1.0,
        metavar="X",
        help="requests arrive X times as fast as the trace says",
    )
    cache = parser.add_argument_group("simulated KV cache")
    cache.add_argument("--layers", type=int, default=2, metavar="N", help="per group")
    cache.add_argument("--kv-heads", type=int, default=2, metavar="N", help="key-value heads")
    cache.add_argument("--head-dim", type=int, default=16, metavar="N", help="elements per head")
    cache.add_argument(
        "--dtype", choices=sorted(ENCODINGS), default="bfloat16", help="element type"
    )
    fill = parser.add_argument_group("fill")
    fill.add_argument(
        "--fill",
        choices=["none", "constant", "normal"],
        default="constant",
        help="what to write; none only plans, and checks no memory",
    )
    fill.add_argument(
        "--selection",
        choices=["interval", "leading"],
        default="interval",
        help="interval: the blocks that cover the external tokens; leading: the first n blocks, "
        "whatever the prefix hit, to see what that rule destroys",
    )
    fill.add_argument(
        "--seed", type=int, default=0, help="of the built-in workload and of the normal fill"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    """Replay as the arguments say; 1 if the memory shows a violation."""
    if not 0 <= args.seed < 2**64:
        raise TraceError(f"--seed {args.seed} is not in [0, 2^64)")
    if args.limit is not None and args.limit < 1:
        raise TraceError(f"--limit {args.limit} is not at least 1")
    if args.concurrency is not None and args.speed != 1:
        raise TraceError("--concurrency does not look at arrivals, which --speed moves")
    args.traces = getattr(args, "traces", [])
    built_in = not args.traces
    model = model_options.read(args)
    if args.groups is None:
        args.groups = ",".join(model["groups"]) if model else _GROUPS
    if model:
        args.num_blocks = model["num_blocks"]
    args.num_blocks = getattr(args, "num_blocks", _BUILT_IN_BLOCKS if built_in else _TRACE_BLOCKS)
    geometry = _geometry(args)
    start = time.perf_counter()
    if built_in:
        trace = Trace.conversation(args.seed, args.limit or _BUILT_IN_REQUESTS)
    else:
        trace = traces.read(args, args.traces)
    trace = trace.at_speed(args.speed)
    groups = [group.strip() for group in args.groups.split(",")]
    replay = Replay(
        trace,
        block_size=args.block_size,
        num_blocks=args.num_blocks,
        groups=groups,
        max_num_seqs=args.max_num_seqs,
        step_ms=args.step_ms,
        selection=args.selection,
        record_memory=geometry is not None,
        concurrency=args.concurrency,
    )
    memory = None
    if geometry is not None:
        memory = Memory(
            geometry, args.num_blocks, args.block_size, len(groups), _pattern(args), len(trace)
        )
    with progress_of(len(trace), quiet=not sys.stderr.isatty()) as progress:
        stats = run(replay, memory, progress)
    result = _result(args, trace, groups, stats, memory)
    if model:
        result["model"] = model
    result["total_seconds"] = time.perf_counter() - start
    if args.json:
        print(json.dumps(result))
    else:
        print_report(result)
    return int(result["violations"] > 0)


def _geometry(args: argparse.Namespace) -> Geometry | None:
    if args.fill == "none":
        return None
    for option in ("layers", "kv_heads", "head_dim"):
        if getattr(args, option) < 1:
            name = option.replace("_", "-")
            raise TraceError(f"--{name} {getattr(args, option)} is not at least 1")
    dtype = ENCODINGS[args.dtype]
    slots = args.num_blocks * args.block_size
    # Keys and values, and beside them two tags per slot and a key per block.
    cache = 2 * slots * args.layers * args.kv_heads * args.head_dim * dtype.itemsize
    needed = cache + 8 * slots + 8 * args.num_blocks
    if needed > _MAX_CACHE_BYTES:
        raise TraceError(
            f"the simulated KV cache takes more than {_MAX_CACHE_BYTES >> 30} GiB: fewer "
            "--num-blocks, a smaller --block-size, --layers, --kv-heads or --head-dim will do"
        )
    return Geometry(args.layers, args.kv_heads, args.head_dim, dtype)


def _pattern(args: argparse.Namespace) -> Pattern:
    return Normal(_MEAN, _STD, args.seed) if args.fill == "normal" else Constant(_MEAN)


def _result(
    args: argparse.Namespace,
    trace: Trace,
    groups: list[str],
    stats: dict[str, Any],
    memory: Memory | None,
) -> dict[str, Any]:
    """Everything there is to say, in the order of the table."""
    report = memory.report if memory is not None else None
    return {
        "trace": ", ".join(map(shown, args.traces)) or "built-in",
        **traces.said(trace),
        "input_tokens": trace.input_tokens,
        "output_tokens": trace.output_tokens,
        "trace_notes": trace.notes,
        "block_size": args.block_size,
        "num_blocks": args.num_blocks,
        "groups": groups,
        "max_num_seqs": args.max_num_seqs,
        "step_ms": args.step_ms,
        "step_ms_is": "an assumption",
        "speed": args.speed,
        "concurrency": args.concurrency,
        "fill": args.fill,
        "selection": args.selection,
        "seed": args.seed,
        **stats,
        "memory_checked": report is not None,
        "fill_bytes": report.fill_bytes if report else 0,
        "fill_seconds": report.fill_seconds if report else 0.0,
        "blocks_verified": report.blocks_verified if report else 0,
        "shared_blocks_overwritten": report.shared_blocks_overwritten if report else 0,
        "fresh_blocks_unfilled": report.fresh_blocks_unfilled if report else 0,
        "other_blocks_damaged": report.other_blocks_damaged if report else 0,
        "violations": report.violations if report else 0,
    }
