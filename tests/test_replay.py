import dataclasses
import gzip
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodebench.cli import main
from decodebench.pattern import Normal
from decodebench.replay import FillStep, Geometry, Memory, Replay, Trace, run

COMMAND = Path(sys.executable).with_name("decodebench")
GEOMETRY = Geometry(layers=2, kv_heads=1, head_dim=4, dtype=np.dtype(np.float16))
KEYS = {
    "requests", "rejected", "steps", "preemptions", "local_tokens", "external_tokens",
    "blocks_selected", "null_blocks_skipped", "heads_preserved", "duplicates_merged", "fill_bytes",
    "fill_seconds", "plan_seconds", "blocks_verified", "shared_blocks_overwritten",
    "fresh_blocks_unfilled", "violations", "selection", "seed",
}  # fmt: skip


def settings_of(**changes: Any) -> dict[str, Any]:
    return {
        "block_size": 16,
        "num_blocks": 4096,
        "groups": ["full", "window:512"],
        "max_num_seqs": 256,
        "step_ms": 20.0,
        "selection": "interval",
        "record_memory": True,
    } | changes


def replayed(trace: Trace, memory_class: type[Memory] = Memory, **changes: Any) -> Memory:
    config = settings_of(**changes)
    memory = memory_class(
        GEOMETRY,
        config["num_blocks"],
        config["block_size"],
        len(config["groups"]),
        Normal(0.0, 1.0),
        len(trace),
    )
    stats = run(Replay(trace, **config), memory)
    assert stats["finished"] + stats["rejected"] == len(trace)
    return memory


@pytest.fixture
def replay(capsys: pytest.CaptureFixture[str]) -> Any:
    def run_(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = main(["replay", *arguments, "--json"])
        out, err = capsys.readouterr()
        assert err == ""
        return code, json.loads(out)

    return run_


def deterministic(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if not key.endswith("_seconds")}


# --- what the memory shows


@pytest.mark.parametrize("fill", ["constant", "normal"])
def test_the_right_selection_harms_nothing(replay: Any, fill: str) -> None:
    code, result = replay("--fill", fill)
    assert code == 0
    assert result.keys() >= KEYS
    assert result["violations"] == 0
    assert result["shared_blocks_overwritten"] == result["fresh_blocks_unfilled"] == 0
    assert result["blocks_verified"] > 0
    assert result["fill_bytes"] > 0
    # The built-in workload is worth the name.
    assert result["requests"] == 400
    assert result["local_tokens"] > 0
    assert result["preemptions"] > 0
    assert result["null_blocks_skipped"] > 0


def test_the_leading_selection_is_caught(replay: Any) -> None:
    code, result = replay("--selection", "leading")
    assert code == 1
    assert result["shared_blocks_overwritten"] > 0
    assert result["fresh_blocks_unfilled"] > 0
    assert result["selections_refused"] > 0
    assert result["violations"] >= (
        result["shared_blocks_overwritten"] + result["fresh_blocks_unfilled"]
    )


def test_the_leading_selection_is_right_where_nothing_is_shared(
    tmp_path: Path, replay: Any
) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 900 + i, "output_length": 5} for i in range(20)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    code, result = replay(str(trace), "--selection", "leading", "--groups", "full")
    assert (code, result["violations"], result["selections_refused"]) == (0, 0, 0)
    assert result["trace_notes"]["unhashed"] == 20


def test_one_shared_block_overwritten_is_counted_once(tmp_path: Path, replay: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    row = {"input_length": 513, "output_length": 1, "hash_ids": [7, 8]}
    other = row | {"hash_ids": [7, 9], "input_length": 530}
    rows = [row | {"timestamp": 0}, other | {"timestamp": 1000}]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = (str(trace), "--groups", "full", "--selection")
    assert replay(*arguments, "interval")[1]["violations"] == 0
    code, result = replay(*arguments, "leading")
    # Tokens [512, 529) come from outside: blocks 32 and 33; the old rule writes blocks 0 and 1.
    assert code == 1
    assert result["local_tokens"] == 512
    assert result["shared_blocks_overwritten"] == 2
    assert result["fresh_blocks_unfilled"] == 2
    assert result["violations"] == 4


def test_without_a_fill_no_memory_is_checked(
    replay: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = replay("--fill", "none")
    assert (code, result["memory_checked"], result["blocks_verified"]) == (0, False, 0)
    assert result["fill_bytes"] == 0
    assert main(["replay", "--fill", "none"]) == 0
    assert "memory check" in (out := capsys.readouterr().out)
    assert "off: nothing was filled" in out


def test_the_numbers_do_not_depend_on_what_is_filled(replay: Any) -> None:
    results = [deterministic(replay("--fill", fill)[1]) for fill in ("none", "constant", "normal")]
    same = (
        "requests", "steps", "preemptions", "local_tokens", "external_tokens", "blocks_selected",
        "null_blocks_skipped",
    )  # fmt: skip
    assert len({str([result[key] for key in same]) for result in results}) == 1


def test_same_input_and_seed_same_json(replay: Any) -> None:
    for arguments in ((), ("--selection", "leading", "--fill", "normal", "--seed", "9")):
        assert deterministic(replay(*arguments)[1]) == deterministic(replay(*arguments)[1])
    assert deterministic(replay("--seed", "1")[1]) != deterministic(replay("--seed", "2")[1])


def test_every_block_size_and_dtype(replay: Any) -> None:
    for size, dtype in (
        ("1", "float32"),
        ("7", "float16"),
        ("48", "float8_e5m2"),
        ("512", "bfloat16"),
    ):
        code, result = replay(
            "--block-size", size, "--dtype", dtype, "--limit", "60", "--num-blocks", "40000",
            "--head-dim", "3", "--kv-heads", "1", "--layers", "1", "--fill", "normal",
        )  # fmt: skip
        assert (code, result["violations"]) == (0, 0)
        assert result["local_tokens"] > 0


# --- a check that cannot fail is no check


@dataclasses.dataclass(slots=True)
class Faulty(Memory):
    """A memory whose backend makes one kind of mistake."""

    def mistake(self, step: FillStep) -> None:
        raise NotImplementedError

    def apply(self, step: FillStep) -> None:
        super(Faulty, self).apply(step)
        self.mistake(step)


class WritesTheNullBlock(Faulty):
    def mistake(self, step: FillStep) -> None:
        self._tags[0, 0] = 1


class WritesAnotherBlock(Faulty):
    def mistake(self, step: FillStep) -> None:
        if len(step.block_ids) and not self.report.violations:
            self._tags[(step.block_ids[0] + 1) % self.num_blocks] += 1


class Skewed(Memory):
    """Memory whose cache, not its tags, is written a byte wrong before it is compared."""

    def _compare_bytes(self, group: int, table: Any) -> None:
        self._caches[-1][table, 3] ^= 1
        super()._compare_bytes(group, table)


@pytest.mark.parametrize("memory_class", [WritesTheNullBlock, WritesAnotherBlock, Skewed])
def test_a_faulty_backend_is_caught(memory_class: type[Memory]) -> None:
    trace = Trace.conversation(0, 50)
    assert replayed(trace).report.violations == 0
    assert replayed(trace, memory_class).report.violations > 0


@given(st.data())
@settings(deadline=None, max_examples=40)
def test_any_trace_replays_without_violation(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Prompts that grow out of each other, in a pool just large enough for some of them."""
    block = 512
    prompts: list[list[int]] = [[]]
    rows = []
    for index in range(data.draw(st.integers(1, 25))):
        prefix = data.draw(st.sampled_from(prompts))
        ids = [*prefix, *(1000 * (index + 1) + i for i in range(data.draw(st.integers(0, 4))))]
        prompts.append(ids)
        length = max(1, len(ids) * block)
        output = data.draw(st.sampled_from([0, 1, 2, 15, 16, 17, 200]))
        arrival = data.draw(st.integers(0, 3)) * 1000
        rows.append(
            {"timestamp": arrival, "input_length": length, "output_length": output, "hash_ids": ids}
        )
    path = tmp_path_factory.mktemp("trace") / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with path.open("rb") as file:
        trace = Trace.read_mooncake(file, "trace")
    groups = data.draw(
        st.lists(
            st.sampled_from(["full", "window:1", "window:16", "window:600"]), min_size=1, max_size=3
        )
    )
    changes = {
        "groups": groups,
        "block_size": data.draw(st.sampled_from([16, 48, 128])),
        "num_blocks": data.draw(st.integers(30, 700)),
        "max_num_seqs": data.draw(st.integers(1, 20)),
    }
    assert replayed(trace, **changes).report.violations == 0


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--groups", "full,chunked:5"], "chunked:5"),
        (["--groups", ""], '""'),
        (["--groups", "window:0"], "window:0"),
        (["--groups", "window:-1"], "window:-1"),
        (["--groups", "window:99999999999"], "window:99999999999"),
        (["--block-size", "0"], "block_size"),
        (["--block-size", "-1"], "block_size"),
        (["--block-size", "99999999999", "--fill", "none"], "block_size"),
        (["--num-blocks", "1"], "num_blocks"),
        (["--num-blocks", "-5"], "num_blocks"),
        (["--num-blocks", "4000000000", "--fill", "none"], "num_blocks"),
        (["--num-blocks", "99999999999999999999999"], "GiB"),
        (["--num-blocks", "9" * 4000], "GiB"),
        (["--limit", "100001"], "requests"),
        (
            ["--layers", "1", "--kv-heads", "1", "--head-dim", "1", "--block-size", "99999999"],
            "GiB",
        ),
        (["--groups", "\udcff"], "Unicode"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--step-ms", "0"], "step_ms"),
        (["--step-ms", "nan"], "step_ms"),
        (["--step-ms", "-1"], "step_ms"),
        (["--step-ms", "inf"], "step_ms"),
        (["--limit", "0"], "--limit"),
        (["--limit", "-1"], "--limit"),
        (["--concurrency", "0"], "concurrency"),
        (["--concurrency", "-1"], "concurrency"),
        (["--concurrency", "4", "--speed", "2"], "--speed"),
        (["--speed", "0"], "speed"),
        (["--speed", "nan"], "speed"),
        (["--seed", "-1"], "--seed"),
        (["--seed", str(2**64)], "--seed"),
        (["--layers", "0"], "--layers"),
        (["--kv-heads", "-2"], "--kv-heads"),
        (["--head-dim", "0"], "--head-dim"),
        (["--head-dim", "9999999999"], "GiB"),
        (["/no/such/trace"], "/no/such/trace"),
        (["/"], "/"),
        ([""], "cannot open"),
    ],
)
def test_bad_settings(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert reason in err


GOOD = '{"timestamp": 0, "input_length": 1024, "output_length": 3, "hash_ids": [1, 2]}\n'


def after_a_good_one(**row: Any) -> bytes:
    return (GOOD + json.dumps({"timestamp": 0, "output_length": 1} | row)).encode()


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", None),
        (b"\n\n", None),
        (GOOD.encode() + b"{", 2),
        (GOOD.encode() + b"\n[]\n", 3),
        (after_a_good_one(input_length=-1), 2),
        (after_a_good_one(input_length=1e300), 2),
        (after_a_good_one(input_length=1024, hash_ids=[1]), 2),
        (after_a_good_one(input_length=9, hash_ids=[1]), 2),
        (after_a_good_one(input_length=513, hash_ids=[2, 1]), 2),
        (gzip.compress(GOOD.encode() * 1000)[:-9], None),
        (np.random.default_rng(0).bytes(4096).replace(b"\n", b""), 1),
        (b"\0" * 4096, 1),
    ],
)
def test_bad_traces(
    content: bytes, line: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content)
    assert main(["replay", str(trace)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert str(trace) in err
    if line is not None:
        assert f"trace.jsonl:{line}: " in err


def test_64_bit_ids_are_kept_whole(tmp_path: Path, replay: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    ids = [2**64 - 1, 2**32 + 7, 7, 2**53 + 1, 2**53]
    rows = [
        {"timestamp": i, "input_length": 512, "output_length": 1, "hash_ids": [id_]}
        for i, id_ in enumerate(ids)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    assert replay(str(trace))[1]["local_tokens"] == 0


def test_what_can_never_fit_is_rejected(tmp_path: Path, replay: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": length, "output_length": 5}
        for length in (100, 16 * 99 - 4, 16 * 99 - 3, 100_000_000)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    code, result = replay(str(trace), "--num-blocks", "100", "--groups", "full")
    assert (code, result["requests"], result["rejected"]) == (0, 2, 2)


def test_standard_input_and_gzip(tmp_path: Path, replay: Any) -> None:
    packed = tmp_path / "trace.jsonl.gz"
    packed.write_bytes(gzip.compress(GOOD.encode() * 3))
    expected = deterministic(replay(str(packed))[1])
    done = subprocess.run(
        [COMMAND, "replay", "-", "--json"], input=GOOD.encode() * 3, capture_output=True, check=True
    )
    result = deterministic(json.loads(done.stdout))
    assert (done.stderr, result.pop("trace"), expected.pop("trace")) == (b"", "-", str(packed))
    assert result == expected


def test_trace_errors_are_one_line_for_odd_file_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(tmp_path / "a\nb")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


# --- the terminal


def interrupted(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130


def test_ctrl_c_while_it_reads() -> None:
    with subprocess.Popen(
        [COMMAND, "replay", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdin is not None
        # More than a pipe holds: once it is written, most of it has been read.
        process.stdin.write(GOOD.encode() * 10_000)
        interrupted(process)
        assert process.stdout is not None
        assert process.stderr is not None
        assert (process.stdout.read(), process.stderr.read()) == (b"", b"")


def test_ctrl_c_while_it_replays() -> None:
    leader, follower = pty.openpty()
    with subprocess.Popen(
        [COMMAND, "replay", "--limit", "100000", "--fill", "none"],
        stdout=subprocess.PIPE,
        stderr=follower,
    ) as process:
        os.close(follower)
        assert os.read(leader, 1)  # the progress bar has begun
        interrupted(process)
        assert process.stdout is not None
        assert process.stdout.read() == b""
    rest = b""
    try:
        while chunk := os.read(leader, 65536):
            rest += chunk
    except OSError:  # the other side is closed
        pass
    os.close(leader)
    assert b"Traceback" not in rest


def test_the_table_is_plain_where_no_color_is_wanted() -> None:
    leader, follower = pty.openpty()
    subprocess.run(
        [COMMAND, "replay", "--limit", "20"],
        stdout=follower,
        stderr=follower,
        env=os.environ | {"NO_COLOR": "1", "TERM": "dumb"},
        check=True,
    )
    os.close(follower)
    text = b""
    with open(leader, "rb", buffering=0) as terminal:
        try:
            while chunk := terminal.read(65536):
                text += chunk
        except OSError:  # the other side is closed
            pass
    assert b"violations" in text
    assert b"\x1b[3" not in text


# --- real traces


def test_the_first_rows_of_real_traces(traces: Path, replay: Any) -> None:
    for name, rejected in (
        ("mooncake_conversation.jsonl", 0),
        ("mooncake_synthetic.jsonl", 0),
        ("mooncake_arxiv_head16.jsonl", 0),
    ):
        code, result = replay(str(traces / name), "--limit", "300")
        assert (code, result["violations"], result["rejected"]) == (0, 0, rejected)
        assert result["local_tokens"] > 0


@pytest.mark.parametrize(
    ("names", "requests"),
    [
        (["azure_2023_code.csv"], 1000),
        (["burstgpt_v1_quoted.csv"], 3),
        (["bailian_row_quoted.jsonl"], 1),
        (["weka_0103.json", "weka_0187.json", "weka_0291.json"], 38),
    ],
)
def test_other_formats_replay(traces: Path, names: list[str], requests: int, replay: Any) -> None:
    paths = [str(traces / name) for name in names]
    code, result = replay(*paths, "--limit", "1000", "--num-blocks", "20000")
    assert (code, result["violations"], result["requests"]) == (0, 0, requests)


def test_speed_moves_arrivals(tmp_path: Path, replay: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(GOOD + GOOD.replace('"timestamp": 0', '"timestamp": 10000'))
    slow, fast = (replay(str(trace), "--speed", x)[1] for x in ("1", "4"))
    assert (slow["virtual_seconds"], fast["virtual_seconds"]) == (10.06, 2.56)
    assert (fast["speed"], fast["step_ms_is"]) == (4.0, "an assumption")


@pytest.mark.parametrize("clients", [1, 2, 3, 40])
def test_a_closed_loop(clients: int, tmp_path: Path, replay: Any) -> None:
    trace = tmp_path / "trace.jsonl"
    outputs = [3, 1, 5, 2, 2, 0, 4, 7]
    rows = [{"timestamp": 10**6, "input_length": 9, "output_length": n} for n in outputs]
    rows.append({"timestamp": 0, "input_length": 10**8, "output_length": 1})
    trace.write_text("\n".join(map(json.dumps, rows)))
    code, result = replay(str(trace), "--concurrency", str(clients), "--num-blocks", "99")
    # Each client in turn takes the next request, as soon as it is free.
    free = [0] * clients
    for output in outputs:
        free.sort()
        free[0] += max(output, 1)
    assert (code, result["rejected"], result["finished"]) == (0, 1, 8)
    assert result["steps"] == max(free)
    assert result["peak_running"] == min(clients, len(outputs))
    assert result["virtual_seconds"] == pytest.approx(max(free) * 0.02)


def test_a_whole_real_trace_plans(traces: Path, replay: Any) -> None:
    code, result = replay(str(traces / "mooncake_conversation.jsonl"), "--fill", "none")
    assert (code, result["requests"], result["rejected"]) == (0, 12_031, 0)
    assert (result["input_tokens"], result["output_tokens"]) == (144_793_823, 4_122_048)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("aiperf_production.jsonl", ":3: "),
        ("ragpulse_head400.jsonl", "RAGPulse"),
        ("dynamo_mooncake_delta.jsonl", ":2: "),
        ("dynamo_agentic_mooncake.jsonl", ":1: "),
    ],
)
def test_other_formats_are_refused(
    traces: Path, name: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", str(traces / name)]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert name in err
    assert reason in err
