"""``@gk.program``: a function of arrays and components, and its two readings: numbers by NumPy, a kernel by its plan."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from gemmkit.programs.called import given_for
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.trace import BLOCK, Along, Loop, Reference, called, entered, stores_of, trace
from gemmkit.programs.values import Cell, Index, Parameter, Place, ProgramAxis, Term, current, refused, term
from gemmkit.runtime.arrays import describe, is_array, on_host

if TYPE_CHECKING:
    from gemmkit.programs.plan import ProgramPlan
    from gemmkit.tuner.subjects import Subject, TunedProgram


#: Arguments of a program's calls.
OWN = "mapping", "stream", "text", "block", "mappings", "effort", "budget", "keep", "jobs", "progress"


def _check_mapping(mapping: Any) -> None:
    if mapping is not None and not isinstance(mapping, Mapping):
        raise TypeError(f"mapping={mapping!r}: a gemmkit.Mapping is needed, such as Mapping({{'m': 128}}), or None")


class Program:
    """A decorated function. Its arguments are arrays, floating-point numbers, and functions that it calls, such as a gate or
    a score. The arrays that it stores into are its results; the caller passes them."""

    def __init__(self, function: Callable[..., None]):
        self.function = function
        self.signature = inspect.signature(function)
        self.names = list(self.signature.parameters)
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"<program {self.function.__name__}{self.signature}>"

    def bound(self, arrays: tuple, components: dict[str, Any]) -> dict[str, Any]:
        """The arguments by name. Raises TypeError for those that the function does not take, or misses."""
        try:
            given = self.signature.bind(*arrays, **components)
        except TypeError as error:
            raise TypeError(f"{self.function.__name__}: {error}") from None
        given.apply_defaults()
        return dict(given.arguments)

    def traced(self, arguments: dict[str, Any]) -> Loop:
        """The program on symbols, for arrays of these shapes. Raises ValueError and TypeError with the user's line."""
        infos = {name: describe(x, name) for name, x in arguments.items() if is_array(x)}
        parameters = {name: Parameter(name, tuple(info.shape), info.dtype) for name, info in infos.items()}
        return trace(self.function, {**given_for(arguments), **parameters})

    def reference(self, *arrays: Any, block: int = BLOCK, **components: Any) -> Any:
        """Compute the results in float64, with NumPy, in blocks of ``block``. Returns one array, or a tuple in the order of
        the arguments. It reads only the shapes of the arrays that the program stores into, and writes nothing to them.
        Elements that the program does not store are NaN.

        Raises ValueError and TypeError with the line of the program that breaks a rule, TypeError for an array of a GPU.
        """
        arguments = self.bound(arrays, components)
        for name, x in arguments.items():
            if is_array(x) and describe(x, name).device >= 0:
                raise TypeError(f"{name} is an array of a GPU, and a reference computes with NumPy; copy it to the host")
        results = {store.parameter.name for store in stores_of(self.traced(arguments))}
        held = {name: np.full(np.shape(x), np.nan) if name in results else on_host(x)
                for name, x in arguments.items() if is_array(x)}
        parameters = {name: Parameter(name, x.shape, x.dtype, x) for name, x in held.items()}
        with entered(Reference(block)) as reference:
            numbers = {name: Term(reference.constant(x)) for name, x in arguments.items()
                       if isinstance(x, (float, np.floating))}
            called(self.function, {**given_for(arguments), **parameters, **numbers}, arguments)
        found = tuple(held[name] for name in arguments if name in results)
        return found if len(found) > 1 else found[0]

    def plan(self, *arrays: Any, mapping: Mapping | None = None, text: str | None = None, **components: Any) -> ProgramPlan:
        """Derive the kernel for arrays of these kinds. ``text``: a kernel's source that runs in its place. Without a mapping
        it takes the one that `tune` has stored, or the default.

        Raises ConfigError for a mapping that cannot be, ValueError and TypeError for a program that has no kernel yet.
        """
        from gemmkit.programs.calls import ProgramProblem

        _check_mapping(mapping)
        return ProgramProblem(self, self.bound(arrays, components), text).plan(mapping)

    def tune(self, *arrays: Any, mappings: Iterable[Mapping] | None = None, effort: str = "quick",
             budget: float | None = None, keep: bool = True, jobs: int | None = None, progress: bool | None = None,
             **components: Any) -> TunedProgram:
        """Try mappings on arrays of a GPU, and keep the fastest for calls and plans without a mapping to take from now on.

        What is tried, checked, timed and kept is `gemmkit.tune`'s, whose arguments ``effort``, ``budget`` (in seconds),
        ``keep``, ``jobs`` and ``progress`` are. Results are not written.

        Args:
            arrays, components: as in a call.
            mappings: what is tried; None: those that differ from the default in one thing, then in two, then in three.

        Returns a `gemmkit.tuner.TunedProgram`: printed it is a table, its ``mapping`` the fastest mapping.

        Raises TypeError for arrays of the host and within ``with gemmkit.emulate():``, ValueError for another effort or
        budget, RuntimeError where the default does not run, and what `plan` raises. Example, on a GPU::

            found = gemm.tune(a, b, d, budget=60)
            print(found)                                       # a table
            gemm(a, b, d)                                      # by the fastest
            gemm(a, b, d, mapping=found.mapping)               # the same, said
        """
        from gemmkit.tuner import tune

        found = tune(self, *arrays, mappings=mappings, effort=effort, budget=budget, keep=keep, jobs=jobs, progress=progress,
                     **components)
        return cast("TunedProgram", found)

    def tuning_subject(self, *arrays: Any, **keywords: Any) -> Subject:
        """What `gemmkit.tune` asks of a program with arguments."""
        from gemmkit.programs.tuned import Programmed

        return Programmed(self, *arrays, **keywords)

    def __call__(self, *arrays: Any, mapping: Mapping | None = None, stream: Any = None, **components: Any) -> None:
        """Run the derived kernel on arrays of a GPU, or on NumPy's within ``with gemmkit.emulate():``. A call that is like
        an earlier one finds its plan, and one with other sizes its derivation (`gemmkit.programs.calls`)."""
        from gemmkit.programs.calls import run

        _check_mapping(mapping)
        run(self, arrays, components, mapping, stream)


def program(function: Callable[..., None]) -> Program:
    """Derive a kernel from a function that is written in the words of `gemmkit.programs`.

    Args:
        function: a function of arrays and numbers. Its first loop is `parallel`; a result is an argument that the function
            stores into. Nothing is compiled until the program is called.

    Returns:
        A `Program`: ``f(*arrays, mapping=None, stream=None)`` launches one kernel, which stores into its arguments;
        ``f.plan(*arrays)`` resolves a call once, and ``f.reference(*arrays)`` computes with NumPy in float64.

    Raises:
        TypeError: no function is given, or one of its arguments has a name that calls of a program use themselves.
        Calls raise errors with the line of the program that cannot be derived.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def row_sums(x, d):
    ...     for m in gp.parallel(x.rows):
    ...         d[m] = x[m].sum(axis=1)
    >>> row_sums.reference(np.ones((2, 3), np.float32), np.empty(2, np.float32)).tolist()
    [3.0, 3.0]
    """
    if not inspect.isfunction(function):
        raise TypeError(f"gk.program({function!r}): a function is needed")
    taken = next((name for name in inspect.signature(function).parameters if name in OWN), None)
    if taken is not None:
        raise TypeError(f"{function.__name__}({taken}): the call has an argument of this name ({', '.join(OWN)}); call the "
                        "program's own otherwise")
    return Program(function)


# --------------------------------------------------------------------------------------------------
# The words that programs are written in.
#
# | word | what |
# |---|---|
# | ``for m, n in parallel(a.rows, b.columns)`` | tiles, in no order: each is one thread block's |
# | ``for k in sequential(a.columns)`` | rounds, one after the other |
# | ``for n in sequential(k.rows, stop=lengths[h])`` | the same, up to a length of the tile's own |
# | ``zeros(m, n)``, ``full(m, value)``, ``copy(x)`` | cells, whose values rounds carry |
# | ``x @ y``, ``.T`` | of matrices |
# | ``x.max(axis=1)``, ``min``, ``sum``, ``mean`` | of a matrix's rows; with ``axis=0`` of its columns |
# | ``exp``, ``log``, ``tanh``, ``erf``, ``sqrt``, ``rsqrt``, ``finite``, ``maximum``, ``minimum``, ``where`` | by element |
# | ``call(f, x)`` | any function of numbers, element by element |
# | ``x == y``, ``!=``, ``<``, ``<=``, ``c & d``, ``c | d``, ``~c`` | conditions, for ``where`` |
# | ``place(m)`` | where the elements of a block are |
# | ``with once(n)`` | what is stored by the first block along ``n`` alone |

def parallel(*extents: ProgramAxis) -> Along:
    """Blocks of one or several axes, which do not know of each other."""
    if not extents:
        raise refused(TypeError, "parallel() needs at least one axis")
    return Along(current().loop(current().extents(extents), "parallel"))


def sequential(extent: ProgramAxis, stop: Any = None) -> Along:
    """Blocks of an axis, one after the other: cells keep what a round has put there.

    ``stop``: an element of an array of whole numbers, ``lengths[h]``, behind which nothing is there (`lengths`).
    """
    return Along(current().loop(current().extents((extent,)), "sequential", stop))


def zeros(*dims: Any) -> Cell:
    """A cell of zeros; its dimensions are blocks, ``zeros(m, n)``, or whole axes, ``zeros(m, v.columns)``."""
    return Cell(current().full(dims, 0.0))


def full(*dims_and_value: Any) -> Cell:
    """A cell of one value, which stands last: ``full(m, -math.inf)``."""
    return Cell(current().full(dims_and_value[:-1], dims_and_value[-1] if dims_and_value else None))


def copy(x: Any) -> Cell:
    """A cell that begins with a value."""
    return Cell(current().lift(x))


def exp(x: Any) -> Any:
    return term("exp", x)


def log(x: Any) -> Any:
    return term("log", x)


def tanh(x: Any) -> Any:
    return term("tanh", x)


def sqrt(x: Any) -> Any:
    return term("sqrt", x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return term("div", 1.0, sqrt(x))


def erf(x: Any) -> Any:
    """The error function."""
    return term("erf", x)


def call(f: Any, *x: Any, dtype: Any = None) -> Any:
    """A function of numbers, applied to each element: device code, which no pass reads.

    Args:
        f: a plain function, such as those of `gemmkit.epilogues.activations` and `math`, or a component that is called with
            numbers: a score of attention, an element-wise epilogue, one of your own. It may use arrays and NumPy scalars
            that it has captured. It is told nothing but ``x``, so that its result must follow from these alone.
        x: values, which it gets in float32; numbers; and indices, which stand for the places of elements, whole numbers from
            0. Elements of arrays of whole numbers, and what is made of places alone, are whole, too.
        dtype: None for a number, float32; ``bool`` for a condition.

    Returns:
        A value whose dimensions are those of all arguments.

    Raises:
        TypeError: with the program's line, for what is no function of as many numbers, for an epilogue that does more than
            make a number of a number, and for another dtype.

    >>> import numpy as np, gemmkit as gk
    >>> from gemmkit import programs as gp
    >>> @gk.program
    ... def gelu_of_product(a, b, d):
    ...     for m, n in gp.parallel(a.rows, b.columns):
    ...         acc = gp.zeros(m, n)
    ...         for k in gp.sequential(a.columns):
    ...             acc += a[m, k] @ b[k, n]
    ...         d[m, n] = gp.call(gk.epilogues.activations.gelu, acc)
    >>> a = np.eye(2, dtype=np.float16)
    >>> gelu_of_product.reference(a, a, a).round(4).tolist()
    [[0.8413, 0.0], [0.0, 0.8413]]
    """
    if dtype is not None and dtype not in (bool, np.bool_, float, np.float32, "float32", "bool"):
        raise refused(TypeError, f"call(dtype={dtype!r}): a function makes a number, dtype=None, or a condition, dtype=bool")
    return Term(current().call(f, x, dtype in (bool, np.bool_, "bool")))


def finite(x: Any) -> Any:
    """0 in place of -inf."""
    return term("finite", x)


def maximum(x: Any, y: Any) -> Any:
    return term("max", x, y)


def minimum(x: Any, y: Any) -> Any:
    return term("neg", term("max", term("neg", x), term("neg", y)))


def place(index: Index) -> Any:
    """Where each element of a block is along its axis, from 0: ``place(m) - place(n)`` is the distance from the diagonal.
    Of an index along a stack it is the matrix's number."""
    if isinstance(index, Place):
        return index                                   # a condition's function is given places
    if not isinstance(index, Index):
        raise refused(TypeError, f"place({index!r}): a variable of parallel(...) or sequential(...) is needed")
    return current().place(index)


def where(condition: Any, x: Any, other: Any) -> Any:
    """Element by element ``x`` or ``other``; ``condition`` is a value, or a function of an element's places."""
    return Term(current().where(condition, x, other))


class once:
    """What is stored within it is stored by the first block along an index alone: the others have the same."""

    def __init__(self, index: Index):
        if not isinstance(index, Index):
            raise refused(TypeError, f"once({index!r}): a variable of parallel(...) is needed")
        self.index = index

    def __enter__(self) -> None:
        current().only = self.index

    def __exit__(self, *error: object) -> None:
        current().only = None
