"""From a model's Hugging Face config to KV-cache groups and the size of the block pool.

The rules are those of vLLM 0.32 (``vllm/v1/core/kv_cache_utils.py``): layers of one kind form a
group; with full and window layers, groups get equally many layers, padded if need be; a block holds
one page per layer of a group.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from decodebench.errors import DecodeBenchError

_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
CACHE_DTYPES = sorted(_BYTES)

_FULL = {
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
}
_WINDOWED = {"Gemma3ForCausalLM", "Gemma3ForConditionalGeneration", "GptOssForCausalLM"}
_MLA = {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"}


@dataclass(frozen=True, slots=True)
class ModelCache:
    """The KV cache of one rank.

    Attributes:
        architecture: Name of the model class.
        groups: KV-cache groups, ``full`` or ``window:TOKENS``.
        layers_per_group: Layers that share a group's block, padding counted.
        layers: Layers that have a cache.
        kv_heads: Key-value heads on this rank; 1 for latent attention.
        head_dim: Elements of a head's key; of the latent vector with its rotary part for latent
            attention.
        dtype: Element type of the cache.
        bytes_per_token_and_layer: Of keys and values, or of the latent vector.
    """

    architecture: str
    groups: list[str]
    layers_per_group: int
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    bytes_per_token_and_layer: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token that every layer keeps."""
        return self.layers * self.bytes_per_token_and_layer

    def num_blocks(self, cache_bytes: int, block_size: int) -> int:
        """Return how many blocks of ``block_size`` tokens fit, the null block counted."""
        return cache_bytes // (self.layers_per_group * block_size * self.bytes_per_token_and_layer)


def read_model(path: str, *, tp: int = 1, cache_dtype: str = "auto") -> ModelCache:
    """Read a ``config.json``.

    Args:
        path: The file.
        tp: Tensor-parallel ranks, over which key-value heads are dealt out.
        cache_dtype: ``auto`` for the model's own type, or one of :data:`CACHE_DTYPES`.

    Raises:
        DecodeBenchError: The file is no such config, or of an architecture that is not known.
    """
    try:
        with open(path, "rb") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DecodeBenchError(f"{path}: cannot read: {reason}") from None
    try:
        return _derive(config, tp, cache_dtype)
    except DecodeBenchError as error:
        raise DecodeBenchError(f"{path}: {error}") from None


def _derive(config: Any, tp: int, cache_dtype: str) -> ModelCache:
    if not isinstance(config, dict):
        raise DecodeBenchError("not a JSON object")
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise DecodeBenchError("architectures names no single model class")
    architecture = names[0]
    if architecture not in _FULL | _WINDOWED | _MLA:
        raise DecodeBenchError(f"architecture {architecture} is not known")
    text = config.get("text_config", config)
    if not isinstance(text, dict):
        raise DecodeBenchError("text_config is no object")
    if text.get("use_sliding_window"):
        raise DecodeBenchError("use_sliding_window is not known for this architecture")
    dtype = _own_dtype(config, text) if cache_dtype == "auto" else cache_dtype
    layers = _number(text, "num_hidden_layers")
    if architecture in _MLA:
        kv_heads, head_dim = 1, _number(text, "kv_lora_rank") + _number(text, "qk_rope_head_dim")
        per_token = head_dim * _BYTES[dtype]
    else:
        heads = _number(text, "num_attention_heads")
        total = _number(text, "num_key_value_heads", heads)
        if heads % tp or (total % tp and tp % total):
            raise DecodeBenchError(f"{heads} and {total} heads cannot be dealt out to {tp} ranks")
        kv_heads = max(1, total // tp)
        head_dim = _number(text, "head_dim", _number(text, "hidden_size", heads) // heads)
        per_token = 2 * kv_heads * head_dim * _BYTES[dtype]
    windowed = architecture in _WINDOWED
    groups, layers_per_group = _grouped(_windows(text, layers) if windowed else [None] * layers)
    return ModelCache(
        architecture, groups, layers_per_group, layers, kv_heads, head_dim, dtype, per_token
    )


def _own_dtype(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    for found in (text.get("dtype"), text.get("torch_dtype"), config.get("torch_dtype")):
        if found is not None:
            if isinstance(found, str) and found in _BYTES:
                return found
            raise DecodeBenchError(f"torch_dtype {found!r} is not known")
    raise DecodeBenchError("torch_dtype is missing")


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    """The window of each layer, ``None`` for full attention."""
    kinds = text.get("layer_types")
    if kinds is None:
        pattern = _number(text, "sliding_window_pattern")
        kinds = [
            "sliding_attention" if (layer + 1) % pattern else "full_attention"
            for layer in range(layers)
        ]
    known = {"sliding_attention", "full_attention"}
    if not isinstance(kinds, list) or len(kinds) != layers or not known.issuperset(map(str, kinds)):
        raise DecodeBenchError("layer_types does not name full or sliding attention layer by layer")
    window = _number(text, "sliding_window") if "sliding_attention" in kinds else None
    return [window if kind == "sliding_attention" else None for kind in kinds]


def _grouped(windows: Sequence[int | None]) -> tuple[list[str], int]:
    """Groups in order of their first layer, and the layers of each, padding counted."""
    counts: dict[int | None, int] = {}
    for window in windows:
        counts[window] = counts.get(window, 0) + 1
    size, most = min(counts.values()), max(counts.values())
    if 2 * most < 3 * size:
        size = most
    groups: list[str] = []
    for window, count in counts.items():
        name = "full" if window is None else f"window:{window}"
        groups += [name] * -(-count // size)
    return groups, size


def _number(text: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = text.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 1 << 31:
        raise DecodeBenchError(f"{key} is {'missing' if value is None else 'no positive number'}")
    return value
