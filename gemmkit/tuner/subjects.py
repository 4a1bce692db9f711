"""What can be tuned: a product of two matrices (a call of `matmul`, of `einsum`), a group of them (`grouped`) or a program.

A subject knows its arrays, its default mapping, which candidates there are and what each would launch. The search
(`gemmkit.tuner.tuner`) compiles, checks and times them, and asks nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.components import arrays_of
from gemmkit.functions.einsum import as_product, einsum
from gemmkit.functions.grouped import CompiledGroup, GroupPlan, grouped, largest, resolved
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import Config
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts.matrices import Matrix, unwrapped
from gemmkit.plans.compiled import Compiled
from gemmkit.plans.launch import Launch
from gemmkit.plans.plan import Plan
from gemmkit.plans.problem import Call, held_by, resolve
from gemmkit.programs.calls import Laid, ProgramProblem
from gemmkit.programs.chains.chain import is_chained
from gemmkit.programs.collectives import ROWS
from gemmkit.programs.mapping import ORDERS, SWITCHES, KernelLimits, Mapping, kernel_of
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.trace import Loop
from gemmkit.programs.values import Index
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launch import Launchable
from gemmkit.runtime.tensor_maps import Encoder
from gemmkit.tuner.measure import Buffers, Job, Pointer, group_job_of, job_of, memory_of, tolerance
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate, candidates
from gemmkit.tuning.operators import AccumulatorRule

if TYPE_CHECKING:
    from gemmkit.programs.mapping import Mapping


# --------------------------------------------------------------------------------------------------
# What came of a search: a row for each mapping that was tried, and the table.

@dataclass(frozen=True)
class Tried:
    """A mapping that was tried: ``ratio`` is the default's time by its own (above 1 it is faster), timed in turns;
    ``error`` says why there is none. ``candidate`` is None for the default."""

    name: str
    config: Any = field(default=None, repr=False)           # a `Config`, or a program's `Mapping`
    candidate: Any = field(default=None, repr=False)        # a `Candidate`, or a program's `Laid`
    microseconds: float | None = None
    ratio: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class Tuned:
    """What `tune` found. ``rows`` are all mappings tried, the fastest first and those without a time last; ``notes`` say
    what was left out. ``kept`` is whether `gemmkit.matmul` finds the best one next time."""

    what: str
    rows: tuple[Tried, ...]
    default: Tried
    best: Tried
    kept: bool
    notes: tuple[str, ...] = ()

    @property
    def config(self) -> Config:
        """The fastest configuration; its ``repr`` can be pasted into a program. (Where the default computes the transpose
        and is the fastest, it is that of the transpose, as `gemmkit.plan(a, b).config` is: no ``conf`` of this product.)"""
        found: Config = self.best.config
        return found

    def __str__(self) -> str:
        lines = [self.what]
        for row in self.rows:
            mark = "*" if row is self.best else " "
            if row.microseconds is None or row.ratio is None:
                lines.append(f"{mark} {'-':>10} {'-':>6}  {row.name}: {row.error}")
            else:
                lines.append(f"{mark} {row.microseconds:8.1f}us {row.ratio:6.3f}  {row.name}")
        return "\n".join([*lines, *self.notes])


class TunedProgram(Tuned):
    """The same of a program, which has a mapping in a configuration's place."""

    @property
    def mapping(self) -> Mapping:
        """The fastest mapping, with all that it left open said; its ``repr`` can be pasted into a program."""
        found: Mapping = self.best.config
        return found


# --------------------------------------------------------------------------------------------------
# What a search asks of what is tuned (products and groups of them; programs).

class Output(NamedTuple):
    """An array that a launch writes, and how far a candidate's may lie from the default's (`measure.difference`)."""

    name: str
    info: ArrayInfo
    allowed: float


class Subject:
    """What is tuned. ``default`` is what the tables' mapping launches (`Compiled`, `CompiledGroup` or `ProgramPlan`)."""

    default: Any
    answer: type[Tuned] = Tuned                            # what a search returns

    @property
    def device(self) -> DeviceInfo:
        raise NotImplementedError

    @property
    def ordinal(self) -> int:
        """The device's number."""
        raise NotImplementedError

    @property
    def what(self) -> str:
        """In words."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        raise NotImplementedError

    def candidates(self) -> Iterable[Any]:
        """In the order in which they should be tried."""
        raise NotImplementedError

    def tried(self, candidate: Any) -> Any:
        """What a candidate launches. Raises ConfigError, ValueError or TypeError where it is not legal."""
        raise NotImplementedError

    def is_known(self, tried: Any) -> bool:
        """Whether it launches what the default does, or one that has been asked about before."""
        raise NotImplementedError

    @staticmethod
    def config_of(compiled: Any) -> Any:
        """The configuration of what is launched, or its mapping."""
        raise NotImplementedError

    def memory(self) -> Buffers:
        raise NotImplementedError

    @staticmethod
    def kernels(compiled: Any) -> list[Launchable]:
        """Those that are launched, in the order in which they run."""
        return [compiled.launchable]

    def job(self, compiled: Any, memory: Buffers, cubins: Sequence[bytes]) -> Job:
        """``cubins``: of its `kernels`, in their order."""
        raise NotImplementedError

    def outputs(self) -> list[Output]:
        raise NotImplementedError

    def key(self) -> str:
        """What the winner is kept under."""
        raise NotImplementedError


class Called(Subject):
    """Products that a function of gemmkit's launches."""

    call: Call                                             # of a group its first product

    @property
    def device(self) -> DeviceInfo:
        return self.call.device

    @property
    def ordinal(self) -> int:
        return self.call.a.device

    def is_known(self, tried: Any) -> bool:
        config, own = self.config_of(tried), self.config_of(self.default)
        return (config.mapping, config.operator) == (own.mapping, own.operator)

    @staticmethod
    def config_of(compiled: Any) -> Config:
        found: Config = compiled.problem.config
        return found

    def memory(self) -> Buffers:
        return memory_of(self.default)


class TunedProduct(Called):
    """A product of two matrices, or a stack of them."""

    def __init__(self, a: Any, b: Any, c: Any = None, *, out: Any = None, **keywords: Any):
        if isinstance(a, Matrix) or isinstance(b, Matrix):
            a, b, keywords = unwrapped(a, b, (c, out), keywords)
        self._keywords = keywords
        with store.unread():
            plan = Plan(a, b, c, out, None, keywords)
        if keywords.get("mapping") is not None:
            raise ValueError(f"mapping={keywords['mapping']!r}: it says which mapping is taken; leave it out to tune")
        if plan._compiled.problem.moduli:
            raise ValueError(f"precision={keywords['precision']!r}: its kernels have no mapping to tune; leave precision "
                             "out, or tune another product")
        if plan._compiled.problem.copies:
            names = " and ".join(sorted(plan._compiled.problem.copies))
            raise ValueError(f"tune: rows of {names} begin elsewhere than at multiples of 16 bytes, and the product copies "
                             f"{names} first; tune it with arrays whose rows do, and this one takes the same mapping")
        self._infos, self._out = (*plan._infos[:3], None if out is None else plan._infos[3]), plan._infos[3]
        self.default, self.call = plan._compiled, plan._compiled.problem
        self._arrays = a, b, c, out, plan                     # alive while addresses of theirs are in use

    @property
    def what(self) -> str:
        call = self.call
        stack = "" if call.stack is None else f"{'x'.join(map(str, call.stack))} products of "
        dtypes = f"{call.a.dtype} x {call.b.dtype}" if call.a.dtype != call.b.dtype else str(call.a.dtype)
        return f"{stack}{call.M} x {call.N} x {call.K}, {dtypes}, on {call.device.name}"

    @property
    def is_empty(self) -> bool:
        return 0 in (self.call.M, self.call.N, self.call.products)

    def candidates(self) -> Sequence[Candidate]:
        call = self.call
        a, b = call.given("global_a_layout"), call.given("global_b_layout")
        return candidates(a, b, _operator(self._keywords, call), (call.M, call.N, call.K), call.device, call.products,
                          (call.a, call.b))

    def tried(self, candidate: Candidate) -> Compiled:
        with store.unread():
            call = resolve(*self._infos, None, self._keywords, candidate)
        return Compiled(call, call.seen_out(self._out))

    def is_known(self, tried: Any) -> bool:
        return super().is_known(tried) and not self.call.swap_ab

    def job(self, compiled: Any, memory: Buffers, cubins: Sequence[bytes]) -> Job:
        return job_of(compiled, memory, *cubins)

    def outputs(self) -> list[Output]:
        config = self.call.config
        infos = [("out", self.default.out), *((held.name, held.info) for _, held in held_by(config) if held.is_output)]
        return [Output(name, info, _allowed(config, info, self.call.K)) for name, info in infos]

    def key(self) -> str:
        assert self.call.tuning_key is not None
        return self.call.tuning_key()


class Contraction(TunedProduct):
    """An `einsum` of two operands."""

    def __init__(self, spec: Any, *operands: Any, out: Any = None, **keywords: Any):
        a, b, d, given = as_product(spec, *operands, out=out, **keywords)
        super().__init__(a, b, out=d, **given)
        self._spec = spec

    @property
    def what(self) -> str:
        return f"einsum({self._spec!r}): {super().what}"


class TunedGroup(Called):
    """Products of different sizes in one launch."""

    def __init__(self, a_list: Any, b_list: Any, c_list: Any = None, out: Any = None, **keywords: Any):
        if keywords.get("conf") is not None:
            raise TypeError("tune: conf= is a mapping already; leave it out")
        with store.unread():
            plan = GroupPlan(a_list, b_list, c_list, out, None, keywords)
        self._keywords, self._infos = keywords, plan.infos
        self._given = [(*of[:3], of[3] if out is not None else None) for of in plan.infos]
        self.default, self.call = plan._compiled, plan._compiled.problem
        self._arrays = a_list, b_list, c_list, out, plan

    @property
    def what(self) -> str:
        a, b, *_ = largest(self._given)
        return (f"a group of {len(self._given)} products up to {a.shape[0]} x {b.shape[1]} x {a.shape[1]}, {a.dtype}, on "
                f"{self.call.device.name}")

    @property
    def is_empty(self) -> bool:
        return not self.default.blocks

    def candidates(self) -> Sequence[Candidate]:
        """Those of the largest product, of the kernels that compute groups, without shares of K."""
        a, b, *_ = largest(self._given)
        config = self.call.config
        listed = candidates(config.global_a_layout, config.global_b_layout, _operator(self._keywords, self.call),
                            (a.shape[0], b.shape[1], a.shape[1]), self.call.device, len(self._given), (a, b))
        return [one for one in listed if one.kernel != "warp_specialised" and one.splits == 1]

    def tried(self, candidate: Candidate) -> CompiledGroup:
        return CompiledGroup(resolved(self._given, None, self._keywords, candidate), [of[3] for of in self._infos])

    def job(self, compiled: Any, memory: Buffers, cubins: Sequence[bytes]) -> Job:
        return group_job_of(compiled, memory, *cubins)

    def outputs(self) -> list[Output]:
        config, found = self.call.config, []
        for n, (a, _, _, out) in enumerate(self._infos):
            if 0 not in out.shape:
                found.append(Output(f"out[{n}]", out, _allowed(config, out, a.shape[1])))
        return [*found, *(Output(held.name, held.info, _allowed(config, held.info, self.call.K))
                          for _, held in held_by(config) if held.is_output)]

    def key(self) -> str:
        return store.digest_of_group(self._given, self._keywords)


def _operator(keywords: dict[str, Any], call: Any) -> Any:
    """The caller's operator, or the default one where the result's dtype decides it; None: mappings may choose theirs."""
    layouts = {name: getattr(call.config, f"global_{name}_layout") for name in "abcd"}
    sums = AccumulatorRule.of(layouts, keywords, call.K)
    decides = sums.widens or sums.is_of_bytes or "precision" in keywords
    return keywords.get("operator") or (call.config.operator if decides else None)


def _allowed(config: Config, info: ArrayInfo, k: int) -> float:
    return tolerance(info.dtype, config.operator.fragment_c.dtype, k)


SUBJECTS: dict[Callable[..., Any], Callable[..., Subject]] = {matmul: TunedProduct, einsum: Contraction, grouped: TunedGroup}


# --------------------------------------------------------------------------------------------------
# A program as it is tuned: its mappings in the order in which they are tried, and its launch.
#
# Mappings are tried that differ from the default in one thing, then in two, then in three. All else stays open in each,
# so that the passes fit it to what is said: ``Mapping(warpgroups=3)`` has shorter blocks and other stages than the
# default. Two mappings of one text are one kernel.

TOGETHER = 3                           # things in which a mapping differs from the default
WARPGROUPS, STAGES = (1, 2, 3), (2, 3, 4, 5, 6)
COLUMNS, DEPTHS, SPLITS = (64, 128, 192, 256), (32, 64, 128), (1, 2, 4, 8, 16, 32, 64, 128)
BANDS = 4, 8, 16, 32
F32 = np.dtype(np.float32)


class Programmed(Subject):
    """A program (`gemmkit.programs.decorated.Program`) with arrays. ``mappings``: what is tried; None: what `listed` has."""

    answer = TunedProgram

    def __init__(self, program: Any, *arrays: Any, mappings: Iterable[Mapping] | None = None, **components: Any):
        if components.get("mapping") is not None:
            raise TypeError("tune: mapping= is the result of tuning; leave it out, or give mappings=[...] to try")
        components.pop("mapping", None)
        arguments = program.bound(arrays, components)
        self._problem = ProgramProblem(program, arguments)
        self._mappings = None if mappings is None else _checked(mappings)
        self.default: ProgramPlan = self._problem.default
        if self.default.is_of_rows:
            raise ConfigError(f"{self.default.name}: a function of rows has one mapping, which the length of its rows "
                              "decides; there is nothing to tune")
        host = next((name for name, info in self.default.given.items() if info.device < 0), None)
        if host is not None:
            raise TypeError(f"{host} is a host array (NumPy); mappings are timed on a GPU")
        self._loop, self._known = program.traced(arguments), {_form(self.default)}

    @property
    def what(self) -> str:
        shapes = ", ".join(f"{name} {'x'.join(map(str, info.shape))} {info.dtype}" for name, info in
                           self.default.given.items())
        return f"{self.default.name}: {shapes}, on {self.device.name}"

    @property
    def device(self) -> DeviceInfo:
        return self.default.device

    @property
    def ordinal(self) -> int:
        return next(iter(self.default.given.values())).device

    @property
    def is_empty(self) -> bool:
        return 0 in (self.default.extents[name] for name in self.default.printed.tile)

    def candidates(self) -> Iterator[Laid]:
        kernel = kernel_of(Mapping(), self.device)
        return map(Laid, listed(self._loop, kernel, self._splits()) if self._mappings is None else self._mappings)

    def _splits(self) -> list[int]:
        """Numbers of blocks that a tile's rounds may be shared by, the default's neighbours first; none where no kernel
        merges what they make."""
        own = self.default.mapping.splits or 1
        try:
            self._problem.plan(Mapping(splits=own if own > 1 else SPLITS[1]))
        except (ConfigError, ValueError):
            return []
        return sorted((count for count in SPLITS if count != own), key=lambda count: abs(math.log2(count / own)))

    def tried(self, candidate: Laid) -> ProgramPlan:
        return self._problem.plan(candidate.mapping)

    def is_known(self, tried: ProgramPlan) -> bool:
        known = _form(tried) in self._known
        self._known.add(_form(tried))
        return known

    @staticmethod
    def config_of(compiled: ProgramPlan) -> Mapping:
        return compiled.mapping

    def memory(self) -> Buffers:
        given, results = self.default.given, self.default.results
        captured = [held.info for component in self.default.called_with({}).components for held in arrays_of(component)]
        return Buffers([*(info for name, info in given.items() if name not in results), *captured],
                       [given[name] for name in results])

    @staticmethod
    def kernels(compiled: ProgramPlan) -> list[Launchable]:
        return [launch.kernel for launch in compiled.launches.kernels]

    def job(self, compiled: ProgramPlan, memory: Buffers, cubins: Sequence[bytes]) -> Job:
        launches, given = compiled.launches, [info.pointer for info in compiled.given.values()]
        brought = *given, 0, *(0 for _ in compiled.call.numbers), *compiled.called_with({}).brought
        first, *then = (_job(launch, brought, len(given), memory, cubin)
                        for launch, cubin in zip(launches.kernels, cubins, strict=True))
        varied = tuple(dict.fromkeys(buffer for one in (first, *then) for buffer in one.varied))
        return replace(first, varied=varied, spare_bytes=launches.spare, then=tuple(then))

    def outputs(self) -> list[Output]:
        plan = self.default
        terms = max(index.extent.length for index in _rounds(self._loop))
        return [Output(name, plan.given[name], self._allowed(plan.given[name], terms)) for name in plan.results]

    def _allowed(self, info: ArrayInfo, terms: int) -> float:
        """A chain rounds what it hands over to its operands' dtype, by another maximum where blocks are longer."""
        printed = self.default.printed
        operands = (*(array for _, array in printed.maps), *printed.operands) if is_chained(self._loop) else ()
        handed = [self.default.infos[name].dtype for name in operands]
        return max(tolerance(dtype, F32, terms) for dtype in (info.dtype, *handed))

    def key(self) -> str:
        return self._problem.key()


def _job(launch: Launch, brought: Sequence[Any], spare: int, memory: Buffers, cubin: bytes) -> Job:
    """Of one kernel of a plan whose arrays, at the addresses ``brought``, lie in ``memory``; ``spare``: where among these
    the address of its own arrays is."""
    kernel, values = launch.kernel, list(launch.kernel.values)
    pointers: list[tuple[int, Pointer]] = []
    maps: list[tuple[int, Pointer, tuple[Any, ...]]] = []
    spares: list[tuple[int, int]] = []
    for put in launch.puts:
        if isinstance(put.encoder, Encoder):
            values[put.slot] = bytes(128)
            maps.append((put.slot, memory.pointer(brought[put.which] + put.offset), put.encoder.arguments))
        elif put.which == spare:
            spares.append((put.slot, put.offset))
        elif put.encoder is None:                      # numbers stay the plan's
            pointers.append((put.slot, memory.pointer(brought[put.which] + put.offset)))
    varied = tuple(dict.fromkeys(at.buffer for at in (*(at for _, at in pointers), *(at for _, at, _ in maps))))
    return Job(cubin, kernel.blocks, kernel.threads, kernel.shared_bytes, tuple(kernel.formats), tuple(values),
               kernel.cluster, kernel.dependent, kernel.waits, tuple(pointers), tuple(maps), (), varied, (), tuple(spares))


def _form(plan: ProgramPlan) -> tuple[str, int]:
    """What tells kernels apart: a text is one for all numbers of shares."""
    return plan.text, plan.mapping.splits


def listed(loop: Loop, kernel: KernelLimits, splits: Sequence[int] = ()) -> Iterator[Mapping]:
    """The mappings of a traced program that a kernel may have, those that differ least from the default first. ``splits``:
    the numbers of shares to try, those nearest to the default's first. They are the first field where the default has
    shares, and else the last one: there tiles are enough for all multiprocessors."""
    chained, rounds = is_chained(loop), _rounds(loop)
    choices: dict[str, list[dict[str, Any]]] = {}

    def lengths(name: str, of: Iterable[int]) -> None:
        choices[f"blocks of {name}"] = [dict(blocks={name: length}) for length in of]

    shares = [dict(splits=count) for count in splits]
    if 1 in splits:                                        # the default has more than one
        choices["splits"] = shares
    if chained:
        for index in rounds:
            if not index.stack:
                lengths(index.name, kernel.lengths)
    else:
        lengths(loop.indices[-1].name, COLUMNS)
    choices["warpgroups"] = [dict(warpgroups=count) for count in WARPGROUPS]
    if not chained and kernel.parts == 2:              # a warp's loads of B serve twice as many rows
        m = loop.indices[-2].name
        choices["warpgroups"] += [dict(warpgroups=count, blocks={m: 2 * ROWS * count}) for count in WARPGROUPS]
    if kernel.uses_tma:
        of_tile = [index.name for index in loop.indices if not index.stack]
        shapes = [{name: 2} for name in of_tile] + ([] if chained else [dict.fromkeys(of_tile, 2)])
        choices["cluster"] = [dict(cluster=shape) for shape in shapes]
    if not chained:
        choices["band"] = [dict(band=rows) for rows in BANDS]
    for switch in SWITCHES if chained else ():
        if switch in ORDERS and not kernel.uses_tma:
            continue
        choices[switch] = [{switch: value} for value in (True, False)]
    choices["stages"] = [dict(stages=count) for count in STAGES]
    if not chained:
        for index in rounds:
            lengths(index.name, (length for length in DEPTHS if length % kernel.depths == 0))
    if shares:
        choices.setdefault("splits", shares)
    for count in range(1, TOGETHER + 1):
        for names in itertools.combinations(choices, count):
            for values in itertools.product(*(choices[name] for name in names)):
                blocks = {name: length for value in values for name, length in value.get("blocks", {}).items()}
                yield Mapping(**{**{key: x for value in values for key, x in value.items()}, "blocks": blocks})


def _rounds(loop: Loop) -> list[Index]:
    """The indices of sequential loops."""
    return [held.indices[0] for held in loop.body if isinstance(held, Loop)]


def _checked(mappings: Any) -> list[Mapping]:
    given = list(mappings) if isinstance(mappings, Iterable) else [mappings]
    other = next((x for x in given if not isinstance(x, Mapping)), None)
    if other is not None or not isinstance(mappings, Iterable):
        raise TypeError(f"tune(mappings={mappings!r}): a list of instances of gemmkit.Mapping is needed, such as "
                        "[gemmkit.Mapping(stages=3)]")
    return given
