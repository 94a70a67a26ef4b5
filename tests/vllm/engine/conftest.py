"""Environment of the engines: on the CPU, in this process unless a test says otherwise."""

import os
from pathlib import Path

import pytest

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    # Engines in processes of their own import the connectors of these tests, too.
    PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
)
pytest.importorskip("vllm.v1", reason="vLLM is not installed")
