"""What a measurement needs of an array library: arrays, the peer's product, a reference, graphs, events.

`choose` takes PyTorch if it is there, else CuPy. Both peers are cuBLAS.
"""

from __future__ import annotations

import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from bench.harness import Call

Array = Any  # a CuPy array or a PyTorch tensor on the device


class Backend(ABC):
    """One array library on the current CUDA device. Shapes are (rows, columns), times are in microseconds."""

    name: str
    dtypes: tuple[str, ...]

    @abstractmethod
    def normal(self, rows: int, columns: int, dtype: str, seed: int) -> Array:
        """A C-ordered array of standard normal numbers (of integers: from all of int8's).

        Zeros would run faster than real data does.
        """

    @abstractmethod
    def empty(self, rows: int, columns: int, dtype: str) -> Array:
        """A C-ordered array with nothing written."""

    @abstractmethod
    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """The peer's product: by cuBLAS, straight into `out`, without TF32."""

    @abstractmethod
    def reference(self, a: Array, b: Array, rows: Array | None = None) -> Array:
        """The product in float64 on the device, of the given rows of `a` or of all."""

    @abstractmethod
    def sample(self, rows: int, count: int, seed: int) -> Array:
        """`count` random row numbers below `rows`, without repetition."""

    @abstractmethod
    def relative_error(self, out: Array, reference: Array) -> float:
        """norm(out - reference) / norm(reference) in float64; NaN if `out` has one."""

    @abstractmethod
    def capture(self, calls: Sequence[Call]) -> Call:
        """Record the calls in a CUDA graph; the result launches it on the current stream."""

    @abstractmethod
    def elapsed_us(self, call: Call) -> float:
        """Time of one call between two events.

        The call is made once before the first event: the device is busy while the host enqueues what is
        timed, so that no gap of the host's making lies between the events.
        """

    @abstractmethod
    def synchronise(self) -> None:
        """Wait for all work of the device."""

    @abstractmethod
    def device(self) -> str:
        """The device's name."""

    @abstractmethod
    def l2_bytes(self) -> int:
        """The size of the device's L2 cache."""

    @abstractmethod
    def peer_name(self) -> str:
        """What results call the peer."""

    def poison(self, array: Array) -> None:
        """Fill `array` with NaN, or with the largest value where its type has none."""
        array.fill(float("nan"))

    def itemsize(self, dtype: str) -> int:
        """Bytes of one element."""
        return int(self.empty(1, 1, dtype).itemsize)

    def known(self, dtype: str) -> str:
        """`dtype` itself, if the library has it.

        Raises:
            ValueError: it has not.
        """
        if dtype not in self.dtypes:
            raise ValueError(
                f"dtype: {self.name} has no {dtype!r} to compare with, only {', '.join(self.dtypes)}"
            )
        return dtype


class Torch(Backend):
    """PyTorch tensors; the peer is torch.matmul."""

    name = "torch"
    types: ClassVar = {
        "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
        "i8": "int8", "i32": "int32", "e4m3": "float8_e4m3fn",
    }  # fmt: skip
    dtypes = tuple(types)

    def __init__(self) -> None:
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no CUDA device")
        torch.backends.cuda.matmul.allow_tf32 = False
        self.torch = torch
        self._types = {name: getattr(torch, attribute) for name, attribute in self.types.items()}

    def normal(self, rows: int, columns: int, dtype: str, seed: int) -> Array:
        generator = self.torch.Generator(device="cuda").manual_seed(seed)
        if dtype in ("i8", "i32"):  # as many bits as there are: all of int8
            numbers = self.torch.randint(-128, 128, (rows, columns), device="cuda", generator=generator)
        else:
            numbers = self.torch.randn(rows, columns, device="cuda", generator=generator)
        return numbers.to(self._types[self.known(dtype)])

    def empty(self, rows: int, columns: int, dtype: str) -> Array:
        return self.torch.empty(rows, columns, device="cuda", dtype=self._types[self.known(dtype)])

    def poison(self, array: Array) -> None:
        dtype = array.dtype
        array.fill_(float("nan") if dtype.is_floating_point else self.torch.iinfo(dtype).max)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        self.torch.matmul(a, b, out=out)

    def reference(self, a: Array, b: Array, rows: Array | None = None) -> Array:
        return (a if rows is None else a[rows]).double() @ b.double()

    def sample(self, rows: int, count: int, seed: int) -> Array:
        generator = self.torch.Generator(device="cuda").manual_seed(seed)
        return self.torch.randperm(rows, device="cuda", generator=generator)[:count]

    def relative_error(self, out: Array, reference: Array) -> float:
        norm = self.torch.linalg.vector_norm
        return float(norm(out.double() - reference) / norm(reference))

    def capture(self, calls: Sequence[Call]) -> Call:
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            for call in calls:
                call()
        replay: Call = graph.replay
        return replay

    def elapsed_us(self, call: Call) -> float:
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def synchronise(self) -> None:
        self.torch.cuda.synchronize()

    def device(self) -> str:
        return str(self.torch.cuda.get_device_name())

    def l2_bytes(self) -> int:
        return int(self.torch.cuda.get_device_properties(self.torch.cuda.current_device()).L2_cache_size)

    def peer_name(self) -> str:
        return f"cuBLAS (torch {self.torch.__version__})"


class CuPy(Backend):
    """CuPy arrays; the peer is cupy.dot, which unlike cupy.matmul writes into `out` without a copy."""

    name = "cupy"
    dtypes = ("f16", "f32", "f64")

    def __init__(self) -> None:
        import cupy

        if cupy.cuda.runtime.getDeviceCount() == 0:
            raise RuntimeError("CuPy sees no CUDA device")
        self.cupy = cupy
        self._types = dict(zip(self.dtypes, (cupy.float16, cupy.float32, cupy.float64), strict=True))

    def normal(self, rows: int, columns: int, dtype: str, seed: int) -> Array:
        numbers = self.cupy.random.default_rng(seed).standard_normal((rows, columns), dtype=self.cupy.float32)
        return numbers.astype(self._types[self.known(dtype)])

    def empty(self, rows: int, columns: int, dtype: str) -> Array:
        return self.cupy.empty((rows, columns), dtype=self._types[self.known(dtype)])

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        self.cupy.dot(a, b, out=out)

    def reference(self, a: Array, b: Array, rows: Array | None = None) -> Array:
        return (a if rows is None else a[rows]).astype(self.cupy.float64) @ b.astype(self.cupy.float64)

    def sample(self, rows: int, count: int, seed: int) -> Array:
        return self.cupy.random.default_rng(seed).permutation(rows)[:count]

    def relative_error(self, out: Array, reference: Array) -> float:
        norm = self.cupy.linalg.norm
        return float(norm(out.astype(self.cupy.float64) - reference) / norm(reference))

    def capture(self, calls: Sequence[Call]) -> Call:
        stream = self.cupy.cuda.Stream(non_blocking=True)
        self.synchronise()
        with stream:
            for call in calls[:1]:  # what the library allocates for a new stream must not be captured
                call()
            stream.synchronize()
            stream.begin_capture()
            for call in calls:
                call()
            graph = stream.end_capture()
        # A graph launches what was captured on any stream, also on the default one, which cannot be captured.
        return lambda: graph.launch(self.cupy.cuda.get_current_stream())

    def elapsed_us(self, call: Call) -> float:
        start, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(self.cupy.cuda.get_elapsed_time(start, end)) * 1e3

    def synchronise(self) -> None:
        self.cupy.cuda.Device().synchronize()

    def device(self) -> str:
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        return str(properties["name"].decode())

    def l2_bytes(self) -> int:
        return int(self.cupy.cuda.Device().attributes["L2CacheSize"])

    def peer_name(self) -> str:
        return f"cuBLAS (cupy {self.cupy.__version__})"


BACKENDS: dict[str, type[Backend]] = {"torch": Torch, "cupy": CuPy}
DISTRIBUTIONS = {"torch": ("torch",), "cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x")}


def installed() -> list[str]:
    """The names of the array libraries that are installed, in the order in which `choose` prefers them."""

    def there(distribution: str) -> bool:
        try:
            importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            return False
        return True

    return [name for name in BACKENDS if any(map(there, DISTRIBUTIONS[name]))]


def choose(name: str | None = None) -> Backend:
    """The backend called `name`, or the first that is installed.

    Raises:
        ValueError: `name` is no backend.
        RuntimeError: no array library, or no CUDA device.
    """
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, must be one of {', '.join(BACKENDS)}")
    found = installed()
    if name is None and not found:
        raise RuntimeError("measuring needs PyTorch or CuPy: the peer is their cuBLAS; neither is installed")
    return BACKENDS[name or found[0]]()
