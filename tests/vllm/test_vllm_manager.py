"""The simulated engine decides what vLLM's scheduler and KV-cache manager decide."""

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")
pytest.importorskip("hypothesis", reason="Hypothesis is not installed")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from twin import Row, Setting, Twin

HASH_BLOCKS = [4, 6, 16]


@st.composite
def workloads(draw: st.DrawFn, *, prompt: int = 90, output: int = 40) -> tuple[list[Row], int]:
    """Rows whose prompts go down one tree of hash blocks, and the tokens of a hash block."""
    hash_block = draw(st.sampled_from(HASH_BLOCKS))
    tree: dict[tuple[int, int, int], int] = {}
    rows, at = [], 0.0
    for _ in range(draw(st.integers(1, 25))):
        at += draw(st.sampled_from([0, 0, 20, 55, 300]))
        length = draw(st.integers(1, prompt))
        ids: list[int] = []
        # A branch per block: mostly the same one, so that prompts share long prefixes.
        if draw(st.integers(0, 9)):
            turn = draw(st.integers(0, length // hash_block + 1))
            for index in range(-(-length // hash_block)):
                tokens = min(hash_block, length - index * hash_block)
                branch = draw(st.integers(0, 2)) if index == turn else 0
                key = (ids[-1] if ids else -1, branch, tokens)
                ids.append(tree.setdefault(key, len(tree)))
        rows.append(Row(at, length, draw(st.integers(0, output)), tuple(ids)))
    return rows, hash_block


QUICK = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)


@QUICK
@given(
    workload=workloads(),
    block_size=st.sampled_from([4, 16]),
    num_blocks=st.integers(8, 60),
    max_num_seqs=st.integers(1, 12),
    groups=st.sampled_from(
        [("full",), ("window:9",), ("full", "window:20"), ("window:5", "full", "window:24")]
    ),
)
def test_random_workloads(workload, block_size, num_blocks, max_num_seqs, groups):
    Twin(*workload, Setting(groups, block_size, num_blocks, max_num_seqs)).run()
