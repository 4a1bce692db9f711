"""``grouped``: products of different sizes in one launch."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from gemmkit.components import anew
from gemmkit.config import Config
from gemmkit.emulator.mode import current_mode, world
from gemmkit.groups import CompiledGroup, Infos, Tables, check_outputs
from gemmkit.lang.guards import Guards
from gemmkit.launch import Cache, Current, Launch, Table, bound, cache
from gemmkit.problem import HOST, Call, _layouts, asked_dtype, check_places, checked_keywords, resolve
from gemmkit.runtime.arrays import ArrayInfo, alignment, as_stream_handle, current_stream, describe, describe_all, empty_like
from gemmkit.runtime.device import target
from gemmkit.runtime.streams import check_stream
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.choose import ProductProblem, by_precision
from gemmkit.tuning.problems import choose

Arrays = Sequence[Any]
_plans = cache()                       # with the configuration whose id is in the key
_TABLES = 256                          # of a plan, that are kept on the host


class GroupPlan:
    """A group of products of arrays of certain kinds: ``run(a_list, b_list, c_list, out=out)``.

    Other arrays of the same shapes, strides, dtypes, device and at least that alignment are accepted. Their addresses are
    put into a table in device memory by an asynchronous copy in front of the launch, unless the stream's last group was of
    the same plan and arrays. While a stream is captured the copy is made at once, beside the graph, and kept for it
    (`gemmkit.runtime.workspace`).
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
        self._library, self._device, self._producer = problems[0].a.library, problems[0].a.device, problems[0].a.stream
        self._lock = threading.Lock()
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
        if self._device == HOST:
            check_outputs(infos, self.config)
            self._emulate(lists, outs, infos)
            return outs
        handle = current_stream(self._library, self._device, self._producer) if stream is None else as_stream_handle(stream)
        if stream is not None:
            check_stream(handle, self._device)
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
        if current is anew:
            self._prepare_anew()
        return self._compiled.launch

    def _prepare_anew(self) -> None:
        conf, keywords = self._origin
        self._prepare(resolved(self.infos, anew(conf), {name: anew(value) for name, value in keywords.items()}))

    def _table(self, infos: Sequence[Infos]) -> Table:
        """The tables of these arrays, whose outputs have been checked."""
        pointers = tuple(0 if info is None else info.pointer for of in infos for info in of)
        found: Table | None = self._known.get(pointers)
        if found is None:
            check_outputs(infos, self.config)
            found = self._known.keep(pointers, Table(self._compiled.tables.packed(Tables.places(infos))))
        return found

    def _emulate(self, lists: Sequence[Arrays], outs: Arrays, infos: Sequence[Infos]) -> None:
        mode = current_mode()
        if mode is None:
            raise TypeError("a_list has host arrays (NumPy), and this plan was made in the emulator; call it inside "
                            "with gemmkit.emulate(): ...")
        if self._compiled.blocks:
            mode.run(self._compiled, (list(zip(*lists[:3], outs)), Tables.places(infos)))


def plan_grouped(a_list: Arrays, b_list: Arrays, c_list: Arrays | None = None, *, out: Arrays | None = None,
                 conf: Config | None = None, **keywords: Any) -> GroupPlan:
    """Resolve a group of products once. Takes what `grouped` takes; the kernel is compiled (or found in the cache) here."""
    made = GroupPlan(a_list, b_list, c_list, out, conf, keywords)
    if made._device != HOST and made._compiled.blocks:
        made.bound()
    return made


def grouped(a_list: Arrays, b_list: Arrays, c_list: Arrays | None = None, out: Arrays | None = None, *,
            conf: Config | None = None, stream: Any = None, **keywords: Any) -> list[Any]:
    """Products of different sizes, ``d[i] = a_list[i] @ b_list[i] + c_list[i]``, in one launch.

    Args: a_list, b_list, c_list: lists of as many matrices, (M, K), (K, N) and (M, N), whose sizes differ from product to
    product and may be 0. All of a list have one dtype and one order (row- or column-major; any strides), for one kernel
    computes all. Pieces of one array are given as a list of views, ``[x[o:p] for o, p in pairwise(offsets)]``.
        out: a list of arrays to write, or None for new ones. They may share memory with nothing else in the group, but each
        may be its product's c.
        conf: a configuration of `gemmkit.get_config` with kernel="multistage" or "singlestage"; None chooses one.
        stream: where to launch; None is the current stream of the arrays' library.
        keywords: a ``dtype``, ``operator``, ``epilogue``, ``condition`` or transforms, as `gemmkit.matmul` takes them: the
        same for all products. A function may ask which product it is for (``batch``, its place in the lists).

    Returns: The results, as a list. No matrix is copied or cast, and nothing is synchronised; a table of addresses is copied
    to the device in front of the launch. With keywords a plan is made in each call: keep one (`plan_grouped`) where that
    matters.

    Raises:
        ValueError: lists of different lengths, devices, shapes or dtypes that do not fit (the product is named), results
        that overlap. TypeError, ConfigError, ComponentError: as `gemmkit.matmul`.

    >>> import numpy as np, gemmkit
    >>> a = [np.ones((2, 3), np.float32), np.ones((1, 4), np.float32)]
    >>> b = [np.ones((3, 1), np.float32), np.ones((4, 2), np.float32)]
    >>> with gemmkit.emulate():
    ...     [d.tolist() for d in gemmkit.grouped(a, b)]
    [[[3.0], [3.0]], [[4.0, 4.0]]]
    """
    if keywords:
        return GroupPlan(a_list, b_list, c_list, out, conf, keywords)(a_list, b_list, c_list, out=out, stream=stream)
    lists = _checked(a_list, b_list, c_list, out)
    if not lists[0]:
        return []
    kinds = tuple(_kinds(_described(n, *of)) for n, of in enumerate(zip(*lists)))
    key = kinds, id(conf), world()
    known = _plans.get(key)
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
            raise TypeError(f"{name} is a {type(given).__name__}; a list of matrices is needed")
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


def _kinds(infos: Sequence[ArrayInfo | None]) -> tuple:
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
    if "gemm_shape" in keywords:
        raise TypeError("gemm_shape: the sizes of a group are those of its matrices")
    infos = []
    for n, of in enumerate(zip(*lists)):
        try:
            infos.append(describe_all(*of))
        except (TypeError, ValueError) as error:
            raise type(error)(f"product {n}: {error}") from None
    first = infos[0]
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
    precision = keywords.pop("precision", None)
    asked = ProductProblem(arrays, layouts, (a.shape[0], b.shape[1], a.shape[1]), keywords, len(infos), key, group=infos)
    if precision is not None:
        others = dataclasses.replace(asked, fields={**keywords, "kernel": "multistage"})
        keywords["operator"] = by_precision(precision, others, device)
    config: Config = choose(asked, device, candidate).spec
    return config
