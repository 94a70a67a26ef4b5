"""``decodebench env``, with CuPy absent, broken, and stood in for."""

import ctypes
import json
import sys
import types

import pytest

from decodebench import BackendError
from decodebench.cli import main
from decodebench.fill.driver import CupyDriver


def fake_cupy(devices=1, nvrtc=(13, 0)):
    """As much of CuPy as is looked at; ``nvrtc`` may be an error."""

    def version():
        if isinstance(nvrtc, Exception):
            raise nvrtc
        return nvrtc

    properties = {"name": b"H200 [x]", "major": 9, "minor": 0, "totalGlobalMem": 1 << 37}
    runtime = types.SimpleNamespace(
        getDeviceCount=lambda: devices, getDeviceProperties=lambda number: properties
    )
    module = types.ModuleType("cupy")
    module.__version__ = "14.2.0"
    module.cuda = types.SimpleNamespace(
        runtime=runtime, nvrtc=types.SimpleNamespace(getVersion=version)
    )
    return module


@pytest.fixture
def env(monkeypatch, capsys):
    def run(cupy, driver=13000):
        def opened(name):
            assert name == "libcuda.so.1"
            if driver is None:
                raise OSError("not here")

            def get(pointer):
                pointer._obj.value = driver
                return 0

            return types.SimpleNamespace(cuDriverGetVersion=get)

        monkeypatch.setattr(ctypes, "CDLL", opened)
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        assert main(["env"]) == 0
        text = " ".join(capsys.readouterr().out.replace("│", " ").split())
        assert main(["env", "--json"]) == 0
        return json.loads(capsys.readouterr().out), text

    return run


def test_without_cupy_numpy_is_taken_and_the_extras_are_named(env):
    found, text = env(None)
    assert (found["cupy"], found["driver"], found["auto"]) == (None, "13.0", "numpy")
    assert "the extras cuda12 and cuda13 bring it" in found["not_cuda"]
    assert "not cuda CuPy cannot be imported" in text


def test_with_everything_cuda_is_taken(env):
    found, text = env(fake_cupy())
    assert found["problems"] == {}
    assert (found["auto"], found["not_cuda"], found["nvrtc"]) == ("cuda", None, "13.0")
    assert found["devices"] == [
        {"name": "H200 [x]", "compute_capability": "90", "memory_bytes": 1 << 37}
    ]
    assert "H200 [x], sm_90, 128.0 GiB" in text
    assert "backend that auto takes cuda" in text


@pytest.mark.parametrize(
    ("cupy", "driver", "reason"),
    [
        (fake_cupy(devices=0), 13000, "finds no device"),
        (fake_cupy(), None, "there is no NVIDIA driver"),
        (fake_cupy(nvrtc=RuntimeError("no\nlibnvrtc")), 13000, "finds no NVRTC (no libnvrtc)"),
        (types.ModuleType("cupy"), 13000, "CuPy cannot be imported"),
    ],
)
def test_what_is_missing_is_said_and_makes_a_typed_error(env, cupy, driver, reason):
    found, _ = env(cupy, driver)
    assert found["auto"] == "numpy"
    assert reason in found["not_cuda"]
    with pytest.raises(BackendError, match="the CUDA backend is not available: "):
        CupyDriver(0)
