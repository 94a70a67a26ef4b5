"""Every format, every ruling on odd rows, and ``decodebench trace``."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from decodebench.cli import main
from decodebench.replay import Trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"


def row(**changes: Any) -> str:
    good = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
    return json.dumps({k: v for k, v in (good | changes).items() if v is not ...}) + "\n"


def weka(*requests: dict[str, Any], **changes: Any) -> str:
    return json.dumps({"block_size": 64, "requests": list(requests)} | changes)


@pytest.fixture
def trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command on the texts as files, and returns its code, result and error."""

    def run(*texts: str | bytes, options: tuple[str, ...] = ()) -> tuple[int, Any, str]:
        paths = [tmp_path / f"t{index}" for index in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        code = main(["trace", *map(str, paths), "--json", *options])
        out, err = capsys.readouterr()
        return code, json.loads(out) if out else None, err

    return run


# --- refusals: file, line, reason


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        # Ids against lengths.
        (row() + row(input_length=1024, hash_ids=[1]), 2, "need at least 2"),
        (row() + row(input_length=512, hash_ids=[1, 2]), 2, "allow at most 1"),
        # Both lines are named.
        (row() + row(input_length=601), 2, "88 on line 1"),
        (row() + row(hash_ids=[3, 2]), 2, "hash id 1 on line 1"),
        (row() + row(output_length=...), 2, "output_length is missing"),
        (row() + row(output_length=None), 2, "output_length is missing"),
        (row(input_length=-1), 1, "input_length is negative"),
        (row(input_length=1.5), 1, "not a whole number"),
        (row(input_length="8"), 1, "a string"),
        (row(input_length=True), 1, "a boolean"),
        (row(timestamp=float("nan")), 1, "not JSON"),
        (row(timestamp="0"), 1, "a string"),
        (row(timestamp=False), 1, "a boolean"),
        (row(hash_ids=[2**64, 1]), 1, "hash_ids[0]"),
        (row(hash_ids={"history": [1]}), 1, "RAGPulse"),
        (row(session_id="a") + row(session_id="b") + row(session_id="a"), 3, "on line 1"),
        (row(session_id="a") + row(session_id="a", delay=5), 2, "session"),
        ('{"schema": "dynamo.agentic_mooncake"}', 1, "agentic"),
        # CSV.
        (AZURE + "2023-11-16 18:17:03.9799600,4808,10\r\nyesterday,1,1", 3, "not a date"),
        (AZURE + "2023-11-16 18:17:03,4808", 2, "2 fields under a header of 3"),
        (AZURE + "2023-11-16 18:17:03,4808,", 2, "GeneratedTokens is missing"),
        (AZURE + "2023-11-16 18:17:03,-1,1", 2, "ContextTokens is negative"),
        (AZURE + "2023-11-16 18:17:03,NaN,1", 2, "ContextTokens is text"),
        (AZURE + "2023-11-16 18:17:03,1.5,1", 2, "not a whole number"),
        (BURST + "NaN,GPT-4,1,1,2,x", 2, "Timestamp is text"),
        (BURST + "true,GPT-4,1,1,2,x", 2, "a boolean"),
        (BURST + "-5,GPT-4,1,1,2,x", 2, "Timestamp is negative"),
        (BURST + "5,GPT-4,0,1,1,x", 2, "at least one token"),
        ("a,b,c\n1,2,3", 1, "no known format"),
        # Conversations.
        (weka({"t": 0, "in": 64, "out": 1, "hash_ids": []}, {"t": 0}), 1, "requests[1]: in is"),
        (weka({"t": 0, "requests": [{"t": 0, "in": 1}]}), 1, "requests[0].requests[0]: out is"),
        (weka({"t": 0, "in": 64, "out": 1, "hash_ids": [1, 2]}), 1, "allow at most 1"),
        (weka(block_size=0), 1, "hash block size 0"),
        (weka(block_size=None), 1, "block_size is missing"),
        # Token ids.
        ('{"prompt_token_ids": [1, -1]}', 1, "prompt_token_ids[1]"),
        ('{"prompt_token_ids": "ab"}', 1, "a string, not a list"),
        ('{"prompt_token_ids": [1], "timestamp": 0}', 1, "output_length is missing"),
        ('{"prompt_token_ids": [], "timestamp": 0, "output_length": 1}', 1, "at least one token"),
    ],
)
def test_refused_rows(text: str, line: int, reason: str, trace: Any) -> None:
    code, result, err = trace(text)
    assert (code, result, err.count("\n")) == (2, None, 1)
    assert f"t0:{line}: " in err
    assert reason in err


@pytest.mark.parametrize("text", ["", "\n\r\n", AZURE, BURST, weka()])
def test_a_file_without_requests_is_refused(text: str, trace: Any) -> None:
    code, _, err = trace(text)
    assert code == 2
    assert err.endswith("t0: no requests\n")


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        (AZURE + "2023-11-16 18:17:03,1,1", ("--trace-block-size", "16"), "no hash ids"),
        (AZURE + "2023-11-16 18:17:03,1,1", ("--time-unit", "s"), "always wall clock"),
        (weka({"t": 0, "in": 1, "out": 1}), ("--trace-block-size", "16"), "blocks of 64"),
        (weka({"t": 0, "in": 1, "out": 1}), ("--time-unit", "ms"), "always s"),
        (row(), ("--trace-block-size", "0"), "--trace-block-size 0"),
        (row(), ("--trace-block-size", "-1"), "--trace-block-size -1"),
        (row(), ("--trace-block-size", str(2**28)), "not in [1,"),
        (row(), ("--trace-block-size", str(2**70)), "must lie in"),
        (row(), ("--limit", "0"), "--limit 0"),
        (row(), ("--format", "azure"), "no column"),
        (row(), ("--format", "weka"), "requests"),
        (row(parent_chat_id=-1), ("--format", "mooncake"), "Bailian"),
        (row(), ("--convert", "/no/such/folder/out"), "cannot write"),
    ],
)
def test_refused_options(text: str, options: tuple[str, ...], reason: str, trace: Any) -> None:
    code, result, err = trace(text, options=options)
    assert (code, result, err.count("\n")) == (2, None, 1)
    assert reason in err


@pytest.mark.parametrize(
    "arguments", [[], ["bogus"], ["trace"], ["trace", "x", "--format", "no"], ["replay", "--x"]]
)
def test_bad_usage_is_one_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)


# --- what is accepted


def test_odd_rows_that_are_good(trace: Any) -> None:
    text = "\ufeff\r\n" + row(timestamp=9, input_length=600.0, hash_ids=[1], more={"a": 1})
    text += "\r\n  \r\n" + row(timestamp=7.5, output_length=0)
    text += row(hash_ids=[], timestamp=8) + row(hash_ids=None, timestamp=8)
    text += row(hash_ids=..., timestamp=8)
    code, result, _ = trace(text)
    assert code == 0
    assert result["trace_notes"] == {
        "unhashed": 3, "floor_hashed": 1, "prefill_only": 1, "out_of_order": 4, "shifted_ms": 7.5
    }  # fmt: skip
    assert (result["requests"], result["input_tokens"]) == (5, 3000)
    # The later row arrives first; 512 tokens are shared.
    assert result["ideal_hit_tokens"] == {"16": 512, "512": 512}


@pytest.mark.parametrize(
    ("text", "what", "arrivals"),
    [
        (row() + row(timestamp=5), ("mooncake", "ms", 512), 5),
        (
            row(parent_chat_id=-1, input_length=20) + row(parent_chat_id=0, timestamp=1.5,
            input_length=20),
            ("bailian", "s", 16),
            1500,
        ),
        (
            AZURE + "2024-05-10 00:00:00+00:00,5,7\r\n2024-05-10 00:00:00.009930+00:00,5,0",
            ("azure", "wall clock", None),
            9.93,
        ),
        (BURST + "5,GPT-4,1,0,1,x\n45.5,GPT-4,1,2,3,x", ("burstgpt", "s", None), 40_500),
        (
            weka(
                {"t": 1, "type": "subagent", "requests": [{"t": 4.5, "in": 70, "out": 1}]},
                {"t": 2, "in": 70, "out": 0, "hash_ids": [1]},
            ),
            ("weka", "s", 64),
            3500,
        ),
        (
            '{"timestamp": 0, "prompt_token_ids": [1], "output_length": 2}\n'
            '{"timestamp": 3, "prompt_token_ids": [1], "output_length": 2}',
            ("token-ids", "ms", 16),
            3,
        ),
    ],
)  # fmt: skip
def test_what_each_format_means(
    text: str, what: tuple[str, str, int | None], arrivals: float, trace: Any
) -> None:
    for content in (text, gzip.compress(text.encode())):
        for options in ((), ("--format", what[0])):
            code, result, _ = trace(content, options=options)
            assert code == 0
            assert (result["format"], result["time_unit"], result["hash_block_size"]) == what
            assert result["requests"] == 2
            assert result["duration_seconds"] == pytest.approx(arrivals / 1000, abs=1e-12)


def test_the_time_unit_and_the_block_size_can_be_given(trace: Any) -> None:
    text = row(input_length=20) + row(input_length=20, timestamp=2)
    _, result, _ = trace(text, options=("--time-unit", "s", "--trace-block-size", "16"))
    assert (result["time_unit"], result["hash_block_size"]) == ("s", 16)
    assert result["duration_seconds"] == 2
    assert result["ideal_hit_tokens"]["16"] == 16


def test_several_files_are_one_trace(trace: Any) -> None:
    _, result, _ = trace(row(), row(timestamp=1))
    assert (result["requests"], result["ideal_hit_tokens"]["512"]) == (2, 512)
    code, _, err = trace(row(), "\n" + row(hash_ids=[3, 2]))
    assert (code, err.count("\n")) == (2, 1)
    assert "t1:2: hash id 2 follows hash id 3 here, but hash id 1 on line 1 of " in err
    code, _, err = trace(row(), weka({"t": 0, "in": 1, "out": 1}))
    assert "t1:1: format weka, but mooncake in the files before" in err
    request = {"t": 0, "in": 20, "out": 1}
    code, _, err = trace(weka(request), weka(request, block_size=16))
    assert "t1:1: hash blocks of 16 tokens, but 64" in err


def test_ids_of_conversations_are_local(trace: Any) -> None:
    request = {"t": 0, "in": 128, "out": 1, "hash_ids": [1, 2]}
    assert trace(weka(request, request))[1]["ideal_hit_tokens"]["16"] == 112
    both = weka(request)
    assert trace(both, both)[1]["ideal_hit_tokens"]["16"] == 0
    assert trace(f"{both}\n{both}")[1]["ideal_hit_tokens"]["16"] == 0


def test_a_folder_is_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert main(["trace", str(folder)]) == 2
    assert "no files in this folder" in capsys.readouterr().err
    (folder / "b").write_text(row(timestamp=1, hash_ids=[1, 3]))
    (folder / "a.gz").write_bytes(gzip.compress(row().encode()))
    (folder / ".hidden").write_text("no trace")
    assert main(["trace", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ideal_hit_tokens"]["512"] == 512


# --- figures


def ideal_hits(prompts: list[list[int]], block: int) -> int:
    """Token by token: the longest shared prefix, not the whole prompt, in whole blocks."""
    total = 0
    for index, prompt in enumerate(prompts):
        longest = 0
        for other in prompts[:index]:
            same = 0
            while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
                same += 1
            longest = max(longest, same)
        total += min(longest, len(prompt) - 1) // block * block
    return total


@given(
    st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(1, 5),
)
@settings(deadline=None)
def test_ideal_hits_of_token_ids(
    tmp_path_factory: Any, prompts: list[list[int]], block: int
) -> None:
    path = tmp_path_factory.mktemp("trace") / "trace"
    rows = [{"timestamp": 0, "prompt_token_ids": p, "output_length": 1} for p in prompts]
    path.write_text("\n".join(map(json.dumps, rows)))
    with path.open("rb") as file:
        trace = Trace.read([(file, "t")], hash_block_size=1)
    assert trace.ideal_hit_tokens(block) == ideal_hits(prompts, block)


@pytest.mark.parametrize(
    ("name", "figures"),
    [
        ("mooncake_conversation.jsonl", (12_031, 144_793_823, 4_122_048)),
        ("mooncake_synthetic.jsonl", (3_993, 61_194_628, 595_432)),
        ("azure_2023_code.csv", (8_819, 18_059_974, 245_896)),
        ("azure_2023_conv.csv", (19_366, 22_361_870, 4_088_665)),
        ("burstgpt_v2_quoted.csv", (4, 3_656, 776)),
        # The file's own totals, subagents counted.
        ("weka_0291.json", (32, 2_254_119, 19_504)),
    ],
)
def test_published_figures(
    traces: Path, name: str, figures: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(traces / name), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    found = tuple(result[key] for key in ("requests", "input_tokens", "output_tokens"))
    assert found == figures
    if name == "mooncake_conversation.jsonl":
        assert result["ideal_hit_tokens"] == {"16": 54_097_440, "512": 54_063_104}
        assert result["trace_notes"]["out_of_order"] == 0


# --- conversion


def test_a_converted_trace_is_the_same(trace: Any, tmp_path: Path) -> None:
    request = {"t": 5.25, "in": 130, "out": 3, "hash_ids": [7, 9]}
    text = weka(request, {**request, "t": 5.25 + 1e-6, "hash_ids": [7, 8], "out": 0})
    out = tmp_path / "out"
    code, result, _ = trace(text, options=("--convert", str(out)))
    assert (code, result["converted"]) == (0, str(out))
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert rows == [
        {"timestamp": 0, "input_length": 130, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 0.001, "input_length": 130, "output_length": 0, "hash_ids": [0, 2]},
    ]
    _, again, _ = trace(out.read_text(), options=("--trace-block-size", "64"))
    same = [key for key in result if key not in ("format", "time_unit", "converted", "trace_notes")]
    assert [again[key] for key in same] == [result[key] for key in same]


def test_a_real_trace_survives_conversion(
    traces: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = traces / "mooncake_synthetic.jsonl", tmp_path / "out"
    assert main(["trace", str(source), "--convert", str(out)]) == 0
    capsys.readouterr()
    read = [json.loads(line) for line in source.read_text().splitlines()]
    written = [json.loads(line) for line in out.read_text().splitlines()]
    numbers: dict[int, int] = {}
    for request in read:
        request["hash_ids"] = [numbers.setdefault(i, len(numbers)) for i in request["hash_ids"]]
    assert written == read
