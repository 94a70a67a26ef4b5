"""Every fill of a run, on the real engine, against the bytes that it must write."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from engine_models import MODELS, write_model
from engine_run import BLOCK, Engine, prompt, run_engine, sampling, transfer
from vllm.version import __version_tuple__

LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 3 * BLOCK, 200]


def mixed(engine: Engine) -> list[list[list[int]]]:
    """Requests at and around the ends of blocks, prefix hits of all sizes, and a crowd."""
    alone = [engine.generate([prompt(length, 1 + i)]) for i, length in enumerate(LENGTHS)]
    together = engine.generate([prompt(length, 20 + i) for i, length in enumerate(LENGTHS)])
    base = prompt(200, 40)
    hits = [engine.generate([base], 2 * BLOCK)]
    for shared in (0, BLOCK, 3 * BLOCK, 200):
        hits.append(engine.generate([base[:shared] + prompt(210 - shared, 41 + shared)]))
    hits.append(engine.generate([base]))
    # A second turn, whose prefix holds KV that the engine computed: no fill may write there.
    hits.append(engine.generate([base + hits[0][0] + prompt(BLOCK, 50)]))
    crowd = engine.generate([prompt(20 + i // 4, 300 + i) for i in range(64)], 12)
    return [*alone, together, *hits, crowd]


@pytest.fixture(params=list(MODELS))
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if request.param == "states" and __version_tuple__[:2] < (0, 32):
        # There a CPU with bfloat16 packs every convolution for it, and then cannot run others.
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return write_model(request.param, tmp_path)


def test_every_fill_writes_the_planned_bytes_and_no_others(model: Path, tmp_path: Path) -> None:
    with run_engine(model, tmp_path / "ours", transfer("Ours")) as engine:
        ours = mixed(engine)
        assert engine.problems() == []
        filled = [name for fill in engine.records("fill") for name in fill["requests"]]
        assert len(filled) == len(set(filled)) == len(engine.admissions()), "filled once each"
        # Each request but those of a single token and those found whole in the prefix cache.
        assert len(filled) >= 2 * (len(LENGTHS) - 1) + 4 + 64
        assert all(fill["num_bytes"] for fill in engine.records("fill"))
        assert engine.longest_step() == 1
        if model.name == "dense":
            assert max(one["local"] for one in engine.admissions()) > 200 + BLOCK
    with run_engine(model, tmp_path / "in-tree", transfer("InTree")) as engine:
        in_tree = mixed(engine)
        if model.name == "states":
            assert engine.problems()
        else:
            assert engine.problems() == []
            assert ours == in_tree


def test_external_tokens_start_where_the_prefix_hit_ends(tmp_path: Path) -> None:
    dense = write_model("dense", tmp_path)
    with run_engine(dense, tmp_path / "ours", transfer("Ours")) as engine:
        whole = prompt(6 * BLOCK, 1)
        engine.generate([whole])
        engine.generate([whole])
        for shared in (0, BLOCK - 1, BLOCK, 4 * BLOCK + 1):
            engine.generate([whole[:shared] + prompt(7 * BLOCK - shared, 2 + shared)])
        engine.generate([whole[: BLOCK + 1]])
        said = [(one["local"], one["external"]) for one in engine.admissions()]
        assert said == [
            (0, 6 * BLOCK - 1),
            # The engine never takes a whole prompt from its cache.
            (5 * BLOCK, BLOCK - 1),
            (0, 7 * BLOCK - 1),
            (0, 7 * BLOCK - 1),
            (BLOCK, 6 * BLOCK - 1),
            (4 * BLOCK, 3 * BLOCK - 1),
        ], "the last prompt's only token to compute follows its prefix"
        assert engine.problems() == []


NUM_BLOCKS_UNDER_PRESSURE = {"dense": 40, "windows": 66, "states": 44}


def under_pressure(engine: Engine) -> list[list[int]]:
    """Four requests that fit at first and outgrow the pool."""
    return engine.generate([prompt(275, 1 + i) for i in range(4)], 100)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_preempted_request_is_filled_again_and_never_prefills(
    model: Path, tmp_path: Path, async_scheduling: bool
) -> None:
    arguments = {
        "num_gpu_blocks_override": NUM_BLOCKS_UNDER_PRESSURE[model.name],
        "max_model_len": 512,
        "async_scheduling": async_scheduling,
    }
    with run_engine(model, tmp_path / "ours", transfer("Ours"), **arguments) as engine:
        tokens = under_pressure(engine)
        assert all(len(one) == 100 for one in tokens)
        again = [one for one in engine.admissions() if one["preemptions"]]
        assert again
        assert all(one["local"] + one["external"] > 275 for one in again)
        assert engine.longest_step() == 1
        assert engine.problems() == []


@pytest.mark.parametrize(
    "connector", [transfer("InTree"), transfer("Ours", on_preemption="recompute")]
)
def test_without_a_refill_a_preempted_request_prefills(
    tmp_path: Path, connector: dict[str, Any]
) -> None:
    dense = write_model("dense", tmp_path)
    arguments = {"num_gpu_blocks_override": 40, "max_model_len": 512}
    with run_engine(dense, tmp_path / "records", connector, **arguments) as engine:
        under_pressure(engine)
        assert engine.longest_step() > BLOCK
        assert not any(one["preemptions"] for one in engine.admissions())
        assert engine.problems() == []


def test_blocks_of_an_aborted_request_are_filled_for_the_next_one(
    model: Path, tmp_path: Path
) -> None:
    pool = {"num_gpu_blocks_override": NUM_BLOCKS_UNDER_PRESSURE[model.name], "max_model_len": 512}
    with run_engine(model, tmp_path / "ours", transfer("Ours"), **pool) as engine:
        core = engine.llm.llm_engine
        for i in range(3):
            core.add_request(f"{100 + i}", {"prompt_token_ids": prompt(250, 1 + i)}, sampling(60))
        for _ in range(10):
            core.step()
        core.abort_request(["100", "102"])
        engine.generate([prompt(300, 20 + i) for i in range(4)])
        assert not core.has_unfinished_requests()
        tables = [set(one["tables"][-1]) - {0} for one in engine.admissions()]
        assert len(tables) >= 7
        assert (tables[0] | tables[2]) & set().union(*tables[3:]), "their blocks were taken again"
        assert engine.longest_step() == 1
        assert engine.problems() == []


def test_a_seed_gives_the_same_bytes_in_every_run(model: Path, tmp_path: Path) -> None:
    options = {"fill_mean": 0.5, "fill_std": 0.25}
    prompts = [prompt(100, 1 + i) for i in range(3)]
    seen: list[tuple[list[list[int]], str]] = []
    for run, seed in enumerate([0, 0, 1]):
        connector = transfer("Ours", fill_seed=seed, **options)
        with run_engine(model, tmp_path / str(run), connector) as engine:
            tokens = engine.generate(prompts, 8)
            assert engine.problems() == []
            seen.append((tokens, engine.records("fill")[0]["digest"]))
    assert seen[0] == seen[1]
    assert seen[0][1] != seen[2][1]


def test_a_fill_at_start_up_leaves_only_what_the_engine_zeroes(model: Path, tmp_path: Path) -> None:
    tokens = {}
    for at_startup in (False, True):
        connector = transfer("Ours", startup_fill=at_startup)
        with run_engine(model, tmp_path / f"{at_startup}", connector) as engine:
            tokens[at_startup] = engine.generate([prompt(50 * i, i) for i in range(1, 6)])
            (registered,) = engine.records("register")
            num_bytes = sum(fill["num_bytes"] for fill in engine.records("fill"))
            assert engine.problems() == []
            if not at_startup:
                assert registered["filled"] == []
                assert num_bytes
            elif model.name == "states":
                assert len(registered["filled"]) == 2, "the convolutions' states"
                assert num_bytes, "new attention blocks are zeroed, and so filled by request"
            else:
                assert len(registered["filled"]) == MODELS[model.name]["num_hidden_layers"]
                assert not num_bytes
    assert tokens[False] == tokens[True]
