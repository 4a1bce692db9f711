"""``torch.func.vmap`` of operators: a batch is one more dimension of a stack of products, and one launch.

Where an operand cannot have that (an array that all products share) there is a launch for each of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["batched_by", "register_vmap"]


def register_vmap(name: str, rule: Callable[..., Any]) -> None:
    """``rule(size, in_dims, *args, **keywords)`` for ``torch.func.vmap`` of an operator."""
    def registered(info: Any, in_dims: Any, *args: Any, **keywords: Any) -> Any:
        return rule(info.batch_size, in_dims, *args, **keywords)

    torch.library.register_vmap(name, registered)


def batched_by(operator: Callable[..., Any], size: int, in_dims: Sequence[int | None], tensors: Sequence[Any],
               cores: Sequence[int | None], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """The operator of a batch, and where the batch lies in each result: in front.

    ``cores`` is how many dimensions of each tensor are one product's, None where a stack cannot have one for each product.
    """
    batched = [n for n, (dim, x) in enumerate(zip(in_dims, tensors)) if dim is not None and x is not None]
    if any(cores[n] is None for n in batched):
        made = [operator(*(x if n not in batched else x.select(in_dims[n], one) for n, x in enumerate(tensors)), **keywords)
                for one in range(size)]
        if not isinstance(made[0], tuple):
            return torch.stack(made), 0
        return tuple(torch.stack(found) for found in zip(*made)), (0,) * len(made[0])
    def stack_ndim(n: int) -> int:
        return tensors[n].dim() - (n in batched) - (cores[n] or 0)

    most = max(stack_ndim(n) for n, x in enumerate(tensors) if x is not None and cores[n] is not None)
    given = list(tensors)
    for n in batched:
        x, missing = tensors[n].movedim(in_dims[n], 0), most - stack_ndim(n)
        given[n] = x[(slice(None), *(None,) * missing)]
    found = operator(*given, **keywords)
    return found, (0,) * len(found) if isinstance(found, tuple) else 0
