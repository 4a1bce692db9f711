"""Kernels in Graphene's way: a function of blocks, threads and tensors (Fig. 8).

>>> from gemmkit import specs
>>> from gemmkit.specs import T
>>> @specs.kernel(grid=(2, 2), block=(4, 4))
... def product(blocks, threads, A: T[8, 8].fp32.GL, B: T[8, 8].fp32.GL, C: T[8, 8].fp32.GL):
...     i, j = blocks.indices()
...     m, n = threads.indices()
...     a, b = A.tile(4, ALL)[i, 0], B.tile(ALL, 4)[0, j]
...     c = C.tile(4, 4)[i, j][m, n]
...     specs.Init(threads.scalar(), c)
...     for k in range(8):
...         specs.MatMul(threads.scalar(), a[m, k], b[k, n], c)      # [].fp32.GL, [].fp32.GL -> [].fp32.GL: fmaf
>>> import gemmkit, numpy as np
>>> x, out = np.eye(8, dtype=np.float32), np.zeros((8, 8), np.float32)
>>> with gemmkit.emulate():
...     product(x, x * 3, out)
>>> float(out.sum())
24.0

What a parameter is annotated with is its tensor's type. The body is device code: compiled for a GPU, Python in the emulator.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, ClassVar

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.runtime.arrays import describe
from gemmkit.shapes import ALL, Shape
from gemmkit.specs.forms import GL, Form
from gemmkit.specs.launching import Array, Code, Kernel, example
from gemmkit.specs.tensors import TensorError, on
from gemmkit.specs.threads import Blocks, Threads

__all__ = ["ALL", "SpecKernel", "kernel"]


@dataclass(frozen=True)
class Decomposition(Component):
    """What the kernel is specialised by: the function, with the shapes that it is given."""

    without_value: ClassVar[tuple[str, ...]] = ("function",)
    function: Any
    blocks: Blocks
    threads: Threads
    forms: tuple


class SpecKernel:
    """A decorated function; called with arrays, it runs."""

    def __init__(self, function: Any, grid: tuple, block: tuple, shared_bytes: int):
        self.__name__, self.__doc__ = function.__name__, function.__doc__
        notes = inspect.get_annotations(function, eval_str=True)
        self.names = tuple(inspect.signature(function).parameters)[2:]            # behind blocks and threads
        self.forms: tuple[Any, ...] = tuple(notes.get(name) for name in self.names)
        wrong = next((name for name, form in zip(self.names, self.forms) if not isinstance(form, Form) or form.memory != GL),
                     None)
        if wrong is not None or len(self.forms) not in _ENTRIES:
            raise TensorError(f"{self.__name__}({wrong or ''}): annotate each of 1 to {max(_ENTRIES)} tensors with its "
                              "type, for example T[64, 64].fp16.GL")
        decomposition = Decomposition(function, Blocks((Shape(grid),)), Threads((Shape(block),)), self.forms)
        self._kernel = Kernel(_ENTRIES[len(self.forms)], decomposition, math.prod(block), math.prod(grid), shared_bytes)

    def __call__(self, *arrays: Any, stream: Any = None) -> None:
        """Run it on arrays, in the order of the tensors. Raises ValueError and TypeError for arrays that are not of their
        types, before anything is compiled."""
        if len(arrays) != len(self.forms):
            raise TypeError(f"{self.__name__} takes {len(self.forms)} arrays, not {len(arrays)}")
        for name, form, array in zip(self.names, self.forms, arrays):
            info = describe(array, name)
            if len(info.shape) != form.rank or any(e not in (None, size) for e, size in zip(form.extents, info.shape)):
                raise ValueError(f"{name} is of shape {info.shape}, and its type is {form}")
            if info.dtype != form.dtype:
                raise TypeError(f"{name} is of {info.dtype}, and its type is {form}")
        self._kernel.run([Array(array, name) for array, name in zip(arrays, self.names)], stream)

    def compile(self, *orders: str) -> Code:
        """PTX and machine code for an H100, without a GPU; each matrix is row-major, or as ``orders`` ("row", "col") say."""
        orders = orders or ("row",) * len(self.forms)
        infos = [example([e or 4096 for e in form.extents], form.dtype, order) for form, order in zip(self.forms, orders)]
        return self._kernel.compile((False,) * len(infos), infos)


def kernel(grid: tuple, block: tuple, shared_bytes: int = 0) -> Any:
    """Decorate a function of (blocks, threads, tensors...): ``grid`` and ``block`` are the shapes of its blocks and threads.

    Raises TensorError where a tensor is not annotated with its type.
    """
    return lambda function: SpecKernel(function, grid, block, shared_bytes)


# -- entries ----------------------------------------------------------------------------------------------------------

def _one(spec: Any, a: Any) -> None:
    spec.function(spec.blocks, spec.threads, on(a, spec.forms[0]))


def _two(spec: Any, a: Any, b: Any) -> None:
    spec.function(spec.blocks, spec.threads, on(a, spec.forms[0]), on(b, spec.forms[1]))


def _three(spec: Any, a: Any, b: Any, c: Any) -> None:
    spec.function(spec.blocks, spec.threads, on(a, spec.forms[0]), on(b, spec.forms[1]), on(c, spec.forms[2]))


def _four(spec: Any, a: Any, b: Any, c: Any, d: Any) -> None:
    spec.function(spec.blocks, spec.threads, on(a, spec.forms[0]), on(b, spec.forms[1]), on(c, spec.forms[2]),
                  on(d, spec.forms[3]))


_ENTRIES = {1: _one, 2: _two, 3: _three, 4: _four}
