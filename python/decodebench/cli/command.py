"""The arguments of ``decodebench``, and what becomes of errors."""

import argparse
import os
import sys
from collections.abc import Sequence

from decodebench import DecodeBenchError, __version__
from decodebench.cli import plan, replay

_BAD_INPUT = 2


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; Ctrl-C is the caller's."""
    parser = argparse.ArgumentParser(
        prog="decodebench",
        description="Fill exactly the KV-cache blocks that a decode benchmark pretends to have "
        "received, and prove it.",
    )
    parser.add_argument("--version", action="version", version=f"decodebench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay.add_parser(commands)
    plan.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except DecodeBenchError as error:
        print(f"decodebench: {error}", file=sys.stderr)
        return _BAD_INPUT
    except BrokenPipeError:
        # Whoever read the output has left; keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code
