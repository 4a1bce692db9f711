"""Plans: a product resolved once, then launched in microseconds."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Collection, Iterable
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit import components
from gemmkit.components import (
    ALONGSIDE,
    CapturedArray,
    Component,
    arrays_of,
    check_held,
    exact,
    freeze,
    slots_of,
    uncached,
    without_arrays,
)
from gemmkit.emulator import current_mode, world
from gemmkit.kernels.config import Config, Keywords, given, names_keywords, sizes_given
from gemmkit.lang.functions import Frozen
from gemmkit.lang.references import Guards
from gemmkit.layouts.matrices import CallSizes, Matrix, arrays, components_of, frozen_components, result, unwrapped
from gemmkit.plans.adapters import TensorCopy, component_for_products
from gemmkit.plans.compiled import OPERANDS, Compiled, normaliser_of
from gemmkit.plans.launch import Cache, Current, KnownCall, KnownCalls, Launch, Start, bound, cache
from gemmkit.plans.problem import PLAIN, Call, check_out, check_places, fitting, held_by, resolve, sharing
from gemmkit.runtime.array_info import are_the_same
from gemmkit.runtime.arrays import (
    KEYS,
    ArrayInfo,
    alignment,
    alike,
    allocator,
    as_stream_handle,
    current_stream,
    describe,
    describe_all,
    empty_like,
    key_of,
    matcher,
    overlaps,
    producer_stream,
    strided,
    whole,
)
from gemmkit.runtime.device import check_stream, launch_stream, stream_finder
from gemmkit.runtime.launch import Space, addresses

if TYPE_CHECKING:
    from typing_extensions import Unpack


def compiled_of(call: Call, given: ArrayInfo) -> Compiled:
    """The kernels of a call whose result is the array ``given``."""
    if call.moduli and 0 not in (call.M, call.N, call.K, call.products):
        from gemmkit.plans.ozaki import OzakiProduct, why_plain  # other products need none of its kernels

        if not call.is_auto or why_plain(call) is None:
            return OzakiProduct(call, given)
    return Compiled(call, given)


class CallValues(NamedTuple):
    """Values of components that a call brings in place of the plan's, and where they stand among the kernel's."""

    slots: tuple[int, ...]
    values: tuple[Any, ...]


class Plan:
    """A product of arrays of one kind (library, shape, strides, dtype, device): ``run(a, b, c, out=d)``.

    Other arrays of that kind and of at least that alignment are accepted; anything else raises ValueError.
    """

    def __init__(self, a: Any, b: Any, c: Any, out: Any, conf: Config | None, keywords: dict[str, Any]):
        self._joined: tuple[str, ...] = ()
        if isinstance(a, Matrix) or isinstance(b, Matrix) or isinstance(out, Matrix):
            self._joined = tuple(name for name, layout in components_of(a, b, out).items() if any(arrays_of(layout)))
            out, keywords = result(out, keywords)
        if isinstance(a, Matrix) or isinstance(b, Matrix):
            a, b, keywords = unwrapped(a, b, (c, out), keywords, conf)
        infos = describe_all(a, b, c, out)
        problem = self._resolve(infos, conf, keywords)
        d_layout = problem.config.global_d_layout
        self._dtype, self._discards = d_layout.storage, d_layout.is_discarded
        self._shape = problem.vectors.result_shape((*(problem.stack or ()), *d_layout.array_shape(problem.M, problem.N)))
        if out is None:
            out = empty_like(a, self._shape, self._dtype)
        self._infos = (*infos[:3], describe(out, "out"))
        self._match = tuple(_no_array if x is None else matcher(x, name)
                            for x, name in ((a, "a"), (b, "b"), (c, "c"), (out, "out")))
        examples = tuple(x for x in (a, b, c) if x is not None)
        self._alike = alike(examples), alike((*examples, out))
        self._library, self._device = infos[0].library, infos[0].device
        if self._device >= 0:
            self._allocate = allocator(infos[0], self._shape, self._dtype)
            self._find_stream = stream_finder(self._library, self._device)
        self._origin: Any = infos, conf, keywords
        self._lock = threading.Lock()
        self._prepare(problem)

    @staticmethod
    def _resolve(infos: tuple[Any, Any, Any, Any], conf: Config | None, keywords: dict[str, Any]) -> Call:
        """What the call asks for, by the code of the components as it is now: what they remember of properties goes."""
        return resolve(*infos, uncached(conf), {name: uncached(value) for name, value in keywords.items()})

    def _prepare(self, problem: Call) -> None:
        """All that depends on the components' code."""
        self.config = problem.config
        self.shape = problem.M, problem.N, problem.K
        self._compiled = compiled_of(problem, problem.seen_out(self._infos[3]))
        seen = problem.a, problem.b, problem.c, self._compiled.out
        self._align = tuple(1 if i is None else alignment(i) for i in seen)
        self._in_place = not problem.config.global_d_layout.is_mirrored
        self._fits = fitting(self._infos, self._align, self._in_place)
        self._held = problem.held
        self._writes = any(held.is_output for _, held in self._held)
        self._has_work = problem.products > 0 and (bool(self._compiled.behind) or (problem.M > 0 and problem.N > 0))
        norm = normaliser_of(self._compiled.config.epilogue)
        self._row_passes = None if norm is None else norm.passes
        self._starts: dict[tuple[int, ...], Start] = {}
        self._parts = {problem.given_as(name): part for name, part in self._compiled.parts.items()}
        self.ranges = {problem.given_as(name): found for name, found in self._compiled.ranges.items()}
        self._watch(self._parts)
        #: `__call__` with values of components (`with_components`; None: the plan's), whose code has been looked at.
        self.run: Any = self._call_on_host if self._device < 0 else self._call_on_device()
        called = self._call_of_matrices if self._joined else self.run
        self._called: Any = called if not self._discards else lambda *given: (called(*given), None)[1]

    def _watch(self, parts: dict[str, Frozen]) -> None:
        """Make `stands`: None where these components have no code of the user's, and captured nothing."""
        guards = Guards(fact for frozen in parts.values() for fact in frozen.facts)
        self.stands: Any = guards.ready() if guards else None

    def current(self) -> Plan:
        """The plan, prepared anew if code or constants of its components are not what they were.

        Raises what `plan` raises, for the code that is there now; RuntimeError where the components have gone
        (`forget_arrays`).
        """
        if self.stands is not None and not self.stands():
            if self._origin is None:
                raise RuntimeError("this plan's components have changed, and it does not keep them; make another plan")
            with self._lock:
                infos, conf, keywords = self._origin
                self._prepare(self._resolve(infos, conf, keywords))
        return self

    def forget_arrays(self, names: Collection[str] = ()) -> None:
        """Keep no array of a component alive: for a plan that gets the components ``names`` with every call."""
        self._origin = None
        self._watch({name: frozen for name, frozen in self._parts.items() if name not in names})
        self._parts = self._compiled.parts = {}
        self._compiled.problem.tuning_key = None             # it is made of the components themselves
        if self._compiled.arguments[0].arrays:
            self.config = self._compiled.problem.config = self._compiled.computed.config = without_arrays(self.config)
            self._compiled.config = without_arrays(self._compiled.config)
            self._compiled.spec = without_arrays(self._compiled.spec)
        for behind in self._compiled.behind:
            behind.forget_arrays()

    @property
    def swap_ab(self) -> bool:
        """Whether the kernel computes the transpose of the product, by a configuration for that."""
        return self._compiled.problem.swap_ab

    @property
    def tiles(self) -> tuple[int, int]:
        """How many rows of D a row of tiles has (those of a cluster), and how many tiles it has."""
        scheduler = self._compiled.spec.scheduler
        return scheduler.block.size.M * scheduler.cluster.m, scheduler.grid(*self.shape[:2])[1]

    @property
    def row_passes(self) -> str | None:
        """How an epilogue normalises rows of D: "one tile" has whole rows in its registers; "one cluster", on Hopper, has
        them in the registers of its blocks; in "two passes" a second kernel finishes them. None without such an
        epilogue."""
        return self._row_passes

    def __repr__(self) -> str:
        M, N, K = self.shape
        stack = self._compiled.problem.stack
        return f"<plan of a {M} x {N} x {K} product>" if stack is None else f"<plan of {stack} products of {M} x {N} x {K}>"

    def __call__(self, a: Any, b: Any, c: Any = None, *, out: Any = None, stream: Any = None) -> Any:
        """Compute the product into ``out``, which is allocated when it is not given, and return it.

        Raises ValueError for arrays that are not of the plan's kind, before anything is launched.
        """
        if self.stands is not None:
            self.current()
        return self._called(None, a, b, c, out, stream)

    def _call_of_matrices(self, brought: CallValues | None, a: Any, b: Any, c: Any, out: Any, stream: Any) -> Any:
        """A call with operands that have layouts, of which these may have arrays and numbers of their own."""
        layouts = components_of(a, b, out)
        out = out.array if isinstance(out, Matrix) else out
        a, b = arrays(a, b, (c, out))
        frozen = frozen_components(self._compiled.problem.given, layouts, self._joined)
        if not frozen:
            return self.run(brought, a, b, c, out, stream)
        if self._device < 0:
            infos, conf, keywords = self._origin
            return self._emulate(a, b, c, out, self._resolve(infos, conf, {**keywords, **layouts}))
        return self.run(self.with_components(frozen, layouts, a, b, c, out), a, b, c, out, stream)

    def with_components(self, frozen: dict[str, Frozen], components: dict[str, Any], a: Any, b: Any, c: Any,
                        out: Any) -> CallValues:
        """What `run` takes for a call with other components of the planned kinds, ``frozen`` as they are, whose arrays are
        checked here.

        Raises ValueError where one of these shares memory with what the call writes."""
        self._check_components(frozen, components, a, b, c, out)
        slots, values = list[int](), list[Any]()
        for name, found in frozen.items():
            adapted = self._adapted(name, components[name])
            leaves = (found if adapted is components[name] else freeze(adapted)).leaves
            first = self.ranges[name].start if leaves else 0
            slots += range(first, first + len(leaves))
            values += [exact(value) for _, value in leaves]
        return CallValues(tuple(slots), tuple(values))

    def _adapted(self, name: str, component: Any) -> Any:
        """A component of the field ``name`` as the kernel takes it."""
        adapted = component_for_products(component, self._compiled.problem.stack)
        return self._compiled.reserved(name, adapted) if name in ("epilogue", "observe_a") else adapted

    def check_held(self, held: Iterable[tuple[str, CapturedArray]], a: Any, b: Any, c: Any, out: Any) -> None:
        """Raise ValueError where arrays of components share memory with what a call writes. A new out shares none."""
        infos = {name: None if x is None else describe(x, name) for name, x in (("a", a), ("b", b), ("c", c), ("out", out))}
        given = infos["out"]
        check_held(held, infos, () if given is None else (self._seen(given),), self._in_place)

    def _seen(self, out: ArrayInfo) -> ArrayInfo:
        """The result as the kernel sees it, all of a stack."""
        return whole(self._compiled.problem.seen_out(out))

    def _check_components(self, frozen: dict[str, Frozen], components: dict[str, Any], a: Any, b: Any, c: Any,
                          out: Any) -> None:
        """`check_held` for a call with other components in the fields ``frozen``."""
        fixed = [(field, held) for field, held in self._held if field not in frozen]
        if not self._writes:
            if out is None:
                return
            given = describe(out, "out")
            own = [(field, info) for field, f in frozen.items() for info in f.arrays]
            if not any(overlaps(info, given) and not (self._in_place and field in ALONGSIDE and are_the_same(info, given))
                       for field, info in (*own, *((field, held.info) for field, held in fixed))):
                return
        theirs = [of for of in held_by(components) if of[0] in frozen]
        self.check_held([*theirs, *fixed], a, b, c, out)

    def export(self, folder: str | Path, name: str = "product") -> list[Path]:
        """Write the plan's kernels for programs in C or C++, which need neither Python nor gemmkit.

        Args:
            folder: where the files go; it is made if it does not exist, and files of the same names are replaced.
            name: what files, functions and macros begin with: a word of C.

        Returns:
            The files: the header ``name.h``; a cubin for each kernel; ``name_example.cpp``, a program that launches them.

        Raises:
            ValueError: the name is no word of C; the plan has no work; it has something that only gemmkit can make at a
                launch, which the message names.

        The kernels are for the GPU that the plan was made for, in an emulated session the one that is assumed there. They
        take arrays of the plan's shapes and strides, by address.

        >>> import tempfile, numpy as np, gemmkit
        >>> a = np.ones((256, 256), np.float16)
        >>> with gemmkit.emulate(mapping="device"), tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in gemmkit.plan(a, a).export(folder, "square")]
        ['square.h', 'square_0.cubin', 'square_example.cpp']
        """
        from gemmkit.plans.ahead import exported

        current = self.current()
        if not current._has_work:
            raise ValueError(f"export: {self!r} has no work, so it has no kernel")
        return exported(current._compiled, dict(zip(("a", "b", "c", "out"), current._infos)), Path(folder), name)

    def launch(self, stream: int, at: tuple[int, int, int, int]) -> None:
        """Launch the product of arrays at these addresses (out, a, b, c; 0: none) on a stream's handle. They must be of the
        plan's kind and must not overlap."""
        if self._has_work:
            self.start()(stream, at)

    def known(self, components: dict[str, Any], brought: int, keeps: Any, like: ArrayInfo | None = None,
              pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None) -> KnownCall | None:
        """Calls with these components, which bring so many values (`gemmkit.components.seen`), and whose results are
        ``like`` an array (None: D); ``pick``: that of `KnownCall`. None where they need more than a launch: components that
        are adapted, or that write."""
        if self._writes or self._device < 0:
            return None
        slots = list[int]()
        for name, component in components.items():
            if self._adapted(name, component) is not component:
                return None
            slots += [self.ranges[name].start + slot for slot in slots_of(component)]
        if len(slots) != brought:
            return None
        like = like or self._infos[0]._replace(shape=self._shape, dtype=self._dtype)
        return KnownCall(self.start(tuple(slots)) if self._has_work else _no_launch, like, self.stands, keeps, pick)

    def _call_on_device(self) -> Any:
        """The checks and the launch of a call, as a closure: its variables cost less than attributes.

        Arrays are recognised in each call. What follows from their addresses is looked at once, and ``fit`` has those that
        were found to be right: all arrays at these addresses share what the first ones shared.
        """
        matches = self._match
        without_c = self._infos[2] is None
        same, with_out = self._alike
        has_work, (allocate, address_of), find_stream = self._has_work, self._allocate, self._find_stream
        fits, shares = self._fits, sharing(self._infos, self._held, self._in_place)
        fit = Cache()                          # with the plan's own components, and with what others bring
        fit_alone = fit if shares is None else Cache()
        starts, planned = self._starts, self._starts.get(())

        def call(brought: CallValues | None, a: Any, b: Any, c: Any, out: Any, stream: Any) -> Any:
            nonlocal planned
            at_out: Any
            if out is None:
                at = same((a, b) if c is None else (a, b, c))
                out = allocate()
                at_out = address_of(out)
            else:
                at = with_out((a, b, out) if c is None else (a, b, c, out))
                at_out = matches[3](out) if at is None else at[-1]
            if at is not None and (c is None) is without_c:
                given: Any = (at_out, at[0], at[1], 0) if without_c else (at_out, *at[:3])
            else:                                              # arrays of several libraries, or otherwise alike
                given = (at_out, *(match(x) for match, x in zip(matches, (a, b, c))))
            if given not in (fit if brought is None else fit_alone):
                if isinstance(a, Matrix) or isinstance(b, Matrix) or isinstance(out, Matrix):
                    return self._call_of_matrices(brought, a, b, c, out, stream)
                if None in given or not fits(*given):
                    self._refuse((("a", a), ("b", b), ("c", c), ("out", out)))
                if brought is None and shares is not None and shares(*given):
                    self.check_held(self._held, a, b, c, out)
                (fit if brought is None else fit_alone).keep(given, True)
            if stream is not None:
                handle = self._stream(stream)
            else:
                handle = self._stream_of(a) if find_stream is None else find_stream()
            if has_work:
                start = planned if brought is None else starts.get(brought.slots)
                if start is None:
                    start = self.start(() if brought is None else brought.slots)
                    if self.run is not call:                   # code has changed, and with it the plan
                        return self.run(brought, a, b, c, out, stream)
                    planned = starts.get(())
                start(handle, given if brought is None else given + brought.values)
            return out

        return call

    def start(self, slots: tuple[int, ...] = ()) -> Start:
        """The launch of calls that bring (out, a, b, c) and values of components at these slots: compiled and loaded
        once."""
        found = self._starts.get(slots)
        if found is None:
            with self._lock:
                launch = bound(lambda current: self._launch(slots, current), "this plan's components")
                found = self._starts[slots] = launch.start
        return found

    def _launch(self, slots: tuple[int, ...], current: Current) -> Launch:
        if current is uncached:
            problem = self._compiled.problem
            self._prepare(dataclasses.replace(problem, config=uncached(problem.config)))
        return self._compiled.launch(slots)

    def _refuse(self, arrays: tuple[Any, ...]) -> None:
        """Say why these arrays do not fit the plan."""
        infos: dict[str, ArrayInfo | None] = {}
        for (name, array), planned, align in zip(arrays, self._infos, self._align):
            infos[name] = info = None if array is None else describe(array, name)
            if (info is None) != (planned is None):
                raise ValueError(f"{name} is {'missing' if info is None else 'given'}, and the plan was made "
                                 f"{'with' if info is None else 'without'} it")
            if info is None or planned is None:
                continue
            if info[1:6] != planned[1:6]:
                fields = ", ".join(f"{field}={getattr(info, field)} (planned {getattr(planned, field)})"
                                   for field in ("shape", "strides", "dtype", "device", "readonly")
                                   if getattr(info, field) != getattr(planned, field))
                raise ValueError(f"{name} differs from the plan's: {fields}; make another plan, or call matmul")
            if info.pointer % align:
                raise ValueError(f"{name} begins at an address that is not a multiple of {align} bytes, unlike the plan's; "
                                 "make another plan, or call matmul")
        out = infos["out"]
        assert out is not None
        check_out(out, infos, self._in_place)
        raise ValueError("an array comes from another library than the plan's; make another plan, or call matmul")

    def _stream(self, stream: Any) -> int:
        handle = as_stream_handle(stream)
        check_stream(handle, self._device)
        return handle

    def _stream_of(self, a: Any) -> int:
        """The stream of a library that has no current one: what the array itself asks for, if it does."""
        return current_stream(self._library, self._device, producer_stream(a, self._library))

    def _call_on_host(self, brought: CallValues | None, a: Any, b: Any, c: Any, out: Any, stream: Any) -> Any:
        if stream is not None:
            as_stream_handle(stream)                           # refuses what is none, as on a GPU
        if isinstance(a, Matrix) or isinstance(b, Matrix) or isinstance(out, Matrix):
            return self._call_of_matrices(brought, a, b, c, out, stream)
        return self._emulate(a, b, c, out)

    def _emulate(self, a: Any, b: Any, c: Any, out: Any, problem: Call | None = None) -> Any:
        compiled = self._compiled if problem is None else compiled_of(problem, problem.seen_out(self._infos[3]))
        mode = current_mode()
        if mode is None:
            raise TypeError("a is a host array (NumPy) and this plan was made in the emulator; call it inside "
                            "with gemmkit.emulate(): ...")
        if out is None:
            out = empty_like(a, self._shape, self._dtype)
        infos = dict(zip(("a", "b", "c", "out"), describe_all(a, b, c, out)))
        check_places(infos)
        if any((i is None) != (p is None) or (i is not None and p is not None and i[1:4] != p[1:4])
               for i, p in zip(infos.values(), self._infos)) or not self._fits(
                   *(0 if x is None else x.pointer for x in map(infos.get, OPERANDS))):
            self._refuse((("a", a), ("b", b), ("c", c), ("out", out)))
        assert infos["out"] is not None
        check_out(infos["out"], infos, self._in_place)
        check_held(held_by(compiled.problem.config), infos, (self._seen(infos["out"]),), self._in_place)
        if self._has_work:
            given = [out, a, b, c]
            for name, of in compiled.problem.copies.items():
                n = OPERANDS.index(name)
                space = compiled.copies[n].on_host(given[n], mode)
                given[n] = strided(space, describe(space), *whole(of)[1:3])
            mode.run(compiled, (*given[1:], given[0]))
        return out


class ReorderedProduct:
    """A product behind copies of one or both operands (`gemmkit.plans.adapters.TensorCopy`, by operand), which lie in the
    stream's workspaces. It takes the operands as they are, which have been checked."""

    stands = None                      # it has no code of the user's

    def __init__(self, copies: dict[int, TensorCopy], product: Plan):
        self.copies, self.product = copies, product
        self._run: Start = _no_launch if product._device < 0 else self._started()

    def _started(self) -> Start:
        spaces = [Space(-1, f"{'ab'[n]} in another order", copy.nbytes) for n, copy in self.copies.items()]
        moves = [(1 + n, bound(lambda _, of=copy: of.launch(), "a copy").start)              # type: ignore[misc]
                 for n, copy in self.copies.items()]
        start, device = self.product.start(), self.product._device

        def run(stream: int, brought: tuple[Any, ...]) -> None:
            at = list(brought)
            for (n, move), place in zip(moves, addresses(device, stream, spaces)):
                move(stream, (place, at[n]))
                at[n] = place
            start(stream, tuple(at))

        return run

    def __call__(self, a: object, b: object, *, out: object, stream: object = None) -> Any:
        mode, infos = current_mode(), [describe(x, name) for x, name in ((out, "out"), (a, "a"), (b, "b"))]
        if mode is None:
            handle = launch_stream(infos[0], None if stream is None else as_stream_handle(stream))
            self._run(handle, (*(info.pointer for info in infos), 0))
            return out
        given = [a, b, out]
        for n, copy in self.copies.items():
            given[n] = copy.on_host(given[n], mode)
        x, y, d = (strided(x, describe(x, "out"), *info[1:3])
                   for x, info in zip(given, (*self.product._infos[:2], self.product._infos[3])))
        self.product(x, y, out=d)
        return out

    def known(self, components: dict[str, Any], brought: int, keeps: object, like: ArrayInfo,
              pick: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None) -> KnownCall:
        """As that of `Plan`."""
        return KnownCall(self._run, like, None, keeps, pick)


def _no_launch(stream: int, brought: tuple[Any, ...]) -> None:
    """Of a product without work."""


def _no_array(x: Any) -> int | None:
    """The matcher of an operand that is not there: its address is 0."""
    return 0 if x is None else None


@names_keywords
def plan(a: Any, b: Any, c: Any = None, conf: Config | None = None, *, out: Any = None,
         **keywords: Unpack[Keywords]) -> Plan:
    """Resolve a product once; calling the plan then costs microseconds.

    The arrays are examples of their kind: the plan accepts others of the same library, shape, strides, dtype and device.
    The kernel is compiled (or found in the cache) and loaded here. No element is read or written.

    Args:
        a: (M, K): an array, a stack, or a matrix with structure, as `gemmkit.matmul` takes it.
        b: (K, N), as a.
        c: (M, N), or None for a plan without C.
        conf: a configuration of `gemmkit.get_config`; None chooses one by dtypes and sizes.
        out: (M, N), an example of the results, or a matrix of `gemmkit.layouts`, as `gemmkit.matmul` takes it; None: results
            are new arrays of a's library, of ``dtype``.
        keywords: those of `gemmkit.matmul`. Types of components are the plan's; their arrays and numbers may change with
            each call.

    Returns:
        A `gemmkit.plans.Plan`: ``run(a, b, c=None, out=None, stream=None)`` launches and returns out.

    Raises:
        ValueError, TypeError, ConfigError, ComponentError: as `gemmkit.matmul` raises them, and before it compiles.

    >>> import numpy as np, gemmkit
    >>> a, b = np.ones((3, 4), np.float32), np.ones((4, 2), np.float32)
    >>> with gemmkit.emulate():
    ...     run = gemmkit.plan(a, b)
    ...     run(a, b).tolist()
    [[4.0, 4.0], [4.0, 4.0], [4.0, 4.0]]
    >>> with gemmkit.emulate():                              # a stack of diagonal matrices
    ...     diagonals = gemmkit.layouts.DiagonalMatrix(np.zeros((5, 3), np.float32))
    ...     gemmkit.plan(diagonals, a), gemmkit.plan(diagonals, a)(diagonals, a).shape
    (<plan of (5,) products of 3 x 4 x 3>, (5, 3, 4))
    """
    made = Plan(a, b, c, out, conf, given(keywords))
    if made._device >= 0 and made._has_work:
        made.start()
    return made


# --------------------------------------------------------------------------------------------------
# Products of two matrices: a call finds its plan, or makes one, and launches it.
#
# `gemmkit.matmul`, stacks of matrices and contractions come down to `multiply`.

class Known(NamedTuple):
    """A plan, and the configuration whose id is in its key."""

    plan: Plan
    conf: Any


_plans = cache()                                # by what decides how a call is computed
_seen = KnownCalls()                            # calls of these plans, by what is quickly seen of arrays and components
_kinds = cache()                                # of arrays that have been described

Otherwise = Callable[[Any, Any, Any, Any, Any, Any, dict[str, Any]], Any]


def multiply(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any],
             otherwise: Otherwise | None = None) -> Any:
    """`gemmkit.matmul` of two matrices.

    Where there is no plan yet ``otherwise`` is asked first, with the same arguments: what it returns is the result, unless
    that is None.
    """
    seen = _quickly(a, b, c, conf, keywords) if keywords or c is not None else (id(conf), (a, b), _NO_C, (), ())
    if seen is not None:
        rest, arrays, behind, held, _ = seen
        found = _again(rest, arrays, behind, held, out, stream)
        if found is not None:
            return found
        if current_mode() is not None:
            seen = None
    if keywords:
        return _with_components(seen, a, b, c, conf, out, stream, keywords, otherwise)
    return _planned(seen, a, b, c, conf, out, stream, otherwise)


#: What is quickly seen of a call: what it is known by, its arrays and those of components, what it brings behind their
#: addresses (0 if there is no c, and numbers of components), what of that may be addresses, and all that components bring,
#: with `gemmkit.components.ADDRESS` for the address of each array.
Seen = tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], Any]


_NO_C = 0,                             # what stands for the address of a c that is not given
_again = _seen.again                   # (a name costs less than an attribute)


def known_call(a: Any, b: Any, out: Any, keywords: dict[str, Any]) -> tuple[KnownCall | None, tuple[Any, ...]]:
    """What is known of such a call of device arrays (None where it has to be looked at), and what it brings behind out's
    address."""
    seen = _quickly(a, b, None, None, keywords)
    return (None, ()) if seen is None else _seen.find(*seen[:3], out)


def _quickly(a: Any, b: Any, c: Any, conf: Config | None, keywords: dict[str, Any],
             readers: dict[type, Callable[..., bool]] = components.READERS) -> Seen | None:
    """None where a component says more than is quickly seen, and in the emulator."""
    if not keywords:
        return (id(conf), (a, b), _NO_C, (), ()) if c is None else (id(conf), (a, b, c), (), (), ())
    if current_mode() is not None:
        return None
    key: list[Any] = [id(conf)]
    brought: list[Any] = []
    arrays = [a, b] if c is None else [a, b, c]
    count = len(arrays)
    for name, value in keywords.items():
        key.append(name)
        read = readers.get(type(value))
        if read is not None:
            if not read(value, key, brought, arrays):
                return _quickly(a, b, c, conf, keywords, {})
        elif isinstance(value, Component):
            components.seen(value, key, brought, arrays)
        elif value is None or (name in PLAIN and isinstance(value, (str, type, np.dtype))):
            key.append(value)
        else:
            return None
    count = len(arrays) - count
    numbers = brought if not count else () if count == len(brought) else [
        value for value in brought if value is not components.ADDRESS]
    return tuple(key), tuple(arrays), (0, *numbers) if c is None else tuple(numbers), tuple(numbers), brought


def _order(seen: Seen) -> Callable[[tuple[Any, ...]], tuple[Any, ...]] | None:
    """What makes (out, a, b, c or 0, and what each component brings, in their order) of (out, all arrays, 0 if there is no
    c, numbers); None where these are one."""
    _, arrays, behind, numbers, brought = seen
    is_without_c, count = len(behind) > len(numbers), len(arrays) + 1
    addresses, others = iter(range(4 - is_without_c, count)), itertools.count(count + is_without_c)
    order = [0, 1, 2, count if is_without_c else 3]
    order += [next(addresses) if value is components.ADDRESS else next(others) for value in brought]
    return None if order == list(range(len(order))) else itemgetter(*order)


def _planned(seen: Seen | None, a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any,
             otherwise: Otherwise | None) -> Any:
    """A call that is not known by what is quickly seen, which finds its plan from then on."""
    kind = (_kind(a, "a"), _kind(b, "b"), c is not None and _kind(c, "c"), out is not None and _kind(out, "out"),
            id(conf), world())
    known: Known | None = _plans.get(kind)
    if known is None:
        other = otherwise and otherwise(a, b, c, conf, out, stream, {})
        if other is not None:
            return other
        known = _plans.keep(kind, Known(Plan(a, b, c, out, conf, {}), conf))
    assert known is not None
    found = known.plan(a, b, c, out=out, stream=stream)          # which looks whether the conf's code is what it was
    _recognise(seen, known, {}, out)
    return found


def _kind(x: Any, name: str) -> Any:
    """What decides how an array is computed with: all but its address and stream."""
    at, key = KEYS.get(type(x), key_of)(x, name)
    found = _kinds.get((key, at & 15))
    if found is None:
        info = describe(x, name)
        found = _kinds.keep((key, at & 15), (
            type(x), info[1:7], alignment(info) if len(info.shape) == 2 else info[0] & 15))
    return found


def _with_components(seen: Seen | None, a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any,
                     keywords: dict[str, Any], otherwise: Otherwise | None) -> Any:
    """A call with components, which are frozen; it is known by what is quickly seen from then on, where that is all."""
    keywords = given(keywords)
    if not keywords:
        return _planned(seen, a, b, c, conf, out, stream, otherwise)
    frozen = {name: components.frozen(value) for name, value in keywords.items() if isinstance(value, Component)}
    sizes = keywords.get("gemm_shape")
    sizes = (sizes_given(sizes.gemm_shape), sizes.stated) if isinstance(sizes, CallSizes) else sizes_given(sizes)
    plain = sizes, *(repr(keywords.get(name)) for name in PLAIN[1:])
    if set(frozen) != set(keywords) - set(PLAIN):      # what is no component: resolved anew each time, or refused
        other = otherwise and otherwise(a, b, c, conf, out, stream, keywords)
        if other is not None:
            return other
        return Plan(a, b, c, out, conf, keywords)(a, b, c, out=out, stream=stream)
    kinds = _kind(a, "a"), _kind(b, "b")
    key: tuple[Any, ...] = (
        *kinds, c is not None and _kind(c, "c"), out is not None and _kind(out, "out"),
        id(conf), world(), plain,
        # A component's arrays may be stacks, which are merged by their strides, or have a tensor map, which has them.
        tuple((name, f.kind, f.fingerprint, keywords[name].known_by, tuple((i.shape, i.strides, i.device) for i in f.arrays))
              for name, f in frozen.items()))
    known = None if current_mode() is not None else _plans.get(key)
    if known is None or (known.plan.stands is not None and not known.plan.stands()):
        other = otherwise and otherwise(a, b, c, conf, out, stream, keywords)
        if other is not None:
            return other
        known = _plans.keep(key, Known(Plan(a, b, c, out, conf, keywords), conf))
        if current_mode() is None:
            known.plan.forget_arrays(frozen)        # those of the conf are kept by the conf
    brought = known.plan.with_components(frozen, keywords, a, b, c, out)
    found = known.plan.run(brought, a, b, c, out, stream)
    _recognise(seen, known, keywords, out)
    return found


def _recognise(seen: Seen | None, known: Known, keywords: dict[str, Any], out: Any) -> None:
    """Have a call found by what is quickly seen from then on, and its addresses known to be right."""
    if seen is None:
        return

    def made() -> KnownCall | None:
        given = {name: x for name, x in keywords.items() if isinstance(x, Component)}
        return known.plan.known(given, len(seen[4]), known.conf, pick=_order(seen))

    rest, arrays, _, held, _ = seen
    _seen.keep(rest, arrays, held, out, made, known.plan.stands)
