"""Products that Hopper's kernel computes as their transpose, D^T = B^T A^T: B is then the first operand.

The kernel's two operands are not alike. The first has 64 rows a wgmma, and may come from registers, where threads transform
it, or pick its elements in any order. The second lies in shared memory, where producer warps have to rewrite it: it is read
and written once more there, which is what limits such products.

| product | computed as it is | as its transpose |
|---|---|---|
| of a few rows | most rows of a tile are padding | `gemmkit.tuning.few_rows` |
| float32 as tf32, A and B contiguous along rows (nn) | B is transposed in place | B comes through registers as it lies |
| 16-bit, with a transform of B alone | B is rewritten in place | B is transformed in registers |

With A contiguous along its columns (tt) it is the operand that has to be transposed, and comes through registers as it is.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.config import of_transpose
from gemmkit.epilogues import Default, Epilogue
from gemmkit.layouts import ArrayLayout, ColMajor, Plain, RowMajor
from gemmkit.operators import WGMMAOp
from gemmkit.runtime.arrays import ArrayInfo, flipped
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning import few_rows, hopper
from gemmkit.tuning.operators import SIXTEEN

Infos = dict[str, ArrayInfo | None]
Layouts = dict[str, ArrayLayout | None]

OF_B = {"transform_global_to_shared_b", "transform_shared_to_regs_b"}
F32 = np.dtype(np.float32)
LEAST_ROWS = few_rows.MOST_ROWS + 1    # of A, where B is transformed: of fewer nothing is measured


def fields(infos: Infos, layouts: Layouts, given: dict[str, Any], sizes: tuple[int, int, int],
           device: DeviceInfo) -> dict[str, Any] | None:
    """The fields of a configuration of the transposed product; None where it is not the one to compute.

    ``given`` are the caller's components, which see coordinates of A, B and D. An epilogue that finishes elements and
    transforms of B are asked with them (`gemmkit.adapters`); with any other component a product is computed as it is.
    """
    if device.arch[0] != 9 or not _sees_elements(given) or not _suit_tma(infos, layouts):
        return None
    if set(given) <= {"epilogue"}:
        found = few_rows.fields(infos, layouts, sizes, device)
        if found is not None:
            return {**found, **given}
    if not _is_rewritten(infos, layouts, given, sizes):
        return None
    turned = {of_transpose(name): value for name, value in given.items()}
    if "operator" in given:
        return turned
    a, b = (_flipped(layouts[name]) for name in "ba")
    arrays: Infos = {"a": flipped(infos["b"]), "b": flipped(infos["a"]), "c": None, "out": flipped(infos["out"])}
    operator, mapping = hopper.choice(a, b, arrays, turned, (sizes[1], sizes[0], sizes[2]), device)
    return dict(operator=operator, kernel="warp_specialised", **{**mapping, **turned})


def _sees_elements(given: dict[str, Any]) -> bool:
    """Whether the epilogue sees single elements: one that stores tiles in its own way, or sees more of a row, would have to
    be told of the other dimension."""
    epilogue = given.get("epilogue", Default())
    return isinstance(epilogue, Epilogue) and not (epilogue.stores_itself or epilogue.finishes_blocks)


def _suit_tma(infos: Infos, layouts: Layouts) -> bool:
    """Whether all matrices are plain, and TMA takes A and B, of one dtype."""
    if any(layout is not None and not (isinstance(layout, Plain) and layout.is_plain) for layout in layouts.values()):
        return False
    dtypes = set()
    for name in "ab":
        info, layout = infos[name], layouts[name]
        assert info is not None and isinstance(layout, Plain)
        if why_not(info, layout.axis) is not None:
            return False
        dtypes |= {info.dtype, layout.dtype}
    return len(dtypes) == 1


def _is_rewritten(infos: Infos, layouts: Layouts, given: dict[str, Any], sizes: tuple[int, int, int]) -> bool:
    """Whether producer warps would rewrite B and leave A alone, and consumers of the transpose can do it on the way.

    C, and an array that an epilogue reads beside D, come ahead of time to a D that is contiguous along rows alone, and an
    epilogue that writes stores pairs of a row: with these a product is computed as it is.
    """
    epilogue = given.get("epilogue", Default())
    if not set(given) <= {"epilogue", "operator", *OF_B}:
        return False
    if 0 in sizes or infos["c"] is not None or epilogue.reads_tiles or epilogue.writes:
        return False
    transforms = [given[name] for name in OF_B & set(given) if not given[name].is_identity]
    if any(transform.with_batch for transform in transforms):
        return False
    a, b, operator = layouts["a"], layouts["b"], given.get("operator")
    assert isinstance(a, Plain) and isinstance(b, Plain)
    if a.dtype == F32:
        return (isinstance(operator, WGMMAOp) and operator.dtype == operator.b_dtype == F32
                and a.axis == b.axis == 1)
    return a.dtype in SIXTEEN and operator is None and bool(transforms) and sizes[0] >= LEAST_ROWS


def of_transposed(layouts: Layouts) -> Layouts:
    """The layouts of D^T = B^T A^T's matrices, by those of a product's plain matrices.

    The transposed arrays do not tell them: the strides of one row, (1, 1) or (1, 9), are a row's in both orders.
    """
    return {name: layouts[other] and _flipped(layouts[other]) for name, other in zip("abcd", "bacd")}


def _flipped(layout: ArrayLayout | None) -> Plain:
    """The layout of a plain matrix's transpose."""
    assert isinstance(layout, Plain)
    return (ColMajor, RowMajor)[1 - layout.axis](layout.dtype)


__all__ = ["fields", "of_transposed"]
