"""Calls that are drawn in pairs, the second like the first but for one thing: what a known call has to notice.

An array is drawn as a place in memory (`Placed`), so that arrays of several libraries, and of two runs, are the same ones.
`DrawnCall.outcome` is what reaches the driver in one call: the kernel, its grid and the bytes of its parameters; or the
error. The second call has one outcome, whether the first came before it or not.
"""

from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

import gemmkit as gk
from bench import stand_ins
from gemmkit import programs as gp
from gemmkit.epilogues import GELU, Bias, ReLU, Residual, Scale, SiLU
from gemmkit.plans.launch import forget
from gemmkit.programs import calls as program_calls
from gemmkit.runtime import arrays, launch
from gemmkit.runtime.array_info import ArrayInfo

BYTES = 1 << 16                        # of each buffer, of which a call's arrays are parts
SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "int32": 4}


class Placed(NamedTuple):
    """An array in one of several buffers; offset and strides are in elements."""

    buffer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = "float16"
    offset: int = 0
    records: bool = False              # whether a tensor requires a gradient


def dense(buffer: int, *shape: int, dtype: str = "float16") -> Placed:
    strides = [math.prod(shape[n + 1:]) for n in range(len(shape))]
    return Placed(buffer, shape, tuple(strides), dtype)


@dataclass(frozen=True)
class DrawnCall:
    """A call by the name of its function, with arrays by their names and other arguments."""

    function: str
    arrays: dict[str, Placed]
    others: dict[str, Any] = field(default_factory=dict)
    records: bool = True               # whether autograd may record


# -- what is drawn --------------------------------------------------------------------------------------------------------

@gk.program
def scaled_product(a: Any, b: Any, d: Any, scale: float) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        acc = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = scale * acc


#: Epilogues that each call makes anew, of a vector, a matrix and a number.
EPILOGUES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "bias": lambda vector, matrix, number: Bias(vector),
    "bias of rows": lambda vector, matrix, number: Bias(vector, "M"),
    "bias and relu": lambda vector, matrix, number: Bias(vector) | ReLU(),
    "relu": lambda vector, matrix, number: ReLU(),
    "gelu": lambda vector, matrix, number: GELU(),
    "gelu by tanh": lambda vector, matrix, number: GELU(form="tanh"),
    "scale": lambda vector, matrix, number: Scale(number),
    "scale of rows": lambda vector, matrix, number: Scale(vector, along="M"),
    "scale and silu": lambda vector, matrix, number: Scale(number) | SiLU(),
    "residual": lambda vector, matrix, number: Residual(matrix),
    "bias, gelu and residual": lambda vector, matrix, number: Bias(vector) | GELU() | Residual(matrix),
}


def drawn(of: random.Random) -> DrawnCall:
    """A call that runs."""
    m, n, k = (of.choice((16, 32, 48)) for _ in range(3))
    function = of.choice(("matmul", "matmul", "plan", "rmsnorm", "layernorm", "softmax", "attention", "einsum", "program"))
    if function in ("matmul", "plan", "program", "einsum"):
        found = {"a": dense(0, m, k), "b": dense(1, k, n)}
        if function == "program" or of.random() < 0.5:
            found["out"] = dense(2, m, n)
        if function == "program":
            return DrawnCall(function, found, {"scale": of.choice((0.5, 2.0, -1.0))})
        if function == "einsum":
            return DrawnCall(function, {**found, "b": dense(1, n, k)}, {"spec": "mk,nk->mn"})
        if of.random() < 0.3:
            found["c"] = dense(3, m, n)
        rule = of.choice((None, *EPILOGUES)) if function == "matmul" else None
        if rule in ("bias", "bias and relu", "bias, gelu and residual"):
            found["vector"] = dense(4, n)
        if rule in ("bias of rows", "scale of rows"):
            found["vector"] = dense(4, m)
        if rule in ("residual", "bias, gelu and residual"):
            found["matrix"] = dense(5, m, n)
        return DrawnCall(function, found, {"epilogue": rule, "number": of.choice((2.0, 0.5))})
    if function == "attention":
        found = {name: dense(at, 2, 2, 16 * (1 + (name != "q")), 32) for at, name in enumerate("qkv")}
        if of.random() < 0.4:
            found["out"] = dense(3, 2, 2, 16, 32)
        if of.random() < 0.4:
            found["key_lengths"] = dense(4, 2, dtype="int32")
        return DrawnCall(function, found, {"mask": of.choice((None, "causal", "window")), "scale": of.choice((None, 0.5)),
                                           "number": of.choice((4, 8))})
    found = {"x": dense(0, m, n)}
    if function != "softmax" and (function == "layernorm" or of.random() < 0.7):
        found["gamma"] = dense(1, n)
    if function == "layernorm":
        found["beta"] = dense(2, n)
    if of.random() < 0.5:
        found["out"] = dense(3, m, n)
    return DrawnCall(function, found, {"number": of.choice((1e-5, 1e-3))})


def changed(call: DrawnCall, of: random.Random, is_torch: bool) -> tuple[str, DrawnCall]:
    """The call with one thing changed, and what that is. It may be one that is refused."""
    name = of.choice(sorted(call.arrays))
    x, found = call.arrays[name], dict(call.arrays)
    size = SIZES[x.dtype]
    hows: dict[str, Callable[[], DrawnCall | None]] = {}

    def array(**how: Any) -> Callable[[], DrawnCall]:
        return lambda: replace(call, arrays={**found, name: x._replace(**how)})

    hows["dtype"] = array(dtype=of.choice([other for other in SIZES if other != x.dtype and SIZES[other] >= size]))
    hows["buffer"] = array(buffer=7)
    hows["an element further on"] = array(offset=x.offset + 1)
    hows["a vector further on"] = array(offset=x.offset + 16)
    hows["another's memory"] = array(buffer=of.choice([y.buffer for y in found.values()]))
    hows["a part of another's memory"] = array(buffer=of.choice([y.buffer for y in found.values()]), offset=x.offset + 32)
    hows["wider rows"] = array(strides=(*[step * 2 for step in x.strides[:-1]], 1)) if len(x.shape) > 1 else array(strides=(2,))
    hows["every second"] = array(strides=(*x.strides[:-1], 2))
    hows["a stride of 0"] = array(strides=(0, *x.strides[1:]))
    hows["fewer"] = array(shape=(*x.shape[:-1], max(1, x.shape[-1] - of.choice((1, 8)))))
    hows["fewer rows"] = array(shape=(max(1, x.shape[0] - 1), *x.shape[1:]))
    hows["one more dimension"] = array(shape=(1, *x.shape), strides=(0, *x.strides))
    hows["all that is there"] = lambda: call
    if len(x.shape) > 1:
        hows["transposed"] = array(shape=(*x.shape[:-2], x.shape[-1], x.shape[-2]),
                                   strides=(*x.strides[:-2], x.strides[-1], x.strides[-2]))
    if is_torch and call.others.get("epilogue") is None:   # whose own numbers autograd keeps in tensors
        hows["gradient"] = array(records=True)
        hows["gradient, not recorded"] = lambda: replace(array(records=True)(), records=False)
    if "out" in found and call.function != "program":
        hows["a new result"] = lambda: replace(call, arrays={key: y for key, y in found.items() if key != "out"})
    for key, values in {"number": (2.0, 0.5, 1e-5, 1e-3, 0.0, -0.0, 4, 8), "scale": (None, 0.5, 2.0, -1.0, 0.0, -0.0),
                        "mask": (None, "causal", "window"), "epilogue": (None, *EPILOGUES),
                        "spec": ("mk,nk->nm", "mk,nk->mn", "km,nk->mn"), "dtype": ("float32", "float16")}.items():
        if key in call.others or (key == "dtype" and call.function in ("matmul", "einsum")):
            value = of.choice(values)
            hows[key] = lambda key=key, value=value: replace(call, others={**call.others, key: value})      # type: ignore[misc]
    how = of.choice(sorted(hows))
    return f"{name if how not in call.others else ''} {how}".strip(), hows[how]() or call


# -- how it is called -----------------------------------------------------------------------------------------------------

def perform(call: DrawnCall, made: Callable[[Placed], Any], plan: Any = None) -> Any:
    """Its result."""
    given = {name: made(x) for name, x in call.arrays.items()}
    others = call.others
    number, out = others.get("number"), given.pop("out", None)
    if call.function in ("matmul", "plan"):
        if call.function == "plan":
            return plan(given["a"], given["b"], given.get("c"), out=out)
        rule = others["epilogue"]
        epilogue = None if rule is None else EPILOGUES[rule](given.get("vector"), given.get("matrix"), number)
        more = {"dtype": np.dtype(others["dtype"])} if "dtype" in others else {}
        return gk.matmul(given["a"], given["b"], given.get("c"), out=out, epilogue=epilogue, **more)
    if call.function == "einsum":
        more = {"dtype": np.dtype(others["dtype"])} if "dtype" in others else {}
        return gk.einsum(others["spec"], given["a"], given["b"], out=out, **more)
    if call.function == "program":
        scaled_product(given["a"], given["b"], out, others["scale"])
        return out
    if call.function == "attention":
        mask = {None: None, "causal": gk.masks.Causal(), "window": gk.masks.Window(int(number or 1))}[others["mask"]]
        return gk.attention(given["q"], given["k"], given["v"], mask=mask, scale=others["scale"], out=out,
                            key_lengths=given.get("key_lengths"))
    if call.function == "softmax":
        return gk.softmax(given["x"], scale=number, out=out)
    if call.function == "rmsnorm":
        return gk.rmsnorm(given["x"], given.get("gamma"), eps=number, out=out)
    return gk.layernorm(given["x"], given["gamma"], given["beta"], eps=number, out=out)


def planned(call: DrawnCall, made: Callable[[Placed], Any]) -> Any:
    """The plan of a call that has one."""
    if call.function != "plan":
        return None
    given = {name: made(x) for name, x in call.arrays.items()}
    return gk.plan(given["a"], given["b"], given.get("c"))


# -- on stand-ins ---------------------------------------------------------------------------------------------------------

class _Kernel(stand_ins.Kernel):
    """A kernel that is told from others by its code."""

    def __init__(self, driver: Driver, number: int):
        super().__init__()
        self.driver, self.number = driver, number

    def _function(self) -> int:
        return self.number

    def bind(self, *how: Any, **more: Any) -> Any:
        bound = super().bind(*how, **more)
        self.driver.sizes[self.number] = bound.packer.size
        return bound


class Driver:
    """Stands for cuLaunchKernelEx: of each launch the kernel's code, how many threads, and the bytes of the parameters."""

    def __init__(self) -> None:
        self.codes: dict[Any, int] = {}
        self.sizes: dict[int, int] = {}
        self.launches: list[Any] = []

    def __call__(self, at_config: Any, function: Any, pointers: Any, extra: Any) -> int:
        config, number = at_config._obj, function.value
        begin = pointers[0]
        how = [*config.grid, *config.block, config.shared_memory, config.stream, config.attribute_count]
        self.launches.append((number, how, ctypes.string_at(begin, self.sizes[number]) if self.sizes[number] else b""))
        return 0

    def entry(self, launchable: launch.Launchable) -> Any:
        code = launchable.kernel.__code__
        key = (code.co_code, repr(code.co_names), launchable.threads, launchable.blocks_per_sm,
               [(str(argument.kind), argument.fingerprint) for argument in launchable.arguments])
        return SimpleNamespace(cubin=repr(key).encode())

    def loaded(self, cubin: bytes) -> _Kernel:
        return _Kernel(self, self.codes.setdefault(cubin, 1 + len(self.codes)))


@dataclass
class World:
    """Where calls run: ``made`` an array at a place, ``driver`` what reaches the driver."""

    made: Callable[[Placed], Any]
    driver: Driver
    is_torch: bool
    recording: Callable[[bool], Any] = lambda records: ExitStack()

    def forget(self) -> None:
        forget(), program_calls.forget_all()

    def outcome(self, call: DrawnCall, plan: Any = None) -> Any:
        """What reaches the driver, or the error."""
        self.driver.launches.clear()
        try:
            with self.recording(call.records):
                result = perform(call, self.made, plan)
            what: Any = "result", tuple(result.shape), str(result.dtype), bool(getattr(result, "requires_grad", False))
        except Exception as error:                         # whatever it is, it is the same however known the call is
            what = type(error).__name__, str(error)
        return what, list(self.driver.launches)


@contextmanager
def driven() -> Iterator[Driver]:
    driver = Driver()
    with stand_ins.gpu(driver), mock.patch.object(launch, "_loaded", driver.loaded), mock.patch.object(
            launch.Launchable, "entry", lambda launchable: driver.entry(launchable)):
        forget(), program_calls.forget_all()
        yield driver
        forget(), program_calls.forget_all()


@contextmanager
def of_cupy() -> Iterator[World]:
    """Arrays that look like CuPy's."""
    def made(x: Placed) -> Any:
        size = SIZES[x.dtype]
        dtype = np.dtype(_bfloat16() if x.dtype == "bfloat16" else x.dtype)
        return stand_ins.CupyArray(x.shape, dtype, (1 << 40) + x.buffer * BYTES + x.offset * size,
                                   tuple(step * size for step in x.strides))

    with driven() as driver, stand_ins.library("cupy"):
        yield World(made, driver, False)


def _bfloat16() -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16


@contextmanager
def tensors_of_a_gpu() -> Iterator[Any]:
    """Within it PyTorch's tensors on the CPU are a GPU's; new ones are made by what this gives."""
    import torch

    empty = torch.empty

    def read(x: Any, name: str) -> ArrayInfo:
        if x.requires_grad and torch.is_grad_enabled():
            raise arrays.RequiresGradient(f"{name} requires a gradient")
        if x.is_neg() or x.is_conj():
            raise ValueError(f"{name} is a lazy view")
        return ArrayInfo(x.data_ptr(), tuple(x.shape), x.stride(), arrays._from_torch()[x.dtype], 0, False, "torch")

    guards = torch._C._dynamo.guards
    with ExitStack() as stack:
        for kind in (torch.Tensor, torch.nn.Parameter):
            stack.enter_context(mock.patch.dict(arrays._READERS, {kind: read}))
            stack.enter_context(mock.patch.dict(arrays.KEYS, {kind: arrays._torch_keys()}))
        stack.enter_context(mock.patch.object(torch, "empty", lambda *shape, device=None, **more: empty(*shape, **more)))
        stack.enter_context(mock.patch.object(guards, "_empty_strided_cuda", guards._empty_strided_cpu))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_getCurrentRawStream", lambda ordinal: 77, create=True))
        yield torch


@contextmanager
def of_torch() -> Iterator[World]:
    """PyTorch's own tensors. Every new one lies in one place."""
    with tensors_of_a_gpu() as torch:
        memory = torch.zeros(9 * BYTES + 256, dtype=torch.uint8)
        memory = memory[-memory.data_ptr() % 256:]

        def made(x: Placed) -> Any:
            buffer = memory[x.buffer * BYTES:].view(getattr(torch, x.dtype))
            found = torch.as_strided(buffer, x.shape, x.strides, buffer.storage_offset() + x.offset)
            return found.detach().requires_grad_() if x.records else found

        def new(shape: Sequence[int], strides: Sequence[int], dtype: Any) -> Any:
            buffer = memory[8 * BYTES:].view(dtype)
            return torch.as_strided(buffer, tuple(shape), tuple(strides), buffer.storage_offset())

        def empty(*shape: Any, dtype: Any = None, **more: Any) -> Any:
            extents = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
            return new(extents, dense(0, *extents).strides, dtype)

        with mock.patch.object(torch._C._dynamo.guards, "_empty_strided_cuda", new), mock.patch.object(
                torch, "empty", empty), driven() as driver:
            yield World(made, driver, True, torch.set_grad_enabled)


WORLDS = {"cupy": of_cupy, "torch": of_torch}


# -- on a GPU -------------------------------------------------------------------------------------------------------------

class OnDevice:
    """Tensors of a GPU: what a call gives is its result's bytes, from memory that is filled anew."""

    is_torch = True

    def __init__(self) -> None:
        import torch

        self.torch = torch
        numbers = np.random.default_rng(20261128).integers(-3, 4, 8 * BYTES // 2)
        filled = (numbers / 4).astype(np.float16)
        filled[4 * BYTES // 2:][:64] = np.int32([5, 9] * 16).view(np.float16)       # where attention's lengths lie
        self.filled = torch.from_numpy(filled.view(np.uint8)).cuda()
        self.memory = self.filled.clone()

    def made(self, x: Placed) -> Any:
        buffer = self.memory[x.buffer * BYTES:].view(getattr(self.torch, x.dtype))
        return self.torch.as_strided(buffer, x.shape, x.strides, buffer.storage_offset() + x.offset)

    def forget(self) -> None:
        forget(), program_calls.forget_all()

    def outcome(self, call: DrawnCall, plan: Any = None) -> Any:
        self.memory.copy_(self.filled)
        try:
            with self.torch.no_grad():
                result = perform(call, self.made, plan)
            what: Any = "result", tuple(result.shape), str(result.dtype), result.contiguous().view(self.torch.uint8).tolist()
        except Exception as error:                         # whatever it is, it is the same however known the call is
            what = type(error).__name__, str(error)
        return what, self.memory.cpu().numpy().tobytes()
