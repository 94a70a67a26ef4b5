"""The engine's cache tensors as layers that can be filled."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, KVQuantMode, MambaSpec

from decodebench import LayoutError, Planner
from decodebench.dtypes import ENCODINGS
from decodebench.layout import Layer

__all__ = ["CacheReader"]

logger = init_logger(f"vllm.{__name__}")


@dataclass(frozen=True, slots=True)
class CacheReader:
    """Turns the tensors that the engine registers for a layer into :class:`Layer` values.

    Args:
        planner: The block pool and the groups that the caches belong to.
        cache_dtype: The engine's ``cache_dtype``, which tells fp8 types stored as uint8 apart.
        interleave: Slots that hold tokens of one context-parallel rank before the next one's.
    """

    planner: Planner
    cache_dtype: str
    interleave: int

    def layers(self, name: str, group: int, spec: KVCacheSpec, cache: object) -> Iterator[Layer]:
        """Return one layer per tensor of a cache: a tensor, or a list or tuple of them.

        Raises:
            LayoutError: A tensor cannot be addressed block by block, or is on a device that there
                is no backend for.
        """
        if isinstance(cache, torch.Tensor):
            if isinstance(spec, MambaSpec) and cache.dtype in (torch.int8, torch.uint8):
                yield from self._states(name, group, spec, cache)
            else:
                yield self._layer(name, group, spec, cache)
            return
        if not isinstance(cache, list | tuple):
            raise LayoutError(
                f"layer {name!r}: expected a tensor, or a list or tuple of them, "
                f"got {type(cache).__name__}"
            )
        for number, tensor in enumerate(cache):
            yield self._layer(f"{name}[{number}]", group, spec, tensor)

    def _layer(self, name: str, group: int, spec: KVCacheSpec, tensor: torch.Tensor) -> Layer:
        dtype = _fp8_dtype(spec, self.cache_dtype) or tensor.dtype
        zeros = _name(dtype) not in ENCODINGS
        if zeros and self.planner.groups[group].indexing in ("positional", "state"):
            logger.warning_once(
                "KV caches of %s, such as that of layer %s, hold no plain floating-point values "
                "and are filled with zeros",
                dtype,
                name,
            )
        on_gpu = tensor.device.type == "cuda"
        return Layer(
            tensor if on_gpu else _array(name, tensor, dtype),
            self.planner,
            group,
            name=name,
            dtype=_name(dtype) if on_gpu and not zeros else None,
            token_axis=self._token_axis(group, spec, tensor),
            interleave=self.interleave,
            zeros=zeros,
            whole_blocks=True,
        )

    def _states(
        self, name: str, group: int, spec: MambaSpec, tensor: torch.Tensor
    ) -> Iterator[Layer]:
        """Return the typed states of raw pages: one after the other, aligned, then padding."""
        pages = tensor.flatten(1)
        if pages.data_ptr() != tensor.data_ptr():
            raise LayoutError(
                f"layer {name!r}: state pages of shape {tuple(tensor.shape)} and strides "
                f"{tensor.stride()} are not contiguous"
            )
        alignment = getattr(spec, "state_alignment", 1)  # from vLLM 0.34 on
        offset = 0
        for number, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
            end = offset + prod(shape) * dtype.itemsize
            if end > pages.shape[1]:
                raise LayoutError(
                    f"layer {name!r}: state {number} ends at byte {end} of a page of "
                    f"{pages.shape[1]}"
                )
            yield self._layer(f"{name}[{number}]", group, spec, pages[:, offset:end].view(dtype))
            offset = -(-end // alignment) * alignment

    def _token_axis(self, group: int, spec: KVCacheSpec, tensor: torch.Tensor) -> int | None:
        """Return the axis of token slots of a ``[blocks, heads, slots, content]`` view."""
        if self.planner.groups[group].indexing != "positional" or tensor.ndim != 4:
            return None
        rows, rest = divmod(tensor.shape[0], self.planner.num_blocks)
        if rest or getattr(spec, "num_states", None) != rows * tensor.shape[2]:
            return None
        return 2


def _fp8_dtype(spec: KVCacheSpec, cache_dtype: str) -> torch.dtype | None:
    """Return the type of plain fp8 values that a cache stores as uint8, else None.

    Pages with scales or other content between the values are not plain.
    """
    if (
        not isinstance(spec, AttentionSpec)
        or spec.dtype != torch.uint8
        or spec.kv_quant_mode != KVQuantMode.FP8_PER_TENSOR
        or getattr(spec, "state_content_bytes", None) is not None
    ):
        return None
    cache_dtype = getattr(spec, "cache_dtype_str", None) or cache_dtype
    if cache_dtype in ("fp8", "fp8_e4m3"):
        return current_platform.fp8_dtype()
    return torch.float8_e5m2 if cache_dtype == "fp8_e5m2" else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class _Memory:
    __array_interface__: dict[str, Any]
    owner: torch.Tensor


def _array(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> NDArray[Any]:
    """Return the memory of a tensor as an array of ``dtype``; nothing is read."""
    if tensor.device.type != "cpu":
        raise LayoutError(
            f"layer {name!r}: its KV cache is on {tensor.device}, which there is no backend for"
        )
    itemsize = tensor.element_size()
    memory = np.asarray(
        _Memory(
            {
                "version": 3,
                "data": (tensor.data_ptr(), False),
                "typestr": f"|V{itemsize}",
                "shape": tuple(tensor.shape),
                "strides": tuple(stride * itemsize for stride in tensor.stride()),
            },
            tensor,
        )
    )
    return memory.view(ENCODINGS.get(_name(dtype), np.dtype(f"V{itemsize}")))
