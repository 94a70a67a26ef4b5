"""The arguments of ``decodebench``, and what becomes of errors."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from decodebench import DecodeBenchError, PlanError, __version__
from decodebench.cli import env, plan, replay, trace
from decodebench.cli.files import shown

_FAILED_CHECK = 1
_BAD_INPUT = 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {shown(message)}\n")


def run(argv: Sequence[str]) -> int:
    """Run the command and return its exit code; Ctrl-C is the caller's."""
    # A stream that was closed is None, and print then writes to whatever is open.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    parser: argparse.ArgumentParser = _Parser(
        prog="decodebench",
        description="Fill exactly the KV-cache blocks that a decode benchmark pretends to have "
        "received, and prove it.",
    )
    parser.add_argument("--version", action="version", version=f"decodebench {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    replay.add_parser(commands)
    trace.add_parser(commands)
    plan.add_parser(commands)
    env.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except PlanError as error:
        print(f"decodebench: {shown(str(error))}", file=sys.stderr)
        return _FAILED_CHECK
    except DecodeBenchError as error:
        return _refuse(str(error))
    except MemoryError:
        return _refuse("out of memory: a smaller --num-blocks or cache may do")
    except UnicodeError as error:
        return _refuse(f"not valid Unicode: {error}")
    except BrokenPipeError:
        _forget_output()
        return 0
    except OSError as error:
        _forget_output()
        return _refuse(f"{error.filename or 'input or output'}: {error.strerror or error}")
    return code


def _refuse(message: str) -> int:
    print(f"decodebench: {shown(message)}", file=sys.stderr)
    return _BAD_INPUT


def _forget_output() -> None:
    """Keep the interpreter from failing once more, at exit, on output that nobody takes."""
    with contextlib.suppress(OSError):  # not every stream has a descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
