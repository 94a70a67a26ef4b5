import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

BENCH = Path(__file__).parents[2] / "benches" / "vllm_connector.py"


def test_the_comparison_with_the_in_tree_class_agrees():
    command = [sys.executable, "-W", "ignore", str(BENCH), "--fast"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" 1.0x\n") >= 4
