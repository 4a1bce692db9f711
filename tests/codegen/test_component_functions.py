"""Functions in components: what they capture, and fingerprints that are the same in every process."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import operators, transforms
from gemmkit.components import freeze
from gemmkit.runtime.compile import stats
from tests.codegen.test_components import transforming
from tests.support.checks import relative_error
from tests.support.harness import Out, compiled, emulated, leaves_nothing, lines_with
from tests.support.machines import on_machines

F4 = np.dtype("f4")


HERE = Path(__file__)


M, N, K = 37, 29, 45


def scaled_by(factor: Any) -> Any:
    return transforms.Elementwise(lambda x: x * factor)


def test_functions_of_equal_code_are_one_kernel() -> None:
    one, other = transforms.Elementwise(lambda x: max(x, 0) + 1), transforms.Elementwise(lambda x: max(x, 0) + 1)
    assert freeze(one).type == freeze(other).type and freeze(one).fingerprint == freeze(other).fingerprint
    different = freeze(transforms.Elementwise(lambda x: max(x, 0) + 2))
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


def test_module_globals_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    transform = transforms.Elementwise(from_table)
    first = freeze(transform)
    assert [code for code, _ in first.leaves] == ["f64", "u64", "i32"] or \
        sorted(code for code, _ in first.leaves) == ["f64", "i32", "u64"]
    ptx = compiled(transforming, Out((32,), np.float64), np.ones(32), transform)
    assert leaves_nothing(ptx) and len(lines_with(ptx, "ld.global")) == 2
    monkeypatch.setattr(sys.modules[__name__], "TABLE", np.array([2.0, 20.0, 200.0]))
    monkeypatch.setattr(sys.modules[__name__], "OFFSET", np.float64(1.5))
    second = freeze(transform)
    assert (first.type, first.fingerprint) == (second.type, second.fingerprint) and first.leaves != second.leaves
    monkeypatch.setattr(sys.modules[__name__], "STEP", 2)
    third = freeze(transform)
    assert third.type != first.type and third.fingerprint != first.fingerprint


@pytest.mark.kin(2)
@on_machines
def test_captured_values_are_those_of_the_call(machine: Any, rng: np.random.Generator) -> None:
    """One kernel; the arrays and scalars that the functions hold when they are called."""
    a, b = rng.standard_normal((M, K)).astype(F4), rng.standard_normal((K, N)).astype(F4)

    def make(weights: Any, shift: Any) -> transforms.Elementwise:
        return transforms.Elementwise(lambda x, i, j: x * weights[j] + shift)

    compiled_before = None
    for seed in range(3):
        weights, shift = np.random.default_rng(seed).standard_normal(N), np.float32(seed)
        with machine.session():
            d = gk.matmul(machine.array(a), machine.array(b), operator=operators.FPUOp(M=16, N=16),
                          transform_regs_to_shared_d=make(machine.array(weights), shift))
        assert relative_error(machine.numpy(d), a.astype(float) @ b.astype(float) * weights + seed) < 1e-5
        assert compiled_before is None or stats.compiled == compiled_before
        compiled_before = stats.compiled


def test_a_name_bound_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
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
from tests.codegen.test_components import MinPlus, Scaled, everything
table = np.arange(3.0)
def helper(x): return x + {1: 2, 3: 4}[1]
confs = [
    gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100),
    gk.get_config(operator=MinPlus(), global_a_layout=layouts.ColMajor("float32"), device=H100,
                  epilogue=Scaled(np.ones(3), 2.0)),
    gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100,
                  transform_regs_to_shared_d=transforms.Elementwise(lambda x, i, j: max(x, 0.5) * table[j])),
]
for conf in confs:
    print(freeze(conf.spec()).fingerprint)
print(freeze(everything()).fingerprint)
print(function_text(singlestage))
print(function_text(lambda x: x in {"a", "b", "c"} or helper(x)))
"""


@pytest.mark.kin(2)
def test_fingerprints_are_the_same_in_every_process() -> None:
    """The key of the cache on disk. Python orders sets and hashes strings anew in each process."""
    def run(seed: str) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path])}
        return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True,
                              env=environment).stdout

    first, second = run("1"), run("4321")
    assert first == second and len(set(first.split())) == 6
