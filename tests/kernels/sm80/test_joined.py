"""Lines of joined and braided operands by cp.async (`kernels.sm80.joined`): where it is taken, and what it brings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.epilogues import Fold
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import MIN_PLUS, FPUOp, MMAOp
from gemmkit.tiling import Tile
from tests.ptx_machine.compare import PTX
from tests.support.machines import MACHINES, poison, whole

OPERATORS: dict[str, Any] = {"f16": MMAOp(), "f64": MMAOp(dtype="f8"), "f32": FPUOp(32, 32)}
MACHINE = [pytest.param(MACHINES["emulator"], id="emulator"), pytest.param(PTX, id="ptx", marks=[pytest.mark.compile, pytest.mark.thorough]),
           pytest.param(MACHINES["gpu"], id="gpu", marks=pytest.mark.gpu)]


def config(kind: str, b: Any) -> gk.Config:
    operator = OPERATORS[kind]
    dtype = operator.fragment_a.dtype
    return gk.get_config(kernel="multistage", operator=operator, global_a_layout=RowMajor(dtype), global_b_layout=b(dtype),
                         global_d_layout=RowMajor(operator.fragment_c.dtype), block_shape=Tile(M=32, N=32, K=16))


def parts(rng: np.random.Generator, rows: tuple[int, ...], columns: tuple[int, ...], dtype: Any, order: Any) -> list[np.ndarray]:
    return [np.asarray(whole(rng, shape, dtype), order=order) for shape in zip(rows, columns)]


@pytest.mark.kin(2)
@pytest.mark.sample(6)
@pytest.mark.parametrize("machine", MACHINE)
@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("order", ["C", "F"])
def test_lines_are_copied_from_the_array_that_has_them(machine: Any, kind: str, order: str) -> None:
    """Extents that are no multiples of the tile's, so that some lie beyond an edge; boundaries that are none of the k-tile's."""
    rng, dtype = np.random.default_rng(0), OPERATORS[kind].fragment_a.dtype
    x, w = parts(rng, (40,) * 3, (24, 8, 40), dtype, "C"), parts(rng, (24, 8, 40), (40,) * 3, dtype, order)
    v = parts(rng, (72,) * 2, (24,) * 2, dtype, order)
    conf = config(kind, RowMajor if order == "C" else ColMajor)
    with machine.session():
        a, b = gk.Concat(*map(machine.array, x), axis=1), gk.Concat(*map(machine.array, w), axis=0)
        braid = gk.Braid(*map(machine.array, v))
        joined, braided = gk.plan(a, b, conf=conf), gk.plan(a, braid, conf=conf, epilogue=Fold(lambda gate, up: gate - 2 * up))
        out = machine.array(poison((40, 40), conf.global_d_layout.dtype))
        joined(a, b, out=out)
        folded = machine.array(poison((40, 24), conf.global_d_layout.dtype))
        braided(a, braid, out=folded)
    left = np.concatenate(x, 1).astype("f8")
    np.testing.assert_array_equal(machine.numpy(out), left @ np.concatenate(w).astype("f8"))
    np.testing.assert_array_equal(machine.numpy(folded), left @ (v[0].astype("f8") - 2 * v[1].astype("f8")))
    routes = [type(plan._compiled.spec.b.route).__name__ for plan in (joined, braided)]          # type: ignore[attr-defined]
    across = kind == "f32" and order == "F"                    # single elements are left to the registers
    assert routes == ["Staged" if across else "CpAsyncJoined"] * 2


REFUSED = {"a boundary of 7": (7, 33, 0, "C"), "a misaligned part": (8, 32, 1, "C"), "parts of different orders": (8, 32, 0, "F")}


@pytest.mark.kin(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_to_the_registers(name: str) -> None:
    first, second, shift, order = REFUSED[name]
    rng = np.random.default_rng(1)
    x = whole(rng, (24, first), "f2")
    room = np.zeros(24 * second + shift, "f2")
    h = room[shift:].reshape((24, second), order=order)
    h[:] = whole(rng, (24, second), "f2")
    w = whole(rng, (first + second, 16), "f2")
    with gk.emulate():
        a = gk.Concat(x, h, axis=1)
        run = gk.plan(a, w, conf=config("f16", RowMajor))
        got = run(a, w)
    assert type(run._compiled.spec.a.route).__name__ == "Staged"                                  # type: ignore[attr-defined]
    np.testing.assert_array_equal(got, np.concatenate([x, h], 1).astype("f8") @ w.astype("f8"))


@pytest.mark.sample(2)
@pytest.mark.parametrize("machine", MACHINE)
def test_beyond_the_end_stands_the_identity(machine: Any) -> None:
    rng = np.random.default_rng(2)
    x, w = whole(rng, (9, 20), "f4"), parts(rng, (12, 8), (36,) * 2, "f4", "C")
    with machine.session():
        b = gk.Concat(*map(machine.array, w), axis=0)
        run = gk.plan(machine.array(x), b, operator=MIN_PLUS.sized(dict(M=32, N=32, MB=4, NB=8), np.dtype("f4"), np.dtype("f4"), np.dtype("f4")))
        got = run(machine.array(x), b)
    np.testing.assert_array_equal(machine.numpy(got), (x[:, :, None] + np.concatenate(w)[None]).min(1))
