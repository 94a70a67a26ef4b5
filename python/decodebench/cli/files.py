"""Opening what the command line names."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from decodebench.errors import DecodeBenchError


@contextmanager
def opened(path: str) -> Iterator[BinaryIO]:
    """Open a file for reading bytes; ``-`` is standard input.

    Raises:
        DecodeBenchError: It cannot be opened.
    """
    if path == "-":
        if sys.stdin is None:
            raise DecodeBenchError("-: standard input is closed")
        yield sys.stdin.buffer
        return
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DecodeBenchError(f"{path}: cannot open: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise DecodeBenchError(f"{path}: cannot open: {error}") from None
    with file:
        yield file


def shown(path: str) -> str:
    """Return the name as text that any terminal can print on one line."""
    return "".join(char if char.isprintable() else "\ufffd" for char in path)
