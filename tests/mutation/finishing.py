"""The battery's products that lanes, warps and blocks finish together, and those of operands of several parts.

They are those of the kernels' own tests, which say what is right: a reduction of rows and columns, rows that are normalised, A
observed, braids and their folds, parts that the blocks of a cluster rewrite for each other, operands that arrive meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import gemmkit as gk
from gemmkit.tiling import Tile
from tests.epilogues import test_normalise, test_observers, test_reductions
from tests.kernels import test_gated
from tests.kernels.sm80 import test_boxes
from tests.kernels.sm80 import test_operands as joined_by_copies
from tests.kernels.sm90 import test_cluster_exchange, test_joined, test_rewrite, test_stores
from tests.mutation.families import right
from tests.mutation.products import EMULATOR, WrongResult, case, equal
from tests.support import joined, programs
from tests.support.machines import poison, whole
from tests.support.sm90 import F16, F32, mapping


def checked(check: Callable[..., None], *given: Any) -> None:
    """A test, by the emulator."""
    right(check, EMULATOR, *given)


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


# -- rows and columns -----------------------------------------------------------------------------------------------------

@case
def reductions() -> None:
    for kind, op in (("rows", "argmax"), ("columns", "sum")):
        checked(test_reductions.test_reductions, "warp_specialised", kind, op, (70, 37, 16))
    a, b = (1 + abs(x) for x in test_reductions.operands((36, 36, 8), F16)[:2])
    product = a.astype("f8") @ b.astype("f8")          # of no 0, which is what values out of range are
    for kind, op, d in (("rows", "argmax", test_reductions.ColMajor(F32)), ("columns", "min", test_reductions.RowMajor(F32))):
        got, found = test_reductions.reduced(EMULATOR, kind, op, a, b, conf=joined.config("singlestage", d=d))
        equal(got, product)
        equal(found, test_reductions.expected(op, product, 1 if kind == "rows" else 0))


@case
def reductions_in_a_chain() -> None:
    """What stands behind them is told its place."""
    checked(test_reductions.test_chains, "singlestage", 2)


@case
def rows_in_one_tile() -> None:
    checked(test_normalise.test_rows, "warp_specialised", "layer", (70, 29, 16))
    checked(test_normalise.test_rows, "singlestage", "layer", (35, 29, 16))


@case
def rows_in_two_passes() -> None:
    checked(test_normalise.test_rows, "warp_specialised", "softmax", (9, 128, 8))
    checked(test_normalise.test_rows, "singlestage", "layer", (9, 67, 8))


@case
def rows_of_columns_in_two_passes() -> None:
    """D's lines lie along M; and no two of its elements are neighbours."""
    a, b, product = test_normalise.operands((9, 67, 8), F16)
    conf = joined.config("warp_specialised", d=test_reductions.ColMajor(F32))
    right(test_normalise.same, test_normalise.normalised(EMULATOR, "softmax", a, b, conf), test_normalise.expected("softmax", product))
    wide = poison((9, 48), F32)
    with gk.emulate():
        gk.matmul(a, b[:, :24], out=wide[:, ::2], conf=joined.config("warp_specialised"),
                  epilogue=test_normalise.QUARTER | test_normalise.Softmax())
    right(test_normalise.same, wide[:, ::2], test_normalise.expected("softmax", product[:, :24]))


@case
def rows_of_a_cluster() -> None:
    for schedule, kind in (("one", "layer"), ("pingpong", "softmax")):
        if test_cluster_exchange.passes(test_cluster_exchange.config(schedule, 2), 6 * 64, 40, kind) != "one cluster":
            raise WrongResult("rows are normalised in two passes")
        right(test_cluster_exchange.test_tile_after_tile, schedule, kind, None)


@case
def observed() -> None:
    checked(test_observers.test_beside_an_epilogue_and_one_of_ones_own, "singlestage")
    for schedule, n in (("two", 40), ("two-2x2", 32)):
        a, b, product = test_observers.operands((140, n, 40), F16)
        d, found = poison((140, n), F32), poison((140,), F32)
        with gk.emulate(seed=1):
            gk.matmul(a, b, out=d, conf=mapping(schedule, test_observers.WGMMAOp(32), depth=16, stages=2),
                      observe_a=test_observers.OperandRowReduce(found, "sum"))
        equal(d, product)
        equal(found, a.astype("f8").sum(1))


# -- parts ----------------------------------------------------------------------------------------------------------------

@case
def folds() -> None:
    for count, order, d in ((2, "C", test_reductions.RowMajor(F32)), (4, "F", test_reductions.RowMajor(F16)), (3, "C", test_reductions.ColMajor(F32))):
        equal(*joined.folded_product(EMULATOR, "warp_specialised", count, (40, 32, 40), order, d=d, coordinates=True))
    equal(*joined.folded_product(EMULATOR, "multistage", 2, (37, 29, 33)))


@case
def joined_along_k() -> None:
    for family in ("warp_specialised", "multistage"):
        equal(*joined.joined_product(EMULATOR, family, "K in three"))


@case
def braids() -> None:
    for schedule, order in (("one", "C"), ("one-2x1", "F")):
        conf = mapping(schedule, test_joined.WGMMAOp(64), stages=2, depth=16, **test_joined.braid_of(64, 2, order))
        equal(*test_joined.braided(EMULATOR, conf, (136, 40, 72), 2, order)[1:])


@case
def joined_by_tma() -> None:
    x, w = ([whole(np.random.default_rng(n), shape, F16) for n in range(2)] for shape in ((70, 32), (32, 40)))
    out, conf = poison((70, 40), F32), mapping("one", depth=16, stages=2)
    with gk.emulate():
        gk.matmul(gk.layouts.Concat(*x, axis=1), gk.layouts.Concat(*w, axis=0), conf=conf, out=out)
    equal(out, np.concatenate(x, 1).astype("f8") @ np.concatenate(w).astype("f8"))


@case
def a_comb_of_columns() -> None:
    flat, out = test_stores.combed(EMULATOR, 70, 256, 8, F16)
    a, b = whole(rng(), (70, 24), F16), whole(rng(), (24, 256), F16)
    conf = mapping("one", test_stores.OPERATOR, depth=16, stages=2,
                   d=test_stores.Matricised.of(test_stores.describe(out), 1))
    test_stores.computed(EMULATOR, conf, a, b, out)
    equal(test_stores.in_order(flat, 0, 70, 256, 8), a.astype("f8") @ b)


@case
def joined_by_cp_async() -> None:
    """Lines of three arrays along K, whose boundaries are none of the k-tile's."""
    rows, columns = (24, 8, 40), (40,) * 3
    x = joined_by_copies.parts(rng(), columns, rows, F16, "C")
    w = joined_by_copies.parts(rng(), rows, columns, F16, "C")
    out = poison((40, 40), F32)
    with gk.emulate():
        gk.matmul(gk.layouts.Concat(*x, axis=1), gk.layouts.Concat(*w, axis=0), conf=joined_by_copies.config("f16", joined_by_copies.RowMajor), out=out)
    equal(out, np.concatenate(x, 1).astype("f8") @ np.concatenate(w).astype("f8"))


@case
def boxes() -> None:
    x, y = test_boxes.operands(rng(), 18, 9, 2, 16, F16)
    equal(test_boxes.product(EMULATOR, x, y, test_boxes.BoxMMAOp(N=8), warps=(1, 1), stages=2), test_boxes.expected(x, y))


# -- of a cluster, and of other ranks -------------------------------------------------------------------------------------

@case
def parts_rewritten() -> None:
    """Each block a part, for all of them: of both operands, and of a triangle, which leaves some as they are."""
    for schedule in ("two-2x2", "pingpong-1x2"):
        fields = {f"transform_global_to_shared_{which}": test_rewrite.Map(lambda x, i, j: x + (i + 2 * j) % 3)
                  for which in test_rewrite.MORE[schedule]}
        a, b = whole(rng(), (144, 72), F16), whole(rng(), (72, 40), F16)
        conf = mapping(schedule, test_rewrite.WGMMAOp(32), depth=16, stages=3, **fields)
        i, j = (np.indices(x.shape) for x in (a, b))
        left = a.astype(F32) + (i[0] + 2 * i[1]) % 3
        right_ = b.astype(F32) + ((j[0] + 2 * j[1]) % 3 if "b" in test_rewrite.MORE[schedule] else 0)
        equal(test_rewrite.product(EMULATOR, conf, a, b), left @ right_)


@case
def parts_beside_registers() -> None:
    """A by the registers of the consumers, to which parts of B are sent by the other block's threads."""
    a, b = whole(rng(), (130, 40), F16), whole(rng(), (40, 40), F16)
    both = {f"transform_global_to_shared_{x}": test_rewrite.Map(lambda x: x + 1) for x in "ab"}
    conf = mapping("one-2x1", test_rewrite.WGMMAOp(32), depth=16, stages=2, b=test_reductions.ColMajor,
                   mem_b_thread=Tile(K=16, N=1), mem_b_warp=Tile(K=16, N=16), **both)
    equal(test_rewrite.product(EMULATOR, conf, a, b), (a.astype("f8") + 1) @ (b.astype("f8") + 1))


@case
def a_triangle_in_parts() -> None:
    """Parts that are as they are stored are sent, too."""
    a, b, out = whole(rng(), (70, 72), F16), whole(rng(), (72, 72), F16), poison((70, 72), F32)
    conf = mapping("one-2x1", test_rewrite.WGMMAOp(32), depth=16, stages=2,
                   b=lambda dtype: test_rewrite.Triangular(test_rewrite.ColMajor(dtype), "lower"))
    with gk.emulate():
        gk.matmul(a, np.asfortranarray(b), None, conf, out=out)
    equal(out, a.astype(F32) @ np.tril(b.astype(F32)))


@case
def sums_of_a_cluster() -> None:
    """A derived kernel whose warps read both operands beside the tensor cores: of a stage each tells those blocks that fill it."""
    a, b = whole(rng(), (128, 40), F16), whole(rng(), (40, 72), F16)
    of_a, of_b, scale, d = np.ones(128, F16), np.zeros(72, F16), np.ones(72, F16), poison((128, 72), F32)
    with gk.emulate():
        programs.zero_points(a, b, of_a, of_b, scale, d, mapping=gk.Mapping({"n": 64}, warpgroups=1, stages=2, cluster={"m": 2, "n": 2}))
    equal(d, (a.astype("f8") - 1) @ b)


@case
def operands_that_arrive() -> None:
    for schedule in ("one", "pingpong"):
        a, b, d = test_gated.run(mapping(schedule, depth=16, stages=2), (64, 64, 20), 1, rng(), depth=24)
        equal(d, a.astype("f8") @ b.astype("f8"))
    a, b, d = test_gated.run(test_gated.threads("singlestage"), (20, 7), 1, rng(), depth=8)
    equal(d, a.astype("f8") @ b.astype("f8"))


@case
def operands_of_another_rank() -> None:
    """A rank without rows of its own waits for its first tile; what is added to D arrives, too."""
    for schedule in ("one", "pingpong"):
        a, b = whole(rng(), (130, 32), F16), whole(rng(), (32, 32), F16)
        conf = mapping(schedule, test_rewrite.WGMMAOp(32), depth=16, stages=2, d=test_reductions.RowMajor(F16),
                       global_c_layout=test_reductions.RowMajor(F16))
        own, d = test_gated.Rank(conf, a, (130, 0), 1, 32), poison((130, 32), F16)
        with gk.emulate(), test_gated.beside(*own.pushes()):
            gk.matmul(own.a, b, own.a, own.conf, out=d)
        equal(d, a.astype("f8") @ b + a)


__all__ = ["checked"]
