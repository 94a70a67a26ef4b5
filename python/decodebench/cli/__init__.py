"""The ``decodebench`` command."""

import argparse
import os
import sys
from collections.abc import Sequence

from decodebench import DecodeBenchError, __version__
from decodebench.cli import plan, replay

__all__ = ["main"]

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: done, but a check failed or a request was refused. 2: bad usage or bad input, said
    in one line on standard error. 130: interrupted.
    """
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
        return EXIT_BAD_INPUT
    except BrokenPipeError:
        # Whoever read the output has left; keep the interpreter from saying so at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return code
