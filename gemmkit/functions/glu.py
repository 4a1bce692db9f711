"""Gated linear units, ``activation(x w) * (x v)``, and LSTM cells, each in one kernel."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.epilogues import Bias, Elementwise, Epilogue, Fold, Store
from gemmkit.epilogues.activations import relu, sigmoid, silu
from gemmkit.functions.matmul import Door, matmul
from gemmkit.kernels.config import Config, Keywords, names_keywords
from gemmkit.lang.checks import check_dtype, function_given, number
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, fitting
from gemmkit.lang.registers import apply
from gemmkit.layouts import ColumnInterleaved, Joined
from gemmkit.layouts.joined import Concat, InterleavedColumns
from gemmkit.layouts.matrices import Matrix
from gemmkit.operators import Operator
from gemmkit.plans.problem import checked_keywords
from gemmkit.runtime.arrays import ArrayInfo, describe, empty_like, strided
from gemmkit.transforms import Map

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _fold(activation: Any) -> Fold:
    own = Map(activation)                # which names the activation where it returns no number
    return Fold(lambda gate, up: number(own, "__call__", activation(gate), gate) * up)


gating = lru_cache(maxsize=64)(_fold)  # kept: a call looks at it in place of reading its code (`gemmkit.components`)


@names_keywords
def glu(x: Any, w: Any, v: Any, activation: Any = silu, *, out: Any = None, conf: Config | None = None, stream: Any = None,
        **keywords: Unpack[Keywords]) -> Any:
    """``activation(x w) * (x v)``: one product by a `gemmkit.layouts.InterleavedColumns` of w and v, whose parts are folded
    in registers.

    Args:
        x: (M, K), or a stack; anything that `gemmkit.matmul` takes as a.
        w: (K, N), the gate's weights.
        v: (K, N), the weights of what is gated; of w's dtype.
        activation: a function of one number, device code; by default `gemmkit.epilogues.activations.silu` (SwiGLU).
        out: (M, N), written and returned; None allocates one.
        conf: a configuration of `gemmkit.get_config`; None chooses one.
        stream: where to launch; None is the current stream of x's library.
        keywords: those of `gemmkit.matmul`; the epilogue follows the gate, at coordinates of the result: ``Residual(x0)``.

    Returns:
        (M, N): ``out``, or a new array of x's library. The activation gets sums in the accumulator's type.

    Raises:
        What `gemmkit.matmul` and `gemmkit.layouts.InterleavedColumns` raise; TypeError for an activation that is no
        function of one number.

    The unit is Dauphin et al.'s (2017); Shazeer, *GLU Variants Improve Transformer* (2020), compares activations.

    >>> import numpy as np, gemmkit as gk
    >>> x, w, v = np.float32([[1, 2]]), np.float32([[1], [1]]), np.float32([[5], [0]])
    >>> with gk.emulate():
    ...     gk.glu(x, w, v, lambda gate: max(gate, 0)).tolist()
    [[15.0]]
    """
    given = function_given(activation, "glu", "activation", (1,), "f(x), a function of one number, such "
                           "as gemmkit.epilogues.activations.gelu,")
    rest = checked_keywords(keywords, "glu", "activation, conf, out, stream") if keywords else {}
    epilogue = rest.pop("epilogue", None)
    is_kept = getattr(given, "__closure__", ()) is None
    fold = gating(given) if is_kept else _fold(given)

    def described() -> tuple[Any, Any, dict[str, Any]]:
        try:
            both = InterleavedColumns(w, v)
        except (TypeError, ValueError) as error:
            raise type(error)(f"glu: {error} (part 0 is w, part 1 is v)") from None
        return x, both, {"epilogue": fold if epilogue is None else fold | epilogue}

    if is_kept and conf is None and epilogue is None and not rest:
        return units(given, (x, w, v), out, stream, described)
    a, b, components = described()
    return matmul(a, b, None, conf, out=out, stream=stream, **components, **rest)


units = Door()                         # of functions that nothing is bound to, of x, w and v


# --------------------------------------------------------------------------------------------------
# LSTM cells in one kernel: joined inputs, four gates as interleaved columns, and a fold that makes both results of them.
#
# A thread has all four gates of its columns in registers (`gemmkit.layouts.ColumnInterleaved`). The fold makes the new
# state and the output gate of them, which travel on as the two parts of a complex number; `KeptState` stores the state and
# gives the output. The product's inputs are read where they are: ``x`` beside ``h`` as A, ``w`` above ``u`` as B.

GATES = 4                              # input, forget, cell and output, in PyTorch's order


@dataclass(frozen=True)
class KeptState(Store):
    """Stores the first part of a complex number, a state, and passes on what the second makes of its hyperbolic tangent."""

    def __call__(self, z: Any, m: int, n: int) -> Any:
        self.array[m, n] = z.real
        return hidden(z, 0)

    def finish(self, values: Elements, tile: Any, shape: Any) -> Elements:
        states = fitting("state of lstm_cell", self.layout.dtype, apply(state_of, values))
        self.layout.store(self.array, tile, states, shape)
        return apply(hidden, values)


def state_of(z: Any, n: int) -> Any:
    return z.real


def hidden(z: Any, n: int) -> Any:
    return z.imag * math.tanh(z.real)


def lstm_cell(x: Any, h: Any, c: Any, w: Any, u: Any, b: Any = None, *, activation: Any = None, out: Any = None,
              state: Any = None, conf: Config | None = None, operator: Operator | None = None, precision: str | None = None,
              stream: Any = None) -> Any:
    """One step of a long short-term memory: ``(h', c')`` of an input ``x``, the last output ``h`` and state ``c``.

    Compute ``i, f, g, o = x w + h u + b`` (side by side), ``c' = sigmoid(f) c + sigmoid(i) tanh(g)`` and
    ``h' = sigmoid(o) tanh(c')`` (Hochreiter and Schmidhuber, 1997; Gers et al., 2000) in one launch, which writes only h'
    and c'.

    With ``c=None`` it computes the simplified cell of one gate, ``h' = activation(x w + h u + b)``, and returns h' alone
    (Bhaskaracharya et al., *Automatic Kernel Generation for Volta Tensor Cores*, 2020).

    Args:
        x: (M, X), of any strides.
        h: (M, H), of x's dtype and any strides.
        c: (M, H), of any float dtype; or None.
        w: (X, 4 H), the gates' weights side by side in PyTorch's order (its ``weight_ih.T``, as a view). The simplified
            cell takes (X, H).
        u: (H, 4 H), as w (``weight_hh.T``). The simplified cell takes (H, H).
        b: 4 H elements (H of the simplified cell); None for none. PyTorch's two biases are to be added.
        activation: of the simplified cell, by default ReLU.
        out: (M, H), for h'; it may not be an operand's memory. None makes one like x.
        state: (M, H), for c', as out. None makes one like c.
        conf: a configuration of `gemmkit.get_config`; None chooses one.
        operator: what multiplies, as `gemmkit.matmul` takes it.
        precision: "tf32" or "fast", as `gemmkit.matmul` takes it.
        stream: where to launch; None is the current stream of x's library.

    Returns:
        (out, state); of the simplified cell out.

    Raises:
        ValueError: shapes do not fit each other; state or out shares memory with an operand. TypeError: an activation for
            the full cell, or a state for the cell of one gate; otherwise what `gemmkit.matmul` raises.

    >>> import numpy as np, gemmkit as gk
    >>> x, h, c = np.float32([[1]]), np.float32([[0]]), np.float32([[2]])
    >>> w = np.float32([[-100, 100, 0, 100]])          # forgets nothing, takes nothing in
    >>> with gk.emulate():
    ...     new_h, new_c = gk.functions.lstm_cell(x, h, c, w, 0 * w)
    >>> new_c.tolist(), new_h.round(3).tolist()
    ([[2.0]], [[0.9639999866485596]])
    """
    about = {name: _matrix(value, name) for name, value in (("x", x), ("h", h), ("w", w), ("u", u))}
    gates = 1 if c is None else GATES
    _check_shapes(about, gates, None if c is None else _matrix(c, "c"))
    vector = None if b is None else _vector(b, gates * about["h"].shape[1], gates)
    inputs, weights = Concat(x, h, axis=1), Concat(w, u, axis=0)
    if out is None:
        out = empty_like(x, about["h"].shape, about["x"].dtype)
    how: dict[str, Any] = dict(out=out, operator=operator, precision=precision, stream=stream)
    if c is None:
        if state is not None:
            raise TypeError("state is given without c: the simplified cell has no state; give c, or leave state out")
        function = function_given(relu if activation is None else activation, "lstm_cell", "activation", (1,), "f(x)")
        then: Epilogue = Elementwise(function)
        return matmul(inputs, weights, None, conf, epilogue=then if vector is None else Bias(vector) | then, **how)
    if activation is not None:
        raise TypeError(f"activation={activation!r}: an LSTM's own are sigmoid and tanh; give c=None for the simplified "
                        "cell, or write the cell as a Fold of four parts")
    if state is None:
        info = describe(c, "c")
        state = empty_like(c, info.shape, info.dtype)
    interleaved = Matrix(w, ColumnInterleaved(cast(Joined, weights.layout), about["h"].shape[1], GATES))
    matmul(inputs, interleaved, None, conf, epilogue=Fold(_cell(c, vector)) | KeptState(state), **how)
    return out, state


def _cell(c: Any, b: Any) -> Any:
    """The fold: a state and its output gate, as one complex number."""
    if b is None:
        def cell(i: Any, f: Any, g: Any, o: Any, m: int, n: int) -> Any:
            return complex(sigmoid(f) * np.float32(c[m, n]) + sigmoid(i) * math.tanh(g), sigmoid(o))
    else:
        def cell(i: Any, f: Any, g: Any, o: Any, m: int, n: int) -> Any:
            new = sigmoid(f + b[1, n]) * np.float32(c[m, n]) + sigmoid(i + b[0, n]) * math.tanh(g + b[2, n])
            return complex(new, sigmoid(o + b[3, n]))
    return cell


# -- checks -----------------------------------------------------------------------------------------------------------

def _matrix(x: Any, name: str) -> ArrayInfo:
    info = describe(x, name)
    check_dtype(info.dtype, name)
    if len(info.shape) != 2:
        raise ValueError(f"{name} has {len(info.shape)} dimensions; a matrix of 2 is needed")
    return info


def _check_shapes(about: dict[str, ArrayInfo], gates: int, c: ArrayInfo | None) -> None:
    (M, X), (_, H) = about["x"].shape, about["h"].shape
    times = "" if gates == 1 else f"{gates} x "
    for name, like in (("h", "x"), ("u", "w")):
        if about[name].dtype != about[like].dtype:
            raise ValueError(f"{name} has dtype {about[name].dtype} and {like} {about[like].dtype}; convert one of them")
    needed = {"h": (M, H), "w": (X, gates * H), "u": (H, gates * H), **({} if c is None else {"c": (M, H)})}
    for name, wanted in needed.items():
        info = c if name == "c" else about[name]
        if info is not None and info.shape != wanted:
            raise ValueError(f"{name} has shape {info.shape}; with x of shape {(M, X)} and h of {about['h'].shape} it needs "
                             f"{wanted}, of {M} rows of x, {X} inputs and {times}{H} outputs")


def _vector(b: Any, count: int, gates: int) -> Any:
    """The bias; of several gates a row each."""
    info = describe(b, "b")
    check_dtype(info.dtype, "b")
    if info.shape != (count,):
        raise ValueError(f"b has shape {info.shape}; {(count,)} is needed, an element for each column of w")
    step = info.strides[0]
    return b if gates == 1 else strided(b, info, (gates, count // gates), (step * (count // gates), step))
