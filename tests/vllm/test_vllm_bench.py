import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

BENCHES = Path(__file__).parents[2] / "benches"


def output_of(bench):
    command = [sys.executable, "-W", "ignore", str(BENCHES / bench), "--fast"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_comparison_with_the_in_tree_class_agrees():
    assert output_of("vllm_connector.py").count(" 1.0x\n") == 6


def test_the_comparison_of_whole_engines_agrees():
    # The in-tree class is what the first two ratios compare with, a prefill what the last does.
    assert output_of("vllm_engine.py").count(" 1.000x") == 3
