"""Bad calls of the whole public surface, which is walked rather than listed: every parameter of every public function and
class, each keyword of `gk.matmul`, programs, and `gk.torch`.

`GOOD` has a value for each parameter, by its name, so that what else a call needs is right; a test sees to it that no
parameter of a new function lacks one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from gemmkit.components import Component
from gemmkit.kernels.config import KEYWORDS
from tests.bad_calls.judge import Case
from tests.bad_calls.values import broken

NAMESPACES = ("", "blas", "layouts", "epilogues", "transforms", "operators", "kernels.masks", "plans.ahead",
              "layouts.quantised", "programs", "torch")

#: Made by others (results of calls), annotations, and words of the language of programs, which mean nothing outside of one.
LEFT_OUT = frozenset(
    "Array Component ComponentError Config ConfigError Explanation GroupPlan Plan Program Scalar Tuned emulate explain float16 float32 "
    "float64 tune Product CompiledKernel Occupancy compiled_kernel imagined check_ranges parts result_layout copy exp finite "
    "full log maximum minimum once packed paged parallel place rsqrt sequential sqrt tanh where zeros Layout Epilogue Transform Operator Mask "
    "Score PlainScores Everything Default Identity Program Folded Packed Embedded Boxed erf Kernel Made compiled kernel_of recorded KernelToCompile ProductOperator".split())

#: A good value of each parameter: (kind of its bad values, code). By function and name where one name means several things.
GOOD: dict[str, tuple[str, str]] = {
    "a": ("array", "of(1, 5, 7)"), "b": ("array", "of(2, 7, 3)"), "c": ("array", "None"), "conf": ("any", "None"),
    "out": ("array", "None"), "stream": ("any", "None"), "spec": ("word", "'ij,jk->ik'"), "operands": ("array", "of(1, 5, 7), of(2, 7, 3)"),
    "optimize": ("word", "True"), "epilogue": ("component", "None"), "operator": ("component", "None"),
    "condition": ("component", "None"), "observe_a": ("component", "None"), "order": ("word", "None"), "gemm_shape": ("shape", "None"),
    **{name: ("component", "None") for name in KEYWORDS if name.startswith(("transform_", "global_"))},
    "x": ("array", "of(1, 5, 7)"), "w": ("array", "of(2, 7, 3)"), "v": ("array", "of(3, 7, 3)"), "activation": ("function:1", "None"),
    "glu.activation": ("function:1", "lambda x: x"), "mlp.activation": ("function:1", "lambda x: x"),
    "array": ("array", "of(1, 32, 32)"), "arrays": ("array", "of(1, 7, 3), of(2, 7, 3)"), "axis": ("count", "1"),
    "mask": ("array", "np.ones((1, 1), bool)"), "block": ("any", "(32, 32)"), "index": ("array", "np.int32([1, 0])"),
    "check": ("any", "False"), "diagonal": ("array", "of(1, 7)"), "half": ("word", "'lower'"), "unit": ("any", "False"),
    "Sliding.panels": ("count", "3"), "Sliding.step": ("count", "1"),
    "parts": ("array", "of(1, 5, 7, 2)"), "f": ("function:1", "lambda x: x"), "shape": ("any", "(5, 7)"), "dtype": ("dtype", "'float32'"),
    "arguments": ("count", "0.5"), "layout": ("component", "layouts.RowMajor('float32')"),
    "blocks": ("any", "None"), "waves": ("count", "2"),
    "q": ("array", "of(1, 1, 2, 5, 16, dtype='f2')"), "k": ("array", "of(2, 1, 2, 5, 16, dtype='f2')"),
    "attention.v": ("array", "of(3, 1, 2, 5, 16, dtype='f2')"), "attention.mask": ("component", "None"), "score": ("component", "None"),
    "scale": ("count", "1.0"), "attention.scale": ("count", "None"), "attention.layout": ("word", "'bhnd'"), "lengths": ("any", "None"), "key_lengths": ("any", "None"), "key_starts": ("any", "None"), "pages": ("any", "None"),
    "lse": ("any", "None"), "device": ("any", "H100"), "get_config.operator": ("component", "SMALL.operator"),
    "get_config.global_a_layout": ("component", "layouts.RowMajor('float32')"),
    "a_list": ("array", "[of(1, 5, 7)]"), "b_list": ("array", "[of(2, 7, 3)]"), "c_list": ("any", "None"),
    "gamma": ("array", "of(1, 7)"), "beta": ("array", "of(2, 7)"), "eps": ("count", "1e-5"),
    "lstm_cell.h": ("array", "of(2, 5, 3)"), "lstm_cell.c": ("array", "of(3, 5, 3)"), "lstm_cell.w": ("array", "of(4, 7, 12)"),
    "lstm_cell.u": ("array", "of(5, 3, 12)"), "lstm_cell.b": ("array", "None"), "state": ("array", "None"),
    "mlp.x": ("array", "of(1, 5, 16, dtype='f2')"), "weights": ("array", "[of(2, 16, 16, dtype='f2')]"), "biases": ("array", "None"),
    "last": ("any", "None"), "rowwise.function": ("function:1", "None"), "tiling": ("tile", "gk.Tile(M=4, N=1)"),
    "parallelise.index": ("count", "0"), "subdivide.index": ("count", "0"), "count": ("count", "1"), "distances": ("count", "1, 1"),
    "linearise.shape": ("any", "(4, 5)"), "linearise.order": ("word", "'row'"), "parallelise.order": ("word", "'row'"),
    "subdivide.order": ("word", "'row'"), "linearise.coord": ("any", "(1, 2)"), "tile": ("tile", "gk.Tile(M=8, N=4)"),
    "transa": ("word", "'N'"), "transb": ("word", "'N'"), "alpha": ("count", "1.0"), "gemmEx.beta": ("count", "0.5"),
    "gemm.beta": ("count", "0.0"), "gemmEx.c": ("array", "of(3, 5, 3)"), "LinearCombination.beta": ("count", "0.5"),
    "select.operator": ("component", "operators.MIN_PLUS"), "select.index": ("array", "None"),
    "registers": ("count", "64"), "threads": ("count", "128"), "shared_bytes": ("count", "1000"),
    "compile_config.conf": ("component", "3"), "compile_config.operands": ("any", "None"),
    "matrix": ("any", "quantise(np.ones((32, 4), 'f4'), group=8)"), "quantise.weights": ("array", "np.ones((32, 4), 'f4')"),
    "bits": ("count", "4"), "group": ("count", "8"), "symmetric": ("any", "True"),
    "program.function": ("function:3", "users_product"),
    "Mapping.blocks": ("any", "{'m': 64}"), "ColumnInterleaved.columns": ("count", "2"), "ColumnInterleaved.parts": ("count", "2"),
    "scales": ("array", "np.ones((4, 3), 'f2')"), "Joined.first": ("component", "layouts.RowMajor('float32')"),
    "Joined.second": ("component", "layouts.RowMajor('float32')"), "Joined.boundary": ("count", "8"), "padding": ("count", "4"),
    "plane": ("component", "layouts.RowMajor('float32')"), "Planes.dtype": ("dtype", "'complex64'"),
    "Planar.dtype": ("dtype", "'complex64'"), "Interleaved.dtype": ("dtype", "'complex64'"), "rows": ("any", "(5,)"),
    "columns": ("any", "(7,)"), "windows": ("component", "layouts.tensor.Windows(4, 1, 1, -1, -1)"), "Matricised.axis": ("count", "1"), "bias": ("array", "of(1, 3)"), "low": ("count", "0.0"),
    "high": ("count", "1.0"), "op": ("word", "'sum'"), "Combine.combine": ("function:2", "lambda x, y: x + y"), "identity": ("count", "0.0"),
    "epilogues.ComposedEpilogue.first": ("component", "epilogues.ReLU()"), "cos": ("array", "np.ones((5, 2), 'f4')"), "sin": ("array", "np.ones((5, 2), 'f4')"),
    "by": ("any", "2.0"), "value": ("count", "0.0"), "Where.mask": ("function:2", "lambda m, n: m > n"),
    "RowReduce.out": ("array", "of(1, 5)"), "ColumnReduce.out": ("array", "of(1, 3)"), "Residual.array": ("array", "of(1, 5, 3)"),
    "Store.array": ("array", "of(1, 5, 3)"), "Binary.array": ("array", "of(1, 5, 3)"), "Binary.f": ("function:2", "lambda x, y: x * y"), "epilogues.first": ("component", "epilogues.ReLU()"),
    "epilogues.second": ("component", "epilogues.ReLU()"), "first": ("component", "transforms.Identity()"),
    "second": ("component", "transforms.Identity()"), "Fold.f": ("function:2", "lambda x, y: x + y"),
    "Pairs.f": ("function:4", "lambda x, y, m, n: (x, y)"), "base": ("component", "operators.FPUOp(M=16, N=16)"),
    "table": ("any", "(((1, 0), (0, 1)), ((0, 1), (-1, 0)))"), "add": ("function:2", "min"), "mul": ("function:2", "lambda x, y: x + y"),
    "zero": ("count", "float('inf')"), "tangents": ("count", "2"), "masks.first": ("component", "gk.masks.Causal()"),
    "masks.second": ("component", "gk.masks.Window(3)"), "starts": ("array", "np.int32([0, 3])"), "ends": ("array", "np.int32([3, 5])"),
    "seen": ("array", "np.int32([[1, 0]])"), "Padding.first": ("array", "np.int32([0])"), "end": ("array", "np.int32([1])"),
    "until": ("array", "np.int32([1])"),
    "left": ("count", "3"), "slopes": ("array", "np.ones(2, 'f4')"), "cap": ("count", "30.0"),
    "scores.bias": ("array", "np.ones((5, 5), 'f4')"), "scores.f": ("function:4", "lambda x, m, n, h: x"),
    "in_features": ("count", "16"), "out_features": ("count", "3"), "torch.bias": ("any", "True"), "name": ("word", "'tests::drawn'"),
    "torch.a": ("array", "torch.ones(5, 7)"), "torch.b": ("array", "torch.ones(7, 3)"), "op.a": ("function:1", "None"),
    "op.b": ("function:1", "None"), "torch.activation": ("word", "None"),
    "GroupQuantised.zeros": ("array", "None"), "uplo": ("word", "'L'"), "side": ("word", "'L'"), "diag": ("word", "'N'"),
    "trans": ("word", "'N'"), "hermitian": ("any", "False"), "syrk.c": ("array", "of(3, 5, 5)"), "herk.c": ("array", "of(3, 5, 5)"),
    "syrk.beta": ("count", "0.5"), "herk.beta": ("count", "0.5"), "symm.beta": ("count", "0.5"), "symm.a": ("array", "of(1, 7, 7)"),
    "symm.c": ("array", "of(3, 7, 3)"), "trmm.a": ("array", "of(1, 7, 7)"), "trmm.c": ("array", "of(3, 7, 3)"),
    "Discard.dtype": ("dtype", "None"),
}

#: Fields that a configuration sets in a component.
SET_BY_CALLS = frozenset("stored kept partials slots across operand skips is_even transposed real_places near vector comb combed".split())


PRODUCT = "gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, {}=result)"
ATTENTION = "gk.attention(of(1, 1, 2, 5, 16, dtype='f2'), of(2, 1, 2, 5, 16, dtype='f2'), of(3, 1, 2, 5, 16, dtype='f2'), {}=result)"
AFTER = {"epilogues": PRODUCT.format("epilogue"), "transforms": PRODUCT.format("transform_regs_to_shared_d"),
         "gk.layouts.RowMajor": PRODUCT.format("global_a_layout"), "gk.layouts.ColMajor": PRODUCT.format("global_b_layout"),
         "masks": ATTENTION.format("mask"), "scores": ATTENTION.format("score"), "gk.torch.Linear": "result(torch.ones(2, 16))",
         "gk.torch.op": "result(torch.ones(5, 7), torch.ones(7, 3))", "gk.programs.Mapping": "users_program.plan(*PROGRAMS, mapping=result)",
         "gk.Mapping": "users_program.plan(*PROGRAMS, mapping=result)"}


class Parameter(NamedTuple):
    name: str
    is_required: bool
    how: Any


class Public(NamedTuple):
    """A public function or class: how it is called, and its parameters."""

    code: str
    name: str
    parameters: tuple[Parameter, ...]
    is_component: bool

    def good(self, parameter: str) -> tuple[str, str] | None:
        return GOOD.get(f"{self.name}.{parameter}", GOOD.get(f"{self.code.split('.')[1]}.{parameter}", GOOD.get(parameter)))

    @property
    def after(self) -> str:
        """What is done with the result: a component is used."""
        namespace = self.code.split(".")[1]
        return AFTER.get(self.code, AFTER.get(namespace, "result"))


@cache
def public() -> tuple[Public, ...]:
    return tuple(_walked())


def _walked() -> Iterator[Public]:
    for namespace in NAMESPACES:
        if namespace == "torch" and importlib.util.find_spec("torch") is None:
            continue
        module = importlib.import_module(f"gemmkit.{namespace}".rstrip("."))
        for name in module.__all__:
            made = getattr(module, name)
            if not callable(made) or name in LEFT_OUT or isinstance(made, Component):
                continue
            left_out = {"self", *SET_BY_CALLS, *(("device", "dtype") if namespace == "torch" and name != "op" else ())}     # PyTorch's own
            signature = inspect.signature(made.__init__ if isinstance(made, type) else made)
            found = [Parameter(x.name, x.default is x.empty and x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD), x.kind)
                     for x in signature.parameters.values() if x.name not in left_out]
            if any(x.how == inspect.Parameter.VAR_KEYWORD for x in found) and name in ("matmul", "plan", "glu", "grouped", "plan_grouped"):
                found += [Parameter(x, False, inspect.Parameter.KEYWORD_ONLY) for x in KEYWORDS]
            space = namespace.removeprefix("kernels.")
            if space == "masks" and any(base.__name__ == "Score" for base in getattr(made, "__mro__", ())):
                space = "scores"
            yield Public(f"gk.{space}.{name}".replace("..", "."), name,
                         tuple(x for x in found if x.how != inspect.Parameter.VAR_KEYWORD),
                         isinstance(made, type) and issubclass(made, Component))


# -- drawn calls ---------------------------------------------------------------------------------------------------------

#: Calls of a program with three arrays: by its name, its plan and its reference.
OF_PROGRAMS = ("users_program({})", "users_program.plan({})", "users_program.reference({})", "users_program.plan(*PROGRAMS).run(dict(zip('abd', ({}))))")


def drawn(rng: np.random.Generator) -> Case:
    """A call of a public function with one or two parameters of a wrong kind, or of a program."""
    if rng.random() < 0.15:
        return _of_program(rng)
    function = public()[int(rng.integers(len(public())))]
    chosen = {function.parameters[int(n)].name
              for n in rng.choice(len(function.parameters), size=min(len(function.parameters), 1 + (rng.random() < 0.2)), replace=False)
              } if function.parameters else set()
    given, broken_ones, names = [], [], [function.name]
    by_keyword = False
    for parameter in function.parameters:
        names.append(parameter.name)
        kind, good = function.good(parameter.name) or ("any", "None")
        if parameter.name in chosen:
            value = broken(kind, good, rng)
            broken_ones.append(f"{parameter.name}={value}")
        elif parameter.is_required or parameter.how == parameter.how.VAR_POSITIONAL:
            value = good
        else:
            by_keyword = True
            continue
        is_positional = parameter.how in (parameter.how.POSITIONAL_ONLY, parameter.how.VAR_POSITIONAL)
        if parameter.how == parameter.how.KEYWORD_ONLY or (by_keyword and not is_positional):
            given.append(f"{parameter.name}={value}")
            by_keyword = True
        elif not by_keyword or not is_positional:
            given.append(value)
    code, after = f"{function.code}({', '.join(given)})", function.after
    if rng.random() < 0.3:                                     # on tensor cores
        code = code.replace("of(1, 5, 7)", "of(1, 5, 7, dtype='f2')").replace("of(2, 7, 3)", "of(2, 7, 3, dtype='f2')")
    if after == "result" and rng.random() < 0.8:
        code = f"resolved(lambda: {code})"
    return Case(code, after, (*names, *NAMED), None, " and ".join(broken_ones))


def _of_program(rng: np.random.Generator) -> Case:
    good = ["PROGRAMS[0]", "PROGRAMS[1]", "PROGRAMS[2]"]
    n = int(rng.integers(3))
    given = list(good)
    given[n] = broken("array", good[n], rng)
    code = str(rng.choice(OF_PROGRAMS)).format(", ".join(given))
    if rng.random() < 0.15 and code.startswith("users_program("):
        code, given[n] = f"users_program({', '.join(good)}, mapping={broken('any', '', rng)})", "mapping"
    return Case(code if "reference" in code else f"resolved(lambda: {code})", "result", ("a", "b", "d", "mapping", "users_program"), None,
                f"{'abd'[n]}={given[n]}")


#: What messages may name beside a parameter: how a component was given to the call that uses it, and what is asked of arrays.
NAMED = ("Layout", "lambda", "a", "b", "c", "epilogue", "mask", "score", "mapping", "blocks", "global_a_layout", "global_b_layout", "block_shape", "array",
         "transform_regs_to_shared_d", "operator", "x", "q", "k", "v", "numbers", "coordinate", "coordinates", "bias", "weight", "operands")

__all__ = ["GOOD", "drawn", "public"]
