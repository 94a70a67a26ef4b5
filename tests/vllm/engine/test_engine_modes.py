"""The connector as part of larger set-ups: several processes, ranks and connectors."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

from engine_models import write_model
from engine_run import BLOCK, Engine, prompt, run_engine, transfer

PROMPTS = [prompt(40 + 37 * i, 1 + i) for i in range(8)]


def run(engine: Engine) -> list[list[int]]:
    tokens = engine.generate(PROMPTS) + engine.generate([PROMPTS[5] + prompt(80, 50)])
    assert engine.problems() == []
    assert engine.longest_step() == 1
    return tokens


@pytest.fixture
def alone(tmp_path: Path) -> list[list[int]]:
    """What one engine in this process generates."""
    dense = write_model("dense", tmp_path)
    with run_engine(dense, tmp_path / "alone", transfer("Ours")) as engine:
        return run(engine)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join("01"[:ranks]))
    arguments = {"tensor_parallel_size": ranks, "distributed_executor_backend": "mp"}
    dense = write_model("dense", tmp_path)
    # Made-up weights differ with the number of ranks, and so do the tokens.
    with run_engine(dense, tmp_path / "in-tree", transfer("InTree"), **arguments) as engine:
        in_tree = run(engine)
    with run_engine(dense, tmp_path / "ours", transfer("Ours"), **arguments) as engine:
        assert run(engine) == in_tree
        fills = engine.records("fill")
        for rank in range(ranks):
            own = [fill for fill in fills if fill["rank"] == rank]
            assert sum(len(fill["requests"]) for fill in own) == len(PROMPTS) + 1
        statistics = engine.statistics()
        assert statistics["num_requests"] == len(PROMPTS) + 1
        assert statistics["num_fills"] == len(fills)
        assert statistics["num_bytes"] == sum(fill["num_bytes"] for fill in fills)
        assert statistics["num_tokens"] == sum(one["external"] for one in engine.admissions())


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def test_one_of_several_connectors(tmp_path: Path, alone: list[list[int]]) -> None:
    dense = write_model("dense", tmp_path)
    both = multi(transfer("Ours"), {"kv_connector": "DecodeBenchConnector", "kv_role": "kv_both"})
    with run_engine(dense, tmp_path / "both", both) as engine:
        assert run(engine) == alone
        assert len(engine.admissions()) == len(PROMPTS) + 1
        assert engine.statistics()["num_requests"] == len(PROMPTS) + 1


def test_what_another_connector_loads_is_not_filled(tmp_path: Path, alone: list[list[int]]) -> None:
    """The other one stores what this engine computed, and comes first."""
    dense = write_model("dense", tmp_path)
    storage = {"shared_storage_path": str(tmp_path / "storage")}
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": storage,
    }
    both = multi(example, transfer("Ours"))
    with run_engine(dense, tmp_path / "both", both, enable_prefix_caching=False) as engine:
        assert engine.generate(PROMPTS[:5]) == alone[:5]
        assert len(engine.admissions()) == 5
        engine.generate(PROMPTS[:5])
        assert len(engine.admissions()) == 5, "the other one has them all"
        assert engine.problems() == []


def test_the_plugin_registers_a_name_of_its_own(tmp_path: Path, alone: list[list[int]]) -> None:
    dense = write_model("dense", tmp_path)
    name = {"kv_connector": "DecodeBench", "kv_role": "kv_both"}
    with run_engine(dense, tmp_path / "plugin", name) as engine:
        tokens = engine.generate(PROMPTS)
        assert tokens == alone[: len(PROMPTS)]
        assert engine.statistics()["num_requests"] == len(PROMPTS)


def test_an_unknown_option_stops_the_engine(tmp_path: Path) -> None:
    dense = write_model("dense", tmp_path)
    with (
        pytest.raises(ValueError, match="unknown option 'fill_meen', known are fill_mean"),
        run_engine(dense, tmp_path / "wrong", transfer("Ours", fill_meen=1.0)),
    ):
        pass


def test_a_block_size_of_its_own(tmp_path: Path) -> None:
    dense = write_model("dense", tmp_path)
    with run_engine(dense, tmp_path / "large", transfer("Ours"), block_size=4 * BLOCK) as engine:
        run(engine)
