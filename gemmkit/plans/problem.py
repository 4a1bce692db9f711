"""From a call's arguments to a problem: operands described, sizes agreed, a configuration chosen, everything checked.

Nothing is launched, allocated or written here; what is wrong with the arguments is said here, by name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import numpy as np

from gemmkit.components import ALONGSIDE, MIRRORED, CapturedArray, Component, arrays_of, check_held, field_values
from gemmkit.emulator import current_mode
from gemmkit.epilogues import parts, result_layout
from gemmkit.kernels.config import KEYWORDS, TRANSFORMS, Config, check_fields, sizes_given, with_swap_ab
from gemmkit.lang.checks import check_dtype, check_methods, dtype_given
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import ArrayLayout, ColMajor, Discarded, GlobalLayout, Interleaved, Plain, ResultLayout, RowMajor, Zero
from gemmkit.layouts.base import check_dimensions, leading
from gemmkit.layouts.matrices import CallSizes
from gemmkit.layouts.quantised import QuantisedTranspose
from gemmkit.operators import Algebra, Operator
from gemmkit.runtime.array_info import ArrayInfo, are_the_same, steps_of
from gemmkit.runtime.arrays import (
    byte_range,
    describe,
    dtype_from_torch,
    flipped,
    is_array,
    on_host,
    overlaps_itself,
    shares_memory,
    whole,
)
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.transforms import Transform
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.choose import MAPPINGS, OZAKI, ProductProblem, batch_invariant, by_precision, in_lines, moduli_of
from gemmkit.tuning.operators import embed, new_dtype, new_layout
from gemmkit.tuning.problems import Choice, choose

__all__ = [
    "check_dimensions", "check_steps", "first_matrices", "first_matrix", "leading", "seen_stack", "stack_of",
    "steps_of", "tuple_text",
]


# --------------------------------------------------------------------------------------------------
# Where the arrays of a plan may lie: at what alignment, and apart from each other.
#
# All follows from their addresses, for the arrays of a plan's calls are of one kind. So a plan asks again only for
# addresses that it has not just asked about.

Question = Callable[[int, int, int, int], bool]


def fitting(infos: Sequence[ArrayInfo | None], alignments: Sequence[int], in_place: bool = True) -> Question:
    """``f(out, a, b, c)``: whether arrays at these addresses are as aligned as a plan's, and out shares memory with none.
    ``in_place`` it may be c itself. An array that is not there is at address 0."""
    (a0, a1), (b0, b1), (c0, c1), (d0, d1) = map(_extent, infos)
    c, out = infos[2:]
    has_c, may_be_c = c is not None, in_place and c is not None and out is not None and _are_alike(c, out)
    mask = max(alignments) - 1

    def fits(at_out: int, at_a: int, at_b: int, at_c: int) -> bool:
        if (at_a | at_b | at_c | at_out) & mask and any(
                at % align for at, align in zip((at_a, at_b, at_c, at_out), alignments)):
            return False
        low, high = at_out + d0, at_out + d1
        return not ((at_a + a0 < high and low < at_a + a1 and share(0, at_a, at_out))
                    or (at_b + b0 < high and low < at_b + b1 and share(1, at_b, at_out))
                    or (has_c and at_c + c0 < high and low < at_c + c1 and not (at_c == at_out and may_be_c)
                        and share(2, at_c, at_out)))

    def share(n: int, at: int, at_out: int) -> bool:
        """Whether arrays whose bytes lie among each other have one in common."""
        x = infos[n]
        assert x is not None and out is not None
        return shares_memory(x._replace(pointer=at), out._replace(pointer=at_out))

    return fits


def sharing(infos: Sequence[ArrayInfo | None], held: Sequence[tuple[str, CapturedArray]],
            in_place: bool = True) -> Question | None:
    """``f(out, a, b, c)``: whether arrays at these addresses may share memory with the components', where one of them is
    written; None where the components have no arrays."""
    if not held:
        return None
    (a0, a1), (b0, b1), (c0, c1), (d0, d1) = map(_extent, infos)
    out = infos[3]
    assert out is not None
    read = [(*byte_range(x.info), x.info.pointer if in_place and field in ALONGSIDE and _are_alike(x.info, out) else -1)
            for field, x in held]
    written = [byte_range(x.info) for _, x in held if x.is_output]

    def shares(at_out: int, at_a: int, at_b: int, at_c: int) -> bool:
        low, high = at_out + d0, at_out + d1
        for first, last, itself in read:
            if first < high and low < last and itself != at_out:
                return True
        for first, last in written:
            if ((first < at_a + a1 and at_a + a0 < last) or (first < at_b + b1 and at_b + b0 < last)
                    or (first < at_c + c1 and at_c + c0 < last) or (first < high and low < last)):
                return True
        return False

    return shares


def _are_alike(x: ArrayInfo, out: ArrayInfo) -> bool:
    """Whether an array at out's address is out."""
    return are_the_same(x._replace(pointer=out.pointer), out)


def _extent(info: ArrayInfo | None) -> tuple[int, int]:
    """First and last byte of an array, relative to its pointer."""
    if info is None:
        return 0, 0
    first, last = byte_range(info)
    return first - info.pointer, last - info.pointer


# --------------------------------------------------------------------------------------------------
# Stacks of matrices on the host: a call's arrays as one product's, and the steps to the others.
#
# What a layout describes is one matrix, of `Layout.dimensions_of` dimensions of its array. Those before are a stack's,
# and are broadcast as NumPy does. From here on a call is planned for the first matrices; each knows by its ``steps``
# (`gemmkit.runtime.array_info.ArrayInfo`) where those of the other products lie.

LIMIT = 2**31 - 2**10                  # coordinates are 32 bits wide, and products are counted in as many

Layouts = Mapping[str, ArrayLayout | None]
Infos = Mapping[str, ArrayInfo | None]


def stack_of(infos: Infos, layouts: Layouts) -> tuple[int, ...] | None:
    """The shape of the stack of products, ``infos`` and ``layouts`` by "a", "b", "c" and "out"; None where none of a, b and
    c has more dimensions than its layout's matrix. (A diagonal's matrix is a vector: two dimensions are a stack of them.)

    Raises ValueError, naming the operand, for stacks that do not fit each other.
    """
    stacks = {name: info.shape[:leading(info, layouts[name])] for name, info in infos.items() if info is not None}
    if not any(stack for name, stack in stacks.items() if name != "out"):
        return None
    a, b, (M, K, rows, N) = infos["a"], infos["b"], _extents(infos, layouts)
    assert a is not None and b is not None
    if K is not None and rows is not None and K != rows:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: the matrices of a have {K} columns and the "
                         f"matrices of b have {rows} rows; both must be K")
    try:
        stack = np.broadcast_shapes(stacks["a"], stacks["b"])
    except ValueError:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: {stacks['a']} and {stacks['b']} cannot be "
                         "broadcast together") from None
    if math.prod(stack) > LIMIT:
        raise ValueError(f"a has shape {a.shape} and b has shape {b.shape}: a stack of {math.prod(stack)} products is over "
                         f"the limit of {LIMIT}")
    shape = (*stack, "M" if M is None else M, "N" if N is None else N)
    c, out = infos.get("c"), infos.get("out")
    if c is not None and (not broadcasts(stacks["c"], stack) or _misfits(c, layouts["c"], M, N)):
        raise ValueError(f"c has shape {c.shape}, which cannot be broadcast to the result's {tuple_text(shape)}")
    if out is not None and (stacks["out"] != stack or _misfits(out, layouts["out"], M, N)):
        raise ValueError(f"out has shape {out.shape}; the result has {tuple_text(shape)}")
    return stack


def broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    """Whether a stack of this shape is one of another, repeated.

    >>> broadcasts((1, 3), (2, 3)), broadcasts((3,), (2, 3)), broadcasts((2,), (2, 3))
    (True, True, False)
    """
    return len(shape) <= len(to) and all(n in (1, m) for n, m in zip(shape[::-1], to[::-1]))


def _extents(infos: Infos, layouts: Layouts) -> tuple[int | None, ...]:
    """Rows and columns of A, then of B, as far as plain layouts say them."""
    found: list[int | None] = []
    for name in ("a", "b"):
        info, layout = infos[name], layouts[name]
        assert info is not None
        is_plain = isinstance(layout, Plain) and layout.dimensions_of(info) == 2 and len(info.shape) >= 2
        found += info.shape[-2:] if is_plain else (None, None)
    return tuple(found)


def _misfits(info: ArrayInfo, layout: ArrayLayout | None, M: int | None, N: int | None) -> bool:
    return (isinstance(layout, Plain) and layout.dimensions_of(info) == 2 and None not in (M, N)
            and info.shape[-2:] != (M, N))


def tuple_text(shape: tuple[Any, ...]) -> str:
    """A shape of which some extents may be letters, as Python writes a tuple."""
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


# -- the first product ------------------------------------------------------------------------------------------------

def first_matrices(infos: Infos, layouts: Layouts, stack: tuple[int, ...] | None) -> dict[str, ArrayInfo | None]:
    """The operands of the first product of a stack; without one the operands themselves."""
    return {name: None if info is None else first_matrix(info, leading(info, layouts[name]), stack)
            for name, info in infos.items()}


def first_matrix(info: ArrayInfo, count: int, stack: tuple[int, ...] | None) -> ArrayInfo:
    """The first matrix of an array whose first ``count`` dimensions are those of a stack, with the steps to the others."""
    if stack is None:
        return info
    steps = steps_of(info.shape[:count], info.strides[:count], stack)
    return info._replace(shape=info.shape[count:], strides=info.strides[count:], steps=steps)


def seen_stack(info: ArrayInfo, layout: ArrayLayout) -> ArrayInfo:
    """All matrices of an array as ``layout`` sees them, in the stack's own dimensions.

    Raises ValueError for an array that the layout does not take.
    """
    count = leading(info, layout)
    if count == 0:
        return layout.seen(info)
    first = info._replace(shape=info.shape[count:], strides=info.strides[count:], steps=tuple(
        (extent, stride if extent > 1 else 0) for extent, stride in zip(info.shape[:count], info.strides)))
    found = layout.seen(first)
    if found is first:
        return info
    return found._replace(shape=(*info.shape[:count], *found.shape), steps=(),
                          strides=(*(stride for _, stride in found.steps), *found.strides))


def check_steps(shape: tuple[int, ...], own: int, stack: tuple[int, ...] | None, name: str, is_output: bool) -> None:
    """Raise ValueError unless the array of a component, of which a product has ``own`` dimensions, fits a stack."""
    before = shape[:max(0, len(shape) - own)]
    if stack is None:
        if before:
            raise ValueError(f"{name} has shape {shape}; without a stack of products it has {own} dimensions"
                             + (f"; give it the shape {shape[-own:]}" if own and math.prod(before) == 1 else ""))
        return
    if not broadcasts(before, stack):
        raise ValueError(f"{name} has shape {shape}: {before} cannot be broadcast to the stack of products, {stack}")
    if is_output and math.prod(before) != math.prod(stack):
        raise ValueError(f"{name} has shape {shape}, and every product of the stack {stack} would write it; give it the "
                         f"shape of the whole stack, {(*stack, *shape[-own:])}")


# --------------------------------------------------------------------------------------------------
# Operands of one dimension, by NumPy's rules: a vector A is a row, a vector B a column, and D lacks that dimension.
#
# A call is planned for the matrices; the arrays that are passed stay vectors, since a kernel is given addresses alone.

Info = ArrayInfo | None


class Vectors(NamedTuple):
    """Which of A and B is a vector.

    >>> Vectors(False, True).result_shape((5, 3, 1))
    (5, 3)
    """

    a: bool = False
    b: bool = False

    @classmethod
    def of(cls, a: ArrayInfo, b: ArrayInfo, layouts: Iterable[Any]) -> Vectors:
        """Those among a call's operands; ``layouts`` are those that the caller gave, or None. An array that has a layout of
        another kind (`layouts.Diagonal`, the caller's own) is what that layout makes of it."""
        return cls(*(len(info.shape) == 1 and (layout is None or isinstance(layout, (RowMajor, ColMajor)))
                     for info, layout in zip((a, b), layouts)))

    def operands(self, a: ArrayInfo, b: ArrayInfo) -> tuple[ArrayInfo, ArrayInfo]:
        """A and B as matrices. Raises ValueError for a number beside a vector."""
        if self.a or self.b:
            for name, info in (("a", a), ("b", b)):
                if not info.shape:
                    raise ValueError(f"{name} has shape (): a product takes no number as an operand; multiply by it")
        if self.a:
            a = _row(a)
        if self.b:                                      # contiguous along K, which is what is loaded in vectors
            b = b._replace(shape=(*b.shape, 1), strides=(*b.strides, b.shape[0] * b.strides[0] or 1))
        return a, b

    def results(self, c: Info, out: Info, stack: tuple[int, ...], M: int | None, N: int | None) -> tuple[Info, Info]:
        """C and ``out`` as matrices, of a product of ``stack`` x M x N (None: not known yet). Raises ValueError for another
        number of dimensions; extents are compared with those of all operands."""
        if not (self.a or self.b):
            return c, out
        shape = self.result_shape((*stack, "M" if M is None else M, "N" if N is None else N))     # type: ignore[arg-type]
        for name, given in (("c", c), ("out", out)):
            if given is not None and len(given.shape) != len(shape):
                raise ValueError(f"{name} has shape {given.shape}; the result has {tuple_text(shape)} (an a of one "
                                 "dimension is a row, a b a column, and the result lacks that dimension)")
        return None if c is None else self.matrix(c), None if out is None else self.matrix(out)

    def matrix(self, out: ArrayInfo) -> ArrayInfo:
        """A result, or a C, as a matrix."""
        if self.b:
            out = out._replace(shape=(*out.shape, 1), strides=(*out.strides, 1))
        return _row(out) if self.a else out

    def result_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a result of (..., M, N)."""
        *stack, M, N = shape
        return (*stack, *(() if self.a else (M,)), *(() if self.b else (N,)))

    def given_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that the caller's operand ``name`` has, whose matrix has this one."""
        if name in ("a", "b"):
            return (shape[1:] if name == "a" else shape[:1]) if getattr(self, name) else shape
        return self.result_shape(shape)

    def host(self, a: Any, b: Any, c: Any, out: Any) -> tuple[Any, Any, Any, Any]:
        """NumPy's arrays of a call as matrices: views."""
        if not (self.a or self.b):
            return a, b, c, out

        def of_result(x: Any) -> Any:
            x = on_host(x)[..., None] if self.b else on_host(x)
            return x[..., None, :] if self.a else x

        return (on_host(a)[None] if self.a else a, on_host(b)[:, None] if self.b else b,
                None if c is None else of_result(c), of_result(out))


def _row(info: ArrayInfo) -> ArrayInfo:
    """The rows of one matrix each that the last dimension of an array is."""
    extent, stride = info.shape[-1], info.strides[-1]
    return info._replace(shape=(*info.shape[:-1], 1, extent), strides=(*info.strides[:-1], extent * stride or 1, stride))


HOST = -1
F32 = np.dtype(np.float32)

LAYOUTS = tuple(f"global_{name}_layout" for name in "abcd")
PLAIN = "gemm_shape", "dtype", "precision", "mapping"          # keywords that are no fields of a configuration


@dataclass
class Call:
    """A checked call: sizes, configuration and operands (``out`` is None when it is still to be made).

    Of a stack of products the operands are those of the first; ``stack`` is its shape, None for a single product.

    With ``swap_ab``, which `gemmkit.tuning.choose` decides, the kernel computes D^T = B^T A^T (`computed`, `order`), and
    ``config`` is of that product.
    ``chosen_by`` names what chose the mapping: "conf" or "operator" (the caller's), "tuned" (`gemmkit.tuning.store`),
    "candidate" (one that is tried), a table of `gemmkit.tuning` ("winners", "boxes", "multistage", "gathered", "hopper",
    "swap_ab"), "batch_invariant", or "units": the operator for the dtypes, in the tiles of `gemmkit.tuning.simt`.
    """

    M: int
    N: int
    K: int
    config: Config
    a: ArrayInfo
    b: ArrayInfo
    c: ArrayInfo | None
    out: ArrayInfo | None
    device: DeviceInfo
    stack: tuple[int, ...] | None = None
    swap_ab: bool = False
    tuning_key: Callable[[], str] | None = None                        # (`gemmkit.tuning.store`)
    vectors: Vectors = Vectors()                                       # among a and b; they are matrices here
    chosen_by: str = "conf"
    moduli: int = 0                                                    # of int8 products that it is computed by; 0: none
    is_auto: bool = False                                              # by these where they are faster
    #: Of a and b those that are copied first (`gemmkit.tuning.choose.in_lines`), as they are then.
    copies: Mapping[str, ArrayInfo] = dataclasses.field(default_factory=dict)

    @property
    def computed(self) -> Call:
        """What the kernel computes: the call itself behind its copies, or with swap-AB its transpose."""
        a, b = self.copies.get("a", self.a), self.copies.get("b", self.b)
        if not self.swap_ab:
            return dataclasses.replace(self, a=a, b=b) if self.copies else self
        return dataclasses.replace(self, M=self.N, N=self.M, a=flipped(b), b=flipped(a), c=flipped(self.c),
                                   out=flipped(self.out), swap_ab=False, tuning_key=None)

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Where the kernel's a, b, c and out stand among the call's."""
        return (1, 0, 2, 3) if self.swap_ab else (0, 1, 2, 3)

    def given_as(self, field: str) -> str:
        """The field in which the caller gave what ``config`` has in ``field``."""
        return with_swap_ab(field) if self.swap_ab else field

    def given(self, field: str) -> Any:
        """The component that the caller gave in a field."""
        found = getattr(self.config, self.given_as(field))
        return found.layout if isinstance(found, QuantisedTranspose) else found

    @cached_property
    def held(self) -> list[tuple[str, CapturedArray]]:
        """`held_by` the configuration, by the fields in which the caller gave it."""
        if self.swap_ab and not self.config.holds_nothing:
            return held_by({self.given_as(field): value for field, value in field_values(self.config).items()})
        return held_by(self.config)

    @property
    def products(self) -> int:
        """How many there are."""
        return math.prod(self.stack or ())

    def seen_out(self, out: ArrayInfo) -> ArrayInfo:
        """An array for the result, as the kernel sees it."""
        layout = self.config.global_d_layout
        out = self.vectors.matrix(out)
        return layout.seen(first_matrix(out, leading(out, layout), self.stack))


#: What other libraries' keywords are called here.
_INSTEAD = {**dict.fromkeys(("alpha", "beta"), "gemmkit.blas.gemmEx(transa, transb, alpha, a, b, beta, c)"),
            **{f"trans{between}{x}": f"{x}.T for {x}" for x in "ab" for between in ("", "_", "pose_")},
            "activation": "epilogue=gemmkit.epilogues.GELU()", "bias": "epilogue=gemmkit.epilogues.Bias(bias)"}


def checked_keywords(keywords: Mapping[str, Any], what: str = "matmul", own: str = "out, stream") -> dict[str, Any]:
    """Those that are given, each of its kind; ``what`` is the function that got them, ``own`` what it takes beside them."""
    unknown = set(keywords) - set(KEYWORDS)
    if unknown:
        said = ", ".join(f"{name} (write {_INSTEAD[name]})" if name in _INSTEAD else name for name in sorted(unknown))
        raise TypeError(f"{what}() got unknown keywords {said}; it takes {own}, " + ", ".join(KEYWORDS))
    keywords = {name: value for name, value in keywords.items() if value is not None}
    for name in set(keywords) & set(TRANSFORMS):
        if not isinstance(keywords[name], Transform):
            raise TypeError(f"{name}={keywords[name]!r}: a Transform is needed; wrap a function in transforms.Map")
    for name in set(keywords) & set(LAYOUTS):
        if not isinstance(keywords[name], ArrayLayout):
            raise ConfigError(f"{name}={keywords[name]!r}: a Layout is needed, for example RowMajor('float16')")
    check_fields({name: value for name, value in keywords.items() if name not in PLAIN})
    return keywords


def resolve(a: ArrayInfo, b: ArrayInfo, c: ArrayInfo | None, out: ArrayInfo | None, conf: Config | None,
            keywords: dict[str, Any], candidate: Candidate | None = None) -> Call:
    """Check a call and complete what it leaves open. Raises ValueError, TypeError or ConfigError; see `matmul`.

    ``candidate`` is the mapping to take where there is no ``conf``; None takes the tuned one, or the tables'.
    """
    keywords = checked_keywords(keywords)
    if conf is None and "order" in keywords:
        raise ConfigError("order: it is part of a mapping; give it with conf, or to get_config")
    precision = keywords.pop("precision", None)
    if precision is not None and (conf is not None or "operator" in keywords):
        beside = "operator" if conf is None else "conf"
        raise ConfigError(f"precision={precision!r}: it is given with {beside}, which already names the operator; leave one "
                          "out")
    mapping = keywords.pop("mapping", None)
    if mapping is not None:
        _check_mapping(mapping, precision, conf, keywords)
    if conf is not None and not isinstance(conf, Config):
        raise TypeError(f"conf={conf!r}: a configuration of gemmkit.get_config is needed")
    gemm_shape, dtype = keywords.pop("gemm_shape", None), asked_dtype(keywords, conf, out)
    vectors = Vectors.of(a, b, [keywords.get(field, getattr(conf, field, None)) for field in LAYOUTS[:2]])
    check_places({"a": a, "b": b, "c": c, "out": out})
    if any(vectors):
        a, b, c, out = _matrices(vectors, a, b, c, out, conf, keywords)
    given = infos = {"a": a, "b": b, "c": c, "out": out}
    layouts = _layouts(infos, conf, keywords, dtype)
    if isinstance(layouts["d"], Discarded):
        keywords["global_d_layout"] = layouts["d"] = _typed(layouts, conf, keywords, target(a.device), dtype)
    stack = stack_of(infos, {**layouts, "out": layouts["d"]})
    infos = first_matrices(infos, {**layouts, "out": layouts["d"]}, stack)
    infos = {name: _seen(info, layouts["d" if name == "out" else name], name) for name, info in infos.items()}
    M, N, K = _sizes(infos, layouts, gemm_shape, vectors)
    device = target(a.device)
    products = math.prod(stack or ())
    key = partial(store.digest_of, infos, layouts, (M, N, K), keywords, device, products)
    asked = ProductProblem(infos, layouts, (M, N, K), keywords, products, key, stack is not None)
    moduli = moduli_of(precision, layouts["a"].dtype if layouts["a"] is not None else a.dtype)
    is_open = conf is None and mapping is None and candidate is None
    lines = in_lines(asked, device, precision) if is_open and not any(vectors) else None
    copies = {name: of for name, of in (lines or asked).infos.items() if of is not None and of is not infos[name]}
    if lines is not None:
        key = partial(store.digest_of, lines.infos, lines.layouts, (M, N, K), keywords, device, products)
        asked = dataclasses.replace(lines, key=key)
    if mapping is None and precision is not None and not (isinstance(precision, str) and precision in OZAKI):
        keywords["operator"] = by_precision(precision, asked, device)
    if mapping is not None:
        choice = batch_invariant(asked, precision, device)
    elif conf is None:
        choice = choose(asked, device, candidate)
    else:
        if "operator" in keywords:
            raise ConfigError("operator: it is given with conf, which already has one; give it to get_config")
        changes = {**keywords, **({"global_c_layout": layouts["c"]} if c is not None else {})}
        choice = Choice(dataclasses.replace(conf, **changes) if changes else conf, "conf")
        choice.spec.check_device(device)
    conf = choice.spec
    if any(vectors) and len(conf.global_d_layout.array_shape(M, N)) > 2:
        raise ValueError(("a" if vectors.a else "b") + " has one dimension, and the other operand an axis for the parts of "
                         "its numbers: give a matrix of one " + ("row, a[None]" if vectors.a else "column, b[:, None]"))
    if not choice.swap_ab:
        _check_operands({**infos, **copies}, conf, M, N, K)
    if out is not None:
        in_place = not conf.global_d_layout.is_mirrored
        check_out(*((infos["out"], infos) if stack is None else (out, given)), in_place)       # type: ignore[arg-type]
    _check_functions(conf, M, N, K, stack)
    assert infos["a"] is not None and infos["b"] is not None
    call = Call(M, N, K, conf, infos["a"], infos["b"], infos["c"], infos["out"], device, stack, choice.swap_ab,
                asked.key, vectors, choice.by, moduli, precision == "auto", copies)
    check_held(call.held, {name: info and whole(info) for name, info in infos.items()}, () if out is None else (out,),
               not conf.global_d_layout.is_mirrored)
    return call


def check_mapping(mapping: object) -> None:
    """Raise ValueError for what is neither None nor a word for a mapping."""
    if mapping is not None and not (isinstance(mapping, str) and mapping in MAPPINGS):
        raise ValueError(f"mapping={mapping!r}: {', '.join(map(repr, MAPPINGS))} is needed; a mapping of your own is a conf "
                         "(gemmkit.get_config)")


def _check_mapping(mapping: object, precision: object, conf: Config | None, keywords: Mapping[str, Any]) -> None:
    """Raise for a word that names no mapping, and for what names another one beside it."""
    check_mapping(mapping)
    if conf is not None or "operator" in keywords:
        beside = "operator" if conf is None else "conf"
        raise ConfigError(f"mapping={mapping!r}: it is given with {beside}, by which products of all sizes are computed "
                          "already; leave one out")
    if isinstance(precision, str) and precision in OZAKI:
        raise ConfigError(f"mapping={mapping!r}: it is given with precision={precision!r}, whose sums are exact; leave "
                          "mapping out")


# -- where the arrays are ---------------------------------------------------------------------------------------------

def check_places(infos: dict[str, ArrayInfo | None]) -> None:
    """All on one device, or all on the host under emulation."""
    emulating = current_mode() is not None
    first: tuple[str, int] | None = None
    for name, info in infos.items():
        if info is None:
            continue
        if info.device == HOST and not emulating:
            what = ("tensor on cpu; move it to the GPU with .cuda()" if info.library == "torch" else
                    "host array (NumPy); put it on the GPU (cupy.asarray)")
            raise TypeError(f"{name} is a {what}, or compute in the emulator: with gemmkit.emulate(): ...")
        if info.device != HOST and emulating:
            raise TypeError(f"{name} is on GPU {info.device}, and the emulator works on NumPy arrays and tensors on the CPU")
        if first is None:
            first = name, info.device
        elif info.device != first[1]:
            raise ValueError(f"{name} is on device {info.device} and {first[0]} on device {first[1]}; all operands of a "
                             "product must be on one device")


# -- layouts and sizes ------------------------------------------------------------------------------------------------

def _matrices(vectors: Vectors, a: ArrayInfo, b: ArrayInfo, c: ArrayInfo | None, out: ArrayInfo | None, conf: Config | None,
              keywords: dict[str, Any]) -> tuple[ArrayInfo, ArrayInfo, ArrayInfo | None, ArrayInfo | None]:
    """The operands of a product with vectors, as matrices.

    Raises ValueError for a K that differs and for results of another number of dimensions, of the arrays as they were given.
    """
    shapes = a.shape, b.shape
    a, b = vectors.operands(a, b)
    (stack_a, M, K), (stack_b, rows, N) = (_rows_and_columns(name, info, conf, keywords)
                                           for name, info in (("a", a), ("b", b)))
    if K is not None and rows is not None and K != rows:
        of_a, of_b = "elements" if vectors.a else "columns", "elements" if vectors.b else "rows"
        raise ValueError(f"a has shape {shapes[0]} and b has shape {shapes[1]}: a has {K} {of_a} and b {rows} {of_b}; both "
                         "must be K")
    return a, b, *vectors.results(c, out, stack_a or stack_b, M, N)


def _rows_and_columns(name: str, info: ArrayInfo, conf: Config | None,
                      keywords: dict[str, Any]) -> tuple[tuple[int, ...], int | None, int | None]:
    """An operand's stack, rows and columns, as far as its layout says them."""
    layout = _layout(name, info, conf, keywords)
    assert layout is not None
    count = leading(info, layout)
    seen = _seen(first_matrix(info, count, info.shape[:count]), layout, name)
    assert seen is not None
    found = layout.extents(seen)
    return info.shape[:count], *(found if isinstance(found, tuple) and len(found) == 2 else (None, None))


def _layout(name: str, info: ArrayInfo | None, conf: Config | None, keywords: dict[str, Any]) -> ArrayLayout | None:
    """The layout of operand ``name``: as given, of the configuration, or the plain one of its array."""
    field = f"global_{'d' if name == 'out' else name}_layout"
    if field in keywords:
        given: ArrayLayout | None = keywords[field]
        return given
    if conf is not None and not (name == "c" and info is not None and isinstance(conf.global_c_layout, Zero)):
        of_conf: ArrayLayout = getattr(conf, field)
        return of_conf
    return None if info is None else layout_of(info, name, keywords.get("operator", getattr(conf, "operator", None)))


def asked_dtype(keywords: dict[str, Any], conf: Config | None, out: ArrayInfo | None,
                what: str = "matmul") -> np.dtype | None:
    """Take ``dtype`` out of the keywords: what a new D is to hold."""
    if "dtype" not in keywords:
        return None
    dtype = keywords.pop("dtype")
    is_torchs = getattr(type(dtype), "__module__", "") == "torch"          # classes may have none
    dtype = dtype_given((dtype_from_torch(dtype) if is_torchs else None) or dtype, what)
    given = out.dtype if out is not None else getattr(keywords.get("global_d_layout"), "dtype", None)
    if conf is not None:
        raise ConfigError(f"dtype={dtype}: it is given with conf, whose layout of D already has one; leave it out")
    if given is not None and given != dtype:
        raise ValueError(f"dtype={dtype} and out has dtype {given}; out's dtype is the result's, so leave dtype out")
    return dtype


def _layouts(infos: dict[str, ArrayInfo | None], conf: Config | None, keywords: dict[str, Any],
             dtype: np.dtype | None = None) -> dict[str, ArrayLayout | None]:
    """The layouts of A, B, C and D; ``dtype`` is that of a D which the call makes, None where it is open."""
    out: dict[str, ArrayLayout | None] = {}
    for name in ("a", "b", "c", "out"):
        out["d" if name == "out" else name] = _layout(name, infos[name], conf, keywords)
    if conf is None:
        embed(out, keywords.get("operator"))
    if out["d"] is None and dtype is not None and out["a"] is not None and out["b"] is not None:
        out["d"] = new_layout(out["a"], out["b"], dtype, RowMajor)
    if isinstance(out["b"], GlobalLayout) and isinstance(out["d"], ResultLayout):
        out["d"] = result_layout(out["b"], keywords.get("epilogue", getattr(conf, "epilogue", None)), out["d"])
    return out


def _typed(layouts: Mapping[str, Any], conf: Config | None, keywords: dict[str, Any], device: DeviceInfo,
           dtype: np.dtype | None) -> Discarded:
    """The layout of a D that is not stored, with the dtype that a stored one would have where it says none."""
    found, of_conf = layouts["d"], getattr(conf, "global_d_layout", None)
    if found.dtype is not None:
        return cast(Discarded, found)
    if dtype is None and of_conf is not None:
        dtype = of_conf.dtype
    return Discarded(new_dtype(layouts["a"].dtype, layouts["b"].dtype, keywords.get("operator"), device, dtype,
                               keywords.get("epilogue")))


def _seen(info: ArrayInfo | None, layout: ArrayLayout | None, name: str) -> ArrayInfo | None:
    if info is None or layout is None:
        return info
    if not isinstance(layout, Plain):
        check_dimensions(info, layout, name)
    try:
        return layout.seen(info)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def has_parts(info: ArrayInfo, operator: Operator | None) -> bool:
    """Whether an array's last axis is the parts of numbers: for an algebra's operator, that of an array of more than two
    dimensions whose elements are no numbers of several parts themselves."""
    return (isinstance(operator, Algebra) and len(info.shape) > 2 and info.dtype.kind != "c" and info.dtype.names is None)


def layout_of(info: ArrayInfo, name: str, operator: Operator | None = None) -> Plain:
    """The plain layout of a matrix, or of each of a stack: column-major if only its first axis is contiguous.

    Where it `has_parts` they are the last axis.
    """
    check_dtype(info.dtype, name)
    if has_parts(info, operator):
        rows, columns, _ = info.strides[-3:]
        return Interleaved(operator.number_dtype(info.dtype), "col" if rows < columns else "row")      # type: ignore[union-attr]
    if len(info.shape) < 2:
        raise ValueError(f"{name} has {len(info.shape)} dimensions; a matrix of 2 is needed (a vector v: v[:, None] or "
                         "v[None, :])")
    rows, columns = info.strides[-2:]
    return (ColMajor if rows == 1 and columns != 1 and info.shape[-2] > 1 else RowMajor)(info.dtype)


def _sizes(infos: dict[str, ArrayInfo | None], layouts: dict[str, ArrayLayout | None], gemm_shape: Any,
           vectors: Vectors) -> tuple[int, int, int]:
    found: dict[str, tuple[str, int]] = {}

    def add(name: str, dim: str, extent: int, what: str) -> None:
        known = found.setdefault(dim, (name, extent))
        if known[1] != extent:
            raise ValueError(f"{name} {what.format(extent)}, and {known[0]} says {dim}={known[1]}; a is (M, K), b is (K, "
                             "N), c and out are (M, N)")

    stated: tuple[tuple[str, str, int], ...] = ()
    if isinstance(gemm_shape, CallSizes):
        gemm_shape, stated = gemm_shape
    for dim, size in zip("MNK", sizes_given(gemm_shape) or ()):
        add("gemm_shape", dim, size, "")
    for name, dim, size in stated:
        add(name, dim, size, f"is a matrix of {dim}={{}}")
    for name, dims in (("a", "MK"), ("b", "KN"), ("c", "MN"), ("out", "MN")):
        info, layout = infos[name], layouts["d" if name == "out" else name]
        if info is None or layout is None:
            continue
        if isinstance(layout, Plain) and len(info.shape) != 2:
            raise ValueError(f"{name} has {len(info.shape)} dimensions; a matrix of 2 is needed (a vector v: v[:, None] or "
                             "v[None, :])")
        check_methods(layout, f"global_{'d' if name == 'out' else name}_layout")
        extents = layout.extents(info)
        if not isinstance(extents, tuple) or len(extents) != 2:
            raise TypeError(f"{type(layout).__qualname__}.extents of {name} returned {extents!r}; a tuple of its rows and "
                            "columns is needed, numbers or None")
        for dim, extent in zip(dims, extents):
            if extent is None:
                continue
            if not isinstance(extent, (int, np.integer)) or extent < 0:
                raise TypeError(f"{type(layout).__qualname__}.extents of {name} returned {extents!r}; {extent!r} is not a "
                                "number of rows or columns")
            add(name, dim, extent, f"has shape {vectors.given_shape(name, info.shape)}, that is {dim}={{}} "
                + ("rows" if dims.index(dim) == 0 else "columns"))
    missing = [dim for dim in "MNK" if dim not in found]
    if missing:
        raise ConfigError(f"gemm_shape=None: {', '.join(missing)} cannot be told from the arrays (their layouts are not "
                          "plain); give gemm_shape=dict(M=..., N=..., K=...)")
    for dim, (name, size) in found.items():
        if size > LIMIT:
            raise ValueError(f"{name}: {dim}={size} is over the limit of {LIMIT}")
    return found["M"][1], found["N"][1], found["K"][1]


# -- configuration ----------------------------------------------------------------------------------------------------

def _check_operands(infos: dict[str, ArrayInfo | None], conf: Config, M: int, N: int, K: int) -> None:
    shapes = {"a": (M, K), "b": (K, N), "c": (M, N), "out": (M, N)}
    for name, info in infos.items():
        layout = getattr(conf, f"global_{'d' if name == 'out' else name}_layout")
        if info is not None:
            layout.check(info, *shapes[name], name)
            if isinstance(layout, Plain):
                _check_order(info, layout, name)


def _check_order(info: ArrayInfo, layout: Plain, name: str) -> None:
    rows, columns = info.strides
    other = columns if layout.axis == 0 else rows
    mine = rows if layout.axis == 0 else columns
    if mine != 1 and other == 1 and min(info.shape) > 1:
        raise ConfigError(f"{name} is {'row' if layout.axis == 0 else 'column'}-major (strides {info.strides} in elements) "
                          f"and global_{'d' if name == 'out' else name}_layout={layout!r}; use "
                          f"{'RowMajor' if layout.axis == 0 else 'ColMajor'}")


def check_out(out: ArrayInfo, infos: dict[str, ArrayInfo | None], in_place: bool = True) -> None:
    """``out`` can be written and shares memory with no other array (``in_place`` it may be c itself)."""
    if out.readonly:
        raise ValueError("out is read-only; give a writable array, or leave it out")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {out.strides}: several of its elements share memory")
    for name in ("a", "b", "c"):
        info = infos.get(name)
        if info is None or not shares_memory(out, info):
            continue
        if name == "c" and are_the_same(info, out):
            if in_place:
                continue
            raise ValueError(f"out is c, and {MIRRORED}; give out memory of its own, or a half alone")
        raise ValueError(f"out overlaps {name} in memory; every thread block reads {name} while others write out")


def _check_functions(conf: Config, M: int, N: int, K: int, stack: tuple[int, ...] | None) -> None:
    for part in parts(conf.epilogue):
        kind = type(part)
        for field, own in part.array_dimensions().items():
            info = described(getattr(part, field))
            if info is not None:
                check_steps(info.shape, own, stack, f"{field} of {kind.__qualname__}", field in kind.outputs)
    if conf.observe_a is not None:
        if stack is not None:
            raise ConfigError(f"observe_a={conf.observe_a!r}: A is a stack, and several products may share one matrix; "
                              "observe the products one by one")
        if M and not N:
            raise ValueError(f"observe_a={conf.observe_a!r}: D has no columns, so no tile is computed and A is not read; "
                             "reduce A in a call of its own")
        conf.observe_a.check(M, K)
    conf.operator.check(M, N, K, stack)
    check = getattr(conf.epilogue, "check", None)
    if check is not None:
        check(M, conf.global_d_layout.finished_columns(N))
    if conf.family.joins_transforms or K % conf.block_shape.size.K == 0 or conf.operator.is_mapped:
        return
    for name in ("transform_shared_to_regs_a", "transform_shared_to_regs_b"):
        if not getattr(conf, name).is_identity:
            raise ConfigError(f"{name}: with {conf.operator!r}, K={K} must be a multiple of the block's "
                              f"{conf.block_shape.size.K} (its registers cannot be masked); transform between global and "
                              "shared memory, or use MMAOp")


def described(value: Any) -> ArrayInfo | None:
    """An array that a component holds, or what is left of it in a plan that keeps none; None for another value."""
    return describe(value) if is_array(value) else None


def held_by(conf: Config | dict[str, Any]) -> list[tuple[str, CapturedArray]]:
    """The arrays of a configuration's components, or of those in some of its fields, each with the field that its component
    is in. Those of a layout are named with their operand."""
    if not isinstance(conf, dict) and conf.holds_nothing:
        return []
    components = conf if isinstance(conf, dict) else field_values(conf)
    return [(field, held._replace(name=f"{held.name} ({field[7]})") if field in LAYOUTS else held)
            for field, value in components.items() if isinstance(value, Component) for held in arrays_of(value)]
