"""Gated linear units: ``activation(x w) * (x v)`` in one kernel."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gemmkit.activations import silu
from gemmkit.epilogues import Epilogue, Fold
from gemmkit.joined import Braid
from gemmkit.lang.given import function_given
from gemmkit.lang.returned import number
from gemmkit.matmul_call import Door, matmul
from gemmkit.transforms import Elementwise


def _fold(activation: Any) -> Fold:
    own = Elementwise(activation)                # which names the activation where it returns no number
    return Fold(lambda gate, up: number(own, "__call__", activation(gate), gate) * up)


_known_fold = lru_cache(maxsize=64)(_fold)       # kept: a call looks at it in place of reading its code (`gemmkit.kept`)


def glu(x: Any, w: Any, v: Any, activation: Any = silu, *, epilogue: Epilogue | None = None, **keywords: Any) -> Any:
    """``activation(x w) * (x v)``: one product by a `gemmkit.Braid` of w and v, whose parts are folded in registers.

    Args:
        x: (M, K), or a stack; anything that `gemmkit.matmul` takes as a.
        w, v: (K, N), the gate's weights and those of what it gates; arrays of one dtype.
        activation: a function of one number, device code; by default `gemmkit.activations.silu` (SwiGLU).
        epilogue: what follows, at coordinates of the result: ``Residual(x0)``.
        keywords: ``out``, ``stream``, ``conf`` and the others of `gemmkit.matmul`.

    Returns:
        (M, N): ``out``, or a new array of x's library. The activation gets sums in the accumulator's type.

    Raises:
        What `gemmkit.matmul` and `gemmkit.Braid` raise; TypeError for an activation that is no function of one number.

    The unit is Dauphin et al.'s (2017); Shazeer, *GLU Variants Improve Transformer* (2020), compares activations.

    >>> import numpy as np, gemmkit as gk
    >>> x, w, v = np.float32([[1, 2]]), np.float32([[1], [1]]), np.float32([[5], [0]])
    >>> with gk.emulate():
    ...     gk.glu(x, w, v, lambda gate: max(gate, 0)).tolist()
    [[15.0]]
    """
    given = function_given(activation, "glu", "activation", (1,), "f(x), a function of one number,")
    is_kept = getattr(given, "__closure__", ()) is None
    fold = _known_fold(given) if is_kept else _fold(given)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        try:
            both = Braid(w, v)
        except (TypeError, ValueError) as error:
            raise type(error)(f"glu: {error} (part 0 is w, part 1 is v)") from None
        return x, both, {"epilogue": fold if epilogue is None else fold | epilogue}

    if is_kept and epilogue is None and not keywords.keys() - {"out", "stream"}:
        return _glu(given, (x, w, v), keywords.get("out"), keywords.get("stream"), described)
    a, b, components = described()
    return matmul(a, b, **components, **keywords)


_glu = Door()
