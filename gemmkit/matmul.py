"""``matmul``: D = A B + C with any components, on arrays of any library."""

from __future__ import annotations

from typing import Any

from gemmkit.batched import is_batched, matmul_batched
from gemmkit.components import Component, freeze
from gemmkit.config import Config
from gemmkit.emulator.mode import current_mode
from gemmkit.matrices import Matrix, unwrapped
from gemmkit.planning import Plan
from gemmkit.runtime.arrays import alignment, describe

__all__ = ["matmul"]

_plans: dict[Any, tuple[Plan, Any]] = {}
_LIMIT = 4096                                   # plans kept; beyond it the memory starts anew


def matmul(a: Any, b: Any, c: Any = None, conf: Config | None = None, *, out: Any = None, stream: Any = None,
           **keywords: Any) -> Any:
    """D = A B + C, or what the components make of it.

    Args:
        a: (M, K), b: (K, N), c: (M, N) or None. CuPy arrays, PyTorch CUDA tensors, Numba device arrays, anything with
            ``__cuda_array_interface__`` or DLPack; NumPy arrays under ``with gemmkit.emulate():``. Any strides: a
            transposed or sliced view is read in place, on the arrays' own device (which need not be the current one).
            a and b may also be matrices with structure (`gemmkit.Diagonal(x)`, `Triangular`, `Symmetric`, `Generated`). Of
            arrays of more dimensions the last two are the matrices, and those before are broadcast as NumPy does; out is
            then (..., M, N).
        conf: a configuration of `gemmkit.get_config`; None chooses one by dtypes and sizes.
        out: (M, N), written and returned; None allocates one of a's library, in C order, of NumPy's result type of a
            and b (of c's type if there is a c). It may be c itself, and may overlap nothing else.
        stream: where to launch; None is the current stream of a's library.
        keywords: an ``operator``, ``epilogue``, ``condition``, any of the eight ``transform_...`` of `Config`, a
            ``global_{a,b,c,d}_layout`` for operands that are not plain matrices, and ``gemm_shape=dict(M=, N=, K=)``
            where such layouts leave the sizes open.

    Returns:
        out. Nothing is copied, cast or synchronised.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit each other; an ``out`` that is read-only, or overlaps itself,
            a, b or an array of a component; an array whose address is no multiple of its elements'.
        TypeError: something that is no array; a host array without emulation; a dtype that no operator takes.
        ConfigError: a configuration that no kernel can carry out.
        ComponentError: a component's method that cannot be compiled, with its file and line.

    >>> import numpy as np, gemmkit
    >>> a, b = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((3, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     gemmkit.matmul(a, b, epilogue=gemmkit.epilogues.Bias(np.float32([0.5, 0]))).tolist()
    [[3.5, 3.0], [12.5, 12.0]]
    """
    if isinstance(a, Matrix) or isinstance(b, Matrix):
        product = next((x.product for x in (a, b) if isinstance(x, Matrix) and hasattr(x, "product")), None)
        if product is not None:                                       # it multiplies in its own way
            return product(a, b, c, conf, out, stream, **keywords)
        a, b, keywords = unwrapped(a, b, (c, out), keywords)
    if not keywords and c is None and out is None and stream is None and current_mode() is None:
        return _simplest(a, b, conf)
    if keywords:
        return _with_components(a, b, c, conf, out, stream, keywords)
    key = (_kind(a, "a"), _kind(b, "b"), c is not None and _kind(c, "c"), out is not None and _kind(out, "out"),
           id(conf), current_mode() is not None)
    known = _plans.get(key)
    if known is None:
        if is_batched(a, b, c, conf, {}):
            return matmul_batched(a, b, c, conf, out, stream, {})
        known = _remember(key, Plan(a, b, c, out, conf, {}), conf)
    return known[0](a, b, c, out=out, stream=stream)              # which looks whether the conf's code is what it was


def _simplest(a: Any, b: Any, conf: Config | None) -> Any:
    """``matmul(a, b)``: what is left to do is to look up the plan, allocate and launch."""
    of_a, of_b = describe(a, "a"), describe(b, "b")
    key = (type(a), of_a[1:7], of_a[0] & 15, type(b), of_b[1:7], of_b[0] & 15, id(conf))    # & 15: the alignment class
    known = _plans.get(key)
    if known is None:
        if is_batched(a, b, None, conf, {}):
            return matmul_batched(a, b, None, conf, None, None, {})
        known = _remember(key, Plan(a, b, None, None, conf, {}), conf)
    elif known[0].stands is not None:
        known[0].current()
    return known[0].launch_new(of_a, of_b.pointer)


def _kind(x: Any, name: str) -> Any:
    """What decides how an array is computed with: all but its address and stream."""
    info = describe(x, name)
    return type(x), info[1:7], alignment(info) if len(info.shape) == 2 else info[0] & 15


def _remember(key: Any, made: Plan, conf: Any) -> tuple[Plan, Any]:
    if len(_plans) >= _LIMIT:
        _plans.clear()
    _plans[key] = found = (made, conf)              # conf is kept, so that its id stays its own
    return found


def _with_components(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any]) -> Any:
    frozen = {name: freeze(value) for name, value in keywords.items() if isinstance(value, Component)}
    sizes = keywords.get("gemm_shape")
    if isinstance(sizes, dict):
        sizes = tuple(sizes.items())
    if set(frozen) != {name for name in keywords if name != "gemm_shape"}:      # None and the like: resolved anew each time
        if is_batched(a, b, c, conf, keywords):
            return matmul_batched(a, b, c, conf, out, stream, keywords)
        return Plan(a, b, c, out, conf, keywords)(a, b, c, out=out, stream=stream)
    key = (_kind(a, "a"), _kind(b, "b"), c is not None and _kind(c, "c"), out is not None and _kind(out, "out"),
           id(conf), current_mode() is not None, sizes,
           tuple((name, f.kind, f.fingerprint, tuple((i.shape, i.device) for i in f.arrays)) for name, f in frozen.items()))
    known = None if current_mode() is not None else _plans.get(key)
    if known is None or (known[0].stands is not None and not known[0].stands()):
        if is_batched(a, b, c, conf, keywords):
            return matmul_batched(a, b, c, conf, out, stream, keywords)
        known = _remember(key, Plan(a, b, c, out, conf, keywords), conf)
        if current_mode() is None:
            known[0].forget_arrays(frozen)      # those of the conf are kept by the conf
    made = known[0]
    made.check_components(frozen, keywords, a, b, c, out)
    values = list(made.values)
    for name, f in frozen.items():
        values[made.ranges[name]] = [value for _, value in f.leaves]
    return made.run(tuple(values), a, b, c, out, stream)
