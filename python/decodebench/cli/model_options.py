"""The pool and the groups of a replay, from a model's config."""

import argparse
import dataclasses
import math
from typing import Any

from decodebench.errors import DecodeBenchError
from decodebench.model import CACHE_DTYPES, read_model


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe a model."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        metavar="CONFIG",
        help="Hugging Face config.json, which gives --groups and, with --gpu-memory, --num-blocks "
        "by the rules of vLLM 0.32; the memory check keeps its own --layers and heads",
    )
    group.add_argument("--gpu-memory", type=float, metavar="GIB", help="KV-cache memory of a rank")
    group.add_argument("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks")
    group.add_argument("--kv-cache-dtype", choices=["auto", *CACHE_DTYPES], default="auto")


def read(args: argparse.Namespace) -> dict[str, Any] | None:
    """Return what was derived, ``num_blocks`` among it; ``None`` without a model.

    Raises:
        DecodeBenchError: The config is refused, or options do not fit together.
    """
    if args.model is None:
        if args.gpu_memory is not None or args.tp != 1 or args.kv_cache_dtype != "auto":
            raise DecodeBenchError("--gpu-memory, --tp and --kv-cache-dtype need --model")
        return None
    if args.tp < 1:
        raise DecodeBenchError(f"--tp {args.tp} is not at least 1")
    if args.groups is not None:
        raise DecodeBenchError("--groups are those of --model")
    if args.block_size < 1:
        raise DecodeBenchError(f"--block-size {args.block_size} is not at least 1")
    if hasattr(args, "num_blocks") == (args.gpu_memory is not None):
        raise DecodeBenchError("--model needs one of --gpu-memory and --num-blocks")
    model = read_model(args.model, tp=args.tp, cache_dtype=args.kv_cache_dtype)
    if args.gpu_memory is None:
        num_blocks = args.num_blocks
    else:
        if not (math.isfinite(args.gpu_memory) and args.gpu_memory > 0):
            raise DecodeBenchError(f"--gpu-memory {args.gpu_memory} is not above 0")
        num_blocks = model.num_blocks(int(args.gpu_memory * 2**30), args.block_size)
    return {
        **dataclasses.asdict(model),
        "bytes_per_token": model.bytes_per_token,
        "tp": args.tp,
        "gpu_memory_gib": args.gpu_memory,
        "num_blocks": num_blocks,
    }
