"""The multistage kernel's products, in the emulator and on a GPU: orders, types, sizes, the ring, and how operands get there.

Values are small whole numbers, so that every result is exactly right or wrong; D is poisoned before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.kernels.sm80.kernel import InStepMainloop
from gemmkit.layouts import ColMajor, RowMajor
from gemmkit.operators import MMAOp
from gemmkit.tiling import Tile
from tests.support.machines import is_poison, on_machines, poison, whole
from tests.support.sm80 import F16, F32, KINDS, expected, mapping, named, operands, product, routes

ORDERS = {"N": RowMajor, "T": ColMajor}
F32_OPERATOR = KINDS["f32"]


@pytest.mark.sample(64)
@on_machines
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_type_in_every_order(machine: Any, kind: str, trans: str, rng: np.random.Generator) -> None:
    """Several tiles and rounds, none of them whole; and sizes of which copies are wide."""
    operator = KINDS[kind]
    m, n, k = operator.shape
    for size in ((2 * m + 3, n + 5, 9 * k + 1), (2 * m + 16, n + 16, 6 * k + 16)):
        a, b = operands(rng, operator, *size)
        conf = mapping(operator, ORDERS[trans[0]], ORDERS[trans[1]], ORDERS[trans[0]])
        assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b)), size


SIZES = [(1, 1, 1), (1, 37, 5), (31, 1, 29), (13, 17, 1), (33, 35, 97), (0, 5, 7), (5, 0, 7), (0, 0, 0), (37, 41, 0)]


@pytest.mark.kin(5)
@pytest.mark.sample(9)
@on_machines
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", ["f16", "f32", "f64 by dmma"])
def test_sizes(machine: Any, kind: str, size: tuple[int, int, int], rng: np.random.Generator) -> None:
    """Nothing, one, primes; without K sums are zero."""
    a, b = operands(rng, KINDS[kind], *size)
    assert np.array_equal(product(machine, mapping(KINDS[kind]), a, b), expected(KINDS[kind], a, b))


# -- the ring -----------------------------------------------------------------------------------------------------------

@pytest.mark.kin(5)
@pytest.mark.sample(40)
@on_machines
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("steps", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["f16", "f64 by dmma"])
def test_stages_and_steps(machine: Any, kind: str, steps: int, stages: int, rng: np.random.Generator) -> None:
    """Both main loops; an odd number of steps moves fragments at a round's end; K shorter than the ring, as long, and longer."""
    operator = KINDS[kind]
    conf = mapping(operator, b=ColMajor, steps=steps, stages=stages)
    depth = conf.block_shape.size.K
    assert isinstance(conf.spec().mainloop, InStepMainloop) == (kind != "f16") and conf.spec().steps_k == steps
    for k in (depth, (stages - 1) * depth, (stages + 1) * depth - 8):
        a, b = operands(rng, operator, 16, 24, k)
        assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b)), k


@pytest.mark.kin(5)
@on_machines
def test_sixteen_products_a_step_go_across_rounds(machine: Any, rng: np.random.Generator) -> None:
    """float64 with enough products for ptxas to keep its waits: the usual main loop."""
    operator = MMAOp(M=8, K=4, dtype="f8")
    conf = mapping(operator, block_shape=Tile(M=32, N=32, K=8), compute_warp=Tile(M=32, N=32, K=8), stages=2)
    assert not isinstance(conf.spec().mainloop, InStepMainloop)
    a, b = operands(rng, operator, 33, 35, 27)
    assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b))


@pytest.mark.kin(5)
@pytest.mark.sample(12)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["f16", "f32", "f64 by dmma"])
def test_threads_in_any_order(kind: str, seed: int, rng: np.random.Generator) -> None:
    """Only the emulator draws orders; no race, and the same sums."""
    from tests.support.machines import MACHINES

    operator = KINDS[kind]
    a, b = operands(rng, operator, 19, 21, 5 * operator.K * 2 + 1)
    conf = mapping(operator, stages=2 + seed % 3)
    assert np.array_equal(product(MACHINES["emulator"], conf, a, b, seed=seed), expected(operator, a, b))


# -- how operands get into the stages -----------------------------------------------------------------------------------

def test_the_widest_copy_is_taken() -> None:
    """By what is known of addresses: 16 bytes along the stage's lines, an element where lines lie across."""
    spec = mapping(MMAOp(), block_shape=Tile(M=32, N=16, K=32)).spec()
    assert named(spec.a.route) == "CpAsync 8"
    spec = mapping(F32_OPERATOR, steps=16).spec()
    assert (named(spec.a.route), named(spec.b.route)) == ("CpAsync 1", "CpAsync 4")          # A is turned on its way
    spec = mapping(F32_OPERATOR, ColMajor, ColMajor, steps=16).spec()
    assert (named(spec.a.route), named(spec.b.route)) == ("CpAsync 4", "CpAsync 1")
    spec = mapping(F32_OPERATOR, transform_global_to_shared_a=gk.transforms.Elementwise(lambda x: x + 1)).spec()
    assert named(spec.a.route) == "Staged"


# what is cut out of a larger matrix: (rows skipped, columns skipped, columns of memory), and the routes
VIEWS = {
    "whole": (0, 0, 64, "CpAsync 8", "CpAsync 8"), "aligned rows": (3, 8, 80, "CpAsync 8", "CpAsync 8"),
    "8 bytes": (0, 4, 80, "CpAsync 4", "CpAsync 4"), "4 bytes": (1, 2, 70, "CpAsync 2", "CpAsync 2"),
    "2 bytes": (0, 1, 80, "Staged", "Staged"), "odd lines": (0, 0, 69, "Staged", "Staged"),
}


@pytest.mark.kin(5)
@pytest.mark.sample(4)
@on_machines
@pytest.mark.parametrize("name", VIEWS)
def test_views_of_f16(machine: Any, name: str, rng: np.random.Generator) -> None:
    """cp.async refuses what is not aligned to 4 bytes, and threads take over."""
    down, right, line, *by = VIEWS[name]
    a = machine.array(whole(rng, (40, line), F16))[down:down + 35, right:right + 64]
    b = machine.array(whole(rng, (70, line), F16))[down:down + 64, right:right + 48]
    conf = mapping(MMAOp(), block_shape=Tile(M=32, N=32, K=32), compute_warp=Tile(M=16, N=32, K=32))
    assert routes(machine, conf, a, b) == tuple(by)
    out = machine.array(poison((35, 48), F32))
    with machine.session():
        gk.matmul(a, b, None, conf, out=out)
    assert np.array_equal(machine.numpy(out), expected(MMAOp(), machine.numpy(a), machine.numpy(b)))


@pytest.mark.kin(5)
@pytest.mark.sample(5)
@on_machines
@pytest.mark.parametrize("view", range(5))
def test_views_of_f32(machine: Any, view: int, rng: np.random.Generator) -> None:
    """Any address of float32 is one of cp.async: 4 bytes. Reversed and spread columns are no lines of memory."""
    base = machine.array(whole(rng, (70, 140), F32))
    conf = mapping(F32_OPERATOR, ColMajor, steps=16)
    b = base[:33, 1:38]
    a, route = ((base.T[:64, :33], "CpAsync 4"), (base.T[1:65, :33], "CpAsync 1"), (base.T[:66:2, :33], "CpAsync 1"),
                (base.T[64:0:-1, :33], "CpAsync 1"), (base.T[:64, 32::-1], "CpAsync 4"))[view]
    assert routes(machine, conf, a, b) == (route, "CpAsync 1")
    out = machine.array(poison((a.shape[0], 37), F32))
    with machine.session():
        gk.matmul(a, b, None, conf, out=out)
    assert np.array_equal(machine.numpy(out), expected(F32_OPERATOR, machine.numpy(a), machine.numpy(b)))


@pytest.mark.kin(5)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("columns", [24, 40])
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_tiles_that_warps_do_not_divide_evenly(machine: Any, trans: str, columns: int, rng: np.random.Generator) -> None:
    """Three or five warps, and four lines of pieces along K: a thread's pieces are at no fixed distance from its first."""
    operator = gk.operators.FPUOp(16, 8, 4, MB=4, NB=8, accumulator=np.float64)
    block = dict(block_shape=Tile(M=32, N=columns, K=32), compute_warp=Tile(M=32, N=8, K=32), warps_per_block=columns // 8)
    conf = mapping(operator, ORDERS[trans[0]], ORDERS[trans[1]], stages=2, **block)
    a, b = operands(rng, operator, 37, columns + 3, 70)
    assert np.array_equal(product(machine, conf, a, b), expected(operator, a, b))


@on_machines
def test_what_is_not_an_operand_is_not_touched(machine: Any, rng: np.random.Generator) -> None:
    """NaN around A and B, and D is a view whose surroundings stay as they were."""
    a, b = (np.full((40, 72), np.nan, F16) for _ in range(2))
    a[3:36, 8:45], b[1:38, 16:47] = whole(rng, (33, 37), F16), whole(rng, (37, 31), F16)
    around = machine.array(poison((40, 40), F32))
    with machine.session():
        gk.matmul(machine.array(a)[3:36, 8:45], machine.array(b)[1:38, 16:47], None, mapping(MMAOp()), out=around[2:35, 4:35])
    d = machine.numpy(around).copy()
    assert np.array_equal(d[2:35, 4:35], expected(MMAOp(), a[3:36, 8:45], b[1:38, 16:47]))
    d[2:35, 4:35] = np.nan
    assert is_poison(d)
