"""Tiny models whose weights are made up, as Hugging Face configurations."""

import json
from pathlib import Path
from typing import Any, Final

VOCABULARY: Final = 128

_COMMON: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

MODELS: Final[dict[str, dict[str, Any]]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 2,
        "head_dim": 32,
    },
    # Two groups of windows, and one of full attention.
    "windows": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "head_dim": 32,
        "sliding_window": 64,
        "sliding_window_pattern": 3,
        "layer_types": ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(6)],
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    # Short convolutions, whose states stand in pages of raw bytes, and full attention.
    "states": {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "conv_L_cache": 3,
        "conv_dim": 64,
        "block_dim": 64,
        "block_multiple_of": 64,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False,
        "tie_word_embeddings": True,
    },
}


def write_model(name: str, directory: Path) -> Path:
    """Write a model's configuration and return the folder that holds it."""
    folder = directory / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**_COMMON, **MODELS[name]}))
    return folder
