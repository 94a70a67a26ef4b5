"""Pool size and groups from a model's config."""

import json
from pathlib import Path
from typing import Any

import pytest

from decodebench.cli import main
from decodebench.errors import DecodeBenchError
from decodebench.model import ModelCache, read_model

GIB = 1 << 30
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "hidden_size": 1152, "head_dim": 256, "torch_dtype": "bfloat16",
    "sliding_window": 512, "sliding_window_pattern": 6,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "hidden_size": 2880, "head_dim": 64, "torch_dtype": "bfloat16",
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
}  # fmt: skip
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "num_hidden_layers": 61, "kv_lora_rank": 512,
    "num_attention_heads": 128, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def derived(tmp_path: Path) -> Any:
    def derive(config: Any, **options: Any) -> ModelCache:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return read_model(str(path), **options)

    return derive


@pytest.mark.parametrize(
    ("config", "groups", "per_token", "page_layers"),
    [
        (LLAMA, ["full"], 131_072, 32),
        (LLAMA | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 64}, ["full"], 65_536, 32),
        # 22 window layers and 4 full ones: six groups of four, the last window group padded.
        (GEMMA, ["window:512"] * 6 + ["full"], 26_624, 4),
        (GPT_OSS, ["window:128", "full"], 49_152, 12),
        (DEEPSEEK, ["full"], 70_272, 61),
    ],
)
def test_families(
    config: Any, groups: list[str], per_token: int, page_layers: int, derived: Any
) -> None:
    model = derived(config)
    assert (model.groups, model.bytes_per_token) == (groups, per_token)
    page = page_layers * 16 * per_token // config["num_hidden_layers"]
    assert model.num_blocks(40 * GIB, 16) == 40 * GIB // page


def test_ranks_and_dtype(derived: Any) -> None:
    assert derived(LLAMA, tp=4).bytes_per_token == 131_072 // 4
    assert derived(LLAMA, tp=16).bytes_per_token == 131_072 // 8
    assert derived(LLAMA, cache_dtype="fp8").bytes_per_token == 131_072 // 2
    assert derived(DEEPSEEK, tp=8).bytes_per_token == 70_272
    assert derived({"architectures": GEMMA["architectures"], "text_config": GEMMA}) == derived(
        GEMMA
    )


@pytest.mark.parametrize(
    ("config", "options", "reason"),
    [
        ([], {}, "not a JSON object"),
        ({}, {}, "architectures"),
        (LLAMA | {"architectures": ["Qwen3NextForCausalLM"]}, {}, "Qwen3NextForCausalLM is not"),
        (LLAMA | {"num_hidden_layers": None}, {}, "num_hidden_layers is missing"),
        (LLAMA | {"num_hidden_layers": True}, {}, "num_hidden_layers is no positive number"),
        (LLAMA | {"torch_dtype": "int4"}, {}, "'int4'"),
        (LLAMA | {"torch_dtype": None}, {}, "torch_dtype is missing"),
        (LLAMA | {"use_sliding_window": True}, {}, "use_sliding_window"),
        (LLAMA, {"tp": 3}, "3 ranks"),
        (GPT_OSS | {"layer_types": ["mamba"] * 24}, {}, "layer_types"),
        (GPT_OSS | {"sliding_window": None}, {}, "sliding_window is missing"),
    ],
)
def test_refused(config: Any, options: Any, reason: str, derived: Any) -> None:
    with pytest.raises(DecodeBenchError, match=r"config\.json: ") as caught:
        derived(config, **options)
    assert reason in str(caught.value)


def test_a_replay_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT_OSS))
    options = ["replay", "--fill", "none", "--json", "--model", str(path)]
    assert main([*options, "--gpu-memory", "4", "--kv-cache-dtype", "fp8"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["groups"] == ["window:128", "full"]
    assert result["num_blocks"] == result["model"]["num_blocks"] == 4 * GIB // (12 * 16 * 1024)
    for bad in (
        [],
        ["--gpu-memory", "nan"],
        ["--gpu-memory", "1", "--num-blocks", "9"],
        ["--gpu-memory", "1", "--tp", "0"],
        ["--gpu-memory", "1", "--groups", "full"],
        ["--gpu-memory", "1", "--block-size", "0"],
        ["--gpu-memory", "1e-9"],
    ):
        assert main([*options, *bad]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main(["replay", "--gpu-memory", "1"]) == 2
