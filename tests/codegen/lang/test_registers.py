"""Registers may not leave the function that makes them: they are its stack. The emulator cannot see it; the compiled code's values do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

from gemmkit.components import Component, freeze
from gemmkit.emulator import machine
from gemmkit.lang import functions as functions_module
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.functions import device
from gemmkit.lang.host import View
from gemmkit.lang.memory import ViewType
from gemmkit.lang.registers import Fragment, registers
from gemmkit.ptx.special import thread_index
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100
from tests.ptx_machine.launch import run_ptx

pytestmark = pytest.mark.compile
F32 = np.dtype("f4")
VIEW = ViewType(F32, 2, 1, 16)


@dataclass(frozen=True)
class Spec(Component):
    """What a kernel makes its registers of."""

    @property
    def one(self) -> Fragment:
        return Fragment(F32, 1)

    def made(self):
        return registers(self.one, 4, 1)


def made(spec):
    return registers(spec.one, 4, 1)


def in_a_tuple(spec):
    held = registers(spec.one, 4, 1)
    return 1, (held, 2)


class Pair(NamedTuple):
    left: Any
    right: Any


def in_a_named_tuple(spec):
    return Pair(1, registers(spec.one, 4, 1))


def on_one_path(spec):
    held = registers(spec.one, 4, 1)
    if thread_index() < 16:
        return held
    held[0, 0] = (np.float32(1),)
    return held


def by_another(spec):
    return made(spec)


def of_an_argument(spec):
    return same(registers(spec.one, 4, 1))


def same(held):
    return held


def by_a_method(spec):
    return spec.made()


def compiled(function: Any) -> Any:
    return device(function).compile((freeze(Spec()).type,))


@pytest.mark.parametrize("function, name, line", [
    (made, "made", "return registers(spec.one, 4, 1)"), (in_a_tuple, "in_a_tuple", "return 1, (held, 2)"),
    (in_a_named_tuple, "in_a_named_tuple", "return Pair(1, registers(spec.one, 4, 1))"), (on_one_path, "on_one_path", "return held"),
    (by_another, "made", "return registers(spec.one, 4, 1)"), (by_a_method, "Spec.made", "return registers(self.one, 4, 1)"),
    (of_an_argument, "same", "return held")])
def test_a_function_that_returns_registers_is_refused(function: Any, name: str, line: str) -> None:
    with pytest.raises(ComponentError, match="returns registers: they are this function's own stack") as caught:
        compiled(function)
    text = str(caught.value)
    assert text.startswith(f"{name} cannot be compiled as device code\n  File \"{__file__}\", line ") and f"\n    {line}\n" in text


def test_registers_can_be_passed_on() -> None:
    def user(spec):
        held = registers(spec.one, 4, 1)
        put(held, 0, np.float32(1))
        return held[0, 0][0]

    assert compiled(user).signature.return_type.bitwidth == 32


# -- what it would compute ------------------------------------------------------------------------------------------------

def put(held, n, x):
    held[n, 0] = (x,)


def fill(held, view, column):
    for n in range(4):
        put(held, n, view[n, column])


def products(spec, a, b, c):
    x, y = made(spec), made(spec)
    t = thread_index()
    fill(x, a, t)
    fill(y, b, t)
    for n in range(4):
        c[n, t] = x[n, 0][0] * y[n, 0][0]


def arrays() -> list[np.ndarray]:
    rng = np.random.default_rng(3)
    out = []
    for n in range(3):
        raw = np.zeros(4 * 32 + 64, F32)
        at = -raw.ctypes.data % 256 // 4
        out.append(raw[at:at + 128].reshape(4, 32))
        out[-1][...] = rng.standard_normal((4, 32)) if n < 2 else np.nan
    return out


def test_the_interpreter_finds_what_the_emulator_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the check disabled: the emulated product is right, the compiled one is b * b."""
    a, b, c = arrays()
    views = [View(x, machine.Memory.for_array(x, name, written=name != "c"), 1, 16) for x, name in zip((a, b, c), "abc")]
    machine.launch(products, (Spec(), *views), grid=(1, 1, 1), block=(32, 1, 1), shared_memory=0)
    assert np.array_equal(c, a * b)

    types = freeze(Spec()).type, VIEW, VIEW, VIEW
    with pytest.raises(ComponentError, match="returns registers"):
        to_ptx(products, types, 32, H100)
    with monkeypatch.context() as patch:
        patch.setattr(functions_module, "_looks", [])
        ptx = to_ptx(products, types, 32, H100)
    device(made)._compiled.clear()                                     # what was compiled without the check
    device(products)._compiled.clear()
    c[...] = np.nan
    parameters = [x for array in (a, b, c) for x in (array, 4, 32, 32)]
    run_ptx(ptx, 32, 1, parameters, [a, b, c])
    assert np.array_equal(c, b * b) and not np.array_equal(c, a * b)
