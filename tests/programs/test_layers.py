"""Products of a tile one after the other, without a loop, against their references: layers of different widths, in parts and in
turn, what their columns are filled up with, on both kernels; and what is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import programs as gp
from gemmkit.plans.ahead import recorded
from gemmkit.runtime.device import A100, H100, assumed
from tests.support.machines import BF16, on_machines, poison
from tests.support.programs import two_layers

F16, F32 = np.dtype(np.float16), np.dtype(np.float32)
KERNELS = pytest.mark.parametrize("kernel", ["warp_specialised", "multistage"])


@gk.program
def three_layers(x: Any, u: Any, v: Any, w: Any, y: Any) -> None:
    """Of a function of which 0 becomes no 0."""
    for m in gp.parallel(x.rows):
        h = gp.exp(x[m] @ u).astype(x.dtype)
        h = (1.0 / (1.0 + gp.exp(h @ v))).astype(x.dtype)
        y[m] = h @ w


@gk.program
def transposed(x: Any, w: Any, v: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = gp.tanh(x[m] @ w.T).astype(x.dtype) @ v.T


@gk.program
def residual(x: Any, w: Any, v: Any, y: Any) -> None:
    """A cell outside of rounds, and rows that are read again."""
    for m in gp.parallel(x.rows):
        acc = gp.zeros(m, w.columns)
        acc += x[m] @ w
        y[m] = gp.maximum(acc, 0.0).astype(w.dtype) @ v + x[m]


@gk.program
def normalised(x: Any, w: Any, v: Any, y: Any, top: Any) -> None:
    """Sums and maxima of rows between products, and a value of each row."""
    for m in gp.parallel(x.rows):
        s = x[m] @ w
        p = gp.exp(s - s.max(axis=1))
        y[m] = (p / p.sum(axis=1)).astype(w.dtype) @ v
        top[m] = s.max(axis=1)


@gk.program
def of_heads(x: Any, w: Any, v: Any, y: Any, scale: float) -> None:
    """Rows of a stack, weights of each matrix and for all, and a number."""
    for b, h, m in gp.parallel(*x.counts, x.rows):
        y[b, h, m] = gp.maximum(x[b, h, m] @ w[h], 0.0).astype(v.dtype) @ v * scale


def half(rng: np.random.Generator, *shape: int, dtype: Any = F16) -> np.ndarray:
    return (rng.standard_normal(shape) * shape[-2] ** -0.5).astype(dtype)


def run(machine: Any, program: Any, kernel: str, arrays: list[np.ndarray], results: int = 1, **more: Any) -> None:
    """Against the reference; what is written has been poisoned."""
    given = [machine.array(x) for x in arrays]
    with machine.session():
        program(*given, mapping=gk.Mapping(kernel=kernel), **more)
    expected = program.reference(*arrays, **more)
    for found, wanted in zip(given[-results:], [expected] if results == 1 else expected):
        found = machine.numpy(found).astype(np.float64)
        assert np.allclose(found, wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max()), np.abs(found - wanted).max()


WIDTHS = [(64, 64, 64), (48, 40, 24), (256, 256, 256), (16, 136, 8), (96, 200, 72)]


@pytest.mark.kin(1)
@pytest.mark.sample(6)
@on_machines
@KERNELS
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_layers(machine: Any, kernel: str, widths: tuple[int, ...], rng: np.random.Generator) -> None:
    a, b, c = widths
    run(machine, two_layers, kernel, [half(rng, 131, a), half(rng, a, b), half(rng, b, c), half(rng, 1, b)[0], poison((131, c), F16)])


@on_machines
@KERNELS
def test_columns_that_are_not_there_are_nothing(machine: Any, kernel: str, rng: np.random.Generator) -> None:
    widths = 24, 40, 72, 40
    weights = [half(rng, k, n, dtype=BF16) for k, n in pairwise(widths)]
    run(machine, three_layers, kernel, [half(rng, 70, 24, dtype=BF16), *weights, poison((70, 40), F32)])
    arrays = [half(rng, 70, 24), half(rng, 24, 40), half(rng, 40, 24), poison((70, 24), F16), poison((70,), F32)]
    run(machine, normalised, kernel, arrays, results=2)


@pytest.mark.kin(1)
@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("a,b,c", [(30, 18, 10), (34, 50, 6), (22, 270 - 16, 2)])
def test_rows_that_tma_cannot_load(machine: Any, a: int, b: int, c: int, rng: np.random.Generator) -> None:
    """Even numbers of columns; a result of any number."""
    run(machine, two_layers, "", [half(rng, 70, a), half(rng, a, b), half(rng, b, c), half(rng, 1, b)[0], poison((70, c), F16)])


@on_machines
def test_rows_that_end_at_odd_columns(machine: Any, rng: np.random.Generator) -> None:
    """Views of rows that begin at multiples of 4 bytes: nothing behind their ends is read, and nothing there is written."""
    held = [machine.array(x) for x in (half(rng, 70, 34), half(rng, 31, 24), half(rng, 19, 14), half(rng, 1, 19)[0], poison((70, 20), F16))]
    views = [held[0][:, :31], held[1][:, :19], held[2][:, :13], held[3], held[4][:, 2:15]]
    for x, end in zip(held[:3], (31, 19, 13)):
        x[:, end:] = float("nan")
    with machine.session():
        two_layers(*views)
    found = machine.numpy(held[4]).astype(np.float64)
    expected = two_layers.reference(*(machine.numpy(x) for x in views))
    assert np.allclose(found[:, 2:15], expected, atol=0.02) and np.isnan(np.delete(found, np.s_[2:15], 1)).all()


@pytest.mark.kin(1)
@on_machines
@KERNELS
def test_transposed_and_read_again(machine: Any, kernel: str, rng: np.random.Generator) -> None:
    run(machine, transposed, kernel, [half(rng, 131, 200), half(rng, 256, 200), half(rng, 40, 256), poison((131, 40), F16)])
    run(machine, residual, kernel, [half(rng, 131, 64), half(rng, 64, 48), half(rng, 48, 64), poison((131, 64), F16)])


@pytest.mark.kin(1)
@on_machines
@KERNELS
def test_stacks(machine: Any, kernel: str, rng: np.random.Generator) -> None:
    x, w, v = half(rng, 2, 3, 70, 64), half(rng, 3, 64, 48), half(rng, 48, 32)
    run(machine, of_heads, kernel, [x, w, v, poison((2, 3, 70, 32), F16)], scale=0.5)


@pytest.mark.kin(1)
@on_machines
@pytest.mark.parametrize("kernel,warpgroups,stages,width", [
    ("warp_specialised", 1, 2, 128), ("warp_specialised", 1, 5, 128), ("multistage", 1, 2, 128), ("multistage", 1, 5, 128),
    ("warp_specialised", 2, 2, 256), ("warp_specialised", 2, 3, 256), ("warp_specialised", 2, 4, 256)])
def test_several_tiles_of_a_block(machine: Any, kernel: str, warpgroups: int, stages: int, width: int, rng: np.random.Generator) -> None:
    """Parts of a product, and the next tile's rows, in fewer stages than there are parts and in more: none waits for ever."""
    x, w, v, bias = half(rng, 400, 256), half(rng, 256, width), half(rng, width, 64), half(rng, 1, width)[0]
    y, mapping = poison((400, 64), F16), gk.Mapping(kernel=kernel, warpgroups=warpgroups, stages={"w": stages})
    given = {name: machine.array(array) for name, array in dict(x=x, w=w, v=v, bias=bias, y=y).items()}
    with machine.session():
        plan = two_layers.plan(**given, mapping=mapping)
        plan.run(given)
    assert np.allclose(machine.numpy(given["y"]), two_layers.reference(x, w, v, bias, y), atol=0.02)
    assert "w_tile" in plan.text and "first=" in plan.text


# -- products that do not need each other, and arrays that several take ---------------------------------------------------------

@gk.program
def swiglu(x: Any, w: Any, v: Any, u: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        gate, up = x[m] @ w, x[m] @ v
        y[m] = (gate / (1.0 + gp.exp(-gate)) * up).astype(x.dtype) @ u


@gk.program
def tied(x: Any, w: Any, v: Any, u: Any, y: Any) -> None:
    """An autoencoder's weights, which are those of its decoder, and a layer that comes twice."""
    for m in gp.parallel(x.rows):
        h = gp.maximum(x[m] @ w, 0.0)
        for _ in range(2):
            h = gp.tanh(h.astype(x.dtype) @ v)
        y[m] = h.astype(x.dtype) @ w.T


@gk.program
def side_by_side(x: Any, w: Any, v: Any, u: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = ((x[m] @ w) * gp.tanh(x[m] @ u)).astype(x.dtype) @ v + x[m] @ u


#: Of columns of x and of what is hidden: the shapes of w, v, u, and the columns of y.
LAYERS: dict[str, tuple[gp.Program, Any]] = {
    "swiglu": (swiglu, lambda d, e: ((d, e), (d, e), (e, d), d)), "tied": (tied, lambda d, e: ((d, e), (e, e), (1, 1), d)),
    "side_by_side": (side_by_side, lambda d, e: ((d, e), (e, e), (d, e), e))}


@pytest.mark.kin(4)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("mapping", [None, gk.Mapping(kernel="multistage"), gk.Mapping(warpgroups=1), gk.Mapping(stages={"w": 3})], ids=repr)
@pytest.mark.parametrize("shape", [(70, 64, 96), (300, 512, 64), (5, 72, 184), (64, 256, 256), (1, 8, 8)], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_products_in_any_order(machine: Any, name: str, shape: tuple[int, int, int], mapping: gk.Mapping | None, rng: np.random.Generator) -> None:
    """Also those that come in parts, whose stages the next product's parts follow in."""
    (program, shapes), (rows, columns, hidden) = LAYERS[name], shape
    *weights, width = shapes(columns, hidden)
    if width > 256:
        return
    if hidden == 256 and name != "tied":               # whose sums are there at the same time
        with pytest.raises(gk.ConfigError, match="registers|shorter blocks"):
            program.plan(half(rng, rows, columns), *(half(rng, *x) for x in weights), poison((rows, width), F16), mapping=mapping)
        return
    arrays = [half(rng, rows, columns), *(half(rng, *x) for x in weights), poison((rows, width), F16)]
    exact, given = program.reference(*arrays), [machine.array(x) for x in arrays]
    with machine.session():
        program(*given, mapping=mapping)
    assert np.allclose(machine.numpy(given[-1]), exact, atol=0.03)


@pytest.mark.compile
@pytest.mark.parametrize("device", [H100, A100], ids=["sm_90", "sm_80"])
@pytest.mark.parametrize("name", LAYERS)
def test_products_in_any_order_spill_nothing(name: str, device: Any, rng: np.random.Generator) -> None:
    program, shapes = LAYERS[name]
    *weights, width = shapes(128, 64)
    with assumed(device):
        plan = program.plan(half(rng, 256, 128), *(half(rng, *x) for x in weights), poison((256, width), F16))
        usage = plan.launchable.entry().meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0


REFUSED: dict[str, tuple[Any, str]] = {}


def refused(match: str) -> Any:
    def keep(f: Any) -> Any:
        REFUSED[f.__name__] = gk.program(f), match
        return f
    return keep


@refused("the right operand of a product is computed")
def computed_right(x: Any, w: Any, v: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m] @ (w @ v)


@refused(r"write h.astype\(v.dtype\)|write .*astype\(v.dtype\)")
def not_rounded(x: Any, w: Any, v: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        h = gp.tanh(x[m] @ w)
        y[m] = h @ v


@refused(r"read blocks of others: w\[m\]")
def element_wise(x: Any, w: Any, v: Any, y: Any) -> None:
    for m in gp.parallel(x.rows):
        y[m] = x[m] * w


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_kernel_is_refused_with_its_line(name: str) -> None:
    program, match = REFUSED[name]
    x, w = np.zeros((70, 64), F16), np.zeros((64, 64), F16)
    with gk.emulate(), pytest.raises((ValueError, TypeError), match=match) as error:
        program.plan(x, w, w.copy(), np.zeros((70, 64), F16))
    assert "test_layers.py:" in str(error.value)


def test_mappings_that_need_rounds_are_refused() -> None:
    given = [np.zeros(shape, F16) for shape in ((70, 64), (64, 64), (64, 64), (64,), (70, 64))]
    for mapping, match in ((gk.Mapping(ahead=True), "products without a loop have no next round"),
                           (gk.Mapping(splits=2), "splits"), (gk.Mapping({"n": 64}), "'n'"),
                           (gk.Mapping(stages={"w": 1}, kernel="multistage"), "2 are needed")):
        with gk.emulate(), pytest.raises(gk.ConfigError, match=match):
            two_layers.plan(*given, mapping=mapping)


@pytest.mark.compile
@pytest.mark.kin(1)
@pytest.mark.parametrize("kernel,width", [("", 128), ("", 256), ("multistage", 128)])
def test_nothing_spills(kernel: str, width: int) -> None:
    arrays = [np.zeros(shape, F16) for shape in ((256, width), (width, width), (width, width), (width,), (256, width))]
    (plan,) = recorded(lambda: two_layers(*arrays, mapping=gk.Mapping(kernel=kernel)), H100, zeros=False)
    usage = plan.launchable.entry().meta["usage"]
    assert usage["spill_stores"] == usage["spill_loads"] == usage["stack_bytes"] == 0
