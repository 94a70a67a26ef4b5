"""Replaying a whole trace with the fill off: requests per second, loading included."""

import argparse
import resource
import statistics
import time
from pathlib import Path

from decodebench.replay import Replay, Trace, run


def replay(trace: str | None, groups: list[str], num_blocks: int) -> tuple[float, int, int]:
    """Seconds, requests and violations-free admissions of one replay."""
    start = time.perf_counter()
    if trace is None:
        loaded = Trace.conversation(0, 400)
    else:
        with open(trace, "rb") as file:
            loaded = Trace.read_mooncake(file, trace)
    replay = Replay(
        loaded,
        block_size=16,
        num_blocks=num_blocks,
        groups=groups,
        max_num_seqs=256,
        step_ms=20.0,
        selection="interval",
        record_memory=False,
    )
    stats = run(replay, None)
    seconds = time.perf_counter() - start
    assert stats["finished"] + stats["rejected"] == len(loaded)
    assert stats["selections_refused"] == 0
    return seconds, len(loaded), stats["admissions"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fast", action="store_true", help="the built-in workload, once")
    parser.add_argument("trace", nargs="?", help="Mooncake JSONL (default: the built-in workload)")
    args = parser.parse_args()
    if args.trace and not Path(args.trace).exists():
        parser.error(f"{args.trace} does not exist")
    rounds = 1 if args.fast else 7
    num_blocks = 16384 if args.trace else 4096
    for groups in (["full"], ["full", "window:4096"]):
        runs = [replay(args.trace, groups, num_blocks) for _ in range(rounds)]
        seconds, (_, requests, admissions) = statistics.median(r[0] for r in runs), runs[0]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(
            f"{','.join(groups):<18} {requests:,} requests, {admissions:,} admissions: "
            f"{seconds:.3f} s, {requests / seconds:,.0f} requests/s, peak memory {peak:.0f} MB"
        )


if __name__ == "__main__":
    main()
