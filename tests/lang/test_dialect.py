"""What device code may contain is the same in the emulator and when compiled: every component, every function once; and what
that costs."""

from __future__ import annotations

import linecache
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pytest
from numba.cuda import types

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.kernels.spec import Condition
from gemmkit.lang import source
from gemmkit.lang import source as dialect
from gemmkit.lang.functions import device
from gemmkit.lang.scalars import index
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100
from tests.support.checks import named_functions_run
from tests.support.harness import Out, compiled
from tests.support.patches import Seeded, Set

# ==========================================================================================================================
# What device code may contain is the same in the emulator and when compiled, and said with the user's line before anything
# runs.

TINY: dict[str, Any] = dict(operator=operators.FPUOp(M=16, N=16), block_shape=gk.Tile(M=16, N=16, K=4),
                            compute_warp=gk.Tile(M=16, N=16, K=4), device=H100)


SQUARE = np.ones((16, 16), np.float32)


class Pair(NamedTuple):
    first: Any
    second: Any


class Empty:
    """An object with state."""

    here = 0


def doubled(x: Any, times: int = 2) -> Any:
    return x * times


def silent(x: Any) -> None:
    """Gives nothing."""


def raising(x: Any) -> Any:
    raise ValueError("no")                # IN A HELPER


SCOPE: dict[str, Any] = dict(
    math=math, np=np, gk=gk, Pair=Pair, doubled=doubled, silent=silent, raising=raising, empty=Empty(), Empty=Empty,
    operator=operator, time=time, halved=partial(operator.mul, 0.5), TABLE=(1.0, 2.0), EXP=np.exp, module=dialect)


def written(body: str, name: str, parameters: str = "x, i, j") -> Callable[..., Any]:
    """A function as a cell of a notebook has it: its source is known to `linecache`, and is in no file."""
    source = f"def f({parameters}):\n" + "".join(f"    {line}\n" for line in body.split("\n"))
    file = f"<cell {name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    scope = dict(SCOPE, __name__="__main__")
    exec(compile(source, file, "exec"), scope)
    return scope["f"]


def emulated(function: Callable[..., Any], rows: int = 3, **components: Any) -> np.ndarray:
    a, out = np.ones((rows, 2), np.float32), np.full((rows, rows), np.nan, np.float32)
    components = components or dict(epilogue=epilogues.Elementwise(function))
    conf = gk.get_config(global_a_layout=layouts.RowMajor("float32"), **TINY)
    if "global_a_layout" in components:
        components["gemm_shape"] = dict(M=rows, N=rows, K=2)
    with gk.emulate():
        try:
            gk.matmul(a, np.ones((2, rows), np.float32), conf=conf, out=out, **components)
        except gk.ComponentError:
            assert np.isnan(out).all()
            raise
    return out


def kernel(function: Callable[..., Any] | None, **components: Any) -> ahead.CompiledKernel:
    components = dict(global_a_layout=layouts.RowMajor("float32")) | (components or dict(
        epilogue=epilogues.Elementwise(function)))
    conf = gk.get_config(**TINY, **components)
    return ahead.compile_config(conf, device=H100, operands={"a": SQUARE, "b": SQUARE})


# -- refused in both worlds --------------------------------------------------------------------------------------------
# Each body has the line that is to be named marked, and what is said of it.

REFUSED = {
    "raise": ('if x > 1:\n    raise ValueError("no")  # <-\nreturn x', "raise ends a thread"),
    "raise again": ("if x > 1:\n    raise  # <-\nreturn x", "raise ends a thread"),
    "assert False": ('if x > 1:\n    return x\nassert False, "never"  # <-', "this assertion always fails"),
    "no value on one way": ("if x > 1:  # <-\n    return x", "it ends here without a value"),
    "None on one way": ("if x > 1:\n    return None  # <-\nreturn x", "it ends here without a value"),
    "None or a value": ("return x if x > 1 else None  # <-", "it ends here without a value"),
    "bare return": ("for k in range(3):\n    if x > k:\n        return  # <-\nreturn x", "it ends here without a value"),
    "no value": ("y = x + 1  # <-", "a value is needed"),
    "pass": ("pass  # <-", "a value is needed"),
    "the value of nothing": ("return silent(x)  # <-", "a value is needed"),
    "the value of nothing on one way": ("if x > 1:\n    return silent(x)  # <-\nreturn x", "it ends here without a value"),
    "a name that is None": ("y = None  # <-\nif x > 1:\n    y = x\nreturn y", "a name that is None"),
    "try": ("try:\n    return x / i\nexcept ZeroDivisionError:\n    return x", "try has no device code"),
    "finally": ("try:\n    return x\nfinally:\n    x = 0", "try has no device code"),
    "with": ("with empty:  # <-\n    return x", "with has no device code"),
    "yield": ("yield x  # <-", "generators"),
    "yield from": ("yield from (x, x)  # <-", "generators"),
    "list": ("y = [x, x]  # <-\nreturn y[0]", "lists"),
    "long list": ("return [1.0, 2.0, 3.0][i % 3] + x  # <-", "lists"),
    "list comprehension": ("y = [x * k for k in range(3)]  # <-\nreturn y[0]", "lists"),
    "generator expression": ("return sum(x * k for k in range(3))  # <-", "generators"),
    "dict": ('y = {"x": x}  # <-\nreturn y["x"]', "dicts"),
    "dict comprehension": ("y = {k: x for k in range(3)}  # <-\nreturn y[0]", "dicts"),
    "set": ("y = {x, 2}  # <-\nreturn x", "sets"),
    "set comprehension": ("y = {k for k in range(3)}  # <-\nreturn x", "sets"),
    "in a set": ("return x if i in {1, 2} else -x  # <-", "sets"),
    "stars of a dict": ('return doubled(**{"x": x})  # <-', "dicts"),
    "list()": ("return list((x, x))[0]  # <-", "lists"),
    "dict()": ("return dict(y=x)  # <-", "dicts"),
    "f-string": ('y = f"{x}"  # <-\nreturn x', "strings"),
    "string %": ('y = "%s" % x  # <-\nreturn x', "strings"),
    "string +": ('return x + "one"  # <-', "strings"),
    "string method": ('y = "".join(("a", "b"))  # <-\nreturn x', "strings"),
    "string returned": ('return "x"  # <-', "strings"),
    "str": ("return str(x)  # <-", "strings"),
    "global": ("global TABLE  # declared\nTABLE = x  # <-\nreturn x", "bind names outside"),
    "nonlocal": ("y = x\ndef g():\n    nonlocal y\n    y = 2  # <-\n    return y\nreturn g()", "bind names outside"),
    "del": ("y = x\ndel y  # <-\nreturn x", "del has no device code"),
    "del of an element": ("del TABLE[0]  # <-\nreturn x", "del has no device code"),
    "import": ("import math  # <-\nreturn math.exp(x)", "cannot import"),
    "from import": ("from math import exp  # <-\nreturn exp(x)", "cannot import"),
    "attribute": ("empty.here = x  # <-\nreturn x", "cannot change attributes"),
    "starred name": ("first, *rest = x, x, x  # <-\nreturn first", "a starred name"),
    "pattern": ("match (i, j):\n    case (1, k):  # <-\n        return x\nreturn -x", "patterns of several parts"),
    "class": ("class Inner:  # <-\n    pass\nreturn x", "cannot define classes"),
    "lambda that raises": ("g = lambda y: raising(y)\nreturn g(x)", "raise ends a thread"),
    "inner function": ("def g(y):\n    if y > 1:  # <-\n        return y\nreturn g(x)", "it ends here without a value"),
    "np.exp": ("return np.exp(x)  # <-", "write math.exp"),
    "np.where": ("return np.where(x > 1, x, 0)  # <-", "write x if condition else y"),
    "np.maximum": ("return np.maximum(x, 0)  # <-", "write max(x, y)"),
    "np.isnan": ("return 0 if np.isnan(x) else x  # <-", "write math.isnan"),
    "np.linalg.norm": ("return np.linalg.norm(x)  # <-", "NumPy's function norm"),
    "np.random": ("return x + np.random.rand()  # <-", "np.random.rand"),
    "an alias of np.exp": ("return EXP(x)  # <-", "write math.exp"),
    "time": ("return time.time()  # <-", "time.time has no device code"),
    "math.gcd": ("return x * math.gcd(i, j)  # <-", "math.gcd has no device code"),
    "sorted": ("return sorted((x, 1))[0]  # <-", "sorted has no device code"),
    "isinstance": ("return x if isinstance(x, float) else -x  # <-", "isinstance has no device code"),
    "getattr": ('return getattr(empty, "here") + x  # <-', "getattr has no device code"),
    "object": ("return Empty().here + x  # <-", "Empty"),
    "partial": ("return halved(x)  # <-", "of type partial"),
    "no such name": ("return nowhere(x)  # <-", "name 'nowhere' is not defined"),
    "itself": ("return f(x, i, j) if x > 1 else x", "calls itself"),
    "any number": ("return other(x)", "any number of arguments"),
}
IN_HELPERS = {"lambda that raises": (__file__, "IN A HELPER")}
LINES = {"try": (3, 4), "finally": (3, 5), "itself": (2, 2)}              # where bytecode has no line of `try` itself


def place(name: str) -> tuple[str, range]:
    """The file and the lines of which one is to be named."""
    if name in IN_HELPERS:
        file, marker = IN_HELPERS[name]
        lines = open(file).read().splitlines()
        at = next(n for n, line in enumerate(lines, 1) if line.endswith(marker))
        return file, range(at, at + 1)
    if name in LINES:
        return f"<cell {name}>", range(LINES[name][0], LINES[name][1] + 1)
    at = next(n for n, line in enumerate(REFUSED[name][0].split("\n"), 2) if line.endswith("# <-"))
    return f"<cell {name}>", range(at, at + 1)


@pytest.mark.sample(9)
@pytest.mark.parametrize("world", [emulated, kernel])
@pytest.mark.parametrize("name", [name for name in REFUSED if name != "any number"])
def test_refused(name: str, world: Callable[..., Any]) -> None:
    body, reason = REFUSED[name]
    file, lines = place(name)
    with pytest.raises(gk.ComponentError) as caught:
        world(written(body, name))
    heading, where, source, why = str(caught.value).splitlines()
    assert heading.endswith("cannot be compiled as device code") and reason in why
    assert where in [f'  File "{file}", line {n}' for n in lines], str(caught.value)
    assert source.strip()


def many(*x: Any) -> Any:
    return x[0]


async def awaited(x: Any) -> Any:
    return x


async def awaiting(x: Any) -> Any:
    async for y in x:
        return y
    return x


REFUSED_FUNCTIONS = {
    "lambda": (lambda x: [x][0], "lists"),
    "lambda of several lines": (lambda x: (
        np.exp(x)), "math.exp"),
    "any number": (lambda x: many(x), "any number of arguments"),
    "async": (awaited, "generators and coroutines"),
    "async for": (awaiting, "generators and coroutines"),
    "print's value": (lambda x: print(x), "a value is needed"),
    "a helper of a helper": (lambda x: doubled(raising(x)), "raise ends"),
}


@pytest.mark.parametrize("world", [emulated, kernel])
@pytest.mark.parametrize("name", REFUSED_FUNCTIONS)
def test_functions_of_files_are_refused(name: str, world: Callable[..., Any]) -> None:
    function, reason = REFUSED_FUNCTIONS[name]
    with pytest.raises(gk.ComponentError, match="cannot be compiled as device code") as caught:
        world(function)
    _, where, source, why = str(caught.value).splitlines()
    assert where.startswith(f'  File "{__file__}", line ') and source.strip() and reason in why


@pytest.mark.parametrize("world", [emulated, kernel])
def test_code_without_any_source(world: Callable[..., Any]) -> None:
    scope: dict[str, Any] = {}
    exec("def f(x):\n  y = 2\n  return [x, y][0]", scope)
    with pytest.raises(gk.ComponentError) as caught:
        world(scope["f"])
    assert str(caught.value).splitlines()[1] == '  File "<string>", line 3'


# -- taken in both worlds ----------------------------------------------------------------------------------------------

TAKEN = {
    "if and elif": ("if x > 1:\n    return x\nelif x < 0:\n    return -x\nelse:\n    return 2 * x", lambda x, i, j: x),
    "for": ("s = x\nfor k in range(3):\n    s += k\nreturn s", lambda x, i, j: x + 3),
    "break and continue": ("s = x\nfor k in range(9):\n    if k == 1:\n        continue\n    if k > 3:\n        break\n"
                           "    s += k\nreturn s", lambda x, i, j: x + 5),
    "for and else": ("for k in range(3):\n    if k > x:\n        return x\nelse:\n    x = -x\nreturn x", lambda x, i, j: -x),
    "for in a tuple": ("s = x\nfor k in (1, 2, 3):\n    s += k\nreturn s", lambda x, i, j: x + 6),
    "for in a literal list": ("s = x\nfor k in [1, 2, 3]:\n    s += k\nreturn s", lambda x, i, j: x + 6),
    "enumerate, zip": ("s = x\nfor k, (a, b) in enumerate(zip((x, x), (x, x))):\n    s += k * a + b\nreturn s",
                       lambda x, i, j: 4 * x),
    "while": ("while x > 1:\n    x /= 2\nreturn x", lambda x, i, j: 1.0),
    "nested tuples": ("(a, b), c = (x, 2 * x), 3 * x\nreturn a + b + c", lambda x, i, j: 6 * x),
    "tuples put together": ("y = (*(x, x), 3 * x)\nreturn y[2] + y[-1] + (x, x)[0]", lambda x, i, j: 7 * x),
    "starred arguments": ("return doubled(*(x, 3))", lambda x, i, j: 3 * x),
    "a conditional expression": ("return x if i < j else -x", lambda x, i, j: x if i < j else -x),
    "chained comparisons": ("return x if 0 < i < 2 else -x", lambda x, i, j: x if 0 < i < 2 else -x),
    "and, or, not": ("return x if (i and j) or not i else -x", lambda x, i, j: x if (i and j) or not i else -x),
    "in a tuple": ("return x if i in (1, 2) else -x", lambda x, i, j: x if i in (1, 2) else -x),
    "defaults": ("return x * y", lambda x, i, j: 2 * x),
    "keywords": ("return doubled(times=3, x=x)", lambda x, i, j: 3 * x),
    "math": ("return math.sqrt(x) + math.pi - math.pi", lambda x, i, j: math.sqrt(2)),
    "built-ins": ("return max(abs(x), min(x, 1)) + float(i) - i", lambda x, i, j: 2.0),
    "conversions": ("return np.float32(np.float16(x)) + np.int32(i) - np.float32(i)", lambda x, i, j: x),
    "augmented": ("x += 1\nx *= 2\nx -= 3\nreturn x", lambda x, i, j: 3.0),
    "a named tuple": ("p = Pair(x, second=3 * x)\nreturn p.second - p.first", lambda x, i, j: 2 * x),
    "an inner function": ("def g(y):\n    return y + x\nreturn g(1)", lambda x, i, j: x + 1),
    "an inner lambda": ("g = lambda y: y + 1\nreturn g(x)", lambda x, i, j: x + 1),
    "a global tuple": ("return TABLE[1] * x", lambda x, i, j: 2 * x),
    "compared strings": ('mode = "relu"\nreturn x if mode == "relu" else -x', lambda x, i, j: x),
    "operator": ("return operator.add(x, 1)", lambda x, i, j: x + 1),
    "match": ("match i:\n    case 1:\n        return x\n    case 2 | 3:\n        return -x\nreturn x",
              lambda x, i, j: -x if i in (2, 3) else x),
    "an assertion": ("assert x > 1 and i >= 0\nassert x < 3 or j < 0\nreturn x", lambda x, i, j: x),
    "an assertion that says something": ('assert x > 1, f"x is {x} at {[i, j]}"\nreturn x', lambda x, i, j: x),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    """In the emulator, where a function is what it is in Python, and compiled for the same types."""
    body, expected = TAKEN[name]
    function = written(body, name, "x, i, j, y=2" if name == "defaults" else "x, i, j")
    dialect.check(epilogues.Elementwise(function))
    assert all(np.isclose(function(np.float32(2), i, j), expected(2.0, i, j)) for i in range(3) for j in range(3))
    taken = device(function)
    bound, _ = taken.bind((types.float32, index, index), {})
    assert taken.compile(bound).signature.return_type in (types.float32, types.float64)


# -- for debugging -----------------------------------------------------------------------------------------------------

def test_assertions_are_checked_in_the_emulator() -> None:
    with pytest.raises(AssertionError, match="x is 2.0"):
        emulated(written('assert x > 3, f"x is {x}"\nreturn x', "false"))


def test_an_assertion_compiles_to_nothing() -> None:
    """Neither a test, nor what it tests, nor a way out."""
    asserting = written('for k in range(4):\n    assert out[k] > 3 and k < 4, "never"\n    out[k] = k', "asserting", "out")
    ptx = compiled(asserting, Out((4,), np.int32))
    assert "setp" not in ptx and "ld.global" not in ptx and ptx.count("ret;") == 1 and ptx.count("st.global") == 4


def printing(out: Any) -> None:
    print("here", out[0])


def test_print_in_both_worlds(capsys: pytest.CaptureFixture) -> None:
    emulated(written('print(f"x is {x}", [x], str(x))\nreturn x', "printed"))
    assert "x is 2.0 [" in capsys.readouterr().out
    assert "vprintf" in compiled(printing, Out((1,), np.int32))
    with pytest.raises(gk.ComponentError, match="strings have no device code"):
        kernel(written('print(f"x is {x}")\nreturn x', "print compiled"))


def test_breakpoint_in_the_emulator_alone(replaced: Seeded) -> None:
    stopped: list[int] = []
    replaced("sys.breakpointhook", lambda: stopped.append(1))
    function = written("breakpoint()\nreturn x", "stopped")
    assert emulated(function, rows=1) == [[2.0]] and stopped
    with pytest.raises(gk.ComponentError, match=r"breakpoint\(\) stops in the emulator alone") as caught:
        kernel(function)
    assert '"<cell stopped>", line 2' in str(caught.value)


# ==========================================================================================================================
# What the dialect looks at: every component, and every function once; and what that costs.


@dataclass(frozen=True)
class Failing(layouts.Layout):
    def element(self, data, i, j, shape):
        return self.at(data, i, j)

    def at(self, data, i, j):
        return [data[i, j]][0]            # IN A METHOD

    @property
    def vector_axis(self) -> int | None:
        return [None][0]                  # Python's

    def extents(self, array):
        if len(array.shape) != 2:
            raise ValueError("a matrix is needed")
        return tuple(list(array.shape))


@dataclass(frozen=True)
class Storing(layouts.RowMajor):
    def store_element(self, data, i, j, value, shape):
        data[i, j] = value if value > 0 else np.exp(value)     # IN STORE


@dataclass(frozen=True)
class Silent(epilogues.Epilogue):
    def __call__(self, x, m, n):
        x + 1                             # NO VALUE


@dataclass(frozen=True)
class Finishing(epilogues.Epilogue):
    def finish(self, values, tile, shape):
        return tuple([x for x in values])  # IN FINISH


@dataclass(frozen=True)
class Multiplying(operators.FPUOp):
    def combine(self, c, product):
        if product > 0:                   # IN COMBINE
            return c + product


@dataclass(frozen=True)
class Sometimes(Condition):
    def __call__(self, m, n, k):
        return k in {0, 16}               # IN CONDITION


@dataclass(frozen=True)
class Inner(gk.Component):
    def of(self, x):
        try:
            return x
        finally:
            x = 0                         # IN A FIELD


@dataclass(frozen=True)
class Outer(transforms.Transform):
    inner: Inner = Inner()

    def __call__(self, x):
        return self.inner.of(x)


COMPONENTS = {
    "IN A METHOD": dict(global_a_layout=Failing("float32")),
    "IN STORE": dict(global_d_layout=Storing("float32")),
    "NO VALUE": dict(epilogue=epilogues.ReLU() | Silent()),
    "IN FINISH": dict(epilogue=Finishing()),
    "IN CONDITION": dict(condition=Sometimes()),
    "IN A FIELD": dict(transform_global_to_shared_a=Outer()),
    "MASK": dict(epilogue=epilogues.Where(lambda m, n: any((m, n)), 0.0)),  # MASK
}


@pytest.mark.parametrize("marker", COMPONENTS)
def test_every_component_is_looked_at(marker: str) -> None:
    components: dict[str, Any] = COMPONENTS[marker]
    for world in (emulated, kernel):
        with pytest.raises(gk.ComponentError) as caught:
            world(None, **components)
        lines = str(caught.value).splitlines()
        assert f'File "{__file__}"' in lines[1] and lines[2].endswith(f"# {marker}"), str(caught.value)


def test_an_operator_is_looked_at() -> None:
    conf = gk.get_config(operator=Multiplying(M=16, N=16), global_a_layout=layouts.RowMajor("float32"), device=H100)
    with pytest.raises(gk.ComponentError, match="if product > 0:"):
        ahead.compile_config(conf, device=H100)
    with pytest.raises(gk.ComponentError, match="if product > 0:"), gk.emulate():
        gk.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32), conf=conf)


@dataclass(frozen=True)
class Reading(epilogues.Epilogue):
    """Its `__call__` is never called: that of a component that works on tiles may say so."""

    def __call__(self, x, m, n):
        raise TypeError("Reading works on tiles")

    def finish(self, values, tile, shape):
        return values

    @cached_property
    def names(self) -> list[str]:
        return [f"{x}" for x in "ab"]

    def check(self, M, N):
        try:
            assert self.names
        except AssertionError:
            raise ValueError("no names") from None


def test_host_methods_are_python() -> None:
    assert (emulated(None, epilogue=Reading()) == 2).all()      # type: ignore[arg-type]


def later(x: Any) -> Any:
    return x


def test_a_name_bound_anew_is_looked_at_again(rebound: Set) -> None:
    def calling(x: Any) -> Any:
        return later(x)

    assert (emulated(calling) == 2).all()
    rebound(later=np.exp)
    for world in (emulated, kernel):
        with pytest.raises(gk.ComponentError, match="write math.exp"):
            world(calling)


def test_what_it_costs() -> None:
    """A second look at a spec reads no code: so many functions are a tenth of a millisecond."""
    conf = gk.get_config(global_a_layout=layouts.RowMajor("float32"),
                         epilogue=epilogues.Elementwise(lambda x: doubled(x)), **TINY)
    spec = conf.spec()
    source.check(spec)
    assert named_functions_run(lambda: source.check(spec)) <= 400
