"""Element-wise epilogues: functions, activations, masks by coordinate, scaling, bias, residual, BLAS's alpha and beta."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import numpy as np

from gemmkit.components import Array, Component, Scalar
from gemmkit.epilogues.activations import gelu, gelu_tanh, relu, silu, tanh
from gemmkit.epilogues.base import Epilogue
from gemmkit.kernels.collectives.operand import column_of, row_of
from gemmkit.lang.aggregates import convert, convert_all, fill
from gemmkit.lang.checks import check_dtype, dtype_given, function_given, number, required, truth
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.host import Elements, Numeric, fitting
from gemmkit.lang.number_rules import REAL_IMAG, SIGNS, TABLE, Record, metadata_of, number_dtype, part_dtypes, to_dtype
from gemmkit.lang.registers import apply, generate
from gemmkit.layouts import ArrayLayout, ColMajor, GlobalLayout, RowMajor
from gemmkit.layouts.base import leading
from gemmkit.ptx.arithmetic import saturate
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.arrays import KEYS, describe, is_array, strided
from gemmkit.tiling import Tile
from gemmkit.transforms.base import check_of_elements, takes_coordinates

# --------------------------------------------------------------------------------------------------
# Factors of a result, alpha and beta: numbers, numbers of several parts, and those in the GPU's memory.
#
# A number goes to the kernel as an argument. One in the GPU's memory stays there, and the epilogue loads it when the
# kernel runs: nothing is copied to the host, and no stream is waited for (cuBLAS's pointer mode "device" does the same).
# What an earlier kernel of the stream writes there is what counts, in a CUDA graph too.

@dataclass(frozen=True)
class Parts(Component):
    """A number of several parts as an argument; ``is_not_zero`` is 0 if all of them are."""

    number: Scalar
    is_not_zero: Scalar

    stands_for_number: ClassVar[bool] = True

    is_left = True

    def value(self) -> Any:
        return self.number

    def is_zero(self) -> Any:
        return self.is_not_zero == 0


@dataclass(frozen=True)
class InMemory(Component):
    """A number in memory: ``array`` has its parts, one of a real or complex number. ``dtype`` is computed with.

    >>> held = InMemory(np.float32([2.5]), 1, np.dtype(np.float32))
    >>> float(held.value()), bool(held.is_zero())
    (2.5, False)
    """

    array: Array
    count: int
    dtype: Any

    stands_for_number: ClassVar[bool] = True

    @property
    def is_left(self) -> bool:
        """Whether it has parts, so that it stands at the left of what it multiplies."""
        return self.count > 1 and self.dtype.names is not None

    def value(self) -> Any:
        if self.count == 1:
            return convert(self.dtype, self.array[0])
        return convert(self.dtype, generate(self.count, part_of, self.array))

    def is_zero(self) -> Any:
        for n in range(self.count):
            if self.array[n] != 0:
                return False
        return True


def part_of(n: int, array: Array) -> Any:
    return array[n]


def factor(value: Any, name: str, dtype: np.dtype, device: int) -> Any:
    """Alpha or beta, the argument ``name``, as an epilogue of a C of ``dtype`` takes it: a number, `Parts` or `InMemory`.

    C is on ``device``, -1 for the host. A host array beside a C on a GPU is read here; one beside a host C, in the emulator,
    stands for one in the GPU's memory.

    Raises TypeError for what is no number of C's kind, ValueError for an array of another shape, and for a number that an
    integer C does not hold.
    """
    if isinstance(value, (int, float, complex, np.generic)):
        return _number(value, name, dtype)
    if isinstance(value, (Parts, InMemory)):
        return value
    value = getattr(value, "parts", value)                                # of a dual number
    if is_array(value):
        if isinstance(value, np.ndarray) and device >= 0:
            value = _checked(value, describe(value, name), name, dtype)[()]
            value = tuple(value) if isinstance(value, np.ndarray) else value
        elif getattr(getattr(value, "device", None), "type", None) == "cpu":                  # a tensor's
            value = value.tolist()
        else:
            return in_memory(value, name, dtype)
    if isinstance(value, (tuple, list, Record)):
        return _parts(value, name, dtype)
    return _number(value, name, dtype)


def computed_in(dtype: np.dtype) -> np.dtype:
    """The dtype that a factor of a C of ``dtype`` has: C's own, with parts of float32 at least where they are floats."""
    part = part_dtypes(dtype)[0]
    wide = part if part.kind in "iu" or part == np.float64 else np.dtype(np.float32)
    if dtype.kind == "c" or dtype.names is None:
        return dtype if dtype.kind == "c" else wide
    metadata = metadata_of(dtype)
    return number_dtype(dtype.names, wide, metadata.get(TABLE), metadata.get(SIGNS))


def _is_complex(dtype: np.dtype) -> bool:
    return dtype.kind == "c" or dtype.names == REAL_IMAG


def _wanted(dtype: np.dtype) -> str:
    if _is_complex(dtype):
        return "a number"
    if dtype.names is not None:
        return f"a real number, or one of {len(dtype.names)} parts ({', '.join(dtype.names)}),"
    return "a real number"


def _checked(value: Numeric, info: ArrayInfo, name: str, dtype: np.dtype) -> Any:
    """An array that may be a factor: of one number, or of a number's parts. Raises ValueError or TypeError for another."""
    count = len(part_dtypes(dtype))
    if info.shape != () and (info.shape != (count,) or count == 1):
        of_parts = "" if count == 1 else f" or, of its parts, ({count},)"
        raise ValueError(f"{name} is an array of shape {info.shape}; {_wanted(dtype)} is needed for a C of {dtype}: one "
                         f"of shape (){of_parts}")
    kinds = "iu" if part_dtypes(dtype)[0].kind in "iu" else "iuf"
    is_number = info.dtype.kind in kinds or (info.dtype.name == "bfloat16" and kinds != "iu")
    if not is_number and not (info.dtype.kind == "c" and _is_complex(dtype) and info.shape == ()):
        raise TypeError(f"{name} is an array of dtype {info.dtype}; {_wanted(dtype)} is needed for a C of {dtype}")
    return value


def in_memory(value: Numeric, name: str, dtype: np.dtype) -> InMemory:
    """A factor of results of ``dtype`` in an array that stays where it is; raises as `factor` does."""
    info = describe(value, name)
    _checked(value, info, name, dtype)
    count = info.shape[0] if info.shape else 1
    real = part_dtypes(computed_in(dtype))[0]
    of_one = computed_in(dtype) if info.dtype.kind == "c" else real
    return InMemory(strided(value, info, (count,), info.strides or (1,)), count, computed_in(dtype) if count > 1 else of_one)


def _parts(value: Any, name: str, dtype: np.dtype) -> Any:
    """A tuple of parts as one number."""
    given, count = tuple(value), len(part_dtypes(dtype))
    if (dtype.names is None and not _is_complex(dtype)) or len(given) != count:
        raise TypeError(f"{name} is {value!r}; {_wanted(dtype)} is needed for a C of {dtype}")
    real = part_dtypes(dtype)[0]
    checked = tuple(_number(part, name, real) for part in given)
    if _is_complex(dtype):
        return _number(complex(*checked), name, dtype)
    made = to_dtype(computed_in(dtype), checked)
    return Parts(made, int(any(part != 0 for part in made)))


def _number(value: Any, name: str, dtype: np.dtype) -> Any:
    """A number: complex ones in the precision of C."""
    kinds: tuple[Any, ...] = (int, float, np.integer, np.floating)
    is_complex = _is_complex(dtype)
    if is_complex:
        kinds = (*kinds, complex, np.complexfloating)
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, kinds):
        raise TypeError(f"{name} is {value!r}; {_wanted(dtype)} is needed for a C of {dtype}")
    if dtype.kind in "iu":
        return _integer(value, name, dtype)
    if is_complex:
        return dtype.type(value) if dtype.kind == "c" else np.complex64(value)
    return float(value) if isinstance(value, int) else value           # 2 and 2.0 are one kernel


def _integer(value: Any, name: str, dtype: np.dtype) -> Any:
    """A number in the dtype of an integer C: 2.0 is 2, and 0.5 is an error."""
    limits = np.iinfo(dtype)
    if value != value or value in (np.inf, -np.inf) or int(value) != value or not limits.min <= int(value) <= limits.max:
        raise ValueError(f"{name} is {value!r} and c holds {dtype}: a whole number from {limits.min} to {limits.max} is "
                         "needed")
    return dtype.type(int(value))


# --------------------------------------------------------------------------------------------------
# Epilogues with operands of their own: scaling by a number or a vector, a residual, a second output, a bias, and BLAS's
# linear combination with C.

@dataclass(frozen=True)
class WeakScalar(Component):
    """A run-time number as weak as a literal."""

    value: Scalar

    def __repr__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class Scale(Epilogue):
    """Multiply by a run-time number, or by a vector: each column by its own element (``along="N"``: by[n]), or each row
    (``"M"``: by[m]). A 0-d array is a number in the GPU's memory, which the kernel loads when it runs.

    >>> import numpy as np
    >>> Scale(2.0)(1.5, 0, 0), float(Scale(np.array([1.0, 10.0]), along="M")(1.5, 1, 0))
    (3.0, 15.0)
    """

    by: Any
    along: Literal["M", "N"] = "N"

    array_ndims = MappingProxyType({"by": 1})

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.by) in KEYS and len(self.by.shape) > 0:
            return
        if isinstance(self.by, (float, np.integer, np.floating)) or (
                isinstance(self.by, int) and not isinstance(self.by, bool) and abs(self.by) < 2**63):
            object.__setattr__(self, "by", WeakScalar(self.by))
        elif not isinstance(self.by, (WeakScalar, InMemory)):
            describe_vector(self.by, "Scale(by=...)")
            info = describe(self.by, "by of Scale")
            if not info.shape:
                object.__setattr__(self, "by", in_memory(self.by, "by of Scale", info.dtype))

    @property
    def is_number(self) -> bool:
        return isinstance(self.by, WeakScalar)

    @property
    def is_in_memory(self) -> bool:
        return isinstance(self.by, InMemory)

    @property
    def is_along_m(self) -> bool:
        return self.along == "M"

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        if self.is_number:
            return x * self.by.value
        if self.is_in_memory:
            return x * self.by.value()
        return x * self.by[m if self.is_along_m else n]

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the vector fits a D of M x N."""
        if not self.is_number and not self.is_in_memory:
            shape, wanted = describe(self.by, "by").shape, (M if self.is_along_m else N,)
            if shape[-1:] != wanted:
                raise ValueError(f"by of Scale has shape {shape}; along={self.along!r} of a {M} x {N} result needs {wanted}"
                                 + "; one number for all is a 0-d array: by.reshape(())" * (shape == (1,)))


def describe_vector(x: Numeric, name: str) -> None:
    if not is_array(x):
        raise TypeError(f"{name}: got {type(x).__name__}; a number or a vector is needed")


#: Layouts of arrays of D's shape, by the keys of these: most are like one that came before.
_layouts: dict[Any, ArrayLayout] = {}
_LAYOUTS = 1024


@dataclass(frozen=True)
class _WithArray(Epilogue):
    """An epilogue with an array of D's shape, of any strides and dtype; of a stack of products, of the stack's (broadcast as
    NumPy does) or of one product's."""

    array: Array
    layout: Any = None                  # of the array; found by its strides

    array_ndims = MappingProxyType({"array": 2})

    def __post_init__(self) -> None:
        kind, keyed = type(self).__name__, KEYS.get(type(self.array))
        key = None if keyed is None or self.layout is not None else keyed(self.array, "")[1]
        known = _layouts.get(key)
        if known is not None:                                    # of an array that is like one before
            object.__setattr__(self, "layout", known)
            return
        info = describe(self.array, f"array of {kind}")
        check_dtype(info.dtype, f"array of {kind}")
        if len(info.shape) < 2:
            raise ValueError(f"array of {kind} has {len(info.shape)} dimensions; a matrix of 2 is needed")
        if self.layout is None:
            column_major = info.strides[-2] == 1 and info.strides[-1] != 1
            found = (ColMajor if column_major else RowMajor)(info.dtype)
            object.__setattr__(self, "layout", found)
            if key is not None:
                if len(_layouts) >= _LAYOUTS:
                    _layouts.clear()
                _layouts[key] = found
        elif not isinstance(self.layout, ArrayLayout):
            raise TypeError(f"{kind}(layout={self.layout!r}): a Layout is needed, for example RowMajor('float16')")
        elif (self.layout.dimensions_of(info) or 2) != 2:
            raise ValueError(f"{kind}(layout={self.layout!r}): the layout of a matrix of 2 dimensions is needed, as its "
                             f"array of shape {info.shape} is")
        elif self.outputs and not self.layout.writable:
            raise TypeError(f"{kind}(layout={self.layout!r}): it has neither store_element nor store, so the array cannot "
                            "be written")
        elif not self.outputs and not self.layout.readable:
            raise TypeError(f"{kind}(layout={self.layout!r}): it has neither element nor load, so the array cannot be read")

    reads_tiles = True

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the array has the shape of D."""
        shape = describe(self.array, "array").shape
        if shape[-2:] != (M, N):
            raise ValueError(f"array of {type(self).__name__} has shape {shape}; the result is {M} x {N}")


@dataclass(frozen=True)
class Residual(_WithArray):
    """Adds an array of D's shape. It may be D's own memory: every element is read and written by one thread.

    The sum is taken in NumPy's common type of the array and the values.

    >>> import numpy as np
    >>> float(Residual(np.array([[1.0, 2.0]]))(0.5, 0, 1))
    2.5
    """

    beside = "array"

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return x + self.array[m, n]

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        others = self.layout.load(self.array, tile, shape)
        return apply(lambda x, n: x + others[n], values)


@dataclass(frozen=True)
class Binary(_WithArray):
    """``f(x, y)`` of every element x of D and y, the array's at its place; ``f(x, y, m, n)`` is given the place, too.

    y has the array's dtype, and what f returns is passed on. As `Residual`'s, the array may be D's own memory.

    >>> import numpy as np
    >>> float(Binary(np.array([[1.0, 2.0]]), f=lambda x, gate: x * gate)(0.5, 0, 1))
    1.0
    """

    f: Any = None

    beside = "array"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = function_given(self.f, "Binary", "f", (2, 4), "f(x, y) or f(x, y, m, n), a function of two numbers,")
        object.__setattr__(self, "f", given)

    @property
    def with_coordinates(self) -> bool:
        return required(self.f) == 4

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        y = self.array[m, n]
        return self.f(x, y, m, n) if self.with_coordinates else self.f(x, y)

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        return apply(of_both, values, self, self.layout.load(self.array, tile, shape), tile)


def of_both(x: Numeric, n: int, epilogue: Binary, others: Elements, tile: Tile) -> Any:
    """`Binary` of a tile's n-th element."""
    if epilogue.with_coordinates:
        return number(epilogue, "f", epilogue.f(x, others[n], row_of(tile, n), column_of(tile, n)), x)
    return number(epilogue, "f", epilogue.f(x, others[n]), x)


@dataclass(frozen=True)
class Store(_WithArray):
    """Stores the values into an array of D's shape as well, converted to its dtype, and passes them on unchanged.

    ``Store(before) | GELU()`` keeps what a backward pass needs. The array may overlap no operand and no other output.
    """

    outputs = ("array",)

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        self.array[m, n] = x
        return x

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        self.layout.store(self.array, tile, fitting("array of Store", self.layout.dtype, values), shape)
        return values


@dataclass(frozen=True)
class Bias(Epilogue):
    """Adds a vector to every row of D (``along="N"``: bias[n], N elements) or to every column (``"M"``: bias[m]).

    Each product of a stack may have its own vector: the array then has the stack's dimensions before the vector's (broadcast
    as in NumPy). The vector may have any dtype; the sum has NumPy's common type of the vector and the accumulator.

    >>> import numpy as np
    >>> float(Bias(np.array([1.0, 2.0]))(0.5, 0, 1))
    2.5
    """

    bias: Array
    along: Literal["M", "N"] = "N"

    array_ndims = MappingProxyType({"bias": 1})

    @property
    def is_along_m(self) -> bool:
        return self.along == "M"

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return x + self.bias[m if self.is_along_m else n]

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless the vector fits a D of M x N."""
        shape, wanted = describe(self.bias, "bias").shape, (M if self.is_along_m else N,)
        if shape[-1:] != wanted:
            raise ValueError(f"bias has shape {shape}; along={self.along!r} of a {M} x {N} result needs {wanted}")


@dataclass(frozen=True)
class LinearCombination(Epilogue):
    """``alpha * x + beta * C``, with run-time alpha and beta; C is not read when beta is 0 (BLAS's rule).

    C may be the same array as D, because one thread reads and writes each element. ``layout`` is C's, and its dtype is the
    result's. The arithmetic is in the accumulator's type, or float32. If C is an integer array, alpha and beta are integers,
    and sums that it cannot hold are refused (ConfigError). Each product of a stack may have its own C, in an array with the
    stack's dimensions before a matrix's (broadcast as in NumPy); alpha and beta are the same for all.

    alpha and beta may be 0-d arrays in the GPU's memory, which the kernel loads. If C has numbers of an algebra, they may be
    such numbers, as a tuple or an array of parts (`gemmkit.epilogues.elementwise`), and multiply from the left.
    """

    alpha: Scalar
    beta: Scalar
    c: Array
    layout: GlobalLayout

    beside = "c"

    def __post_init__(self) -> None:
        if not isinstance(self.layout, ArrayLayout):
            raise TypeError(f"LinearCombination(layout={self.layout!r}): a Layout is needed, for example "
                            "RowMajor('float16')")
        if not isinstance(self.layout, GlobalLayout) or type(self.layout).element is GlobalLayout.element:
            raise TypeError(f"LinearCombination(layout={self.layout!r}): it has no element(data, i, j, shape), so c cannot "
                            "be read")
        for name in ("alpha", "beta"):
            value = getattr(self, name)
            if is_array(value) or isinstance(value, (tuple, list)):
                object.__setattr__(self, name, factor(value, name, self.layout.dtype, self._described().device))
            if self.layout.dtype.kind in "iu" and isinstance(value, (float, np.floating)):
                raise TypeError(f"LinearCombination({name}={value!r}): C holds {self.layout.dtype}, and its multiple by a "
                                "float is none; give an integer")
        super().__post_init__()

    is_elementwise = False

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        raise TypeError("LinearCombination works on tiles")

    def check(self, M: int, N: int) -> None:
        """Raise ValueError unless C, or each of a stack, has the shape of D."""
        c = self._described()
        count = leading(c, self.layout)
        first = c._replace(shape=c.shape[count:], strides=c.strides[count:])
        self.layout.check(self.layout.seen(first), M, N, "c")

    def array_dimensions(self) -> Mapping[str, int]:
        own = self.layout.dimensions_of(self._described())
        return {} if own is None else {"c": own}

    def _described(self) -> ArrayInfo:
        return describe(self.c, "c")          # a plan keeps no array

    def reads_alongside(self) -> bool:
        if self.is_beta_held:
            return not self.beta.is_zero()
        return bool(self.beta != 0)

    def finish(self, values: Elements, tile: Any, shape: Any) -> Elements:
        if self.is_alpha_held or self.is_beta_held:
            return self.finish_held(values, tile, shape)
        if self.beta == 0:
            return convert_all(self.layout.dtype, apply(scaled, fitting("c", self.layout.dtype, values), self))
        c = convert_all(self.wide, self.layout.load(self.c, tile, shape))
        return convert_all(self.layout.dtype, apply(combined, fitting("c", self.layout.dtype, values), self, c))

    def finish_held(self, values: Elements, tile: Any, shape: Any) -> Elements:
        """`finish` with a factor in memory, or of several parts: each is loaded once for a tile."""
        if self.is_alpha_held:
            if self.alpha.is_zero():                       # whatever the product is, NaN too
                return self.finish_without(values, tile, shape)
        alpha = self.alpha.value() if self.is_alpha_held else self.alpha
        multiples = apply(multiple, fitting("c", self.layout.dtype, values), alpha, self.is_alpha_left)
        if not self.reads_alongside():
            return convert_all(self.layout.dtype, multiples)
        beta = self.beta.value() if self.is_beta_held else self.beta
        c = convert_all(self.computed, self.layout.load(self.c, tile, shape))
        return convert_all(self.layout.dtype, apply(lambda x, n: x + multiple(c[n], n, beta, self.is_beta_left), multiples))

    def finish_without(self, values: Elements, tile: Any, shape: Any) -> Elements:
        """beta C, where alpha is 0."""
        if not self.reads_alongside():
            return fill(self.layout.dtype, len(values), 0)
        beta = self.beta.value() if self.is_beta_held else self.beta
        c = convert_all(self.computed, self.layout.load(self.c, tile, shape))
        return convert_all(self.layout.dtype, apply(multiple, c, beta, self.is_beta_left))

    @property
    def is_alpha_held(self) -> bool:
        return isinstance(self.alpha, Component)

    @property
    def is_beta_held(self) -> bool:
        return isinstance(self.beta, Component)

    @property
    def computed(self) -> np.dtype:
        """What C is multiplied in by a beta in memory, or of several parts."""
        return computed_in(self.layout.dtype)

    @property
    def is_alpha_left(self) -> bool:
        """Whether alpha's place matters: it is a number of several parts, and complex ones commute."""
        return self.is_alpha_held and self.alpha.is_left

    @property
    def is_beta_left(self) -> bool:
        return self.is_beta_held and self.beta.is_left

    reads_tiles = True

    @property
    def wide(self) -> np.dtype:
        """What C is multiplied by beta in: float32 for the narrow floats, which beta, a plain number, would not widen."""
        dtype = self.layout.dtype
        is_narrow = dtype.names is None and dtype.kind not in "iub" and dtype.itemsize < 4
        return np.dtype(np.float32) if is_narrow else dtype


def first(m: int, n: int) -> int:
    return m


def second(m: int, n: int) -> int:
    return n


def scaled(x: Numeric, n: int, epilogue: Any) -> Any:
    return x * epilogue.alpha


def combined(x: Numeric, n: int, epilogue: Any, c: Elements) -> Any:
    return x * epilogue.alpha + c[n] * epilogue.beta


def multiple(x: Numeric, n: int, alpha: Numeric, is_left: bool) -> Any:
    if is_left:
        return alpha * x
    return x * alpha


@dataclass(frozen=True)
class Elementwise(Epilogue):
    """Applies a plain Python function ``f(x)``, ``f(x, m, n)`` or ``f(x, m, n, batch)`` to every element of D.

    Arrays and NumPy scalars that the function captured are kernel arguments.

    >>> Elementwise(lambda x, m, n: x + 10 * m + n)(0.5, 1, 2)
    12.5
    """

    f: Any

    def __post_init__(self) -> None:
        check_of_elements(self.f, "epilogues.Elementwise")
        given = function_given(self.f, "Elementwise", "f", (1, 3, 4), "f(x) or f(x, m, n), a function of x or of x, m, n")
        object.__setattr__(self, "f", given)

    @property
    def with_batch(self) -> bool:
        return required(self.f) == 4

    def in_product(self, x: Numeric, m: int, n: int, batch: int) -> Any:
        return self.f(x, m, n, batch)

    @property
    def with_coordinates(self) -> bool:
        return takes_coordinates(self.f, "Elementwise")

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return self.f(x, m, n) if self.with_coordinates else self.f(x)


@dataclass(frozen=True)
class ReLU(Epilogue):
    """max(x, 0)."""

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return relu(x)


@dataclass(frozen=True)
class GELU(Epilogue):
    """The Gaussian error linear unit; ``form`` is "erf" (itself) or "tanh" (the usual approximation)."""

    form: Literal["erf", "tanh"] = "erf"

    @property
    def is_exact(self) -> bool:
        return self.form == "erf"

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return gelu(x) if self.is_exact else gelu_tanh(x)


@dataclass(frozen=True)
class SiLU(Epilogue):
    """x / (1 + exp(-x))."""

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return silu(x)


@dataclass(frozen=True)
class Tanh(Epilogue):
    """The hyperbolic tangent."""

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return tanh(x)


@dataclass(frozen=True)
class Clamp(Epilogue):
    """min(max(x, low), high), with run-time bounds.

    >>> Clamp(0.0, 6.0)(7.5, 0, 0)
    6.0
    """

    low: Scalar
    high: Scalar

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return min(max(x, self.low), self.high)


@dataclass(frozen=True)
class Where(Epilogue):
    """x where ``mask(m, n)`` is true, else ``value``: a mask by global row and column.

    >>> band = Where(lambda m, n: abs(m - n) <= 1, 0.0)
    >>> band(2.5, 3, 4), band(2.5, 3, 5)
    (2.5, 0.0)
    """

    mask: Any
    value: Scalar

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "mask", function_given(self.mask, "Where", "mask", (2,), "a function of m, n"))

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        if truth(self, "mask", self.mask(m, n)):
            return x
        return self.value


@dataclass(frozen=True)
class CausalMask(Epilogue):
    """x where n <= m + ``offset``, else ``value``: what a query may see of the keys.

    ``offset`` is a run-time number: with a cache of keys, how many came before the first query.

    >>> [CausalMask()(1.0, 1, n) for n in range(3)]
    [1.0, 1.0, -inf]
    """

    value: Scalar = float("-inf")
    offset: Scalar = 0

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        if n <= m + self.offset:
            return x
        return self.value


@dataclass(frozen=True)
class Saturate(Epilogue):
    """Converts to ``dtype``, clamped to what it holds: the end of a quantised product.

    Floats become the nearest integers, ties to even. A value that is too large or too small, infinities included, becomes
    the largest or smallest number of the dtype (for a float dtype: the largest finite one). NaN becomes 0 (for a float dtype
    it stays NaN). Raises TypeError for a dtype that is no integer and no float, or that device code does not have.

    >>> from gemmkit.epilogues import Scale
    >>> int8 = Scale(0.5) | Saturate("int8")
    >>> [int(int8(np.int32(x), 0, 0)) for x in (5, 7, 1000, -1000)]
    [2, 4, 127, -128]
    """

    dtype: Any

    def __post_init__(self) -> None:
        try:
            dtype = dtype_given(self.dtype, "Saturate")
            known = dtype.kind not in "bc" and dtype.names is None
        except TypeError:
            known = False
        if not known:
            raise TypeError(f"Saturate(dtype={self.dtype!r}): an integer or a float that device code has is needed, for "
                            "example 'int8'")
        object.__setattr__(self, "dtype", dtype)

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return saturate(self.dtype, x)

    @property
    def result_dtype(self) -> Any:
        return self.dtype
