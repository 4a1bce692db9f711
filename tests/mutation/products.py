"""What the battery's products are made with: small operands, and D against what NumPy says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.kernels.sm90 import mainloop, rewrite, routes
from gemmkit.kernels.spec import Condition
from gemmkit.runtime.device import assumed, gpu
from tests.support.machines import MACHINES, poison, whole
from tests.support.sm90 import F16, F32, mapping, ordered, product

EMULATOR = MACHINES["emulator"]
CASES: dict[str, Callable[[], None]] = {}


class WrongResult(Exception):
    """A product that is not what NumPy says."""


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def multiprocessors(count: int = 1) -> AbstractContextManager[None]:
    """Within it so many do everything, where there would be more."""
    return assumed(gpu(f"sm_90a:{count}"))


def equal(d: np.ndarray, expected: np.ndarray) -> None:
    if not np.array_equal(d, expected.astype(d.dtype)):
        raise WrongResult(f"{np.sum(d != expected.astype(d.dtype))} of {d.size} elements")


def operands(m: int, n: int, k: int, dtype: Any = F16) -> tuple:
    rng = np.random.default_rng(0)
    return tuple(whole(rng, shape, dtype) for shape in ((m, k), (k, n), (m, n)))


def plain(schedule: str, size: tuple[int, int, int], operator: Any = None, dtype: Any = F16, seed: int | None = None,
          **fields: Any) -> None:
    """A B, both by TMA where sizes allow; with ``seed`` in an order of the threads that it draws."""
    a, b, _ = operands(*size, dtype)
    conf = mapping(schedule, operator, **{**dict(stages=2, depth=32 // dtype.itemsize), **fields})
    equal(product(EMULATOR, conf, a, b, seed=seed), a.astype("f8") @ b.astype("f8"))


def product_of(conf: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    out = poison((a.shape[0], b.shape[1]), F32)
    with gk.emulate():
        gk.matmul(ordered(a, conf.global_a_layout), ordered(b, conf.global_b_layout), None, conf, out=out)
    return out


@contextmanager
def pairs() -> Iterator[None]:
    """Transforms are computed two elements at a time, as compiled code does where it can."""
    def is_pairwise(transform: Any, dtype: np.dtype) -> bool:
        return not transform.with_coordinates

    modules: Any = rewrite, routes, mainloop
    kept = rewrite.is_pairwise
    for module in modules:
        module.is_pairwise = is_pairwise
    yield
    for module in modules:
        module.is_pairwise = kept


class Sometimes(Condition):
    is_always = False

    def __call__(self, m, n, k):
        return (m // 64 + k // 16) % 2 == 0
