"""Partial sums of ranks that share out K, and how they become rows of D: merged in the order of ranks, then finished."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemmkit.distributed.calls import BEFORE_SUM, new
from gemmkit.distributed.rank_order import InRankOrder, OfTransform, WithOther

#: Components that see a row's number, or rows together: A is then multiplied as a whole, not rank by rank.
_OF_ROWS = tuple(name for name in BEFORE_SUM if name.endswith("_a") or name in ("condition", "global_a_layout"))
#: Transforms of D, in the order in which a kernel applies them.
_OF_D = "transform_regs_to_shared_d", "transform_shared_to_global_d"


class Reduction(NamedTuple):
    """How a call's partial sums are merged: of which dtype they travel, in which they are added, and by which rule."""

    travels: np.dtype
    adds: np.dtype
    rule: Any
    result: np.dtype
    gates: Any = None                  # of this rank's own rows, where peers may push theirs


def before_sum(components: dict[str, Any]) -> dict[str, Any]:
    """The components of the partial products."""
    return {name: value for name, value in components.items() if name in BEFORE_SUM}


def given(components: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in components.items() if value is not None}


def sees_rows(conf: Any, components: dict[str, Any]) -> bool:
    """Whether a component before the sum sees rows of the whole A."""
    return conf is not None or any(components.get(name) is not None for name in _OF_ROWS)


def is_fused(a: Any, c: Any, conf: Any, components: dict[str, Any]) -> bool:
    """Whether this rank's own rows are one product with the merge in its epilogue, behind a gate: nothing stands between
    sums and epilogue, and every tile has a k-tile that waits."""
    between = any(components.get(name) is not None for name in (*_OF_D, "global_b_layout"))
    return c is None and a.shape[1] > 0 and not between and not sees_rows(conf, components)


def in_rank_order(parts: Any, how: Reduction, own: int | None, follows: bool = False) -> InRankOrder:
    """The epilogue that merges the ranks' partial sums; ``own`` is the rank whose sums the product itself has."""
    travels = None if own is None else how.travels
    ranks, rows, columns = parts.shape
    return InRankOrder(parts.view(ranks * rows, columns), rows, how.rule, how.adds, ranks, follows,
                       travels, -1 if own is None else own)


def with_own(parts: Any, how: Reduction, own: int, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a product of this rank's own rows that takes the others' partial sums."""
    epilogue: Any = components.get("epilogue")
    if parts.shape[0] == 2:
        merging: Any = WithOther(parts[1 - own], how.rule, how.adds, how.travels, own == 0)
    else:
        merging = in_rank_order(parts, how, own)
    return {**given(components), "epilogue": merging if epilogue is None else merging | epilogue}


def finishing(parts: Any, how: Reduction, follows: bool, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a product of K = 0 that merges partial sums and finishes them; ``follows``: a C."""
    after = {name: value for name, value in given(components).items() if name not in BEFORE_SUM}
    merging: Any = in_rank_order(parts, how, None, follows)
    for name in _OF_D:                                   # in a kernel they stand before the epilogue, which merges here
        if name in after:
            merging = merging | OfTransform(after.pop(name))
    epilogue = after.pop("epilogue", None)
    return {**after, "epilogue": merging if epilogue is None else merging | epilogue}


def nothing(parts: Any, how: Reduction) -> tuple[Any, Any]:
    """Operands of K = 0, of which the merge is the epilogue."""
    return new(parts, (parts.shape[1], 0), how.adds), new(parts, (0, parts.shape[2]), how.adds)
