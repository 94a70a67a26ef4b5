"""The ``decodebench`` command."""

import sys
from collections.abc import Sequence

__all__ = ["main"]

_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0: done. 1: done, but a check failed or a request was refused. 2: bad usage or bad input, said
    in one line on standard error. 130: interrupted.
    """
    try:
        # Most of a short run is spent in this import, and Ctrl-C may well come meanwhile.
        from decodebench.cli.command import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED
