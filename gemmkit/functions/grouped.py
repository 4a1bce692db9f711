"""``grouped``: products of different sizes in one launch."""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gemmkit import programs as gp
from gemmkit.components import check_held, freeze, uncached, with_fields
from gemmkit.emulator import current_mode, world
from gemmkit.kernels.collectives.batched import GroupScheduler, GroupShape, MatrixGroup, Member
from gemmkit.kernels.collectives.operand import OperandArrays as ArraysOfProduct
from gemmkit.kernels.config import Config, Keywords, names_keywords
from gemmkit.kernels.spec import Spec, StackShape
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.functions import Frozen, ViewKind, freeze_array
from gemmkit.lang.memory import EXTENTS, PLACES, PLACES_DTYPE, SIZES_DTYPE
from gemmkit.lang.references import Guards
from gemmkit.layouts import Plain
from gemmkit.plans.adapters import for_products
from gemmkit.plans.compiled import Nothing
from gemmkit.plans.launch import Cache, Current, Launch, LaunchTable, Put, bound, cache
from gemmkit.plans.problem import (
    HOST,
    Call,
    _layouts,
    asked_dtype,
    check_out,
    check_places,
    checked_keywords,
    held_by,
    resolve,
)
from gemmkit.programs.decorated import program
from gemmkit.programs.values import Parameter
from gemmkit.runtime.arrays import (
    ArrayInfo,
    alignment,
    as_stream_handle,
    byte_range,
    describe,
    describe_all,
    empty_like,
    overlaps,
    shares_memory,
    unit_axis,
)
from gemmkit.runtime.device import launch_stream, target
from gemmkit.runtime.launch import Launchable, described, spaces_of
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.choose import ProductProblem, by_precision
from gemmkit.tuning.problems import choose

if TYPE_CHECKING:
    from typing_extensions import Unpack

# --------------------------------------------------------------------------------------------------
# Groups on the host: the arrays of products of different sizes as one class of problems, and the tables that tell them
# apart.

OPERANDS = ("a", "b", "c", "out")
Infos = tuple[ArrayInfo, ArrayInfo, "ArrayInfo | None", ArrayInfo]


@dataclass(frozen=True)
class GroupTables:
    """What a kernel reads of a group: see `gemmkit.kernels.collectives.batched`. Addresses change from call to call."""

    sizes: np.ndarray
    products: np.ndarray

    @classmethod
    def of(cls, problems: Sequence[Call], outs: Sequence[ArrayInfo], counts: Sequence[int]) -> GroupTables:
        """Of products of so many tiles."""
        sizes = np.zeros((len(problems), EXTENTS + 2 * len(OPERANDS)), SIZES_DTYPE)
        order = sorted(range(len(problems)), key=lambda n: -problems[n].K)
        first = 0
        for n in order:
            problem = problems[n]
            sizes[n, :EXTENTS] = first, problem.M, problem.N, problem.K
            for at, info in enumerate((problem.a, problem.b, problem.c, outs[n])):
                sizes[n, EXTENTS + 2 * at:EXTENTS + 2 * at + 2] = (0, 0) if info is None else info.shape
            first += counts[n]
        products = np.repeat(np.array(order, SIZES_DTYPE), [counts[n] for n in order])
        return cls(sizes, products)

    @staticmethod
    def places(infos: Sequence[Infos]) -> np.ndarray:
        """Addresses and strides."""
        out = np.zeros((len(infos), PLACES * len(OPERANDS)), PLACES_DTYPE)
        for row, of_product in zip(out, infos):
            for at, info in enumerate(of_product):
                if info is not None:
                    row[PLACES * at:PLACES * at + PLACES] = info.pointer, *info.strides
        return out

    def packed(self, places: np.ndarray) -> np.ndarray:
        """The tables as bytes, with the ``places`` of arrays, each where `starts` says."""
        starts, total = self.starts
        packed = np.zeros(total, np.uint8)
        for role, part in (("places", places), ("sizes", self.sizes), ("products", self.products)):
            packed[starts[role]:starts[role] + part.nbytes] = part.reshape(-1).view(np.uint8)
        return packed

    @property
    def starts(self) -> tuple[dict[str, int], int]:
        """Where each begins among these bytes, by the role of its workspace; and how many there are."""
        found, at = {}, 0
        places = len(self.sizes) * PLACES * len(OPERANDS) * PLACES_DTYPE.itemsize
        for role, nbytes in (("places", places), ("sizes", self.sizes.nbytes), ("products", self.products.nbytes)):
            found[role], at = at, at + -(-nbytes // 256) * 256
        return found, max(at, 1)


def typical(infos: Sequence[ArrayInfo | None]) -> ArrayInfo | None:
    """One array for a class: what holds of its alignment, contiguous axis and extents holds of all."""
    there = [info for info in infos if info is not None and 0 not in info.shape] or [i for i in infos if i is not None]
    if not there:
        return None
    axes = {unit_axis(info) for info in there if min(info.shape) > 1} or {unit_axis(info) for info in there}
    axis = axes.pop() if len(axes) == 1 else None
    rows, columns = (math.gcd(*(info.shape[n] for info in there)) for n in (0, 1))
    if axis is not None and any(info.strides[axis] != 1 and info.shape[axis] > 1 for info in there):
        axis = None
    strides = (4096, 1) if axis == 1 else (1, 4096) if axis == 0 else (4096 * 4096, 4096)
    return there[0]._replace(pointer=functools.reduce(min, (alignment(info, axis) for info in there)), shape=(rows, columns),
                             strides=strides)


class CompiledGroup:
    """The kernel of a group: its specialisation, and where its arguments lie."""

    def __init__(self, problems: Sequence[Call], outs: Sequence[ArrayInfo]):
        conf = problems[0].config
        _check(conf, problems)
        conf = self.config = for_products(conf, (len(problems),))
        for name, held in held_by(conf):
            if held.info.device != problems[0].a.device:
                raise ValueError(f"{name}={type(getattr(conf, name)).__qualname__}(...): {held.name} is on device "
                                 f"{held.info.device} and a_list[0] on device {problems[0].a.device}")
        M, N, K = (math.gcd(*(getattr(problem, name) for problem in problems)) for name in "MNK")
        infos = [(p.a, p.b, p.c if conf.has_c else None, out) for p, out in zip(problems, outs)]
        a, b, c, out = (typical(column) for column in zip(*infos))
        self.infos = infos
        spec = conf.spec(ArraysOfProduct(a, b, out, M, N, K, c, None, problems[0].device))
        self.tables = GroupTables.of(problems, outs, [spec.scheduler.computed(p.M, p.N) for p in problems])
        self.blocks = len(self.tables.products)
        if self.blocks >= 2**31:
            raise ValueError(f"the products have {self.blocks} tiles; a launch has less than 2**31")
        rows = len(problems)
        sizes = described("sizes", rows, SIZES_DTYPE, self.tables.sizes.shape[1])
        places = described("places", rows, PLACES_DTYPE, PLACES * len(OPERANDS))
        self.spec = with_tables(spec, sizes, places, described("products", self.blocks, SIZES_DTYPE))
        self.shape = GroupShape(StackShape(M, N, K, 0), sizes)
        self.operands = [_frozen(info, name != "out") for name, info in zip(OPERANDS, (a, b, c, out))]
        self.problem, self.arguments = problems[0], [freeze(self.spec), *self.operands, freeze(self.shape)]
        self.launchable = Launchable(conf.family.kernel, self.arguments, conf.threads, max(1, self.blocks),
                                     problems[0].device, problems[0].a.device, self.spec.shared_bytes, 1, conf.blocks_per_sm)
        self.spaces = spaces_of(self.launchable.values, self.arguments[0].arrays + self.arguments[-1].arrays)

    @property
    def launch(self) -> Launch:
        """What a call brings is the address of its table alone."""
        starts, _ = self.tables.starts
        return Launch(self.launchable, [Put(space.slot, 0, starts[space.role]) for space in self.spaces])

    # -- without a GPU (`gemmkit.emulator`) ----------------------------------------------------------------------------

    def filled(self, arrays: tuple[list[tuple[Any, ...]], np.ndarray]) -> list[Any]:
        return [out for *_, out in arrays[0]]

    def emulated(self, arrays: tuple[list[tuple[Any, ...]], np.ndarray],
                 arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        """Of each product (a, b, c, out), and the table of their places."""
        products, places = arrays
        seen: dict[str, Any] = {}
        for at in (3, 0, 1, 2):                            # outputs first: they say what has been written
            name, kind = OPERANDS[at], self.operands[at].kind
            how = dict(written=products[0][2] is not None) if name == "out" else dict(readonly=True)
            views = [arena.view(of[at], f"{name}[{n}]", kind.unit, kind.alignment, **how)
                     for n, of in enumerate(products)] if isinstance(kind, ViewKind) else []
            seen[name] = arena.members(views, products[0][at], getattr(kind, "alignment", 0))
        spec = arena.component(with_tables(self.spec, self.tables.sizes, places, self.tables.products))
        shape = arena.component(with_fields(self.shape, {"sizes": self.tables.sizes}))
        yield self.launchable, (spec, *(seen[name] for name in OPERANDS), shape)


def _frozen(info: ArrayInfo | None, readonly: bool) -> Frozen:
    if info is None:
        return freeze(Nothing())
    unit = unit_of(info)
    return freeze_array(info, unit, alignment(info, unit), readonly=readonly)


def unit_of(info: ArrayInfo) -> int | None:
    return next((axis for axis in (1, 0) if info.strides[axis] == 1), None)


def with_tables(spec: Spec, sizes: Any, places: Any, products: Any) -> Spec:
    """The specialisation for a group, with its tables or descriptions of them."""
    one = getattr(spec.scheduler, "one", spec.scheduler)
    group = MatrixGroup(*(Member(n, sizes, places) for n in range(len(OPERANDS))))
    return dataclasses.replace(spec, scheduler=GroupScheduler(one, group, sizes, products))          # type: ignore[arg-type]


def _check(conf: Config, problems: Sequence[Call]) -> None:
    if conf.kernel not in ("multistage", "singlestage"):
        raise ConfigError(f"kernel={conf.kernel!r}: groups are computed by 'multistage' and 'singlestage'")
    if conf.splits != 1:
        raise ConfigError(f"splits={conf.splits!r}: the tiles of a group fill the device together; use splits=1")
    if conf.epilogue.reduces or conf.observe_a is not None:
        field = "epilogue" if conf.epilogue.reduces else "observe_a"
        raise ConfigError(f"{field}={getattr(conf, field)!r}: a group cannot reduce, because its products differ in size; "
                          "reduce each product in its own matmul, or use a stack")
    for name in "abcd":
        layout = getattr(conf, f"global_{name}_layout")
        if not isinstance(layout, Plain) and (name != "c" or conf.has_c):
            raise ConfigError(f"global_{name}_layout={layout!r}: groups are of plain matrices (RowMajor, ColMajor)")
    for n, problem in enumerate(problems):
        for info in (problem.a, problem.b, problem.c):
            if info is not None and math.prod(info.shape) >= 2**31:
                raise ValueError(f"product {n} has an operand of {math.prod(info.shape)} elements; those of groups have "
                                 "less than 2**31")


def check_outputs(infos: Sequence[Infos], conf: Config) -> None:
    """Raise ValueError unless each result can be written, and shares memory with no operand and no result of the group (but
    with the c of its own product), and with no array of a component."""
    held = held_by(conf)
    for n, (a, b, c, out) in enumerate(infos):
        try:
            operands = {"a": a, "b": b, "c": c}
            check_out(out, operands)
            check_held(held, operands, (out,))
        except ValueError as error:
            raise ValueError(f"product {n}: {error}") from None
    spans = sorted(((*byte_range(info), name, n, info) for n, of in enumerate(infos) for name, info in zip(OPERANDS, of)
                    if info is not None and 0 not in info.shape), key=lambda span: span[:2])
    active: list[Any] = []
    for low, high, name, n, info in spans:
        active = [other for other in active if other[1] > low]
        for _, _, other_name, m, other in active:
            if n == m or "out" not in (name, other_name) or not overlaps(info, other) or not shares_memory(info, other):
                continue
            written, read = ((n, name), (m, other_name)) if name == "out" else ((m, other_name), (n, name))
            raise ValueError(f"out[{written[0]}] shares memory with {read[1]}[{read[0]}]: the products of a group run at "
                             "the same time")
        active.append((low, high, name, n, info))


Arrays = Sequence[Any]
_plans = cache()                       # with the configuration whose id is in the key
_TABLES = 256                          # of a plan, that are kept on the host


class GroupPlan:
    """A group of products of arrays of certain kinds: ``run(a_list, b_list, c_list, out=out)``.

    It accepts other arrays of the same shapes, strides, dtypes and device and at least the same alignment. An asynchronous
    copy before the launch puts their addresses into a table in device memory, unless the stream's last group had the same
    plan and arrays. While a stream is captured, the copy happens at once, outside the graph, and stays for it
    (`gemmkit.runtime.launch`).
    """

    def __init__(self, a_list: Arrays, b_list: Arrays, c_list: Arrays | None, out: Arrays | None, conf: Config | None,
                 keywords: dict[str, Any]):
        lists = _checked(a_list, b_list, c_list, out)
        self._origin = conf, keywords
        problems = _problems(lists, conf, keywords)
        self._shapes, self._dtype = [(p.M, p.N) for p in problems], problems[0].config.global_d_layout.storage
        outs = self._made(lists) if out is None else out
        self.infos = [(p.a, p.b, p.c, describe(x, f"out[{n}]")) for n, (p, x) in enumerate(zip(problems, outs))]
        self._kinds = [_kinds(of) for of in self.infos]
        self._device, self._lock = problems[0].a.device, threading.Lock()
        self._prepare(problems)

    def _prepare(self, problems: list[Call]) -> None:
        """All that depends on the components' code."""
        self.config = problems[0].config
        check_outputs(self.infos, self.config)
        self._compiled = CompiledGroup(problems, [of[3] for of in self.infos])
        self._launch: Launch | None = None
        self._known = Cache(_TABLES)
        guards = Guards(fact for argument in self._compiled.arguments for fact in argument.facts)
        self._stands = guards.ready() if guards else None

    def __repr__(self) -> str:
        return f"<plan of a group of {len(self._shapes)} products>"

    def __call__(self, a_list: Arrays, b_list: Arrays, c_list: Arrays | None = None, *, out: Arrays | None = None,
                 stream: Any = None) -> list[Any]:
        """Compute the products into ``out``, which is allocated when it is not given, and return them as a list.

        Raises ValueError for arrays that are not of the plan's kinds, before anything is launched.
        """
        if self._stands is not None and not self._stands():
            with self._lock:
                self._prepare_anew()
        lists = _checked(a_list, b_list, c_list, out)
        outs = self._made(lists) if out is None else list(out)
        infos = [_described(n, *of) for n, of in enumerate(zip(*lists[:3], outs))]
        if len(infos) != len(self._kinds):
            raise ValueError(f"a_list has {len(infos)} arrays and the plan {len(self._kinds)}; make another plan")
        for n, (of, planned) in enumerate(zip(infos, self._kinds)):
            _check_kinds(n, of, planned)
        given = None if stream is None else as_stream_handle(stream)
        if self._device == HOST:
            check_outputs(infos, self.config)
            self._emulate(lists, outs, infos)
            return outs
        handle = launch_stream(infos[0][0], given)
        if self._compiled.blocks:
            self.bound().run(handle, (), self._table(infos))
        return outs

    def _made(self, lists: Sequence[Arrays]) -> list[Any]:
        return [empty_like(a, shape, self._dtype) for a, shape in zip(lists[0], self._shapes)]

    def bound(self) -> Launch:
        """The launch, compiled and loaded; anew where code of its components has changed."""
        if self._launch is None:
            with self._lock:
                self._launch = bound(self._described, "this group's components")
        return self._launch

    def _described(self, current: Current) -> Launch:
        if current is uncached:
            self._prepare_anew()
        return self._compiled.launch

    def _prepare_anew(self) -> None:
        conf, keywords = self._origin
        self._prepare(resolved(self.infos, uncached(conf), {name: uncached(value) for name, value in keywords.items()}))

    def _table(self, infos: Sequence[Infos]) -> LaunchTable:
        """The tables of these arrays, whose outputs have been checked."""
        pointers = tuple(0 if info is None else info.pointer for of in infos for info in of)
        found: LaunchTable | None = self._known.get(pointers)
        if found is None:
            check_outputs(infos, self.config)
            found = self._known.keep(pointers, LaunchTable(self._compiled.tables.packed(GroupTables.places(infos))))
        return found

    def _emulate(self, lists: Sequence[Arrays], outs: Arrays, infos: Sequence[Infos]) -> None:
        mode = current_mode()
        if mode is None:
            raise TypeError("a_list has host arrays (NumPy), and this plan was made in the emulator; call it inside "
                            "with gemmkit.emulate(): ...")
        if self._compiled.blocks:
            mode.run(self._compiled, (list(zip(*lists[:3], outs)), GroupTables.places(infos)))


@names_keywords
def plan_grouped(a_list: Arrays, b_list: Arrays, c_list: Arrays | None = None, *, out: Arrays | None = None,
                 conf: Config | None = None, **keywords: Unpack[Keywords]) -> GroupPlan:
    """Resolve a group of products once; the kernel is compiled (or found in the cache) here.

    Args:
        a_list: matrices (M, K), as `grouped` takes them; examples of their kinds.
        b_list: matrices (K, N).
        c_list: matrices (M, N); None for a plan without C.
        out: examples of the results; None: each call makes new ones.
        conf: a configuration of `gemmkit.get_config`; None chooses one.
        keywords: those of `grouped`.

    Returns:
        A `GroupPlan`: ``run(a_list, b_list, c_list, out=out)``.

    Raises:
        ValueError: a_list is empty.
        ValueError, TypeError, ConfigError, ComponentError: as `grouped`.
    """
    made = GroupPlan(a_list, b_list, c_list, out, conf, dict(keywords))
    if made._device != HOST and made._compiled.blocks:
        made.bound()
    return made


@names_keywords
def grouped(a_list: Arrays, b_list: Arrays, c_list: Arrays | None = None, out: Arrays | None = None, *,
            conf: Config | None = None, stream: Any = None, **keywords: Unpack[Keywords]) -> list[Any]:
    """Products of different sizes, ``d[i] = a_list[i] @ b_list[i] + c_list[i]``, in one launch.

    Args:
        a_list: a list of matrices (M, K), whose sizes differ from product to product and may be 0. All of them have one
            dtype and one order (row- or column-major; any strides), because one kernel computes all products. Pass pieces of
            one array as a list of views, ``[x[o:p] for o, p in pairwise(offsets)]``.
        b_list: a list of as many matrices (K, N).
        c_list: a list of as many matrices (M, N), or None.
        out: a list of arrays to write, or None for new ones. They may share memory with nothing else in the group, but each
        may be its product's c.
        conf: a configuration of `gemmkit.get_config` with kernel="multistage" or "singlestage"; None chooses one.
        stream: where to launch; None is the current stream of the arrays' library.
        keywords: those of `gemmkit.matmul` except ``gemm_shape`` and ``observe_a``, the same for all products. A function
            may ask which product it computes (``batch``, its place in the lists). With keywords each call makes a plan: keep
            one (`plan_grouped`) if the time matters.

    Returns:
        The results, as a list. No matrix is copied or cast, and nothing is synchronised; a table of addresses is copied to
        the device in front of the launch.

    Raises:
        ValueError: lists of different lengths, devices, shapes or dtypes that do not fit (the product is named), results
            that overlap.
        TypeError, ConfigError, ComponentError: as `gemmkit.matmul`.

    >>> import numpy as np, gemmkit
    >>> a = [np.ones((2, 3), np.float32), np.ones((1, 4), np.float32)]
    >>> b = [np.ones((3, 1), np.float32), np.ones((4, 2), np.float32)]
    >>> with gemmkit.emulate():
    ...     [d.tolist() for d in gemmkit.grouped(a, b)]
    [[[3.0], [3.0]], [[4.0, 4.0]]]
    """
    if keywords:
        return GroupPlan(a_list, b_list, c_list, out, conf, dict(keywords))(a_list, b_list, c_list, out=out, stream=stream)
    lists = _checked(a_list, b_list, c_list, out)
    if not lists[0]:
        return []
    kinds = tuple(_kinds(_described(n, *of)) for n, of in enumerate(zip(*lists)))
    key = kinds, id(conf), world()
    known: tuple[GroupPlan, Config | None] | None = _plans.get(key)
    if known is None:
        known = _plans.keep(key, (GroupPlan(a_list, b_list, c_list, out, conf, {}), conf))
    return known[0](a_list, b_list, c_list, out=out, stream=stream)


# -- checks -----------------------------------------------------------------------------------------------------------

def _checked(a_list: Arrays, b_list: Arrays, c_list: Arrays | None, out: Arrays | None) -> list[list[Any]]:
    """The four lists, of as many entries; a list that is not given is of None."""
    lists: list[list[Any]] = []
    for name, given in (("a_list", a_list), ("b_list", b_list), ("c_list", c_list), ("out", out)):
        if given is None and name in ("c_list", "out"):
            lists.append([None] * len(lists[0]))
            continue
        if not isinstance(given, (list, tuple)):
            raise TypeError(f"{name} is a {type(given).__name__}; a list of matrices is needed; list(x) "
                            "makes one of a stack, and matmul takes stacks of one size")
        lists.append(list(given))
        if len(given) != len(lists[0]):
            raise ValueError(f"{name} has {len(given)} arrays and a_list has {len(lists[0])}; each product needs one")
        missing = [n for n, x in enumerate(given) if x is None]
        if missing:
            raise TypeError(f"{name}[{missing[0]}] is None; an array is needed for every product")
    return lists


def _described(n: int, a: Any, b: Any, c: Any, out: Any) -> Any:
    return tuple(None if x is None else describe(x, f"{name}[{n}]")
                 for name, x in (("a_list", a), ("b_list", b), ("c_list", c), ("out", out)))


def _kinds(infos: Sequence[ArrayInfo | None]) -> tuple[Any, ...]:
    return tuple(None if info is None else (info[1:7], alignment(info)) for info in infos)


def _check_kinds(n: int, infos: Sequence[ArrayInfo | None], planned: Sequence[Any]) -> None:
    for name, info, kind in zip(("a_list", "b_list", "c_list", "out"), infos, planned):
        if (info is None) != (kind is None):
            raise ValueError(f"{name} is {'missing' if info is None else 'given'}, and the plan was made "
                             f"{'with' if info is None else 'without'} it")
        if info is not None and (info[1:6] != kind[0][:5] or alignment(info) < kind[1]):
            raise ValueError(f"{name}[{n}] differs from the plan's in shape, strides, dtype, device or alignment "
                             f"({info.shape}, {info.strides}, {info.dtype}; planned {kind[0][:3]}); make another plan, or "
                             "call grouped")


def _problems(lists: list[list[Any]], conf: Config | None, keywords: dict[str, Any]) -> list[Call]:
    """Each product checked, by one configuration."""
    if not lists[0]:
        raise ValueError("a_list is empty; a plan needs a product")
    if keywords.get("gemm_shape") is not None:
        raise TypeError("gemm_shape: the sizes of a group are those of its matrices")
    infos = []
    for n, of in enumerate(zip(*lists)):
        try:
            infos.append(describe_all(*of))
        except (TypeError, ValueError) as error:
            raise type(error)(f"product {n}: {error}") from None
    first = infos[0]
    orders: dict[tuple[str, bool], int] = {}
    for n, of_product in enumerate(infos):
        for name, info, other in zip(("a_list", "b_list", "c_list", "out"), of_product, first):
            if info is None or other is None:
                continue
            if len(info.shape) != 2:
                raise ValueError(f"{name}[{n}] has {len(info.shape)} dimensions; a matrix of 2 is needed")
            if info.dtype != other.dtype:
                raise ValueError(f"{name}[{n}] has dtype {info.dtype} and {name}[0] has {other.dtype}; one kernel computes "
                                 "all products of a group")
            if info.device != first[0].device:
                raise ValueError(f"{name}[{n}] is on device {info.device} and a_list[0] on device {first[0].device}; all "
                                 "operands of a group must be on one device")
            if (info.strides[0] == 1) != (info.strides[1] == 1) and min(info.shape) > 1:
                orders.setdefault((name, info.strides[0] == 1), n)
                if (name, info.strides[0] != 1) in orders:
                    raise ConfigError(f"{name}[{orders[name, True]}] is column-major and {name}[{orders[name, False]}] is "
                                      "row-major; one kernel computes all products of a group, so give them one order")
    check_places({f"{name}_list[0]": info for name, info in zip("abc", first)})
    return resolved(infos, conf, keywords)


def resolved(infos: Sequence[Any], conf: Config | None, keywords: dict[str, Any],
             candidate: Candidate | None = None) -> list[Call]:
    """Each product checked, by one configuration: ``conf``, or that of ``candidate``, or the tuned one, or the tables'."""
    keywords = checked_keywords(keywords, "grouped")
    if conf is None:
        conf, keywords = _chosen(infos, keywords, candidate), {}
    problems = []
    for n, (a, b, c, out) in enumerate(infos):
        try:
            problems.append(resolve(a, b, c, out, conf, keywords))
        except (TypeError, ValueError) as error:
            raise type(error)(f"product {n}: {error}") from None
    return problems


def largest(infos: Sequence[Any]) -> Any:
    """The arrays of the product with the most multiplications."""
    def work(of: Any) -> int:
        return int(min(1, *of[0].shape, *of[1].shape) * of[0].shape[0] * of[0].shape[1] * of[1].shape[1])

    return max(infos, key=work)


def _chosen(infos: Sequence[Any], keywords: dict[str, Any], candidate: Candidate | None) -> Config:
    """A configuration for all: the candidate's, the tuned one, or one for the largest product and the number of them."""
    device = target(infos[0][0].device)
    key = partial(store.digest_of_group, infos, keywords)
    a, b, _, _ = of_largest = largest(infos)
    arrays, keywords = dict(zip(("a", "b", "c", "out"), of_largest)), dict(keywords)
    layouts = _layouts(arrays, None, keywords, asked_dtype(keywords, None, arrays["out"]))
    precision, mapping = keywords.pop("precision", None), keywords.pop("mapping", None)
    if mapping is not None:
        raise ValueError(f"mapping={mapping!r}: tiles of a group are those of its largest product; leave it out, or "
                         "multiply one by one")
    asked = ProductProblem(arrays, layouts, (a.shape[0], b.shape[1], a.shape[1]), keywords, len(infos), key, group=infos)
    if precision is not None:
        others = dataclasses.replace(asked, fields={**keywords, "kernel": "multistage"})
        keywords["operator"] = by_precision(precision, others, device)
    config: Config = choose(asked, device, candidate).spec
    return config


# --------------------------------------------------------------------------------------------------
# Groups on the GPU: rows that are sorted by group, as tokens are by expert, whose offsets the host does not read. Each
# program's gradients are the other's, and its own.

@program
def by_groups(d: Parameter, x: Parameter, w: Parameter, offsets: Parameter, turned: bool,
              token: Parameter | None = None) -> None:
    """``turned``: a group's matrix has the result's columns as its rows. ``token`` names the row of x that a row is."""
    rows = gp.packed(d.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.rows if turned else w.columns):
        sums = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            sums += (x[m, k] if token is None else x[token[m], k]) @ (w[i, n, k].T if turned else w[i, k, n])
        d[m, n] = sums


@program
def of_groups(d: Parameter, x: Parameter, y: Parameter, offsets: Parameter, token: Parameter | None = None) -> None:
    """``token`` names the row of y that belongs to a row of x."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, x.columns, y.columns):
        sums = gp.zeros(m, n)
        for k in gp.sequential(rows[i]):
            sums += x[k, m].T @ (y[k, n] if token is None else y[token[k], n])
        d[i, m, n] = sums


# --------------------------------------------------------------------------------------------------
# A mixture of gated experts (`gemmkit.torch.experts`): rows in the order of their experts, which take them where they lie.
# ``token`` names the row of x that a row is, ``to`` where its result goes: each token has a place for the result of each of
# its experts, and these are added up in one order, so that a sum has the same bits every time. ``turned`` is `by_groups`'.
#
#     h = f(x Gate) * (x Up),   y = sum over a token's experts of  weight (h Down)
#
# With e = dy Down^T, of a token's row for each of its experts, the gradients are
#
#     dGate = x^T (weight e * Up(x) * f'(x Gate)),   dUp = x^T (weight e * f(x Gate)),   dDown = (weight h)^T dy,
#     dweight = sum of (e * h),   dx = the sum over its experts of  dgate Gate^T + dup Up^T

@program
def gated_groups(h: Parameter, of_gate: Parameter | None, of_up: Parameter | None, x: Parameter, gate: Parameter,
                 up: Parameter, token: Parameter, offsets: Parameter, turned: bool, f: Callable[[Any], Any]) -> None:
    """``of_gate``, ``of_up``: the two products, for gradients."""
    rows = gp.packed(h.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, gate.rows if turned else gate.columns):
        g, u = gp.zeros(m, n), gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            g += x[token[m], k] @ (gate[i, n, k].T if turned else gate[i, k, n])
            u += x[token[m], k] @ (up[i, n, k].T if turned else up[i, k, n])
        h[m, n] = gp.call(f, g) * u
        if of_gate is not None and of_up is not None:
            of_gate[m, n] = g
            of_up[m, n] = u


@program
def scattered_groups(d: Parameter, x: Parameter, y: Parameter | None, w: Parameter, v: Parameter | None, to: Parameter,
                     offsets: Parameter, weight: Parameter | None, turned: bool) -> None:
    """x w, or x w + y v, in the rows of d that ``to`` names; times the ``weight`` of each row where there is one."""
    rows = gp.packed(x.rows, offsets)
    for i, m, n in gp.parallel(rows.count, rows.rows, w.rows if turned else w.columns):
        sums = gp.zeros(m, n)
        for k in gp.sequential(x.columns):
            sums += x[m, k] @ (w[i, n, k].T if turned else w[i, k, n])
            if y is not None and v is not None:
                sums += y[m, k] @ (v[i, n, k].T if turned else v[i, k, n])
        d[to[m], n] = sums if weight is None else sums * weight[m]


@program
def gate_backward(e: Parameter, of_gate: Parameter, of_up: Parameter, weight: Parameter, gate: Parameter, up: Parameter,
                  h: Parameter, of_weight: Parameter, f: Callable[[Any], Any], slope: Callable[[Any], Any]) -> None:
    """The gradients of both products and of the weight, and the weighted h."""
    for m in gp.parallel(e.rows):
        g, u = of_gate[m], of_up[m]
        a, of_h = gp.call(f, g), e[m] * weight[m]
        gate[m] = of_h * u * gp.call(slope, g)
        up[m] = of_h * a
        h[m] = a * u * weight[m]
        of_weight[m] = (e[m] * (a * u)).sum(axis=1)


@program
def of_token_groups(d: Parameter, c: Parameter, x: Parameter, y: Parameter, z: Parameter, token: Parameter,
                    offsets: Parameter) -> None:
    """Of the rows of x that ``token`` names, with two others."""
    rows = gp.packed(y.rows, offsets)
    for i, m, n in gp.parallel(rows.count, x.columns, y.columns):
        first, second = gp.zeros(m, n), gp.zeros(m, n)
        for k in gp.sequential(rows[i]):
            first += x[token[k], m].T @ y[k, n]
            second += x[token[k], m].T @ z[k, n]
        d[i, m, n] = first
        c[i, m, n] = second
