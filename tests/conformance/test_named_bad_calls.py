"""Calls that users make wrong, by name: each works, or says what is wrong in an error of the caller's kind.

Drawn ones are in `tests.conformance.test_bad_calls`; both are judged by `tests.bad_calls.judge`, in the emulator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemmkit import epilogues
from gemmkit.lang.scalars import numba_type
from tests.bad_calls.judge import Case, good_call, run
from tests.support.lang.typing import INDEX, result

A, B = "of(1, 5, 7)", "of(2, 7, 3)"
AC, BC = "of(1, 5, 7, dtype='c8')", "of(2, 7, 3, dtype='c8')"
SUM = f"{A} @ {B}"


def multiplied(**components: str) -> str:
    return f"gk.matmul({A}, {B}, conf=SMALL, " + ", ".join(f"{name}={value}" for name, value in components.items()) + ")"


def multiplied_numbers(**components: str) -> str:
    conf = ("gk.get_config(operator=operators.Algebra(operators.FPUOp(M=16, N=16), operators.COMPLEX), "
            "global_a_layout=layouts.RowMajor('complex64'), block_shape=gk.Tile(M=16, N=16, K=4), "
            "compute_warp=gk.Tile(M=16, N=16, K=4))")
    return f"gk.matmul({AC}, {BC}, conf={conf}, " + ", ".join(f"{name}={value}" for name, value in components.items()) + ")"


def finishing(body: str) -> str:
    """A product with a user's own epilogue on tiles."""
    return multiplied(epilogue=f"method(epilogues.Epilogue, 'finish', 'values, tile, shape', {body!r})()")


def of_interface(entry: str) -> str:
    return f"gk.matmul(Interface({A}, {entry}), Interface({B}), out=Interface(np.zeros((5, 3), 'f4')))"


INTERFACES = ("shape=DROP", "shape=None", "shape=7", "shape=('5', 7)", "shape=(-5, 7)", "shape=(5.0, 7)", "typestr=DROP", "typestr=4",
              "typestr='<q9'", "typestr=None", "typestr='<f3'", "data=DROP", "data=None", "data=(0,)", "data=('0', False)",
              "data=(3.5, False)", "data=5", "strides='ab'", "strides=(4,)", "strides=('4', 4)", "strides=(28, None)", "version=DROP",
              "version='new'", "version=None")

HALVES = "gk.matmul(of(1, 5, 7, dtype='f2'), of(2, 7, 3, dtype='f2'), {})"

# name: the call, the words of which one is in a right error's text, and NumPy's result where there is one
CALLS: dict[str, tuple[str, tuple[str, ...], str | None]] = {
    # values of other kinds
    **{f"condition={value} of float16": (HALVES.format(f"condition={value}"), ("condition",), None)
       for value in ("3", "'x'", "epilogues.ReLU()")},
    "a function as an epilogue": (HALVES.format("epilogue=lambda x: x * 2"), ("epilogues.Elementwise",), None),
    "a list as a layout": ("gk.attention(of(1, 1, 2, 5, 16, dtype='f2'), of(2, 1, 2, 5, 16, dtype='f2'), of(3, 1, 2, 5, 16, dtype='f2'), "
                           "layout=[[]])", ("layout",), None),
    "a transform of einsum's": (f"gk.einsum('ij,jk->ik', {A}, {B}, transform_global_to_shared_b=transforms.Identity())",
                                ("transform_global_to_shared_b",), None),
    "a tuple as sizes": (f"gk.matmul({A}, {B}, gemm_shape=(5, 3, 7))", (), SUM),
    "a word as an operator of stacks": ("gk.matmul(of(1, 2, 5, 7), of(2, 7, 3), operator='x')", ("operator",), None),
    "dequantised": ("gk.quantisation.dequantise(of(1, 3))", ("matrix",), None),
    "an activation that returns bytes": ("gk.glu(of(1, 5, 7), of(2, 7, 3), of(3, 7, 3), lambda x: b'x')", ("lambda",), None),
    # functions
    "math.exp as an epilogue": (multiplied(epilogue="epilogues.Elementwise(math.exp)"), ("exp",), f"np.exp({SUM})"),
    "math.exp as a transform": (multiplied(transform_regs_to_shared_d="transforms.Map(math.exp)"), ("exp",), f"np.exp({SUM})"),
    "np.exp in a transform": (multiplied(transform_global_to_shared_a="transforms.Map(lambda x: np.exp(x))"), ("math.exp",), None),
    "np.exp as a transform": (multiplied(transform_global_to_shared_a="transforms.Map(np.exp)"), ("exp",), f"np.exp({A}) @ {B}"),
    **{f"a function that returns {what}": (multiplied(epilogue=f"epilogues.Elementwise(lambda x: {what})"),
                                           ("lambda", "__call__", "epilogue", "Elementwise"), None)
       for what in ("(x, x)", "'x'", "None", "math", "1j * x", "np.float32", "()", "(x,)", "lambda y: y")},
    **{f"a transform that returns {what}": (multiplied(transform_shared_to_regs_a=f"transforms.Map(lambda x: {what})"),
                                            ("lambda", "__call__", "transform", "transform_shared_to_regs_a", "Elementwise"), None)
       for what in ("(x, x)", "'x'", "None", "x > 0", "1j * x")},
    "a function of too many arguments": (multiplied(epilogue="epilogues.Elementwise(lambda x, y, z, w: x)"), ("lambda", "f"), None),
    "an order that returns a number": (f"gk.matmul({A}, {B}, conf=gk.get_config(operator=operators.FPUOp(), global_a_layout=layouts.RowMajor('float32'), "
                                   "order=method(Order, 'block', 'linear, rows, columns', 'return linear')()))", ("block",), None),
    "a condition that returns a pair": (multiplied(condition="method(Condition, '__call__', 'm, n, k', 'return m, n')()"), ("__call__",), None),
    "a layout that loads nothing": (multiplied(global_a_layout="method(layouts.Layout, 'element', 'data, i, j, shape', 'pass')('float32')",
                                               gemm_shape="dict(M=5, N=3, K=7)"), ("element",), None),
    # chains on numbers of two parts
    "f | f on complex numbers": (multiplied_numbers(epilogue="epilogues.Elementwise(lambda x: x * 2j) | "
                                                             "epilogues.Elementwise(lambda x: x + 1)"), (), f"({AC} @ {BC}) * 2j + 1"),
    "f | f of the parts": (multiplied_numbers(epilogue="epilogues.Elementwise(lambda x: (x.imag, x.real)) | "
                                                       "epilogues.Elementwise(lambda x: x + 1)"), (),
                           f"1j * np.conj({AC} @ {BC}) + 1"),
    "f | f on an operand's parts": (
        multiplied_numbers(transform_global_to_shared_a="transforms.Map(lambda x: (x.imag, x.real)) | "
                                                        "transforms.Map(lambda x: x + 1)"), (),
        f"(1j * np.conj({AC}) + 1) @ {BC}"),
    "f | f of three parts": (multiplied_numbers(epilogue="epilogues.Elementwise(lambda x: (x.imag, x.real, x.real)) | "
                                                         "epilogues.Elementwise(lambda x: x)"), ("lambda", "epilogue"), None),
    # arrays
    "a misaligned call of a plan": (f"gk.plan({A}, {B})(misaligned({A}), {B})", ("a",), SUM),
    "a misaligned out of a plan": (f"gk.plan({A}, {B})({A}, {B}, out=misaligned(np.zeros((5, 3), 'f4')))", ("out",), SUM),
    "a plan of misaligned arrays": (f"gk.plan(misaligned({A}), {B})({A}, {B})", ("a",), SUM),
    **{f"an interface with {entry}": (of_interface(entry), ("a",), None) for entry in INTERFACES},
    "an interface that is a list": (f"gk.matmul(Interface([1]), {B})", ("a",), None),
    "tangents of another library": ("gk.functions.Dual.of(of(1, 5), Interface(of(2, 5, 2), stream=0))", ("tangents", "one library"), None),
    "one tangent of another library": ("gk.functions.Dual.of(of(1, 5), Interface(of(2, 5), stream=0))", ("tangents", "one library"), None),
    "an interface that is None": (f"gk.matmul(Interface(None), {B})", ("a",), None),
    **{f"complex256 as {name}": (code, ("complex256", "clongdouble"), None) for name, code in {
        "a": f"gk.matmul({A}.astype('c32'), {B})", "out": f"gk.matmul({A}, {B}, out=np.zeros((5, 3), 'c32'))",
        "both": f"gk.matmul({A}.astype('c32'), {B}.astype('c32'))", "a layout": "layouts.RowMajor('complex256')",
        "an operator": "operators.FPUOp(dtype='complex256')", "an einsum": f"gk.einsum('ij,jk->ik', {A}.astype('c32'), {B}.astype('c32'))",
    }.items() if hasattr(np, "complex256")},
    # words
    "device='x' of a configuration": ("gk.get_config(operator=operators.FPUOp(), global_a_layout=layouts.RowMajor('float32'), device='x')",
                                      ("device",), None),
    "device='x' of an inspection": ("inspection.compile_config(SMALL, device='x')", ("device",), None),
    "device='x' of an occupancy": ("inspection.occupancy(64, 128, 1000, 'x')", ("device",), None),
    "optimize='nope'": (f"gk.einsum('ij,jk,kl->il', {A}, {B}, of(3, 3, 2), optimize='nope')", ("optimize",), None),
    "gemm_shape=dict(M=1)": (f"gk.matmul({A}, {B}, gemm_shape=dict(M=1))", ("gemm_shape",), None),
    "gemm_shape=dict(M=1) of an inspection": ("inspection.compile_config(SMALL, gemm_shape=dict(M=1))", ("gemm_shape",), None),
    "gemm_shape=(1, 2, 3)": (f"gk.matmul({A}, {B}, gemm_shape=(1, 2, 3))", ("gemm_shape",), None),
    # what gemmkit's own components are given
    "a complex bias": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, epilogue=epilogues.Bias(np.ones(3, 'c8')))", ("Bias",), None),
    "a bias elsewhere": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, epilogue=epilogues.Bias(Interface(np.ones(3, 'f4'), stream=0)))",
                         ("epilogue",), None),
    "a bias elsewhere, and its field": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, epilogue=epilogues.Bias(Interface(np.ones(3, 'f4'), stream=0)))",
                                        ("bias",), None),
    "a layout of C that reads nothing": (multiplied(epilogue="epilogues.LinearCombination(1.0, 1.0, of(3, 5, 3), layouts.Layout('float32'))"),
                                         ("layout",), None),
    "a c that cannot hold the sums": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), of(3, 5, 3).astype('i1'))", ("dtype of c",), None),
    "an uneven tile of a thread": ("gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor('float32'), "
                                   "mem_cd_thread=gk.Tile(M=3, N=5), kernel='singlestage')", ("mem_cd_thread",), None),
    "a misaligned operand": ("gk.einsum('ij,jk->ik', misaligned(of(1, 5, 7)), of(2, 7, 3))", ("operand 0",), None),
    # what a layout of an array beside D must do, classes without a module, results that became read-only
    "a residual that is not read": ("epilogues.Residual(of(1, 5, 3), layouts.Padded(layouts.RowMajor('float32'), 4))", ("layout",), None),
    "a store that is not written": ("epilogues.Store(of(1, 5, 3), layouts.Padded(layouts.RowMajor('float32'), 4))", ("layout",), None),
    "columns of a braid": ("layouts.ColumnInterleaved(layouts.RowMajor('float32'), (1,), 2)", ("columns",), None),
    "a stream of no module": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), stream=type('A', (), {})())", ("stream",), None),
    "a dtype of no module": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), dtype=type('A', (), {})())", ("dtype",), None),
    "an epilogue's dtype of no module": ("gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, epilogue=epilogues.Softmax(dtype=type('A', (), {})()))",
                                         ("Softmax", "epilogue"), None),
    "a plan's result that is read-only": ("users_program.plan(*PROGRAMS).run(dict(zip('abd', (*PROGRAMS[:2], readonly(PROGRAMS[2])))))", ("d",), None),
    "parts of a gated unit": ("gk.glu(of(1, 5, 7), of(2, 7, 3), of(3, 7, 2))", ("v",), None),
    "splits beyond all sizes": ("gk.get_config(operator=operators.WGMMAOp(64), global_a_layout=layouts.RowMajor('float16'), "
                                "kernel='warp_specialised', splits=2**31, device=H100)", ("splits",), None),
    # a user's own finish
    **{f"finish: {body}": (finishing(body), ("finish",), None) for body in (
        "return values[0]", "return values[:1]", "pass", "return None", "return values, values", "return (values[0],) * 99", "return ()",
        "return tuple(v for v in values)", "return [v for v in values]", "return values.first", "return values[99]", "return tile.nowhere",
        "return values[tile.Q]", "return next(iter(values))", "return shape['M']", "raise StopIteration", "raise KeyError('x')",
        "return self.nowhere", "return values + 1", "return ('x',) * len(values)", "return (None,) * len(values)",
        "return tuple(values)", "return values[::-1]", "return map(abs, values)")},
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_call_by_name(name: str) -> None:
    code, words, expected = CALLS[name]
    outcome = run(Case(code, "result", words, expected))
    assert outcome.fault is None, f"{code}\n{outcome.fault}"
    assert outcome.kind == "right result" or not name.startswith("f | f o") or "three" in name


@pytest.mark.parametrize("first", [lambda x: x * x, lambda x: (x.imag, x.real)], ids=["numbers", "parts"])
def test_a_chain_on_complex_numbers_has_their_type(first: Any) -> None:
    """`f | f` compiles, too: the next function of a chain gets a number again."""
    chain = epilogues.Elementwise(first) | epilogues.Elementwise(lambda x: x + 1)

    assert result(lambda x, m, n: chain(x, m, n), np.dtype("c8"), INDEX, INDEX) == numba_type(np.dtype("c8"))


def test_an_ordinary_call_afterwards() -> None:
    assert good_call() is None
