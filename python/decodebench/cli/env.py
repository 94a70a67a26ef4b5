"""``decodebench env``: what is here, and which backend that makes."""

import argparse
import json
import platform
from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from decodebench import __version__
from decodebench.cli.report import print_table
from decodebench.fill.environment import Environment, look


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command to the parser of ``decodebench``."""
    parser = commands.add_parser(
        "env",
        help="say what is installed here, and which backend fills",
        description="Say what was found of CuPy, a driver, devices and NVRTC, which backend auto "
        "takes, and why not the other.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    found = look()
    if args.json:
        print(json.dumps(_result(found)))
    else:
        print_table("environment", [_versions(), _gpu(found), _backend(found)])
    return 0


def _result(found: Environment) -> dict[str, Any]:
    return {
        "decodebench": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cupy": found.cupy,
        "driver": found.driver,
        "nvrtc": found.nvrtc,
        "devices": [
            {
                "name": device.name,
                "compute_capability": device.compute_capability,
                "memory_bytes": device.memory_bytes,
            }
            for device in found.devices
        ],
        "problems": dict(found.problems),
        "auto": found.auto,
        "not_cuda": found.not_cuda,
    }


def _versions() -> Iterator[tuple[str, str]]:
    yield "decodebench", __version__
    yield "Python", platform.python_version()
    yield "platform", platform.platform()


def _gpu(found: Environment) -> Iterator[tuple[str, str]]:
    for what, name, version in (
        ("CuPy", "cupy", found.cupy),
        ("driver, for CUDA up to", "driver", found.driver),
        ("NVRTC", "nvrtc", found.nvrtc),
    ):
        yield what, version or escape(f"no: {found.problems[name]}")
    for number, device in enumerate(found.devices):
        memory = f"{device.memory_bytes / 2**30:,.1f} GiB"
        yield f"device {number}", escape(f"{device.name}, sm_{device.compute_capability}, {memory}")
    if not found.devices:
        yield "devices", escape(f"no: {found.problems['devices']}")


def _backend(found: Environment) -> Iterator[tuple[str, str]]:
    yield "backend that auto takes", found.auto
    if found.not_cuda is None:
        yield "numpy", "for caches in host memory"
    else:
        yield "not cuda", escape(found.not_cuda)
