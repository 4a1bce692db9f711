"""Hypothesis strategies of drawn cases (`tests.support.drawn`): families whose mappings are legal, and problems of a family."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import reject
from hypothesis import strategies as st

import gemmkit as gk
from tests.support.drawn import ALGEBRAS, ORDERS, Family, Place, Problem, config_of, operator_of

F16, BF16, F32, F64 = "float16", "bfloat16", "float32", "float64"
FP8 = ("float8_e4m3fn", "float8_e5m2")
MORE_TENSOR = ((F64, F64), (F64, F64), ("int8", "int32"))
TENSOR = ((F16, F32), (F16, F32), (F16, F16), (BF16, F32))
FPU = ((F32, F32, F32), (F32, F32, F32), (F32, F32, F64), (F64, F64, F64), (F16, F16, F32), (BF16, BF16, F32), (F16, F32, F32),
       ("int8", "int8", "int32"), ("uint8", "uint8", "int32"), ("int8", "uint8", "int32"), ("int16", "int16", "int32"),
       ("int32", "int32", "int32"), ("int64", "int64", "int64"))
SEMIRING = (("min_plus", F32), ("min_plus", F64), ("min_plus", "int32"), ("max_plus", F32), ("max_plus", "int64"), ("max_times", F32),
            ("log_sum_exp", F32), ("or_and", "int32"), ("or_and", "int64"), ("widest", F32))
FPU_SHAPES = ((4, 8, 1, 4, 8), (8, 8, 1, 4, 8), (8, 16, 2, 8, 4), (16, 16, 1, 4, 8), (16, 32, 1, 2, 16), (32, 16, 1, 8, 4), (16, 8, 4, 4, 8))
WGMMA = ((F16, F16, F32), (F16, F16, F32), (BF16, BF16, F32), (F16, F16, F16), (F32, F32, F32), ("int8", "int8", "int32"),
         ("int8", "uint8", "int32"), (FP8[0], FP8[0], F32), (FP8[1], FP8[0], F32), (FP8[0], FP8[0], F16))


@dataclass(frozen=True)
class Reach:
    """How large tiles and matrices may be on a machine."""

    emulated: bool

    @property
    def columns(self) -> tuple[int, ...]:
        return (8, 16, 24, 32) if self.emulated else (8, 16, 24, 32, 48, 64, 96, 128, 128, 192, 256)


refused: Counter[str] = Counter()              # by the rule that a drawn mapping broke: those are drawn anew


def pick(draw: Any, *options: Any) -> Any:
    return draw(st.sampled_from(options))


def often(draw: Any, ten: int) -> bool:
    """True ``ten`` times out of ten."""
    return bool(draw(st.integers(0, 9)) < ten)


def divisor(draw: Any, number: int, most: int) -> int:
    return pick(draw, *(d for d in range(1, min(number, most) + 1) if number % d == 0))


# -- operators ------------------------------------------------------------------------------------------------------------

def draw_operator(draw: Any, kernel: str, reach: Reach) -> tuple:
    if kernel == "warp_specialised":
        a, b, accumulator = pick(draw, *WGMMA)
        allowed = [n for n in reach.columns if not (a in ("int8", "uint8") and n % 16 and n > 24)]
        return "wgmma", pick(draw, *allowed), a, b, accumulator, 0
    kind = pick(draw, "mma", "mma", "wmma", "fpu", "fpu", "semiring", "algebra")
    if kind == "mma":
        return "mma", *pick(draw, *TENSOR, *(MORE_TENSOR if kernel == "multistage" else ()))
    if kind == "wmma":
        return "wmma", *pick(draw, (16, 16), (8, 32), (32, 8)), *pick(draw, *TENSOR)
    if kind == "fpu":
        return "fpu", *pick(draw, *FPU), *pick(draw, *FPU_SHAPES)
    if kind == "semiring":
        return "semiring", *pick(draw, *SEMIRING), *pick(draw, *FPU_SHAPES)
    if kernel == "multistage" and often(draw, 3):
        return "algebra", pick(draw, "complex", "complex", "dual"), ("mma", F64, F64)
    base = ("mma", *pick(draw, *TENSOR)) if often(draw, 5) else ("fpu", *pick(draw, *FPU[:6]), *pick(draw, *FPU_SHAPES[:4]))
    name = pick(draw, "complex", "complex", "dual", "dual", *ALGEBRAS)
    return "algebra", name, base


def dtypes_of(operator: tuple) -> tuple[str, str, str]:
    """Of A, B and the sums; of parts, for numbers."""
    if operator[0] == "algebra":
        operator = operator[2]
    made: Any = operator_of(operator)
    return made.fragment_a.dtype.name, made.fragment_b.dtype.name, np.dtype(made.accumulator).name


# -- places ---------------------------------------------------------------------------------------------------------------

def draw_place(draw: Any, dtype: str, kinds: tuple[str, ...] = ("plain",), plain: int = 6) -> Place:
    kind = kinds[0] if often(draw, plain) else pick(draw, *kinds)
    size = np.dtype(dtype).itemsize
    unit = pick(draw, 16, 16, 16, 8, 4, 2, 1)
    step = 1 if often(draw, 8) else 2
    back = kind == "plain" and dtype not in (BF16, *FP8) and often(draw, 1)
    return Place(dtype, kind, pick(draw, 1, 0), max(unit, size), pick(draw, 0, 0, 1), step, back)


def draw_operand(draw: Any, name: str, dtype: str, operator: tuple) -> Place:
    kinds = ("plain", "lower", "upper", "lower unit", "lower symmetric", "upper symmetric", "diagonal", "hankel", "generated",
             *(("toeplitz",) if name == "a" else ()))
    if operator[0] == "algebra":
        kinds = ("interleaved", "planar", *(("records",) if operator[1] == "complex" and dtype in (F32, F64) else ()))
    elif operator[0] == "semiring":
        kinds = ("plain", "hankel", *(("lower", "upper", "diagonal") if operator[1] in ("min_plus", "max_plus", "log_sum_exp")
                                      and dtype in (F32, F64) else ()))
    elif dtype in FP8:
        kinds = ("plain", "lower", "hankel", "upper symmetric")
    return draw_place(draw, dtype, kinds)


def draw_c(draw: Any, name: str, dtype: str, operator: tuple) -> Place:
    """C, or D: of the sums' type or of another. D is not of a narrower integer, which is refused."""
    integers = "int32", "int32", "int64", *(("int16",) if name == "c" else ())
    others = {F32: (F32, F32, F16, BF16), F64: (F64, F32), F16: (F16, F32), "int32": integers}
    if operator[0] == "algebra":
        kinds = ("interleaved", "planar", *(("records",) if operator[1] == "complex" and dtype in (F32, F64) else ()))
        return draw_place(draw, dtype, kinds)
    if operator[0] == "semiring" and dtype.startswith("int"):
        return draw_place(draw, dtype, ("plain", "packed"), 8)
    return draw_place(draw, pick(draw, *others.get(dtype, (dtype,))), ("plain", "packed"), 8)


# -- functions ------------------------------------------------------------------------------------------------------------

POINTS = ("global_to_shared_a", "global_to_shared_b", "global_to_shared_c", "shared_to_regs_a", "shared_to_regs_b", "shared_to_regs_c",
          "regs_to_shared_d", "shared_to_global_d")


def draw_transforms(draw: Any, operator: tuple, dtypes: tuple[str, str, str], with_c: bool) -> tuple:
    kind = operator[0]
    out = []
    for point in POINTS:
        on = point[-1]
        if not often(draw, 2) or (on == "c" and not with_c):
            continue
        if on in "ab" and (dtypes["ab".index(on)] in FP8 or (kind == "wmma" and point.startswith("shared_to_regs"))):
            continue
        names = ["affine"]
        in_registers = kind == "wmma" and point in ("shared_to_regs_c", "regs_to_shared_d")
        if kind != "algebra":
            names.append("relu")
        if not in_registers and (kind != "semiring" or operator[1] in ("min_plus", "max_plus", "log_sum_exp")):
            names.append("placed")
        if not in_registers and kind != "semiring":
            names.append("captured")
        chosen = (pick(draw, *names),)
        if often(draw, 2):
            chosen = (*chosen, pick(draw, *names))
        out.append((point, chosen))
    return tuple(out)


def draw_epilogue(draw: Any, operator: tuple, accumulator: str) -> tuple:
    if often(draw, 3):
        return ()
    kind, integer = operator[0], accumulator.startswith("int")
    vector = accumulator if integer else pick(draw, accumulator, F16, F32, F64)
    matrix = accumulator if integer else pick(draw, accumulator, F16, F32)
    parts = ["scale", f"bias_n:{vector}", f"bias_m:{vector}", "affine", "placed", f"scale_n:{vector}", f"scale_m:{vector}"]
    if kind != "algebra":
        parts += ["relu", "clamp", "where", "causal", f"residual:{matrix}", f"store:{matrix}"]
        if not integer:
            parts += ["leaky"]
        if kind == "semiring":
            parts = [part for part in parts if not part.startswith("scale")]
        else:
            parts += [f"combine:{matrix}"]
            if not integer:
                parts += ["gelu", "gelu_tanh", "silu", "tanh"]
    chosen = [pick(draw, *parts) for _ in range(draw(st.integers(1, 4)))]
    outputs = [part for part in chosen if part.startswith(("store", "combine"))]
    return tuple(part for n, part in enumerate(chosen) if part not in outputs[1:] or n == chosen.index(part))


# -- mappings -------------------------------------------------------------------------------------------------------------

def draw_moves(draw: Any, name: str, extents: tuple[int, int]) -> tuple:
    """(field, (a warp's tile, a thread's)): any that divide the block's; a patch, or a line that is moved at once."""
    thread = [divisor(draw, extent, 8) for extent in extents]
    if thread[0] * thread[1] > 16 or often(draw, 6):
        thread[draw(st.integers(0, 1))] = 1
    warp = tuple(t * divisor(draw, extent // t, 64) for t, extent in zip(thread, extents))
    return f"mem_{name}", (warp, tuple(thread))


def draw_singlestage(draw: Any, operator: tuple, reach: Reach) -> tuple:
    m, n, k = operator_of(operator).shape
    rows, columns = pick(draw, (1, 1), (2, 1), (1, 2), (2, 2), *(() if reach.emulated else ((4, 1), (2, 4), (1, 3))))
    most = 1 if operator[0] == "algebra" or m * n > 256 else 2
    warp = m * draw(st.integers(1, most)), n * draw(st.integers(1, most)), k * draw(st.integers(1, 2))
    depth = pick(draw, *(d for d in (1, 2, 3, 4, 8) if 2 <= warp[2] * d <= 48))
    block = warp[0] * rows, warp[1] * columns, warp[2] * depth
    fields: list[tuple] = [("block_shape", block), ("compute_warp", warp), ("warps_per_block", rows * columns), ("order", pick(draw, *ORDERS))]
    for name in "abcd":
        fields.append((f"shared_{name}_layout", (pick(draw, 0, 1), draw(st.integers(0, 3)))))
    fields += [draw_moves(draw, "a", (block[0], block[2])), draw_moves(draw, "b", block[:0:-1]), draw_moves(draw, "cd", block[:2])]
    return tuple(fields)


def draw_multistage(draw: Any, operator: tuple, reach: Reach) -> tuple:
    """A ring of any length, k-tiles of an odd and an even number of steps; shared layouts and moves drawn, or the defaults'."""
    m, n, k = operator_of(operator).shape
    rows, columns = pick(draw, (1, 1), (2, 1), (1, 2), (2, 2), *(() if reach.emulated else ((4, 1), (2, 4), (1, 3))))
    most = 1 if operator[0] == "algebra" or m * n > 256 else 2
    warp = m * draw(st.integers(1, most)), n * draw(st.integers(1, most))
    steps = pick(draw, *(d for d in (1, 2, 3, 4, 8, 16) if 2 <= k * d <= 64))
    block = warp[0] * rows, warp[1] * columns, k * steps
    fields: list[tuple] = [("kernel", "multistage"), ("block_shape", block), ("compute_warp", (*warp, block[2])), ("warps_per_block", rows * columns),
                           ("order", pick(draw, *ORDERS)), ("stages", pick(draw, 2, 3, 3, 4, 5))]
    if often(draw, 4):                         # of which cp.async brings what lies so in memory; the defaults have more of it
        fields += [(f"shared_{name}_layout", (pick(draw, 0, 1), draw(st.integers(0, 3)))) for name in "ab"]
        fields += [draw_moves(draw, "a", (block[0], block[2])), draw_moves(draw, "b", block[:0:-1])]
    if often(draw, 3):
        fields += [(f"shared_{name}_layout", (pick(draw, 0, 1), draw(st.integers(0, 3)))) for name in "cd"]
        fields.append(draw_moves(draw, "cd", block[:2]))
    return tuple(fields)


def draw_warp_specialised(draw: Any, operator: tuple, d_dtype: str, reach: Reach) -> tuple[tuple, tuple]:
    """(the operator, with its promotion; the mapping)."""
    _, N, a, b, accumulator, _ = operator
    itemsize = np.dtype(a).itemsize
    schedule = pick(draw, "cooperative", "cooperative", "pingpong")
    groups = 1 if schedule == "pingpong" else pick(draw, 1, 1, 2, 3)
    group = 64 if reach.emulated else pick(draw, 64, 64, 128)
    K = pick(draw, 32, 64, 128, *(() if reach.emulated else (128, 256))) // itemsize
    M = group * groups
    warps = 8 if schedule == "pingpong" else 4 * groups
    fields: list[tuple] = [("block_shape", (M, N, K)), ("compute_warp", (group, N, K)), ("warps_per_block", warps), ("schedule", schedule),
                           ("producer_warps", pick(draw, 4, 4, 8) if warps <= 8 else 4), ("stages", draw(st.integers(2, 4))),
                           ("cluster", pick(draw, (1, 1), (1, 1), (2, 1), (1, 2))), ("order", pick(draw, *ORDERS))]
    for name, across, k_axis in (("a", M, 1), ("b", N, 0)):
        axis = pick(draw, k_axis, k_axis, 1 - k_axis) if itemsize == 2 and across % 16 == 0 else k_axis
        along = K if axis == k_axis else across
        width = pick(draw, *(w for w in (32, 64, 128) if along * itemsize % w == 0))
        fields.append((f"shared_{name}_layout", (axis, width)))
        extents = (across, K) if name == "a" else (K, across)
        length = pick(draw, *(n for n in (1, 2, 4, 8, 16) if n * itemsize <= 16))
        thread = [1, 1]
        thread[axis] = length
        warp = tuple(t * divisor(draw, extent // t, 32) for t, extent in zip(thread, extents))
        fields.append((f"mem_{name}", (warp, tuple(thread))))
    fields.append(("shared_d_layout", (1, pick(draw, *(w for w in (32, 64, 128) if N * np.dtype(d_dtype).itemsize % w == 0)))))
    promote = pick(draw, 0, K, 2 * K) if a in FP8 and accumulator == F32 else 0
    return (*operator[:5], promote), tuple(fields)


# -- families and problems ------------------------------------------------------------------------------------------------

@st.composite
def families(draw: Any, reach: Reach, kernel: str = "") -> Family:
    """A family with a legal mapping; what gemmkit refuses is counted in `refused` and drawn anew."""
    if draw(st.integers(0, 2**31 - 1)) == 0:
        reject()                                                       # hypothesis begins every search with the same one
    kernel = kernel or pick(draw, "singlestage", "multistage", "multistage", "warp_specialised")
    operator = draw_operator(draw, kernel, reach)
    dtypes = dtypes_of(operator)
    a, b = draw_operand(draw, "a", dtypes[0], operator), draw_operand(draw, "b", dtypes[1], operator)
    call = "conf"
    if operator[0] != "semiring" and often(draw, 1):
        call = "gemmEx"
    elif not reach.emulated and operator[0] in ("mma", "fpu", "algebra", "semiring") and often(draw, 1):
        call = "dispatch"
    c = draw_c(draw, "c", dtypes[2], operator) if call != "gemmEx" and often(draw, 5) else None
    d = draw_c(draw, "d", dtypes[2], operator)
    transforms: tuple = ()
    epilogue: tuple = ()
    if call == "gemmEx":
        a, b, d = (_plainly(x, operator) for x in (a, b, d))
    else:
        transforms, epilogue = draw_transforms(draw, operator, dtypes, c is not None), draw_epilogue(draw, operator, dtypes[2])
    mapping: tuple = ()
    if kernel == "warp_specialised":
        if operator[1] * np.dtype(d.dtype).itemsize % 32:
            operator = (operator[0], 16 if np.dtype(d.dtype).itemsize < 4 else 8, *operator[2:])
        operator, mapping = draw_warp_specialised(draw, operator, d.dtype, reach)
    elif call != "dispatch":
        mapping = {"singlestage": draw_singlestage, "multistage": draw_multistage}[kernel](draw, operator, reach)
    residues = draw(st.tuples(*[st.sampled_from((0, 0, 8, *range(16)))] * 3))
    family = Family(operator, a, b, c, d, transforms, epilogue, mapping, call, residues, pick(draw, *EDGES))
    first, second = family.is_square
    m, n, k = residues
    residues = (k if first else m, k if second else n, k)
    family = Family(operator, a, b, c, d, transforms, epilogue, mapping, call, residues, family.edge)
    if call != "dispatch":
        try:
            config_of(family)
        except gk.ConfigError as error:
            refused[str(error).split("=")[0]] += 1
            reject()
    return family


EDGES = ((), (), (), ("M", 0), ("N", 0), ("K", 0), ("M", 1), ("N", 1), ("K", 1), ("MNK", 1))


def _plainly(place: Place, operator: tuple) -> Place:
    kind = "plain" if operator[0] != "algebra" else "records" if place.kind == "records" else "interleaved"
    return Place(place.dtype, kind, place.axis, place.unit, place.skip, place.step if kind == "plain" else 1)


@st.composite
def problems(draw: Any, family: Family, reach: Reach, ordinal: int, last: bool = False) -> Problem:
    """Sizes of the family's class; ``last``: its edge, if it has one. Problems with different ``ordinal`` (below 100) differ."""
    sizes = {}
    block = dict(family.mapping).get("block_shape", (64, 64, 64))
    for dim, residue, tile in zip("MNK", family.residues, block):
        if reach.emulated:
            most = max(1, (min(tile, 160) + 16) // 16)
        else:
            most = 50 if often(draw, 1) else 18
        sizes[dim] = 16 * draw(st.integers(int(residue < 2), most)) + residue
    first, second = family.is_square
    if last and family.edge:
        for dim in family.edge[0]:
            sizes[dim] = family.edge[1]
            if (dim in "MK" and first) or (dim in "KN" and second):
                tied = "MK" * first + "KN" * second
                sizes |= {other: family.edge[1] for other in tied}
    if first:
        sizes["M"] = sizes["K"]
    if second:
        sizes["N"] = sizes["K"]
    integer = dtypes_of(family.operator)[2].startswith("int")
    numbers = (1, 0, -1, 2) if integer else (1.0, 0.0, -0.5, 2.0, 0.3)
    return Problem(**sizes, values=pick(draw, "whole", "whole", "normal"), seed=100 * draw(st.integers(0, 2**31 - 1)) + ordinal,
                   alpha=pick(draw, *numbers), beta=pick(draw, *numbers), trans=pick(draw, "NN", "NT", "TN", "TT"))


__all__ = ["Reach", "families", "problems", "refused"]
