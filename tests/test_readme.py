import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", README, re.DOTALL))
def test_the_examples_run(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_the_plan_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from decodebench.cli import main

    example = re.search(r"\$ echo '(.*)' \| decodebench plan\n(.*)\n", README)
    assert example is not None
    file = tmp_path / "request.jsonl"
    file.write_text(example[1])
    assert main(["plan", str(file)]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(example[2])


def test_the_demo_damage_is_what_the_demo_shows(capsys: pytest.CaptureFixture[str]) -> None:
    from decodebench.cli import main

    assert main(["replay", "--selection", "leading", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    for key in ("shared_blocks_overwritten", "fresh_blocks_unfilled"):
        assert re.search(rf"{key.replace('_', ' ')} +{result[key]:,}\n", README)


def test_make_has_the_commands() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", README):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
