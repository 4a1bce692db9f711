"""Components as compile-time values: fields, run-time arguments, and the functions that they hold."""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.components import freeze
from gemmkit.kernels.spec import FAMILIES
from gemmkit.ptx.special import thread_index
from gemmkit.runtime import compile as compile_module
from gemmkit.runtime.compile import stats
from gemmkit.runtime.device import H100
from gemmkit.transforms.base import transformed
from tests.support.checks import relative_error
from tests.support.compiling import arguments, machine_code
from tests.support.harness import Out, compiled, constants_stored, emulated, instructions, leaves_nothing, lines_with
from tests.support.machines import on_machines
from tests.support.patches import Set
from tests.support.user_layouts import Toeplitz

# ==========================================================================================================================
# Components: a user's small classes as compile-time values, their runtime fields as arguments, and what is said of
# those that cannot be.

F4 = np.dtype("f4")
HERE = Path(__file__)


# -- a user's own classes, in every slot ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaky(transforms.Transform):
    """A leaky ReLU, its slope known at compile time."""

    slope: float = 0.125

    def __call__(self, x):
        return x if x > 0 else self.slope * x


@dataclass(frozen=True)
class MinPlus(operators.FPUOp):
    """The shortest of all two-part ways."""

    identity = start = math.inf

    def multiply(self, a, b):
        return a + b

    def combine(self, c, product):
        return min(c, product)


@dataclass(frozen=True)
class Scaled(epilogues.Epilogue):
    """Each row times its own factor, and a constant to it all."""

    rows: gk.Array
    plus: gk.Scalar

    def __call__(self, x, m, n):
        return x * self.rows[m] + self.plus


@pytest.mark.parametrize("kind", [Toeplitz, Leaky, MinPlus, Scaled])
def test_a_component_is_about_ten_lines(kind: type) -> None:
    lines = [line for line in inspect.getsource(kind).splitlines() if line.strip()]
    assert len(lines) <= 10
    assert not any(word in "\n".join(lines).lower() for word in ("numba", "cuda", "ptx"))


M, N, K = 37, 29, 45


def compact(**fields: Any) -> gk.Config:
    """A configuration of one small block of four warps, for operands of float32."""
    return gk.get_config(**{**dict(
        operator=operators.FPUOp(M=16, N=16, K=4), block_shape=gk.Tile(M=32, N=32, K=8),
        compute_warp=gk.Tile(M=16, N=16, K=8), global_a_layout=layouts.RowMajor(F4), global_b_layout=layouts.RowMajor(F4),
        device=H100), **fields})


@pytest.mark.kin(4)
@on_machines
def test_a_layout_a_transform_and_an_epilogue_of_the_users(machine: Any, rng: np.random.Generator) -> None:
    t, b = rng.standard_normal(M + K - 1).astype(F4), rng.standard_normal((K, N)).astype(F4)
    rows = rng.standard_normal(M)
    conf = compact(global_a_layout=Toeplitz(F4), transform_global_to_shared_b=Leaky(),
                   epilogue=Scaled(machine.array(rows), 0.5))
    a = t.astype(float)[np.arange(M)[:, None] - np.arange(K) + K - 1]
    expected = a @ np.where(b > 0, b, 0.125 * b).astype(float) * rows[:, None] + 0.5
    with machine.session():
        d = gk.matmul(machine.array(t), machine.array(b), None, conf, gemm_shape=dict(M=M, N=N, K=K))
    assert relative_error(machine.numpy(d), expected) < 1e-5


@pytest.mark.kin(4)
@on_machines
def test_an_operator_of_the_users(machine: Any, rng: np.random.Generator) -> None:
    a, b = (rng.uniform(0, 9, shape).astype(F4) for shape in ((M, K), (K, N)))
    conf = compact(operator=MinPlus(M=16, N=16, K=4))
    with machine.session():
        d = gk.matmul(machine.array(a), machine.array(b), None, conf)
    assert np.array_equal(machine.numpy(d), (a[:, :, None] + b).min(axis=1))


@pytest.mark.kin(4)
@pytest.mark.compile
def test_the_users_classes_compile_without_a_gpu() -> None:
    rows = np.ones(256)
    code = machine_code(compact(transform_global_to_shared_b=Leaky(), epilogue=Scaled(rows, 0.5),
                                operator=MinPlus(M=16, N=16, K=4)))
    assert code.usage.spill_stores == code.usage.stack_bytes == 0 and leaves_nothing(code.ptx)
    assert code.count("FMNMX") > 0 and code.count("FFMA") == 0
    # Toeplitz reads a vector: its operand is one-dimensional.
    conf = compact(global_a_layout=Toeplitz(F4))
    spec, _, b, c, d, shape = arguments(conf)
    ptx = compile_module.to_ptx(FAMILIES[conf.kernel].kernel, (spec.type, freeze(np.zeros(511, F4)).type, b.type, c.type, d.type,
                                                       shape.type), conf.threads, H100)
    assert leaves_nothing(ptx)


# -- static and runtime fields -----------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Everything(gk.Component):
    """One field of each kind."""

    number: int
    fraction: float
    flag: bool
    text: str
    kind: Any
    tile: gk.Tile
    function: Any
    inner: gk.Component
    array: gk.Array
    alpha: gk.Scalar
    strong: Any = np.float32(0.5)
    nothing: Any = None
    listed = (4, 5)
    tenth = 0.1

    @property
    def twice(self) -> int:
        return 2 * self.number

    @cached_property
    def sizes(self) -> tuple[int, int]:
        return self.tile.extents

    @staticmethod
    def halved(x: Any) -> Any:
        return x / 2

    def method(self, x: Any, y: Any = 3, *, z: Any = 1) -> Any:
        return x * y + z

    def __call__(self, x: Any) -> Any:
        return self.method(x, z=self.number)


def plus_one(x: Any) -> Any:
    return x + 1


def everything(**changed: Any) -> Everything:
    fields = dict(number=3, fraction=0.25, flag=True, text="row", kind=np.dtype("f2"), tile=gk.Tile(M=8, N=4),
                  function=plus_one, inner=Leaky(0.5), array=np.arange(4.0), alpha=1.5)
    return Everything(**{**fields, **changed})


def test_runtime_fields_are_arguments_and_static_ones_are_not() -> None:
    frozen = freeze(everything())
    assert [code for code, _ in frozen.leaves] == ["u64", "i32", "f64", "f32"]         # the array, alpha, strong
    assert [value for _, value in frozen.leaves[1:]] == [4, 1.5, 0.5]
    assert [info.shape for info in frozen.arrays] == [(4,)]
    assert set(frozen.type.runtime) == {"array", "alpha", "strong"}


def use_statics(out: Any, c: Any) -> None:
    out[0], out[1], out[2] = c.number, c.twice, np.int32(c.fraction * 100)
    out[3] = 1 if c.flag else 0
    out[4] = 1 if c.text == "row" else 0
    out[5], out[6] = c.tile.size.M, c.sizes[1]
    out[7] = c.function(c.number)
    out[8] = np.int32(c.inner(-8.0))
    out[9] = c.listed[1]
    out[10] = np.int32(c.tenth * 100)
    out[11] = 1 if c.nothing is None else 0
    out[12] = np.int32(c.halved(8.0))
    out[13], out[14], out[15], out[16] = c.method(2), c.method(2, 5), c.method(y=4, x=2), c.method(2, z=c.number)
    out[17] = c(2)
    out[18] = np.int32(c.kind.type(2049.0))


STATICS = [3, 6, 25, 1, 1, 8, 4, 4, -4, 5, 10, 1, 4, 7, 11, 9, 9, 9, 2048]


def test_static_fields_fold() -> None:
    statics = np.zeros(len(STATICS), int)
    use_statics(statics, everything())
    assert list(statics) == STATICS

    @dataclass(frozen=True)
    class Statics(Everything):
        """The runtime fields have values, which the kernel does not use."""

    ptx = compiled(use_statics, Out((len(STATICS),), np.int32), Statics(**vars_of(everything())))
    stored = constants_stored(ptx.replace("ld.param.u64", "ld.other", len(lines_with(ptx, "ld.param.u64")) - 1))
    assert stored == {4 * n: value for n, value in enumerate(STATICS)}


def vars_of(component: Any) -> dict[str, Any]:
    import dataclasses

    return {f.name: getattr(component, f.name) for f in dataclasses.fields(component)}


def use_runtime(out: Any, c: Any) -> None:
    i = thread_index()
    out[i] = c.array[i] * c.alpha + c.strong + c.array.shape[0]


def test_runtime_fields_are_read() -> None:
    ptx = compiled(use_runtime, Out((4,), np.float64), everything())
    assert instructions(ptx)["ld.param.f64"] == 1 and instructions(ptx)["ld.param.f32"] == 1
    assert leaves_nothing(ptx)


ALIKE = {
    "another array": dict(array=np.ones(9)), "another alpha": dict(alpha=-2.0), "infinite alpha": dict(alpha=math.inf),
    "another strong scalar": dict(strong=np.float32(7)),
}
OTHERWISE = {
    "number": dict(number=4), "fraction": dict(fraction=0.5), "flag": dict(flag=False), "text": dict(text="col"),
    "kind": dict(kind=np.dtype("f4")), "tile": dict(tile=gk.Tile(M=8, N=8)), "function": dict(function=lambda x: x + 2),
    "inner": dict(inner=Leaky(0.25)), "inner class": dict(inner=transforms.Identity()), "nothing": dict(nothing=1),
    "array's dtype": dict(array=np.arange(4, dtype=F4)), "array's dimensions": dict(array=np.ones((2, 2))),
    "array's strides": dict(array=np.ones(8)[::2]), "alpha's type": dict(alpha=np.float32(1)), "integer alpha": dict(alpha=2),
    "strong's type": dict(strong=np.float64(0.5)),
}


@pytest.mark.parametrize("changed", ALIKE.values(), ids=ALIKE.keys())
def test_new_runtime_values_are_the_same_kernel(changed: dict[str, Any]) -> None:
    one, other = freeze(everything()), freeze(everything(**changed))
    assert (one.type, one.fingerprint) == (other.type, other.fingerprint)


@pytest.mark.parametrize("changed", OTHERWISE.values(), ids=OTHERWISE.keys())
def test_another_static_value_or_type_is_another_kernel(changed: dict[str, Any]) -> None:
    one, other = freeze(everything()), freeze(everything(**changed))
    assert one.type != other.type and one.fingerprint != other.fingerprint


def kernel_of(conf: gk.Config) -> Any:
    """Compile (or find) a configuration's kernel, as a plan does."""
    given = arguments(conf)
    return compile_module.cubin_of(FAMILIES[conf.kernel].kernel, given, conf.threads, H100)


@pytest.mark.kin(4)
@pytest.mark.compile
def test_a_new_bias_and_a_new_alpha_compile_nothing(own_cache: Any) -> None:
    before = stats.compiled
    first = kernel_of(compact(epilogue=Scaled(np.ones(256), 0.5)))
    assert stats.compiled == before + 1
    assert kernel_of(compact(epilogue=Scaled(np.zeros(300), -0.5))).cubin == first.cubin
    assert stats.compiled == before + 1
    assert kernel_of(compact(epilogue=Scaled(np.ones(256, F4), 0.5))).cubin != first.cubin
    assert stats.compiled == before + 2


# -- functions -------------------------------------------------------------------------------------------------------------


def transforming(out: Any, a: Any, transform: Any) -> None:
    i = thread_index()
    out[i] = transformed(transform, a[i], i, i)


# -- what cannot be -------------------------------------------------------------------------------------------------------------

def line_of(marker: str) -> int:
    """The number of the line in this file that ends with the comment ``# marker``."""
    (number,) = (n for n, line in enumerate(HERE.read_text().splitlines(), 1) if line.endswith(f"# {marker}"))
    return number


@dataclass
class NotFrozen(gk.Component):
    by: float = 1.0


class NotADataclass(gk.Component):
    by: float = 1.0


class NoFields(transforms.Transform):
    """No decorator is needed where there is nothing to declare."""

    def __call__(self, x):
        return x * 2


def test_components_are_frozen_dataclasses() -> None:
    for kind in (NotFrozen, NotADataclass):
        with pytest.raises(TypeError, match=f"{kind.__name__}: a component is a frozen dataclass; write @dataclass"):
            freeze(kind())
    (out,) = emulated(transforming, Out((32,), F4), np.ones(32, F4), NoFields())
    assert (out == 2).all() and leaves_nothing(compiled(transforming, Out((32,), F4), np.ones(32, F4), NoFields()))


@pytest.mark.parametrize("changed, message", [
    (dict(alpha="large"), r"Everything.alpha: 'large' \(str\) is not a number"),
    (dict(alpha=None, array=[1, 2]), "Everything.array: got list; an array"),
    (dict(array=np.array(["text"])), "Everything.array: dtype <U4 has no device type"),
    (dict(array=np.zeros(3, "V12")), "Everything.array: dtype |V12 has no device type"),
    (dict(strong=np.str_("a")), "Everything.strong: dtype <U1 has no device type"),
])
def test_runtime_fields_that_device_code_cannot_hold(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        freeze(everything(**changed))


@dataclass(frozen=True)
class Holding(transforms.Transform):
    thing: Any

    def __call__(self, x):
        return x + self.thing  # THING


@pytest.mark.parametrize("thing", [[1, 2], {"a": 1}, {1}, object()], ids=["list", "dict", "set", "object"])
def test_static_fields_that_device_code_cannot_hold(thing: Any) -> None:
    """Only where they are used: a component may have fields for the host alone."""
    with pytest.raises(gk.ComponentError, match=r"Holding.thing: .*cannot be a compile-time value") as caught:
        compiled(transforming, Out((32,), F4), np.ones(32, F4), Holding(thing))
    assert f'File "{HERE}", line {line_of("THING")}' in str(caught.value)


@dataclass(frozen=True)
class Dependent(gk.Component):
    alpha: gk.Scalar

    @property
    def twice(self) -> Any:
        return self.alpha * 2

    @property
    def compared(self) -> bool:
        return self.alpha > 0

    @property
    def nested(self) -> Any:
        return self.alpha.real

    @property
    def equal(self) -> bool:
        return self.alpha == 0

    @cached_property
    def kept(self) -> Any:
        return self.alpha + 1

    def by_method(self) -> Any:
        return self.alpha * 2


@pytest.mark.parametrize("name", ["twice", "compared", "nested", "equal", "kept"])
def test_a_property_cannot_depend_on_a_runtime_field(name: str) -> None:
    space: dict[str, Any] = {}
    exec(f"def kernel(out, c): out[0] = c.{name}", space)
    with pytest.raises(TypeError, match=r"a property that.*may not depend on the runtime field Dependent.alpha"):
        component = Dependent(1.5)
        assert getattr(component, name) is not None                 # a value that was asked for in Python is no constant
        compiled(space["kernel"], Out((1,), np.float64), component)


def test_a_method_can() -> None:
    def kernel(out: Any, c: Any) -> None:
        out[0] = c.by_method()

    assert leaves_nothing(compiled(kernel, Out((1,), np.float64), Dependent(1.5)))
    assert emulated(kernel, Out((1,), np.float64), Dependent(1.5), threads=1)[0][0] == 3.0


@dataclass(frozen=True)
class Pair(transforms.Transform):
    """Two transforms, one after the other: components nest, with their runtime fields."""

    first: Any
    second: Any

    def __call__(self, x):
        return self.second(self.first(x))


@dataclass(frozen=True)
class Times(transforms.Transform):
    by: gk.Scalar

    def __call__(self, x):
        return x * self.by


def test_components_nest() -> None:
    nested = Pair(Pair(Times(2.0), NoFields()), Pair(Times(3.0), Leaky(0.5)))
    assert [value for _, value in freeze(nested).leaves] == [2.0, 3.0]
    assert freeze(nested).type == freeze(Pair(Pair(Times(5.0), NoFields()), Pair(Times(7.0), Leaky(0.5)))).type
    (out,) = emulated(transforming, Out((32,), F4), np.full(32, -1, F4), nested)
    assert (out == -6).all()
    assert leaves_nothing(compiled(transforming, Out((32,), F4), np.ones(32, F4), nested))


def test_attributes_are_no_globals() -> None:
    """An array of the module that merely has the name of an attribute is not captured."""
    space = {"gk": gk, "shape": np.ones(3), "__name__": "users_program"}
    exec("function = lambda x: x.shape", space)
    assert not freeze(space["function"]).leaves


# ==========================================================================================================================
# Functions in components: what they capture, and fingerprints that are the same in every process.


def scaled_by(factor: Any) -> Any:
    return transforms.Map(lambda x: x * factor)


def test_functions_of_equal_code_are_one_kernel() -> None:
    one, other = transforms.Map(lambda x: max(x, 0) + 1), transforms.Map(lambda x: max(x, 0) + 1)
    assert freeze(one).type == freeze(other).type and freeze(one).fingerprint == freeze(other).fingerprint
    different = freeze(transforms.Map(lambda x: max(x, 0) + 2))
    assert different.type != freeze(one).type and different.fingerprint != freeze(one).fingerprint


def test_captured_constants_are_part_of_the_kernel() -> None:
    two, three = freeze(scaled_by(2)), freeze(scaled_by(3))
    assert two.type != three.type and two.fingerprint != three.fingerprint and not two.leaves
    assert freeze(scaled_by(2)).type == two.type
    assert freeze(scaled_by(2.0)).fingerprint != two.fingerprint


@pytest.mark.parametrize("one, other", [
    (np.float32(2), np.float32(3)), (np.arange(4.0), np.ones(7)), (np.int64(5), np.int64(-5)),
], ids=["scalar", "array", "integer"])
def test_captured_arrays_and_numpy_scalars_are_arguments(one: Any, other: Any) -> None:
    first, second = freeze(scaled_by(one)), freeze(scaled_by(other))
    assert (first.type, first.fingerprint) == (second.type, second.fingerprint) and first.leaves != second.leaves


TABLE = np.array([1.0, 10.0, 100.0])                 # module globals that the functions below refer to


OFFSET = np.float64(0.5)


STEP = 3


def from_table(x: Any, i: int, j: int) -> Any:
    return x * TABLE[j % STEP] + OFFSET


def test_module_globals_are_captured(rebound: Set) -> None:
    transform = transforms.Map(from_table)
    first = freeze(transform)
    assert [code for code, _ in first.leaves] == ["f64", "u64", "i32"] or \
        sorted(code for code, _ in first.leaves) == ["f64", "i32", "u64"]
    ptx = compiled(transforming, Out((32,), np.float64), np.ones(32), transform)
    assert leaves_nothing(ptx) and len(lines_with(ptx, "ld.global")) == 2
    rebound(TABLE=np.array([2.0, 20.0, 200.0]))
    rebound(OFFSET=np.float64(1.5))
    second = freeze(transform)
    assert (first.type, first.fingerprint) == (second.type, second.fingerprint) and first.leaves != second.leaves
    rebound(STEP=2)
    third = freeze(transform)
    assert third.type != first.type and third.fingerprint != first.fingerprint


@pytest.mark.kin(4)
@on_machines
def test_captured_values_are_those_of_the_call(machine: Any, rng: np.random.Generator) -> None:
    """One kernel; the arrays and scalars that the functions hold when they are called."""
    a, b = rng.standard_normal((M, K)).astype(F4), rng.standard_normal((K, N)).astype(F4)

    def make(weights: Any, shift: Any) -> transforms.Map:
        return transforms.Map(lambda x, i, j: x * weights[j] + shift)

    compiled_before = None
    for seed in range(3):
        weights, shift = np.random.default_rng(seed).standard_normal(N), np.float32(seed)
        with machine.session():
            d = gk.matmul(machine.array(a), machine.array(b), operator=operators.FPUOp(M=16, N=16),
                          transform_regs_to_shared_d=make(machine.array(weights), shift))
        assert relative_error(machine.numpy(d), a.astype(float) @ b.astype(float) * weights + seed) < 1e-5
        assert compiled_before is None or stats.compiled == compiled_before
        compiled_before = stats.compiled


def test_a_name_bound_anew_is_seen() -> None:
    """A constant, a helper, and an attribute of a module that a method refers to: changed, it is another kernel."""
    module = types.ModuleType("users_module")
    module.__dict__.update(EPS=0.5, helper=lambda x: x * 2)
    space = {"gk": gk, "dataclass": dataclass, "users_module": module, "SCALE": 2.0, "transforms": transforms,
             "__name__": "users_program"}
    exec("from __future__ import annotations\n"
         "def by_scale(x): return x * SCALE\n"
         "@dataclass(frozen=True)\n"
         "class Changing(transforms.Transform):\n"
         "    def __call__(self, x): return by_scale(users_module.helper(x)) + users_module.EPS\n", space)
    transform = space["Changing"]()
    seen = set()
    steps: list[Callable[[], Any]] = [
        lambda: None, lambda: space.update(SCALE=3.0), lambda: module.__dict__.update(EPS=0.25),
        lambda: module.__dict__.update(helper=lambda x: x * 4),
        lambda: space.update(by_scale=lambda x: x - 1),
    ]
    for step in steps:
        step()
        ptx = compiled(transforming, Out((32,), F4), np.ones(32, F4), transform)
        constants = tuple(sorted(word for line in ptx.splitlines() for word in line.split() if word.startswith("0f")))
        seen.add((freeze(transform).fingerprint, constants))
        (out,) = emulated(transforming, Out((32,), F4), np.ones(32, F4), transform)
        assert out[0] == transform(1.0)
    assert len({fingerprint for fingerprint, _ in seen}) == len(steps) and len({c for _, c in seen}) == len(steps)


PROGRAM = """
import numpy as np
import gemmkit as gk
from gemmkit import epilogues, layouts, operators, transforms
from gemmkit.components import freeze
from gemmkit.kernels.simt import singlestage
from gemmkit.lang.fingerprint import function_text
from gemmkit.runtime.device import H100
from tests.components.test_components import MinPlus, Scaled, everything
table = np.arange(3.0)
def helper(x): return x + {1: 2, 3: 4}[1]
confs = [
    gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100),
    gk.get_config(operator=MinPlus(), global_a_layout=layouts.ColMajor("float32"), device=H100,
                  epilogue=Scaled(np.ones(3), 2.0)),
    gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100,
                  transform_regs_to_shared_d=transforms.Map(lambda x, i, j: max(x, 0.5) * table[j])),
]
for conf in confs:
    print(freeze(conf.spec()).fingerprint)
print(freeze(everything()).fingerprint)
print(function_text(singlestage))
print(function_text(lambda x: x in {"a", "b", "c"} or helper(x)))
"""


@pytest.mark.kin(4)
def test_fingerprints_are_the_same_in_every_process() -> None:
    """The key of the cache on disk. Python orders sets and hashes strings anew in each process."""
    def run(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path])}
        return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
                              env=environment).stdout

    first, second = run("1"), run("4321")
    assert first == second and len(set(first.split())) == 6
