"""The filler of caches wherever they are."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from decodebench.errors import BackendError, LayoutError
from decodebench.fill import numpy as host
from decodebench.fill.common import Selection
from decodebench.fill.cuda import CudaFiller
from decodebench.fill.driver import CupyDriver
from decodebench.layout import Layer
from decodebench.pattern import Pattern

__all__ = ["Backend", "Filler", "device_of"]

Backend = Literal["auto", "numpy", "cuda"]


class Filler:
    """Fills the selected blocks of the caches of all layers of one planner.

    All that depends on the caches is prepared here: views of them or tables on the GPU, the
    pattern's tiles, and the compiled kernel.

    Args:
        layers: Where to write. Groups without a layer are allowed, and nothing is written for them.
        pattern: What to write; layers that want zeros get those instead. In GPU memory, a constant
            pattern or :class:`decodebench.pattern.Normal`.
        backend: ``"numpy"`` for caches in host memory, ``"cuda"`` for those of one GPU, ``"auto"``
            for what the caches ask for.

    Attributes:
        backend: ``"numpy"`` or ``"cuda"``.

    Raises:
        LayoutError: There is no layer, the layers are of different planners or devices, or tensors
            of one group overlap without being the same.
        PatternError: The pattern has no usable tile for a cache.
        BackendError: The backend does not reach the caches, or cannot be used here.
    """

    __slots__ = ("_impl", "backend")

    def __init__(
        self, layers: Sequence[Layer], pattern: Pattern, backend: Backend = "auto"
    ) -> None:
        if backend not in ("auto", "numpy", "cuda"):
            raise BackendError(f"there is no backend {backend!r}, expected auto, numpy or cuda")
        device = device_of(layers)
        own = "numpy" if device is None else "cuda"
        if backend not in ("auto", own):
            where = "host memory" if device is None else f"the memory of CUDA device {device}"
            raise BackendError(f"the caches are in {where}, which backend {backend!r} cannot write")
        self.backend = own
        self._impl: host.Filler | CudaFiller
        if device is None:
            self._impl = host.Filler(layers, pattern)
        else:
            self._impl = CudaFiller(layers, pattern, CupyDriver(device))

    def fill(
        self,
        plan: Selection,
        *,
        keys: NDArray[np.int64] | None = None,
        stream: object = None,
    ) -> int:
        """Write the pattern to the blocks of ``plan``, whole or the tokens that it names.

        Args:
            plan: The blocks to fill, such as a :class:`decodebench.StepPlan`.
            keys: Integers beside ``plan.block_ids``: in one tensor, equal keys get equal bytes.
                By default, the ids.
            stream: Where a GPU is to write: a handle, or a CuPy or torch stream; None is CuPy's
                current stream. The call returns when the writes are enqueued. Without a meaning in
                host memory.

        Returns:
            Number of bytes written.

        Raises:
            LayoutError: The plan is malformed or not for these caches; nothing is written.
        """
        if isinstance(self._impl, CudaFiller):
            return self._impl.fill(plan, keys=keys, stream=stream)
        return self._impl.fill(plan, keys=keys)


def device_of(layers: Sequence[Layer]) -> int | None:
    """Return the CUDA device of the layers, None for host memory.

    Raises:
        LayoutError: They are not all on one.
    """
    filled = [layer for layer in layers if layer.tensors]  # not those of excluded groups
    for layer in filled:
        if layer.device != filled[0].device:
            places = [
                "host memory" if one.device is None else f"CUDA device {one.device}"
                for one in (filled[0], layer)
            ]
            raise LayoutError(
                f"layers {filled[0].name!r} and {layer.name!r} are in {places[0]} and {places[1]}: "
                "a filler writes to one"
            )
    return filled[0].device if filled else None
