"""The ``decodebench`` command."""

import os
import signal
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
        with _quick_exit():
            from decodebench.cli.command import run

        return run(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        return _INTERRUPTED


class _quick_exit:  # noqa: N801
    """End the process at once on Ctrl-C.

    Half of a short run is spent importing, and extension modules that are interrupted there report
    a broken installation instead.
    """

    def __enter__(self) -> None:
        self._ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._ours:
            signal.signal(signal.SIGINT, lambda *_: os._exit(_INTERRUPTED))

    def __exit__(self, *_: object) -> None:
        if self._ours:
            signal.signal(signal.SIGINT, signal.default_int_handler)
