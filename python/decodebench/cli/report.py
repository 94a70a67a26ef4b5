"""What a replay shows on a terminal."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table


@contextmanager
def progress_of(total: int, *, quiet: bool) -> Iterator[Callable[[int], None] | None]:
    """A progress bar over requests, on standard error; nothing if ``quiet``."""
    if quiet:
        yield None
        return
    columns = (TextColumn("replaying"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=total)
        yield lambda done: progress.update(task, completed=done)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to the command, which knows its exit code."""
        raise


def print_table(title: str, sections: Iterable[Iterable[tuple[str, str]]]) -> None:
    """Print rows of what and how much, section by section, on standard output."""
    table = Table(title=escape(title))
    table.add_column("what")
    table.add_column("how much", justify="right")
    for section in sections:
        for what, how_much in section:
            table.add_row(what, how_much)
        table.add_section()
    _Console(highlight=False).print(table)


def print_report(result: dict[str, Any]) -> None:
    """Print the table of a replay's result on standard output."""
    title = f"replay of {result['trace']}, selection {result['selection']}"
    print_table(title, (_workload(result), _blocks(result), _memory(result)))


def _workload(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    tokens = result["local_tokens"] + result["external_tokens"]
    block = result["hash_block_size"]
    hashes = f"{block} tokens per hash id" if block else "no hash ids"
    yield "trace", f"{result['format']}, times in {result['time_unit']}, {hashes}"
    if model := result.get("model"):
        yield "model", escape(model["architecture"])
        yield (
            "KV cache of a rank, derived",
            f"{model['layers']} layers, {model['kv_heads']} x {model['head_dim']} "
            f"{model['dtype']}, {model['bytes_per_token']:,} bytes per token",
        )
    yield "requests", f"{result['requests']:,}"
    if result["rejected"]:
        yield "rejected: larger than the pool", f"{result['rejected']:,}"
    yield "prompt tokens", f"{result['input_tokens']:,}"
    yield "output tokens", f"{result['output_tokens']:,}"
    for what, count in result["trace_notes"].items():
        if count:
            yield f"note: {NOTES[what]}", f"{count:,}"
    yield f"engine steps of {result['step_ms']:g} ms, an assumption", f"{result['steps']:,}"
    if result["concurrency"] is not None:
        yield "clients in a closed loop", f"{result['concurrency']:,}"
    if result["speed"] != 1:
        yield "arrivals sped up by", f"{result['speed']:g}"
    yield "preemptions", f"{result['preemptions']:,}"
    yield "most requests at once", f"{result['peak_running']:,}"
    yield "most blocks in use", f"{result['peak_blocks']:,} of {result['num_blocks'] - 1:,}"
    yield "prefix hits", _share(result["local_tokens"], tokens)
    yield "tokens filled", _share(result["external_tokens"], tokens)


def _blocks(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for index, (group, blocks) in enumerate(
        zip(result["groups"], result["blocks_selected"], strict=True)
    ):
        yield f"blocks selected, group {index} ({escape(group)})", f"{blocks:,}"
    yield "null blocks skipped", f"{result['null_blocks_skipped']:,}"
    yield "blocks begun inside the prefix", f"{result['heads_preserved']:,}"
    yield "repeats merged", f"{result['duplicates_merged']:,}"
    yield (
        "planning per request, p50 / p99",
        f"{result['plan_p50_seconds'] * 1e6:,.1f} / {result['plan_p99_seconds'] * 1e6:,.1f} us",
    )
    if result["selection"] == "leading":
        yield "selections the planner would refuse", f"{result['selections_refused']:,}"


def _memory(result: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if not result["memory_checked"]:
        yield "memory check", "off: nothing was filled"
        return
    seconds, filled = result["fill_seconds"], result["fill_bytes"]
    yield f"bytes filled ({result['fill']})", f"{filled:,}"
    yield "fill speed", f"{filled / seconds / 1e9 if seconds else 0:,.2f} GB/s"
    yield "memory check: blocks verified", f"{result['blocks_verified']:,}"
    yield "shared blocks overwritten", f"{result['shared_blocks_overwritten']:,}"
    yield "fresh blocks unfilled", f"{result['fresh_blocks_unfilled']:,}"
    if result["other_blocks_damaged"]:
        yield "other blocks damaged", f"{result['other_blocks_damaged']:,}"
    style = "bold red" if result["violations"] else "bold green"
    yield f"[{style}]violations[/]", f"[{style}]{result['violations']:,}[/]"


NOTES = {
    "unhashed": "prompts without hash ids, unshared",
    "floor_hashed": "prompts with an unhashed tail",
    "prefill_only": "requests without output",
    "out_of_order": "requests sorted by arrival",
    "shifted_ms": "ms that the first arrival was moved to 0",
}


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole if whole else 0:.1%})"
