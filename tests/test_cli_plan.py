import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decodebench.cli import main

# The example of the README and of the command's documentation.
REQUEST = {
    "id": "r1",
    "num_blocks": 64,
    "null_block": 0,
    "local": 32,
    "external": 17,
    "groups": [{"indexing": "positional", "span": 16}, {"indexing": "ring"}],
    "tables": [[1, 2, 3, 4], [9]],
}
ANSWER = {
    "id": "r1",
    "groups": [
        {"start": 2, "end": 4, "block_ids": [3, 4], "head_slot": 0, "tail_slot": 1},
        {"start": 0, "end": 1, "block_ids": [9], "head_slot": 0, "tail_slot": 0},
    ],
}
COMMAND = Path(sys.executable).with_name("decodebench")
GOLDEN = Path(__file__).parent / "golden" / "plans.jsonl"


@pytest.fixture
def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*lines: str | bytes | dict[str, Any]) -> tuple[int, list[Any], str]:
        file = tmp_path / "requests.jsonl"
        encoded = [
            line
            if isinstance(line, bytes)
            else (line if isinstance(line, str) else json.dumps(line)).encode()
            for line in lines
        ]
        file.write_bytes(b"\n".join(encoded))
        code = main(["plan", str(file)])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    return run


def test_the_documented_example(plan: Any) -> None:
    assert plan(REQUEST) == (0, [ANSWER], "")


def test_the_command_reads_a_pipe() -> None:
    done = subprocess.run(
        [COMMAND, "plan"], input=json.dumps(REQUEST), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ANSWER


def test_every_golden_request(plan: Any) -> None:
    cases = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
    code, answers, err = plan(*(case["request"] for case in cases))
    assert (code, err) == (1, "")
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers, strict=True):
        assert answer["id"] == case["request"]["id"]
        if "kinds" in case["answer"]:
            assert answer["error"]["kind"] in case["answer"]["kinds"]
        else:
            assert answer["groups"] == case["answer"]["groups"]


def test_an_exact_tail_is_binding_and_said_so(plan: Any) -> None:
    assert plan(REQUEST | {"exact_tail": True})[1] == [ANSWER | {"exact_tail": True}]
    assert plan(REQUEST | {"exact_tail": False})[1] == [ANSWER]


def test_blank_lines_and_no_lines(plan: Any) -> None:
    assert plan("", REQUEST, "  ", "") == (0, [ANSWER], "")
    assert plan("") == (0, [], "")


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in REQUEST.items() if name != key}


@pytest.mark.parametrize(
    ("request_", "kind"),
    [
        (REQUEST | {"external": 33}, "range_outside_table"),
        (REQUEST | {"local": 2**64 - 1}, "interval_overflow"),
        (REQUEST | {"tables": [[1, 2, 99, 4], [9]]}, "block_outside_pool"),
        (REQUEST | {"tables": [[1, 2, 2, 4], [9]]}, "prefix_block_selected"),
        (REQUEST | {"tables": [[1, 2, 3, 4], [4]]}, "block_in_two_groups"),
        (REQUEST | {"tables": [[1, 2, 3, 4]]}, "table_count"),
        (REQUEST | {"num_blocks": 0}, "num_blocks"),
        (REQUEST | {"groups": []}, "no_groups"),
        (REQUEST | {"groups": [{"indexing": "positional", "span": 0}]}, "zero_span"),
        (REQUEST | {"local": -1}, "bad_argument"),
        (REQUEST | {"local": 1.5}, "bad_argument"),
        (REQUEST | {"local": True}, "bad_argument"),
        (REQUEST | {"local": None}, "bad_argument"),
        (REQUEST | {"external": 10**400}, "bad_argument"),
        (REQUEST | {"num_blocks": "64"}, "bad_argument"),
        (REQUEST | {"num_blocks": True}, "bad_argument"),
        (REQUEST | {"num_blocks": [64]}, "bad_argument"),
        (REQUEST | {"null_block": 0.0}, "bad_argument"),
        (REQUEST | {"null_block": 2**31}, "bad_argument"),
        (REQUEST | {"exact_tail": 1}, "bad_argument"),
        (REQUEST | {"groups": None}, "bad_argument"),
        (REQUEST | {"groups": [1]}, "bad_argument"),
        (REQUEST | {"groups": [{"indexing": "positional"}]}, "bad_argument"),
        (REQUEST | {"groups": [{"indexing": "ring", "span": 16}]}, "bad_argument"),
        (REQUEST | {"groups": [{"indexing": ["ring"]}]}, "bad_argument"),
        (REQUEST | {"groups": [{"indexing": "\ud800"}]}, "bad_argument"),
        (REQUEST | {"groups": [{"indexing": "ring", "size": 1}]}, "bad_argument"),
        (REQUEST | {"groups": [{"indexing": "positional", "span": "16"}]}, "bad_argument"),
        (REQUEST | {"tables": None}, "bad_argument"),
        (REQUEST | {"tables": "12"}, "bad_argument"),
        (REQUEST | {"tables": [[1, "2"], [9]]}, "bad_argument"),
        (REQUEST | {"tables": [{"1": 2}, [9]]}, "bad_argument"),
        (REQUEST | {"window": 5}, "bad_argument"),
        *((without(key), "bad_argument") for key in ("local", "external", "groups", "tables")),
        (without("num_blocks"), "bad_argument"),
    ],
)
def test_a_refused_request_is_answered_and_the_others_too(
    plan: Any, request_: dict[str, Any], kind: str
) -> None:
    code, answers, err = plan(REQUEST, request_, REQUEST)
    assert (code, err) == (1, "")
    assert answers[0] == answers[2] == ANSWER
    assert answers[1].keys() == {"id", "error"}
    assert answers[1]["error"]["kind"] == kind
    assert answers[1]["error"]["message"].startswith("request r1: ")
    assert "\n" not in answers[1]["error"]["message"]


def test_the_null_block_is_zero_or_none(plan: Any) -> None:
    request = without("null_block") | {"tables": [[1, 2, 0, 4], [9]]}
    assert plan(request)[1][0]["groups"][0]["block_ids"] == [4]
    assert plan(request | {"null_block": None})[1][0]["groups"][0]["block_ids"] == [0, 4]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b"\x1f\x8b\x08\x00", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("7", 'not an object with a string "id"'),
        ("{}", 'not an object with a string "id"'),
        ('{"id": 7}', 'not an object with a string "id"'),
        (REQUEST | {"id": "a\nb"}, "unprintable"),
        (REQUEST | {"id": "\ud800"}, "unprintable"),
    ],
)
def test_what_cannot_be_answered_ends_the_command(plan: Any, line: Any, reason: str) -> None:
    code, answers, err = plan(REQUEST, line, REQUEST)
    assert code == 2
    assert answers == [ANSWER]
    assert err.count("\n") == 1
    assert "requests.jsonl:2: " in err
    assert reason in err


def test_a_file_that_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/proc/self/mem")):
        assert main(["plan", str(path)]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert str(path) in err or "Input/output error" in err
    for name in ("odd\nname", "odd\udcff", "odd\0name"):
        for command in ("plan", "replay"):
            assert main([command, name]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.count("\n") == 1
            assert "odd\ufffd" in err


def test_an_endless_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "/dev/zero"]) == 2
    assert "/dev/zero:1: the line is longer" in capsys.readouterr().err


def test_bad_usage(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["plan", "a", "b"], ["fill"], ["replay", "--fill", "ones"]):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert capsys.readouterr().out == ""


def test_a_reader_that_leaves() -> None:
    lines = (json.dumps(REQUEST) + "\n") * 20_000
    done = subprocess.run(
        f"{COMMAND} plan | head -n 1",
        shell=True,
        input=lines,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == ANSWER
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("redirect", "code", "err"),
    [
        (">&-", 0, ""),
        (">/dev/full", 2, "decodebench: input or output: No space left on device\n"),
        ("2>&-", 0, ""),
        ("| true", 0, ""),
    ],
)
def test_streams_that_take_nothing(redirect: str, code: int, err: str) -> None:
    for command in (f"echo '{json.dumps(REQUEST)}' | {COMMAND} plan", f"{COMMAND} replay"):
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{command} {redirect}"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (code, err)


def test_closed_input() -> None:
    done = subprocess.run(
        f"{COMMAND} plan <&-", shell=True, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "decodebench: -: standard input is closed\n"
