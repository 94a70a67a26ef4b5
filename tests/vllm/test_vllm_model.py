"""Groups and pages of a model, against vLLM's own grouping of the same layers."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm.v1", reason="vLLM is not installed")

import torch
from vllm.v1.core import kv_cache_utils as engine
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from decodebench.model import ModelCache, read_model

GIB = 1 << 30


def model_of(tmp_path: Path, layer_types: list[str], tp: int) -> ModelCache:
    path = tmp_path / "config.json"
    config: dict[str, Any] = {
        "architectures": ["GptOssForCausalLM"],
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "hidden_size": 2880,
        "torch_dtype": "bfloat16",
        "sliding_window": 128,
        "layer_types": layer_types,
    }
    path.write_text(json.dumps(config))
    return read_model(str(path), tp=tp)


@pytest.mark.parametrize("tp", [1, 4, 16])
@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize(
    ("full", "window", "repeats"),
    [(1, 0, 5), (0, 1, 5), (1, 1, 12), (1, 5, 4), (3, 1, 6), (4, 5, 1), (2, 3, 1), (13, 12, 1)],
)
def test_the_engine_groups_the_same(
    tmp_path: Path, full: int, window: int, repeats: int, block_size: int, tp: int
) -> None:
    kinds = (["sliding_attention"] * window + ["full_attention"] * full) * repeats
    model = model_of(tmp_path, kinds, tp)
    shape = {
        "block_size": block_size,
        "num_kv_heads": model.kv_heads,
        "head_size": 64,
        "dtype": torch.bfloat16,
    }
    specs = {
        f"layer.{index}": SlidingWindowSpec(**shape, sliding_window=128)
        if kind == "sliding_attention"
        else FullAttentionSpec(**shape)
        for index, kind in enumerate(kinds)
    }
    groups = engine._get_kv_cache_groups_uniform_page_size(specs)
    theirs = [
        f"window:{group.kv_cache_spec.sliding_window}"
        if isinstance(group.kv_cache_spec, SlidingWindowSpec)
        else "full"
        for group in groups
    ]
    assert model.groups == theirs
    page = groups[0].kv_cache_spec.page_size_bytes
    block = max(len(group.layer_names) for group in groups) * page
    assert model.num_blocks(7 * GIB, block_size) == 7 * GIB // block
