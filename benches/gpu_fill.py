"""The CUDA backend: checked first, then timed against memset, a copy, and the per-layer torch way.

Needs numpy, cupy, torch and the package. ``--fake`` runs the same code without a GPU: memory is the
host's, launches are the kernel built by g++, and times mean nothing. A table goes to standard
output, everything as JSON to ``--output``.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from decodebench import Group, Planner, StepPlan
from decodebench.dtypes import ENCODINGS
from decodebench.fill import cuda, driver
from decodebench.fill.numpy import Filler as NumpyFiller
from decodebench.layout import Layer
from decodebench.pattern import Constant, Normal, Pattern

SPAN = 16
PATTERNS: dict[str, Pattern] = {"constant": Constant(0.015), "normal": Normal(0.015, 0.1, 7)}
POISON = 0xA5


@dataclass(frozen=True)
class Geometry:
    """Layers of one model: elements of a block in each, and the group of each."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[int, ...]


GEOMETRIES = (
    Geometry("dense GQA, 32 layers", ((2, SPAN, 8, 128),) * 32, (0,) * 32),
    Geometry("MLA, 61 layers", ((SPAN, 576),) * 61, (0,) * 61),
    Geometry(
        "hybrid, 8 + 24 layers", ((2, SPAN, 8, 128),) * 8 + ((2048,),) * 24, (0,) * 8 + (1,) * 24
    ),
)


class Gpu:
    """Memory, events and streams of device 0."""

    def __init__(self) -> None:
        import cupy
        import torch

        self.cp, self.torch = cupy, torch
        self.driver: cuda.Driver = driver.CupyDriver(0)
        self.l2 = int(cupy.cuda.Device().attributes["L2CacheSize"])
        self.cold = cupy.empty(4 * self.l2, cupy.uint8)
        self.name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()

    def empty(self, size: int) -> Any:
        return self.cp.full(size, POISON, self.cp.uint8)

    def read(self, memory: Any) -> NDArray[np.uint8]:
        return np.asarray(self.cp.asnumpy(memory))

    def sync(self) -> None:
        self.cp.cuda.Device().synchronize()

    def release(self) -> None:
        self.cp.get_default_memory_pool().free_all_blocks()
        self.torch.cuda.empty_cache()

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the time on the device, with nothing of use in its cache."""
        start, end = self.cp.cuda.Event(), self.cp.cuda.Event()
        self.cold.fill(1)
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(self.cp.cuda.get_elapsed_time(start, end)) / 1e3

    def memset(self, memory: Any, size: int) -> None:
        self.cp.cuda.runtime.memsetAsync(
            memory.data.ptr, 1, size, self.cp.cuda.get_current_stream().ptr
        )

    def copy(self, memory: Any, size: int) -> None:
        half = size // 2
        self.cp.cuda.runtime.memcpyAsync(
            memory.data.ptr, memory.data.ptr + half, half, 3, self.cp.cuda.get_current_stream().ptr
        )

    def address(self, memory: Any) -> int:
        return int(memory.data.ptr)

    def torch_way(
        self, layers: list[Any], ids: NDArray[np.int32], name: str, dtype: str
    ) -> Callable[[], None]:
        """Return a fill by a temporary and an index assignment per layer."""
        torch = self.torch
        with torch.cuda.stream(torch.cuda.ExternalStream(0)):
            index = torch.as_tensor(ids, device="cuda", dtype=torch.int64)
        # torch has no normal samples of fp8: 16-bit ones stand in, of half the elements.
        kind = torch.bfloat16

        def fill() -> None:
            with torch.cuda.stream(torch.cuda.ExternalStream(0)):
                for layer in layers:
                    view = torch.as_tensor(layer, device="cuda").view(kind)
                    shape = (len(ids), view.shape[1])
                    if name == "constant":
                        view[index] = torch.full(shape, 0.015, dtype=kind, device="cuda")
                    else:
                        view[index] = torch.normal(0.015, 0.1, shape, dtype=kind, device="cuda")

        return fill

    def capture(self, call: Callable[[object], object]) -> Callable[[], None]:
        stream = self.cp.cuda.Stream(non_blocking=True)
        self.sync()
        stream.begin_capture()
        call(stream)
        graph = stream.end_capture()

        def replay() -> None:
            graph.launch(stream)
            stream.synchronize()

        return replay

    def streams(self) -> tuple[object, ...]:
        return tuple(self.cp.cuda.Stream(non_blocking=True) for _ in range(2))


class Fake:
    """Host memory in its place."""

    name, l2 = "no GPU", 0

    def __init__(self) -> None:
        sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
        from cuda_fake import GXX, FakeDriver

        self.can_run = GXX is not None
        self.fake = FakeDriver(runs=self.can_run)
        self.driver: cuda.Driver = self.fake

    def empty(self, size: int) -> Any:
        return np.full(size, POISON, np.uint8)

    def read(self, memory: Any) -> NDArray[np.uint8]:
        return np.array(memory)

    def sync(self) -> None:
        pass

    def release(self) -> None:
        pass

    def seconds(self, call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start

    def memset(self, memory: Any, size: int) -> None:
        memory[:size] = 1

    def copy(self, memory: Any, size: int) -> None:
        memory[: size // 2] = memory[size // 2 : size // 2 * 2]

    def address(self, memory: Any) -> int:
        return int(memory.ctypes.data)

    def torch_way(
        self, layers: list[Any], ids: NDArray[np.int32], name: str, dtype: str
    ) -> Callable[[], None]:
        def fill() -> None:
            for layer in layers:
                layer[ids] = 1

        return fill

    def capture(self, call: Callable[[object], object]) -> Callable[[], None]:
        self.fake.captures.add(99)
        call(99)
        return lambda: None

    def streams(self) -> tuple[object, ...]:
        return 3, 4


class Case:
    """Caches of one geometry, and what fills them."""

    def __init__(self, gpu: Any, geometry: Geometry, dtype: str, num_blocks: int) -> None:
        groups = [Group("positional", SPAN), Group("state", SPAN)][: max(geometry.groups) + 1]
        self.gpu, self.dtype, self.geometry = gpu, dtype, geometry
        self.planner = Planner(groups, num_blocks)
        itemsize = ENCODINGS[dtype].itemsize
        self.memories, self.layers = [], []
        self.host_memories: list[NDArray[np.uint8]] = []
        for shape, group in zip(geometry.shapes, geometry.groups, strict=True):
            block = int(np.prod(shape)) * itemsize
            memory = gpu.empty(num_blocks * block)
            typed = memory.view(np.dtype(f"u{itemsize}")).reshape(num_blocks, *shape)
            axis = 1 + shape.index(SPAN) if group == 0 else None
            self.memories.append(memory.reshape(num_blocks, block))
            self.layers.append(Layer(typed, self.planner, group, token_axis=axis, dtype=dtype))
        self.fillers = {
            name: cuda.CudaFiller(self.layers, pattern, gpu.driver)
            for name, pattern in PATTERNS.items()
        }

    def plan(self, requests: int, blocks: int, *, shuffled: bool, local: int = 0) -> StepPlan:
        count = len(self.planner.groups)
        ids = np.arange(1, 1 + count * requests * blocks, dtype=np.int32)
        if shuffled:
            ids = np.random.default_rng(1).permutation(ids)
        tables = ids.reshape(count, requests, blocks)
        return self.planner.plan_step(
            [
                (str(r), local, blocks * SPAN - local, [tables[g, r] for g in range(count)])
                for r in range(requests)
            ]
        )

    def reference(self, name: str, plan: StepPlan) -> list[NDArray[np.uint8]]:
        """Return the bytes that NumPy leaves in poisoned caches."""
        arrays, layers = [], []
        size = ENCODINGS[self.dtype].itemsize
        for shape, group in zip(self.geometry.shapes, self.geometry.groups, strict=True):
            array = np.full((self.planner.num_blocks, int(np.prod(shape)) * size), POISON, np.uint8)
            typed = array.view(f"u{size}").reshape(-1, *shape)
            axis = 1 + shape.index(SPAN) if group == 0 else None
            arrays.append(array)
            layers.append(Layer(typed, self.planner, group, token_axis=axis, dtype=self.dtype))
        NumpyFiller(layers, PATTERNS[name]).fill(plan)
        return arrays

    def poison(self) -> None:
        for memory in self.memories:
            memory[:] = POISON
        self.gpu.sync()

    def expect(self, arrays: list[NDArray[np.uint8]], what: str) -> None:
        self.gpu.sync()
        for number, (memory, array) in enumerate(zip(self.memories, arrays, strict=True)):
            if not np.array_equal(self.gpu.read(memory), array):
                raise SystemExit(f"{self.geometry.name}, {self.dtype}, {what}: layer {number}")


def check(gpu: Any) -> list[str]:
    """Compare every byte with NumPy's; end the program at the first difference."""
    done = []
    for geometry in GEOMETRIES:
        for dtype in ("bfloat16", "float8_e4m3fn"):
            case = Case(gpu, geometry, dtype, 64)
            plan = case.plan(3, 5, shuffled=True, local=5)
            other = case.plan(2, 7, shuffled=False)
            for name, filler in case.fillers.items():
                expected = case.reference(name, plan)
                case.poison()
                filler.fill(plan)
                case.expect(expected, name)
                case.poison()
                replay = gpu.capture(lambda s, f=filler, p=plan: f.fill(p, stream=s))
                for _ in range(6):  # the ring goes round between capture and replay
                    filler.fill(other)
                gpu.sync()
                if isinstance(gpu, Gpu):
                    case.poison()
                    replay()
                    case.expect(expected, f"{name}, graph")
                case.poison()
                first, second = gpu.streams()
                for _ in range(8):
                    filler.fill(plan, stream=first)
                    filler.fill(other, stream=second)
                both = [
                    np.where(one != POISON, one, two)
                    for one, two in zip(expected, case.reference(name, other), strict=True)
                ]
                case.expect(both, f"{name}, two streams")
            done.append(f"{geometry.name}, {dtype}: bytes, neighbours, graph, two streams")
    return done


def bench(gpu: Any, geometry: Geometry, dtype: str, fast: bool) -> list[dict[str, Any]]:
    per_request, counts, rounds = (20, (1, 2), 1) if fast else (2500, (1, 64, 256), 7)
    item = ENCODINGS[dtype].itemsize
    per_block = sum(int(np.prod(shape)) * item for shape in geometry.shapes)
    # 256 requests of 2,500 blocks are more than a card holds: the layers that fit are kept.
    budget = (1 << 30) if fast else (40 << 30)
    rows = []
    for count in counts:
        groups = max(geometry.groups) + 1
        num_blocks = groups * count * per_request + 1
        keep = len(geometry.shapes)
        share = min(1.0, budget / (num_blocks * per_block))
        kept = [i for i in range(keep) if i % max(1, round(1 / share)) == 0]
        part = Geometry(
            geometry.name,
            tuple(geometry.shapes[i] for i in kept),
            tuple(geometry.groups[i] for i in kept),
        )
        case = Case(gpu, part, dtype, num_blocks)
        for shuffled in (False, True):
            plan = case.plan(count, per_request, shuffled=shuffled)
            for name, filler in case.fillers.items():
                size = filler.fill(plan)
                gpu.sync()
                biggest = max(case.memories, key=lambda memory: memory.nbytes)
                flat = biggest.reshape(-1)
                portion = min(size, flat.nbytes)
                layers = case.memories
                calls: dict[str, Callable[[], object]] = {
                    "fill": partial(filler.fill, plan),
                    "memset": partial(gpu.memset, flat, portion),
                    "copy": partial(gpu.copy, flat, portion),
                    "torch": gpu.torch_way(layers, plan.group_block_ids(0), name, dtype),
                }
                times: dict[str, list[float]] = {key: [] for key in calls}
                host: list[float] = []
                for _ in range(rounds):
                    for key, call in calls.items():
                        times[key].append(gpu.seconds(call))
                    start = time.perf_counter()
                    filler.fill(plan)
                    host.append(time.perf_counter() - start)
                    gpu.sync()
                middle = {key: statistics.median(values) for key, values in times.items()}
                written = {"fill": size, "memset": portion, "copy": portion // 2 * 2}
                written["torch"] = sum(
                    plan.group_block_ids(0).size * memory.shape[1] for memory in layers
                )
                rates = {key: written[key] / middle[key] / 1e9 for key in middle}
                rows.append(
                    {
                        "geometry": geometry.name,
                        "layers": len(kept),
                        "dtype": dtype,
                        "requests": count,
                        "ids": "shuffled" if shuffled else "contiguous",
                        "pattern": name,
                        "bytes": size,
                        "seconds": middle,
                        "gb_per_s": rates,
                        "host_us": statistics.median(host) * 1e6,
                    }
                )
        del case, calls, layers, flat, biggest, filler, plan
        gpu.release()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fake", action="store_true", help="no GPU: prove that the script runs")
    parser.add_argument("--fast", action="store_true", help="small steps, one round")
    parser.add_argument("--output", type=Path, help="file for the JSON object")
    args = parser.parse_args()
    gpu: Any = Fake() if args.fake else Gpu()
    started = time.perf_counter()
    checks = check(gpu) if not args.fake or gpu.can_run else []
    for line in checks:
        print(f"checked {line}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for geometry in GEOMETRIES:
        for dtype in ("bfloat16", "float8_e4m3fn"):
            if time.perf_counter() - started < 200:  # what is left out shows in the table
                rows += bench(gpu, geometry, dtype, args.fast or args.fake)
    report = {"device": gpu.name, "l2_bytes": gpu.l2, "checks": checks, "fills": rows}
    if args.output:
        args.output.write_text(json.dumps(report))
    print(f"{gpu.name}: GB/s, share of memset, times torch, host microseconds")
    for row in rows:
        rate = row["gb_per_s"]
        print(
            f"{row['geometry']:<22} {row['layers']:>3} {row['dtype']:<14} {row['requests']:>4} "
            f"{row['ids']:<11} {row['pattern']:<9} {rate['fill']:8.1f} "
            f"{rate['fill'] / rate['memset']:5.0%} {rate['fill'] / rate['torch']:6.1f} "
            f"{row['host_us']:7.1f}"
        )


if __name__ == "__main__":
    main()
