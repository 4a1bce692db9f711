"""``torch.func.vmap`` of operators: a batch is one more dimension of a stack of products, and one launch.

Where an operand cannot have that (an array that all products share) there is a launch for each of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def batched_by(operator: Callable[..., Any], size: int, in_dims: Sequence[int | None], tensors: Sequence[Any],
               cores: Sequence[int | None], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The operator of a batch, and where the batch lies in each result: in front.

    ``cores`` is how many dimensions of each tensor are one product's, None where a stack cannot have one for each product.
    """
    batched = [n for n, (dim, x) in enumerate(zip(in_dims, tensors)) if dim is not None and x is not None]
    if any(cores[n] is None for n in batched):
        return _one_after_the_other(operator, size, in_dims, tensors, batched, keywords)

    def stack_ndim(n: int) -> int:
        return tensors[n].dim() - (n in batched) - (cores[n] or 0)

    most = max(stack_ndim(n) for n, x in enumerate(tensors) if x is not None and cores[n] is not None)
    given = list(tensors)
    for n in batched:
        x, missing = tensors[n].movedim(in_dims[n], 0), most - stack_ndim(n)
        given[n] = x[(slice(None), *(None,) * missing)]
    if not {0, 1}.intersection(batched):                   # the stack is that of A and B
        given[0] = tensors[0].expand(size, *(1,) * (most - stack_ndim(0)), *tensors[0].shape)
    found = operator(*given, **keywords)
    return found, (0,) * len(found) if isinstance(found, tuple) else 0


def _one_after_the_other(operator: Callable[..., Any], size: int, in_dims: Sequence[int | None], tensors: Sequence[Any],
                         batched: Sequence[int], keywords: dict[str, Any]) -> tuple[Any, Any]:
    made = [operator(*(x if n not in batched else x.select(in_dims[n], one) for n, x in enumerate(tensors)), **keywords)
            for one in range(size)]
    if not isinstance(made[0], tuple):
        return torch.stack(made), 0
    return tuple(torch.stack(found) for found in zip(*made)), (0,) * len(made[0])
