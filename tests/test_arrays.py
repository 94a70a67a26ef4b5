"""Arrays of other libraries, stood in for by objects with the same protocols."""

import sys
import types

import numpy as np
import pytest

from cuda_fake import FakeDriver
from decodebench import BackendError, Group, LayoutError, Planner
from decodebench.fill import Filler, filler
from decodebench.layout import Layer
from decodebench.pattern import Constant
from fill_oracle import plan_of

PLANNER = Planner([Group("positional", 16)], 8)


class OnGpu:
    """What CuPy and Numba show of an array."""

    def __init__(self, array, device=0, read_only=False, strides=False):
        self.dtype = array.dtype
        self.device = types.SimpleNamespace(id=device)
        self.__cuda_array_interface__ = {
            "shape": array.shape,
            "typestr": array.dtype.str,
            "data": (array.ctypes.data, read_only),
            "strides": array.strides if strides else None,
            "version": 3,
        }


class Tensor:
    """What torch shows of a tensor; its module is set to torch's."""

    def __init__(self, array, dtype, device="cpu", index=None):
        self._array, self.dtype = array, f"torch.{dtype}"
        self.device = types.SimpleNamespace(type=device, index=index)
        self.shape = array.shape

    def data_ptr(self):
        return self._array.ctypes.data

    def element_size(self):
        return self._array.itemsize

    def stride(self):
        return tuple(stride // self._array.itemsize for stride in self._array.strides)


Tensor.__module__ = "torch"


class Exporter:
    """DLPack alone."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def cache_of(dtype=np.float16):
    return np.zeros((8, 2, 16, 3, 4), dtype)


@pytest.mark.parametrize("strided", [False, True])
def test_device_arrays_have_the_segments_of_the_same_host_array(strided):
    cache = cache_of()
    view = cache.transpose(0, 1, 3, 2, 4).copy().transpose(0, 1, 3, 2, 4) if strided else cache
    layer = Layer(OnGpu(view, 3, strides=strided), PLANNER, 0)
    assert layer.device == 3
    assert layer.tensors == Layer(view, PLANNER, 0).tensors
    assert Layer(view, PLANNER, 0).device is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("device", "index"), [("cpu", None), ("cuda", 1)])
def test_torch_tensors_are_read_without_torch(dtype, device, index):
    cache = cache_of()
    layer = Layer(Tensor(cache, dtype, device, index), PLANNER, 0)
    expected = Layer(cache.view(np.uint16), PLANNER, 0, dtype=dtype)
    assert (layer.tensors, layer.device) == (expected.tensors, index)
    assert "torch" not in sys.modules


def test_dlpack_alone_is_enough():
    cache = cache_of()
    assert Layer(Exporter(cache), PLANNER, 0).tensors == Layer(cache, PLANNER, 0).tensors


def test_what_cannot_be_written_is_refused():
    for cache, message in (
        (OnGpu(cache_of(), read_only=True), "read-only"),
        (Tensor(cache_of(), "float16", "xpu"), "which there is no backend for"),
        (Tensor(cache_of(), "complex32"), "no known encoding"),
        ((OnGpu(cache_of(), 0), OnGpu(cache_of(), 1)), "its tensors are on devices"),
        (3, "expected an array"),
    ):
        with pytest.raises(LayoutError, match=message):
            Layer(cache, PLANNER, 0, name="one")


def test_caches_on_several_devices_are_refused():
    layers = [
        Layer(cache, PLANNER, 0, name=name)
        for name, cache in (("a", OnGpu(cache_of(), 0)), ("b", OnGpu(cache_of(), 1)))
    ]
    with pytest.raises(LayoutError, match="'a' and 'b' are in CUDA device 0 and CUDA device 1"):
        Filler(layers, Constant(1))
    layers[0] = Layer(cache_of(), PLANNER, 0, name="h")
    with pytest.raises(LayoutError, match="'h' and 'b' are in host memory and CUDA device 1"):
        Filler(layers, Constant(1))


def test_auto_takes_the_backend_of_the_caches(monkeypatch):
    drivers = []

    def made(device):
        drivers.append((device, FakeDriver()))
        return drivers[-1][1]

    monkeypatch.setattr(filler, "CupyDriver", made)
    gpu, host = Layer(OnGpu(cache_of(), 2), PLANNER, 0), Layer(cache_of(), PLANNER, 0)
    plan = plan_of(8, PLANNER.groups, [[3]])
    chosen = Filler([gpu], Constant(1))
    assert (chosen.backend, drivers[0][0]) == ("cuda", 2)
    assert chosen.fill(plan, stream=5) == 768
    assert [call[-1] for call in drivers[0][1].calls if call[0] in ("copy", "launch")] == [5, 5]
    assert Filler([host], Constant(1)).backend == "numpy"
    assert Filler([host], Constant(1), "numpy").fill(plan) == 768
    for layer, backend, message in (
        (host, "cuda", "the caches are in host memory, which backend 'cuda' cannot write"),
        (gpu, "numpy", "memory of CUDA device 2, which backend 'numpy' cannot write"),
        (gpu, "tpu", "there is no backend 'tpu'"),
    ):
        with pytest.raises(BackendError, match=message):
            Filler([layer], Constant(1), backend)
