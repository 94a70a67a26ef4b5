"""The simulated engine decides what vLLM's scheduler and KV-cache manager decide."""

import json
from pathlib import Path

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


TRACES = Path(__file__).parents[3] / "shared" / "traces"


def rows_of(name: str) -> list[Row]:
    """The first 1,000 requests, ten times as fast, prompts cut to 4,096 tokens, outputs to 1/8.

    Uncut, vLLM's Python would take minutes to hash and to list the blocks of every step.
    """
    if not (TRACES / name).exists():
        pytest.skip(f"{name} is not at hand")
    rows = []
    for line in (TRACES / name).read_text().splitlines()[:1000]:
        row = json.loads(line)
        prompt = min(row["input_length"], 8 * 512)
        ids = tuple(row["hash_ids"][: -(-prompt // 512)])
        rows.append(Row(row["timestamp"] / 10, prompt, row["output_length"] // 8, ids))
    return rows


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    "groups", [("full",), ("full", "window:1024"), ("window:512", "full", "window:1024")]
)
@pytest.mark.parametrize("name", ["mooncake_conversation.jsonl", "mooncake_synthetic.jsonl"])
def test_real_traces(name, groups, block_size):
    num_blocks = 20_000 // block_size * len(groups)
    twin = Twin(rows_of(name), 512, Setting(groups, block_size, num_blocks, 24))
    twin.run(every=50)
    stats = twin.ours.stats()
    assert stats["finished"] + stats["rejected"] == len(twin.rows)
    assert stats["local_tokens"] > 0
    assert stats["preemptions"] > 0
