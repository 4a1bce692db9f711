"""What the calls over several ranks have in common: arguments checked by each rank, then by all; products of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gemmkit.config import TRANSFORMS
from gemmkit.distributed.ranks import GPU, Ranks
from gemmkit.distributed.statements import gpu_text, statement_of
from gemmkit.matmul_call import matmul
from gemmkit.planning import Plan, plan
from gemmkit.problem import FUNCTIONS, LAYOUTS
from gemmkit.runtime.arrays import dtype_to_torch

Made = TypeVar("Made")

#: Components that act on operands, before sums are made; all others act on the sums.
BEFORE_SUM = (*(name for name in TRANSFORMS if name.endswith(("_a", "_b"))), "observe_a", "condition", "operator",
              "global_a_layout", "global_b_layout")


def check_keywords(call: str, components: dict[str, Any], refused: tuple[str, ...] = ()) -> None:
    """Raise TypeError for a keyword that the call does not take."""
    known = [name for name in (*FUNCTIONS, *LAYOUTS, "operator") if name not in refused]
    unknown = sorted(name for name, value in components.items() if name not in known and value is not None)
    if unknown:
        raise TypeError(f"{call}() got keywords {', '.join(unknown)}; of components it takes {', '.join(known)}")


def meet(ranks: Ranks, call: str, tensor: Any, facts: Callable[[], dict[str, Any]], components: dict[str, Any],
         make: Callable[[], Made]) -> Made:
    """All ranks make the same call, and each of them can compute it: or all refuse, and nothing has been launched.

    ``facts`` gives what all ranks have alike beside the components, and raises what is wrong with this rank's arguments.
    ``make`` is called where the ranks have not agreed on these facts yet; what it returned is returned for all later calls.
    These exchange nothing, unless torch.distributed's debug level says so (``TORCH_DISTRIBUTED_DEBUG=INFO``): a rank that
    repeats a known call while another makes a new one is found by the timeout otherwise.
    """
    try:
        statement = statement_of(call, tensor, facts(), components)
        if tensor.is_cuda and ranks.backend(tensor.device) == "nccl":
            statement[GPU] = gpu_text(tensor.device)
        key = tuple(statement.items())
        known = key in ranks.agreed
        if known and dist.get_debug_level() == dist.DebugLevel.OFF:
            return ranks.agreed[key]
        made = ranks.agreed[key] if known else make()
    except Exception as error:
        ranks.refuse(error)
        raise
    ranks.agree(statement)
    ranks.agreed[key] = made
    return made


def planned(a: Any, b: Any, c: Any, out: Any, conf: Any, components: dict[str, Any]) -> Plan:
    """The plan of a product of tensors, compiled: it raises all that is wrong with one."""
    return plan(a, b, c, conf, out=out, **components)


def multiply(a: Any, b: Any, c: Any, out: Any, conf: Any, components: dict[str, Any]) -> Any:
    """`gemmkit.matmul` of tensors, as a tensor."""
    return matmul(a, b, c, conf, out=out, **components)


def new(like: Any, shape: tuple[int, ...], dtype: np.dtype | torch.dtype) -> Any:
    """An uninitialised tensor on the device of another."""
    return torch.empty(shape, dtype=dtype if isinstance(dtype, torch.dtype) else dtype_to_torch(dtype), device=like.device)
