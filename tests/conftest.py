from pathlib import Path

import pytest

TRACES = Path(__file__).parents[2] / "shared" / "traces"


@pytest.fixture(scope="session")
def traces() -> Path:
    """Real request traces, which are not part of the project."""
    if not TRACES.is_dir():
        pytest.skip(f"no real traces at {TRACES}")
    return TRACES
