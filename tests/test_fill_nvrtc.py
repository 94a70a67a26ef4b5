"""The kernel as CUDA's own compiler sees it."""

import re
import subprocess
import sysconfig
from pathlib import Path

import pytest

from cuda_fake import SOURCE
from decodebench.fill.driver import OPTIONS

nvrtc = pytest.importorskip("cuda.bindings.nvrtc")


def call(function, *arguments):
    status, *result = function(*arguments)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    return result[0] if result else None


def text_of(program, size, get):
    buffer = b" " * call(size, program)
    call(get, program, buffer)
    return buffer


def compiled(architecture):
    """Return the machine code, the PTX and the log."""
    program = call(nvrtc.nvrtcCreateProgram, SOURCE.encode(), b"fill.cu", 0, [], [])
    options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}", "--ptxas-options=-v"]
    encoded = [option.encode() for option in options]
    status = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)[0]
    log = text_of(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode()
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log
    cubin = text_of(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    ptx = text_of(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).decode()
    return cubin, ptx, log


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_no_warning_no_spill_and_few_registers(architecture):
    _, ptx, log = compiled(architecture)
    assert "warning" not in log.lower(), log
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", log), log
    assert int(re.search(r"Used (\d+) registers", log)[1]) <= 64, log
    assert ".local" not in ptx
    assert "atom" not in ptx


def test_sm_90_moves_16_bytes_at_a_time(tmp_path):
    cubin, _, _ = compiled(90)
    package = Path(sysconfig.get_path("purelib")) / "nvidia"
    tools = sorted(package.glob("**/bin/nvdisasm"))
    if not tools:
        pytest.skip("there is no nvdisasm")
    file = tmp_path / "fill.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([tools[0], file], capture_output=True, check=True, text=True)
    assert len(re.findall(r"LDG\.E\.128", done.stdout)) >= 4
    assert len(re.findall(r"STG\.E\.128", done.stdout)) >= 4
    assert not re.search(r"\b(LDL|STL)\b", done.stdout)
