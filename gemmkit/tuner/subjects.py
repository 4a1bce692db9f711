"""What can be tuned: a product of two matrices (a call of `matmul`, of `einsum`), a group of them (`grouped`) or a program.

A subject knows its arrays, its default mapping, which candidates there are and what each would launch. The search
(`gemmkit.tuner.search`) compiles, checks and times them, and asks nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gemmkit.compiled import Compiled
from gemmkit.config import Config
from gemmkit.contraction import as_product, einsum
from gemmkit.grouped_call import GroupPlan, grouped, largest, resolved
from gemmkit.groups import CompiledGroup
from gemmkit.matmul_call import matmul
from gemmkit.matrices import Matrix, unwrapped
from gemmkit.planning import Plan
from gemmkit.problem import Call, held_by, resolve
from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuner.jobs import Job, Memory, group_job_of, group_memory_of, job_of, memory_of
from gemmkit.tuner.subject import Output, Subject
from gemmkit.tuner.verifying import tolerance
from gemmkit.tuning import store
from gemmkit.tuning.candidates import Candidate, candidates
from gemmkit.tuning.operators import Sums


def subject_of(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Subject:
    """Of the arguments of `gemmkit.tune`: those of `matmul`, or a function of gemmkit's and its own.

    Raises TypeError for another function.
    """
    if not arguments or not callable(arguments[0]):
        return Product(*arguments, **keywords)
    function, *given = arguments
    if hasattr(function, "tuning_subject"):                # a program
        made: Subject = function.tuning_subject(*given, **keywords)
        return made
    found = SUBJECTS.get(function)
    if found is None:
        raise TypeError(f"tune({getattr(function, '__name__', function)!r}, ...): matmul, einsum and grouped have mappings "
                        "that are tuned, and programs; give one of these, or the operands of a product")
    return found(*given, **keywords)


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


class Product(Called):
    """A product of two matrices, or a stack of them."""

    def __init__(self, a: Any, b: Any, c: Any = None, *, out: Any = None, **keywords: Any):
        if isinstance(a, Matrix) or isinstance(b, Matrix):
            a, b, keywords = unwrapped(a, b, (c, out), keywords)
        self._keywords = keywords
        with store.unread():
            plan = Plan(a, b, c, out, None, keywords)
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

    def memory(self) -> Memory:
        return memory_of(self.default)

    def job(self, compiled: Any, memory: Memory, cubins: Sequence[bytes]) -> Job:
        return job_of(compiled, memory, *cubins)

    def outputs(self) -> list[Output]:
        config = self.call.config
        infos = [("out", self.default.out), *((held.name, held.info) for _, held in held_by(config) if held.is_output)]
        return [Output(name, info, _allowed(config, info, self.call.K)) for name, info in infos]

    def key(self) -> str:
        assert self.call.tuning_key is not None
        return self.call.tuning_key()


class Contraction(Product):
    """An `einsum` of two operands."""

    def __init__(self, spec: Any, *operands: Any, out: Any = None, **keywords: Any):
        a, b, d, given = as_product(spec, *operands, out=out, **keywords)
        super().__init__(a, b, out=d, **given)
        self._spec = spec

    @property
    def what(self) -> str:
        return f"einsum({self._spec!r}): {super().what}"


class Group(Called):
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

    def memory(self) -> Memory:
        return group_memory_of(self.default)

    def job(self, compiled: Any, memory: Memory, cubins: Sequence[bytes]) -> Job:
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
    sums = Sums.of(layouts, keywords, call.K)
    decides = sums.widens or sums.is_of_bytes or "precision" in keywords
    return keywords.get("operator") or (call.config.operator if decides else None)


def _allowed(config: Config, info: ArrayInfo, k: int) -> float:
    return tolerance(info.dtype, config.operator.fragment_c.dtype, k)


SUBJECTS: dict[Callable[..., Any], Callable[..., Subject]] = {matmul: Product, einsum: Contraction, grouped: Group}
