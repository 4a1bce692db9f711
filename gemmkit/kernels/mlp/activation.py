"""What becomes of a layer's sums: the caller's function, and the words that the next product reads."""

from __future__ import annotations

from typing import Any

from gemmkit.activations import relu
from gemmkit.components import Component
from gemmkit.kernels.mlp.work import F32
from gemmkit.kernels.sm90.store import own_column
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.control import split
from gemmkit.lang.given import function_given
from gemmkit.lang.members import EXTENTS, number_of
from gemmkit.lang.registers import apply
from gemmkit.lang.returned import converted
from gemmkit.lang.values import convert
from gemmkit.ptx.pack_fragment import pack_fragment, pack_relu


@dataclass(frozen=True)
class Activation(Component):
    """A plain function of one number; arrays and NumPy scalars that it captured are arguments of the kernel."""

    f: Any

    is_identity = False
    is_relu = False

    def __post_init__(self) -> None:
        given = function_given(self.f, "mlp", "activation", (1,), "f(x), a function of one number,")
        object.__setattr__(self, "f", given)

    def __call__(self, x: Any) -> Any:
        return self.f(x)


@dataclass(frozen=True)
class Relu(Component):
    """max(x, 0), which the instruction that packs words takes with it."""

    is_identity = False
    is_relu = True

    def __call__(self, x: Any) -> Any:
        return relu(x)


@dataclass(frozen=True)
class Identity(Component):
    """Sums as they are."""

    is_identity = True
    is_relu = False

    def __call__(self, x: Any) -> Any:
        return x


def columns_of(shapes: Any, layer: int) -> int:
    """The columns of a layer's weights: its width, without what pads it."""
    return number_of(shapes, layer, EXTENTS + 1)


def words_of(sums: tuple, n: int, spec: Any, columns: int) -> tuple:
    """The activations of a fragment of the next layer's A, the ``n``-th, of a thread's sums."""
    if spec.activation.is_relu:
        return pack_relu(spec.dtype, sums)             # of sums that pad a layer, 0, it is 0
    return pack_fragment(spec.dtype, apply(activated, sums, spec, n * spec.hand_over.k, columns))


def activated(x: Any, i: int, spec: Any, first: int, columns: int) -> Any:
    """The activation of the ``i``-th of a thread's sums from column ``first`` on. Columns that pad a layer become 0: of some
    functions 0 becomes no finite number, which the zeros of the next layer's weights would not take away."""
    value = converted(spec.activation, "__call__", spec.activation(x), F32)
    if spec.has_padding:
        return value if first + own_column() + i // 4 * 8 + i % 2 < columns else convert(F32, 0.0)
    return value


def fragments(spec: Any, sums: tuple, shapes: Any, layer: int) -> tuple:
    """The activations of a layer as A of the next one, a fragment at a time (`gemmkit.kernels.common.hand_over`)."""
    columns = columns_of(shapes, layer) if spec.has_padding else layer
    return apply(words_of, split(sums, spec.hand_over.values), spec, columns)


def finished(sums: tuple, spec: Any) -> tuple:
    """The sums of the last layer, with its own activation."""
    if spec.last.is_identity:
        return sums
    return apply(finished_one, sums, spec)


def finished_one(x: Any, i: int, spec: Any) -> Any:
    return converted(spec.last, "__call__", spec.last(x), F32)
