"""``conv``: convolutions of one to three dimensions and their gradients, each as matrix products that read the tensors in
place.

The rows of a product are positions (n, p, q), its columns are channels, and K runs over the taps and channels of a window:

| result | A | B | K |
|---|---|---|---|
| D | windows of x | w | taps, channels of x |
| the gradient of x | windows of the gradient | w | taps, channels of the gradient |
| the gradient of w | the gradient, transposed | windows of x | positions |

No matrix of windows is written: `gemmkit.layouts.Im2col` computes where its elements lie. With a stride s, positions of the
gradient of x fall into s classes along each dimension, and each class sees its own taps: a product for each class, none of
which multiplies zeros that the stride puts in (Dumoulin and Visin, "A guide to convolution arithmetic for deep learning",
2016, section 4.5). Groups are a stack of products in one launch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from gemmkit.epilogues import GELU, Bias, Clamp, Default, Elementwise, Epilogue, ReLU, Saturate, Scale, SiLU, Tanh
from gemmkit.functions.matmul import matmul
from gemmkit.lang.checks import check_dtype
from gemmkit.layouts import Im2col, Matricised, Positions, PositionsAcross
from gemmkit.plans.problem import asked_dtype, check_places
from gemmkit.runtime.arrays import ArrayInfo, check_aligned, describe, empty_like, shares_memory, strided
from gemmkit.runtime.device import target
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.shapes import NOTHING, merged
from gemmkit.tuning.operators import new_dtype

LAYOUTS = {"NWC": 1, "NHWC": 2, "NDHWC": 3, "NCW": 1, "NCHW": 2, "NCDHW": 3}


class Convolution(NamedTuple):
    """A convolution's parameters, one of each for every spatial dimension, the slowest first; ``padding`` is (before,
    behind)."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    is_last: bool                      # whether channels are an array's last dimension

    def positions(self, spatial: Sequence[int], taps: Sequence[int]) -> tuple[int, ...]:
        """The result's extents."""
        return tuple((extent + before + behind - (t - 1) * dilation - 1) // stride + 1
                     for extent, t, stride, (before, behind), dilation
                     in zip(spatial, taps, self.stride, self.padding, self.dilation))

    def last(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Of something of each dimension, that of the channels last."""
        return tuple(shape) if self.is_last else (shape[0], *shape[2:], shape[1])

    def as_given(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """The reverse."""
        return tuple(shape) if self.is_last else (shape[0], shape[-1], *shape[1:-1])


def conv(x: Any, w: Any, c: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
         layout: str = "NHWC", epilogue: Epilogue | None = None, precision: str | None = None, dtype: Any = None,
         out: Any = None, stream: Any = None) -> Any:
    """Convolve x with w (as deep learning has it: a cross-correlation), add c, and apply an epilogue, in one kernel.

    Args:
        x: (N, H, W, C), of any strides; one dimension has (N, W, C), three have (N, D, H, W, C). Channels that are
            neighbours in memory are fast, and on Hopper brought by TMA where a multiple of 16 of them (32 bytes) lies at
            multiples of 16 bytes.
        w: (K, R, S, C / groups), of x's dtype: K filters.
        c: of the result's shape, added before the epilogue; None adds nothing.
        stride: the step between windows; a number, or one for each spatial dimension.
        padding: zeros around x: a number, one for each dimension, or a pair (before, behind) for each; "valid" (none) or
            "same" (the result has x's extents; with an odd number of zeros the additional one is behind).
        dilation: the step between a window's elements, as stride.
        groups: into so many groups channels and filters are divided; each filter sees its group's channels.
        layout: "NHWC" ("NWC", "NDHWC"), or "NCHW" ("NCW", "NCDHW"): then x is (N, C, H, W) and w (K, C / groups, R, S), as
            PyTorch has them. The word names the order of dimensions; strides decide the speed, so PyTorch's
            ``channels_last`` tensors are fast.
        epilogue: an epilogue of `gemmkit.epilogues` on the result as a matrix: its rows are positions (n, p, q) in C order,
            its columns are filters (``Bias(b)`` has an element for each filter). With groups it sees each group's filters;
            its arrays have the groups as first dimension (``Bias(b.reshape(groups, -1))``).
        precision: "tf32" for float32, or "fast" for float8, as of `gemmkit.matmul`.
        dtype: the result's; None is x's, or what the epilogue says.
        out: (N, P, Q, K) in the order of ``layout``, any strides; None allocates it, with channels neighbours in memory if
            they are x's.
        stream: where to launch; None is the current stream of x's library.

    Returns:
        out.

    Raises:
        ValueError: shapes do not fit each other, or leave no window; out overlaps an operand; an unknown layout.
        TypeError: dtypes differ, or are complex; an argument is no array.
        ConfigError, ComponentError: as `gemmkit.matmul` raises them.

    >>> import numpy as np, gemmkit as gk
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    >>> w = np.ones((1, 3, 3, 1), np.float32)
    >>> with gk.emulate():
    ...     gk.conv(x, w, padding=1, epilogue=gk.epilogues.Scale(0.5))[0, :2, :, 0].tolist()
    [[5.0, 9.0, 12.0, 9.0], [13.5, 22.5, 27.0, 19.5]]
    """
    infos = {"x": describe(x, "x"), "w": describe(w, "w")}
    how = parameters("conv", infos["x"].shape, infos["w"].shape, stride, padding, dilation, groups, layout)
    of_c, of_out = (None if y is None else describe(y, name) for name, y in (("c", c), ("out", out)))
    _check("conv", {**infos, "c": of_c, "out": of_out})
    shape = result_shape(infos["x"].shape, infos["w"].shape, how)
    asked = asked_dtype({} if dtype is None else {"dtype": dtype}, None, of_out, "conv")
    out, of_out = _result("conv", x, out, of_out, shape, asked, epilogue, infos["x"], infos["w"], how)
    _check_shapes("conv", {"c": (of_c, shape)})
    taps = how.last(infos["w"].shape)[1:-1]
    slides = _slides(how, infos["x"], taps, infos["w"].shape[0] <= NARROW, (of_c, of_out), epilogue)
    recipe = _forward(how, _places(infos["x"]), _places(infos["w"]), of_c and _places(of_c), _places(of_out), slides)
    _launch([recipe], (x, infos["x"]), (w, infos["w"]), (c, of_c), (out, of_out), epilogue, precision, stream)
    return out


def conv_input_gradient(shape: Sequence[int], w: Any, gradient: Any, c: Any = None, *, stride: Any = 1, padding: Any = 0,
                        dilation: Any = 1, groups: int = 1, layout: str = "NHWC", epilogue: Epilogue | None = None,
                        precision: str | None = None, dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
    """The gradient of `conv`'s x, of ``shape``, from that of its result: a transposed convolution of ``gradient`` with w.

    Args:
        shape: that of x, in the order of ``layout``.
        w: the filters, as `conv` takes them.
        gradient: that of the result of `conv`, of its shape and w's dtype.
        c: of ``shape``, added before the epilogue; None adds nothing.
        stride: as of the `conv` whose gradient it is. More than 1 takes a launch for each class of positions.
        padding: as of that `conv`.
        dilation: as of that `conv`.
        groups: as of that `conv`.
        layout: as of that `conv`.
        epilogue: on the gradient as a matrix, its rows positions, its columns channels. With a stride of more than 1 it sees
            values and columns alone: activations, functions of x alone, ``Scale`` and ``Bias``.
        precision: as of `conv`.
        dtype: the gradient's; None is w's.
        out: of ``shape``; None allocates it.
        stream: where to launch; None is the current stream of the gradient's library.

    Returns:
        out.

    Raises:
        ValueError, TypeError: as `conv`; another epilogue with a stride of more than 1.

    >>> import numpy as np, gemmkit as gk
    >>> w, g = np.ones((1, 2, 2, 1), np.float32), np.ones((1, 2, 2, 1), np.float32)
    >>> with gk.emulate():
    ...     made = gk.functions.conv_input_gradient((1, 4, 4, 1), w, g, stride=2)
    >>> made[0, :2, :, 0].tolist()
    [[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]]
    """
    name = "conv_input_gradient"
    infos = {"w": describe(w, "w"), "gradient": describe(gradient, "gradient")}
    of_x = _shape(name, shape)
    how = parameters(name, of_x, infos["w"].shape, stride, padding, dilation, groups, layout)
    of_c, of_out = (None if y is None else describe(y, label) for label, y in (("c", c), ("out", out)))
    _check(name, {**infos, "c": of_c, "out": of_out})
    _check_shapes(name, {"gradient": (infos["gradient"], result_shape(of_x, infos["w"].shape, how)),
                         "c": (of_c, of_x)})
    if epilogue is not None and max(how.stride) > 1 and any(map(_sees_rows, epilogue.stages())):
        raise ValueError(f"{name}: epilogue={epilogue!r} may see rows, and with stride={how.stride} each class of positions "
                         "is a product with rows of its own; apply it by a call of its own")
    asked = asked_dtype({} if dtype is None else {"dtype": dtype}, None, of_out, name)
    out, of_out = _result(name, gradient, out, of_out, of_x, asked, epilogue, infos["gradient"], infos["w"], how)
    (_, *taps, channels) = how.last(infos["w"].shape)
    is_narrow = max(how.stride) == 1 and channels <= NARROW
    slides = _slides(how, infos["gradient"], taps, is_narrow, (of_c, of_out), epilogue)
    recipes = _of_input(how, _places(infos["gradient"]), _places(infos["w"]), of_c and _places(of_c), _places(of_out),
                        slides)
    _launch(recipes, (gradient, infos["gradient"]), (w, infos["w"]), (c, of_c), (out, of_out), epilogue, precision,
            stream)
    return out


def conv_weight_gradient(x: Any, shape: Sequence[int], gradient: Any, c: Any = None, *, stride: Any = 1, padding: Any = 0,
                         dilation: Any = 1, groups: int = 1, layout: str = "NHWC", precision: str | None = None,
                         dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
    """The gradient of `conv`'s w, of ``shape``, from that of its result: each tap's sums over all positions.

    Args:
        x: as `conv` takes it. An infinite element or a NaN of few channels may make all taps of its channel NaN.
        shape: that of w, in the order of ``layout``.
        gradient: that of the result of `conv`, of its shape and x's dtype.
        c: of ``shape``, added; it may be out itself. None adds nothing.
        stride: as of the `conv` whose gradient it is.
        padding: as of that `conv`.
        dilation: as of that `conv`.
        groups: as of that `conv`.
        layout: as of that `conv`.
        precision: as of `conv`.
        dtype: the gradient's; None is x's.
        out: of ``shape``; None allocates it.
        stream: where to launch; None is the current stream of x's library.

    Returns:
        out.

    Raises:
        ValueError, TypeError: as `conv`.

    >>> import numpy as np, gemmkit as gk
    >>> x = np.arange(16, dtype=np.float32).reshape(1, 4, 4, 1)
    >>> g = np.ones((1, 3, 3, 1), np.float32)
    >>> with gk.emulate():
    ...     gk.functions.conv_weight_gradient(x, (1, 2, 2, 1), g)[0, :, :, 0].tolist()
    [[45.0, 54.0], [81.0, 90.0]]
    """
    name = "conv_weight_gradient"
    infos = {"x": describe(x, "x"), "gradient": describe(gradient, "gradient")}
    of_w = _shape(name, shape)
    how = parameters(name, infos["x"].shape, of_w, stride, padding, dilation, groups, layout)
    of_c, of_out = (None if y is None else describe(y, label) for label, y in (("c", c), ("out", out)))
    _check(name, {**infos, "c": of_c, "out": of_out})
    _check_shapes(name, {"gradient": (infos["gradient"], result_shape(infos["x"].shape, of_w, how)),
                         "c": (of_c, of_w)})
    asked = asked_dtype({} if dtype is None else {"dtype": dtype}, None, of_out, name)
    out, of_out = _result(name, x, out, of_out, of_w, asked, None, infos["x"], infos["gradient"], how)
    slides = _slides(how, infos["x"], how.last(of_w)[1:-1], of_w[0] <= LOW, (infos["gradient"],))
    recipe = _of_weights(how, _places(infos["x"]), _places(infos["gradient"]), of_c and _places(of_c), _places(of_out),
                         slides)
    _launch([recipe], (gradient, infos["gradient"]), (x, infos["x"]), (c, of_c), (out, of_out), None, precision,
            stream)
    return out


# -- what is asked for ------------------------------------------------------------------------------------------------

def parameters(name: str, x: Sequence[int], w: Sequence[int], stride: Any, padding: Any, dilation: Any, groups: Any,
               layout: Any) -> Convolution:
    """The parameters of a convolution of arrays of these shapes. Raises ValueError, naming the argument, for bad ones."""
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f"{name}: layout={layout!r}; one of {', '.join(map(repr, LAYOUTS))} is needed")
    count = LAYOUTS[layout]
    is_last = layout.endswith("C")
    for label, shape in (("x", x), ("w", w)):
        if len(shape) != count + 2:
            fitting = [word for word, n in LAYOUTS.items() if n == len(shape) - 2 and word.endswith("C") == is_last]
            raise ValueError(f"{name}: {label} has shape {tuple(shape)}, and layout={layout!r} has {count + 2} dimensions"
                             + (f"; layout={fitting[0]!r} has as many" if fitting else ""))
    how = Convolution(_numbers(name, "stride", stride, count, 1), ((0, 0),) * count,
                      _numbers(name, "dilation", dilation, count, 1), _numbers(name, "groups", groups, 1, 1)[0], is_last)
    (_, *spatial, channels), (filters, *taps, depth) = how.last(x), how.last(w)
    if channels != depth * how.groups:
        raise ValueError(f"{name}: x has {channels} channels and w takes {depth} in each of groups={how.groups}; x needs "
                         f"{depth * how.groups}, or w {channels // how.groups} "
                         f"(layout={layout!r}: x is {tuple(x)}, w is {tuple(w)})")
    if filters % how.groups:
        raise ValueError(f"{name}: w has {filters} filters, which groups={how.groups} does not divide")
    how = how._replace(padding=_padding(name, padding, count, spatial, taps, how))
    for label, shape in (("x", x), ("w", w)):
        if 0 in shape[1:]:
            raise ValueError(f"{name}: {label} has shape {tuple(shape)}; a dimension of no elements leaves nothing to sum")
    for at, positions in enumerate(how.positions(spatial, taps)):
        if positions < 1:
            reach = (taps[at] - 1) * how.dilation[at] + 1
            raise ValueError(f"{name}: along spatial dimension {at} a window of {reach} elements does not fit into "
                             f"{spatial[at]} with padding={how.padding[at]}")
    return how


def result_shape(x: Sequence[int], w: Sequence[int], how: Convolution) -> tuple[int, ...]:
    """The shape of the result of a convolution of arrays of these shapes."""
    (images, *spatial, _), (filters, *taps, _) = how.last(x), how.last(w)
    return how.as_given((images, *how.positions(spatial, taps), filters))


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, Sequence) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in shape):
        raise TypeError(f"{name}: shape={shape!r}; a tuple of extents is needed")
    return tuple(map(int, shape))


def _numbers(name: str, label: str, value: Any, count: int, least: int) -> tuple[int, ...]:
    found = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,) * count
    if len(found) != count or not all(isinstance(n, (int, np.integer)) and not isinstance(n, bool) and n >= least
                                      for n in found):
        raise ValueError(f"{name}: {label}={value!r}; a whole number of at least {least} is needed"
                         + (f", or {count} of them" if count > 1 else ""))
    return tuple(map(int, found))


def _padding(name: str, padding: Any, count: int, spatial: Sequence[int], taps: Sequence[int],
             how: Convolution) -> tuple[tuple[int, int], ...]:
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"{name}: padding={padding!r}; a number, 'same' or 'valid' is needed")
        if padding == "valid":
            return ((0, 0),) * count
        if max(how.stride) > 1:
            raise ValueError(f"{name}: padding='same' needs stride=1; stride is {how.stride}")
        missing = [(t - 1) * dilation for t, dilation in zip(taps, how.dilation)]
        return tuple((n // 2, n - n // 2) for n in missing)
    if isinstance(padding, Sequence) and any(isinstance(n, Sequence) for n in padding):
        if len(padding) != count or not all(isinstance(n, Sequence) and len(n) == 2 for n in padding):
            raise ValueError(f"{name}: padding={padding!r}; {count} pairs (before, behind) are needed")
        pairs = [_numbers(name, "padding", tuple(n), 2, 0) for n in padding]
        return tuple((before, behind) for before, behind in pairs)
    return tuple((n, n) for n in _numbers(name, "padding", padding, count, 0))


def _check(name: str, infos: dict[str, ArrayInfo | None]) -> None:
    """All in one place, operands of one real dtype."""
    check_places(infos)
    first: tuple[str, np.dtype] | None = None
    for label, info in infos.items():
        if info is None:
            continue
        check_dtype(info.dtype, label)
        check_aligned(info, label)
        if info.dtype.kind in "cb" or info.dtype.names is not None:
            raise TypeError(f"{name}: {label} has dtype {info.dtype}; real numbers are needed (of complex ones convolve the "
                            "parts)")
        if label in ("c", "out"):
            continue
        if first is not None and info.dtype != first[1]:
            raise TypeError(f"{name}: {label} has dtype {info.dtype} and {first[0]} {first[1]}; convert one of them")
        first = first or (label, info.dtype)


def _check_shapes(name: str, given: dict[str, tuple[ArrayInfo | None, tuple[int, ...]]]) -> None:
    for label, (info, wanted) in given.items():
        if info is not None and info.shape != wanted:
            raise ValueError(f"{name}: {label} has shape {info.shape}; {wanted} is needed")


#: Epilogues that see an element's value, and these two its column where they have a vector.
OF_VALUES, OF_COLUMNS = (Clamp, Default, GELU, ReLU, Saturate, SiLU, Tanh), (Bias, Scale)


def _sees_rows(stage: Epilogue) -> bool:
    """Whether a stage of an epilogue may see which row an element is in."""
    if isinstance(stage, Elementwise):
        return bool(stage.with_coordinates or stage.with_batch)
    if isinstance(stage, OF_COLUMNS):
        return bool(stage.along != "N")
    return not isinstance(stage, OF_VALUES)


#: Columns of a tile, or rows of a gradient of w, that are so few that the L2 limits it, which gives each window once; and
#: the most elements of the taps that a tile holds together.
NARROW, LOW, TOGETHER = 32, 64, 256


def _slides(how: Convolution, read: ArrayInfo, taps: Sequence[int], is_narrow: bool, others: Sequence[ArrayInfo | None],
            epilogue: Epilogue | None = None) -> bool:
    """Whether taps along the fastest dimension are to see the lines of each other's positions in shared memory
    (`Im2col.slide`): on Hopper, of few channels that TMA brings."""
    channels, unit, size = how.last(read.shape)[-1], how.last(read.strides)[-1], read.dtype.itemsize
    fits = channels * size in (32, 64, 128) and 1 < taps[-1] <= TOGETHER // channels
    if not (is_narrow and fits and unit == how.stride[-1] == how.groups == 1 and size == 2
            and target(read.device).arch[0] == 9 and not any(map(_sees_rows, epilogue.stages() if epilogue else ()))):
        return False
    axis = len(read.shape) - 1 if how.is_last else 1
    return all(y is None or (how.last(y.strides)[-1] == 1 and why_not(y, axis) is None) for y in (read, *others))


def _result(name: str, like: Any, out: Any, of_out: ArrayInfo | None, shape: tuple[int, ...], dtype: np.dtype | None,
            epilogue: Epilogue | None, a: ArrayInfo, b: ArrayInfo, how: Convolution) -> tuple[Any, ArrayInfo]:
    """The result's array: as it is given, or a new one, whose channels lie as those of ``like``."""
    if of_out is None:
        held = new_dtype(a.dtype, b.dtype, None, target(a.device), dtype, epilogue)
        strides = how.last(a.strides)
        if how.is_last or strides[-1] != 1 or strides[-2] == 1:
            out = empty_like(like, shape, held)
        else:
            made = empty_like(like, how.last(shape), held)
            info = describe(made, "out")
            out = strided(made, info, shape, how.as_given(info.strides))
        return out, describe(out, "out")
    if of_out.shape != shape:
        raise ValueError(f"{name}: out has shape {of_out.shape}; the result has {shape}")
    for label, info in (("an operand", a), ("an operand", b)):
        if info.pointer and shares_memory(of_out, info):
            raise ValueError(f"{name}: out overlaps {label} in memory; give it memory of its own")
    return out, of_out


# -- the products that it is ------------------------------------------------------------------------------------------

Dimensions = tuple[tuple[int, int], ...]           # (extent, stride), the fastest first
Places = tuple[tuple[int, ...], tuple[int, ...], np.dtype]


class PlacedView(NamedTuple):
    """An operand as a view of its array from the element ``begin`` on (None: the first), and its layout (None: plain)."""

    begin: tuple[int, ...] | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layout: Any


class ConvProduct(NamedTuple):
    """The product D = A B of views of arrays."""

    a: PlacedView
    b: PlacedView
    c: PlacedView | None
    out: PlacedView


def _places(info: ArrayInfo) -> Places:
    return info.shape, info.strides, info.dtype


def _matrix(dtype: np.dtype, rows: Sequence[tuple[int, int]], columns: Sequence[tuple[int, int]], group: int, groups: int,
            begin: tuple[int, ...] | None = None, boxes: bool = False) -> PlacedView:
    """A matrix whose rows and columns are made of these dimensions; ``group`` elements are from a group's to the next."""
    up, down = _joined(rows), _joined(columns)
    stack = ((groups, group),) if groups > 1 else ()
    shape, strides = zip(*stack, *up, *down)
    layout = None
    if len(up) > 1 or len(down) > 1:
        own = ArrayInfo(0, shape[len(stack):], strides[len(stack):], dtype, 0, False, "")
        layout = Matricised.of(own, len(up), boxes)
    return PlacedView(begin, shape, strides, layout)


def _joined(dimensions: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """(extent, stride), the fastest first, those made one that lie in each other's stride."""
    found = merged([(extent, stride) for extent, stride in dimensions if extent != 1])
    return [(1, 1)] if found == NOTHING else list(found)


def _windows(places: Places, how: Convolution, positions: Sequence[int], taps: Sequence[int],
             steps: Sequence[tuple[int, int, int]], taps_first: bool, spare: int = 0,
             kind: type[Im2col] = Im2col) -> PlacedView:
    """The matrix of an array's windows: (stride, step, start) along each spatial dimension; so many positions of each line
    are ``spare``."""
    shape, strides, dtype = how.last(places[0]), how.last(places[1]), places[2]
    shape = (*shape[:-1], shape[-1] // how.groups)
    is_pointwise = all(t == stride == 1 and start == 0 for t, (stride, _, start) in zip(taps, steps))
    positions = (*positions[:-1], positions[-1] + spare)
    if is_pointwise and shape[1:-1] == positions:
        return _matrix(dtype, list(zip(shape, strides))[-2::-1], [(shape[-1], strides[-1])], shape[-1] * strides[-1],
                       how.groups)
    own = ArrayInfo(0, shape, strides, dtype, 0, False, "")
    layout = kind.of(own, positions, tuple(taps), tuple(steps), taps_first, spare)
    if how.groups > 1:
        return PlacedView(None, (how.groups, *shape), (shape[-1] * strides[-1], *strides), layout)
    return PlacedView(None, shape, strides, layout)


def _taps_first(x: Places, w: Places, how: Convolution) -> bool:
    """Whether K is to run over taps before channels: where channels are neighbours in neither tensor."""
    return bool(how.last(x[1])[-1] != 1 and how.last(w[1])[-1] != 1)


@functools.lru_cache(maxsize=4096)
def _forward(how: Convolution, x: Places, w: Places, c: Places | None, out: Places, slides: bool = False) -> ConvProduct:
    (_, *spatial, _), (filters, *taps, depth) = how.last(x[0]), how.last(w[0])
    steps = [(stride, dilation, -before) for stride, dilation, (before, _) in zip(how.stride, how.dilation, how.padding)]
    first = _taps_first(x, w, how)
    spare = (taps[-1] - 1) * how.dilation[-1] if slides else 0
    a = _windows(x, how, how.positions(spatial, taps), taps, steps, first, spare)
    (of_filters, *of_taps, of_depth), each = how.last(w[1]), filters // how.groups
    inner = [(depth, of_depth)], list(zip(taps, of_taps))[::-1]
    b = _matrix(w[2], [*inner[first], *inner[not first]], [(each, of_filters)], each * of_filters, how.groups)
    return ConvProduct(a, b, c and _positions(c, how, spare=spare), _positions(out, how, spare=spare))


def _positions(places: Places, how: Convolution, begin: tuple[int, ...] | None = None, spare: int = 0,
               kind: type[Im2col] = Positions) -> PlacedView:
    """The matrix of all positions and channels of an array, and so many ``spare`` ones of each line."""
    if spare:
        positions = how.last(places[0])[1:-1]
        return _windows(places, how, positions, [1] * len(positions), [(1, 1, 0)] * len(positions), False, spare, kind)
    *rows, (channels, step) = zip(how.last(places[0]), how.last(places[1]))
    each = channels // how.groups
    return _matrix(places[2], rows[::-1], [(each, step)], each * step, how.groups, begin)


@functools.lru_cache(maxsize=4096)
def _of_input(how: Convolution, gradient: Places, w: Places, c: Places | None, out: Places,
              slides: bool = False) -> tuple[ConvProduct, ...]:
    """A product for each class of positions: those that are equal modulo the stride."""
    (_, *spatial, _), (filters, *taps, depth) = how.last(out[0]), how.last(w[0])
    (of_filters, *of_taps, of_depth), each = how.last(w[1]), filters // how.groups
    first = _taps_first(gradient, w, how)
    found = []
    for phases in itertools.product(*map(range, how.stride)):
        if any(phase >= extent for phase, extent in zip(phases, spatial)):
            continue
        seen = [_taps_of(phase, t, stride, before, dilation) for phase, t, stride, (before, _), dilation
                in zip(phases, taps, how.stride, how.padding, how.dilation)]
        extents = [-(-(extent - phase) // stride) for extent, phase, stride in zip(spatial, phases, how.stride)]
        counts = [count for _, _, count, _, _ in seen]
        spare = (counts[-1] - 1) * abs(seen[-1][3]) if slides else 0
        a = _windows(gradient, how, extents, counts, [(1, step, start) for *_, step, start in seen], first, spare)
        d, of_c = (y and _class_of(y, how, phases, extents, spare) for y in (out, c))
        of_seen = [(count, step * stride) for (_, step, count, _, _), stride in zip(seen, of_taps)]
        inner = [(each, of_filters)], of_seen[::-1]
        b = _matrix(w[2], [*inner[first], *inner[not first]], [(depth, of_depth)], each * of_filters, how.groups,
                    how.as_given((0, *(at for at, *_ in seen), 0)), boxes=True)
        assert d is not None
        found.append(ConvProduct(a, b, of_c, d))
    return tuple(found)


def _class_of(places: Places, how: Convolution, phases: Sequence[int], extents: Sequence[int], spare: int) -> PlacedView:
    """The matrix of a class of positions."""
    (images, *_, channels), (first, *steps, last) = how.last(places[0]), how.last(places[1])
    own = (first, *(step * stride for step, stride in zip(steps, how.stride)), last)
    return _positions((how.as_given((images, *extents, channels)), how.as_given(own), places[2]), how,
                      how.as_given((0, *phases, 0)), spare)


def _taps_of(phase: int, taps: int, stride: int, before: int, dilation: int) -> tuple[int, int, int, int, int]:
    """Which taps positions of a class see along a dimension: the first, the step to the next, and how many; and where the
    gradient is read: its step from tap to tap, and its start. Without a tap, one that lies out of the gradient everywhere.

    >>> _taps_of(0, 3, 2, 1, 1), _taps_of(1, 3, 2, 1, 1)
    ((1, 2, 1, -1, 0), (0, 2, 2, -1, 1))
    """
    common = math.gcd(stride, dilation)
    step = stride // common
    at = next((tap for tap in range(min(step, taps)) if (phase + before - tap * dilation) % stride == 0), None)
    if at is None:
        return 0, 1, 0, 0, 0
    return at, step, -(-(taps - at) // step), -(dilation // common), (phase + before - at * dilation) // stride


@functools.lru_cache(maxsize=4096)
def _of_weights(how: Convolution, x: Places, gradient: Places, c: Places | None, out: Places,
                slides: bool = False) -> ConvProduct:
    (_, *spatial, _), (filters, *taps, _) = how.last(x[0]), how.last(out[0])
    steps = [(stride, dilation, -before) for stride, dilation, (before, _) in zip(how.stride, how.dilation, how.padding)]
    *positions, (_, of_filters) = zip(how.last(gradient[0]), how.last(gradient[1]))
    each = filters // how.groups
    spare = (taps[-1] - 1) * how.dilation[-1] if slides else 0
    if slides:
        a = _positions(gradient, how, spare=spare, kind=PositionsAcross)
    else:
        a = _matrix(gradient[2], [(each, of_filters)], positions[::-1], each * of_filters, how.groups)
    first = _taps_first(x, out, how)
    b = _windows(x, how, how.positions(spatial, taps), taps, steps, first, spare)
    d, of_c = (y and _filters(y, how, first) for y in (out, c))
    assert d is not None
    return ConvProduct(a, b, of_c, d)


def _filters(places: Places, how: Convolution, first: bool) -> PlacedView:
    """The matrix of filters by taps and channels."""
    (filters, *taps, depth), (of_each, *of_taps, of_depth) = how.last(places[0]), how.last(places[1])
    each, inner = filters // how.groups, ([(depth, of_depth)], list(zip(taps, of_taps))[::-1])
    return _matrix(places[2], [(each, of_each)], [*inner[first], *inner[not first]], each * of_each, how.groups)


# -- the launches -----------------------------------------------------------------------------------------------------

Array = tuple[Any, ArrayInfo]


def _launch(products: Sequence[ConvProduct], a: Array, b: Array, c: tuple[Any, ArrayInfo | None], out: Array,
            epilogue: Epilogue | None, precision: str | None, stream: Any) -> None:
    keywords: dict[str, Any] = {name: value for name, value in (("epilogue", epilogue), ("precision", precision))
                                if value is not None}
    for product in products:
        layouts = {f"global_{name}_layout": view.layout for name, view in zip("abcd", product)
                   if view is not None and view.layout is not None}
        matmul(_view(a, product.a), _view(b, product.b), None if product.c is None else _view(c, product.c),
               out=_view(out, product.out), stream=stream, **layouts, **keywords)


def _view(array: tuple[Any, ArrayInfo | None], view: PlacedView) -> Any:
    x, info = array
    assert info is not None
    if view.begin is not None and any(view.begin):
        x = x[tuple(slice(first, None) for first in view.begin)]
        info = describe(x)
    return strided(x, info, view.shape, view.strides)
