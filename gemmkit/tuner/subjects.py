"""What can be tuned: a product of two matrices (a call of `matmul`, of `einsum`), a group of them (`grouped`) or a program.

A subject knows its arrays, its default mapping, which candidates there are and what each would launch. The search
(`gemmkit.tuner.tuner`) compiles, checks and times them, and asks nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmkit.functions.einsum import as_product, einsum
from gemmkit.functions.grouped import CompiledGroup, GroupPlan, grouped, largest, resolved
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import Config
from gemmkit.layouts.matrices import Matrix, unwrapped
from gemmkit.plans.compiled import Compiled
from gemmkit.plans.plan import Plan
from gemmkit.plans.problem import Call, held_by, resolve
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launch import Launchable
from gemmkit.tuner.measure import Buffers, Job, group_job_of, group_memory_of, job_of, memory_of, tolerance
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
# What a search asks of what is tuned (`gemmkit.tuner.subjects`, `gemmkit.tuner.programs`).

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


class TunedProduct(Called):
    """A product of two matrices, or a stack of them."""

    def __init__(self, a: Any, b: Any, c: Any = None, *, out: Any = None, **keywords: Any):
        if isinstance(a, Matrix) or isinstance(b, Matrix):
            a, b, keywords = unwrapped(a, b, (c, out), keywords)
        self._keywords = keywords
        with store.unread():
            plan = Plan(a, b, c, out, None, keywords)
        if plan._compiled.problem.moduli:
            raise ValueError(f"precision={keywords['precision']!r}: its kernels have no mapping to tune; leave precision "
                             "out, or tune another product")
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
        call, config = self.call, self.call.config
        a, b = (config.global_b_layout, config.global_a_layout) if call.swap_ab else (
            config.global_a_layout, config.global_b_layout)
        return candidates(a, b, _operator(self._keywords, call), (call.M, call.N, call.K), call.device, call.products,
                          (call.a, call.b))

    def tried(self, candidate: Candidate) -> Compiled:
        with store.unread():
            call = resolve(*self._infos, None, self._keywords, candidate)
        return Compiled(call, call.seen_out(self._out))

    def is_known(self, tried: Any) -> bool:
        return super().is_known(tried) and not self.call.swap_ab

    def memory(self) -> Buffers:
        return memory_of(self.default)

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

    def memory(self) -> Buffers:
        return group_memory_of(self.default)

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
