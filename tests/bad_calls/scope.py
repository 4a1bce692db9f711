"""The names that drawn calls may use: gemmkit's, and a few objects that are wrong in ways that take more than an expression."""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit import blas, epilogues, layouts, operators, transforms
from gemmkit.kernels.collectives.scheduler import Columns, Grouped, Hilbert, Order
from gemmkit.kernels.spec import Condition
from gemmkit.layouts.quantised import quantise
from gemmkit.plans import ahead
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import H100
from gemmkit.tools.cli import main

DROP = object()
SMALL = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"),        # one warp a block
                      block_shape=gk.Tile(M=16, N=16, K=16), compute_warp=gk.Tile(M=16, N=16, K=16))


class Interface:
    """An array behind ``__cuda_array_interface__``, some of whose entries are others, or missing."""

    def __init__(self, x: Any, **changed: Any):
        if not isinstance(x, np.ndarray):
            self.entries: Any = x
            return
        self.dtype = x.dtype
        self.entries = {"shape": x.shape, "typestr": x.dtype.str, "data": (x.ctypes.data, False), "version": 3, "strides": None}
        for name, value in changed.items():
            self.entries[name] = value
            if value is DROP:
                del self.entries[name]

    @property
    def __cuda_array_interface__(self) -> Any:
        if isinstance(self.entries, Exception):
            raise self.entries
        return self.entries


class DLPack:
    def __init__(self, capsule: Any, device: Any):
        self.capsule, self.device = capsule, device

    def __dlpack__(self, **keywords: Any) -> Any:
        if isinstance(self.capsule, Exception):
            raise self.capsule
        return self.capsule

    def __dlpack_device__(self) -> Any:
        return self.device


class Raising:
    """Raises at whatever it is asked."""

    def __bool__(self) -> bool:
        raise KeyError("bool")

    def __eq__(self, other: object) -> bool:
        raise KeyError("eq")

    def __hash__(self) -> int:
        raise KeyError("hash")

    def __index__(self) -> int:
        raise KeyError("index")

    def __len__(self) -> int:
        raise KeyError("len")


class Callable:
    def __call__(self, *x: Any) -> Any:
        return x[0]

    def method(self, x: Any) -> Any:
        return x


class Thawed(gk.Component):
    """No dataclass."""

    def __init__(self) -> None:
        self.dtype = np.dtype("f4")

    def __call__(self, x: Any) -> Any:
        return x


@dataclass(frozen=True)
class NoCall(transforms.Transform):
    pass


@dataclass(frozen=True)
class Stateful(epilogues.Epilogue):
    table: Any = None

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return x + self.table


def readonly(x: Any) -> Any:
    if not isinstance(x, np.ndarray):
        return type(x)(map(readonly, x))
    x = x.copy()
    x.flags.writeable = False
    return x


def misaligned(x: Any) -> Any:
    """At an address that is no multiple of the element's size."""
    if not isinstance(x, np.ndarray):
        return type(x)(map(misaligned, x))
    memory = np.zeros(x.nbytes + 1, np.uint8)[1:]
    out = memory.view(x.dtype).reshape(x.shape)
    out[...] = x
    return out


def apart(x: Any) -> Any:
    """With strides that are no multiples of the element's size."""
    if not isinstance(x, np.ndarray):
        return type(x)(map(apart, x))
    record = np.zeros(x.shape, [("value", x.dtype), ("flag", "u1")])
    record["value"] = x
    return record["value"]


def method(base: Any, name: str, arguments: str, body: str, **constants: Any) -> Any:
    """A component's class with one method of the user's."""
    scope = dict(globals())
    exec(f"def {name}(self{', ' if arguments else ''}{arguments}):\n    {body}", scope)
    return dataclass(frozen=True)(type("Mine", (base,), {name: scope[name], **constants}))


def of(seed: int, *shape: int, dtype: Any = "f4") -> np.ndarray:
    """Small whole numbers."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


@gk.program
def users_program(a: Any, b: Any, d: Any) -> None:
    for m, n in gk.programs.parallel(a.rows, b.columns):
        acc = gk.programs.zeros(m, n)
        for k in gk.programs.sequential(a.columns):
            acc += a[m, k] @ b[k, n]
        d[m, n] = acc


users_product = users_program.function
PROGRAMS = (of(1, 64, 64, dtype="f2"), of(2, 64, 64, dtype="f2"), np.zeros((64, 64), np.float32))


def resolved(call: Any) -> Any:
    """What a call returns that is resolved for an H100 and not computed."""
    returned: list[Any] = []
    recorded(lambda: returned.append(call()), H100)
    return returned[0]


def scope() -> dict[str, Any]:
    names = (Callable, Columns, Condition, DLPack, DROP, Grouped, H100, Hilbert, Interface, NoCall, Order, Raising, SMALL, Stateful, Thawed, apart,
             blas, epilogues, functools, gk, ahead, layouts, main, math, method, misaligned, ml_dtypes, np, of, operator, operators, PROGRAMS, quantise,
             readonly, resolved, transforms, users_product, users_program)
    by_value = {id(value): name for name, value in globals().items()}
    torch = {"torch": importlib.import_module("torch")} if importlib.util.find_spec("torch") is not None else {}
    return {**{by_value[id(value)]: value for value in names}, **torch}
