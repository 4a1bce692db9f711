"""What the calls over several ranks have in common: arguments checked by each rank, then by all; products of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gemmkit import components as kept
from gemmkit.components import Component
from gemmkit.distributed.ranks import GPU, InRankOrder, OfTransform, Ranks, WithOther, gpu_text, statement_of
from gemmkit.emulator.mode import current_mode
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import KEYWORDS, TRANSFORMS, Config
from gemmkit.lang.functions import Frozen
from gemmkit.layouts.joined import Concat
from gemmkit.plans.compiled import PARTS
from gemmkit.plans.launch import Cache
from gemmkit.plans.plan import Plan, plan
from gemmkit.plans.problem import PLAIN
from gemmkit.runtime.arrays import KEYS, dtype_to_torch

Made = TypeVar("Made")

#: Components that act on operands, before sums are made; all others act on the sums.
BEFORE_SUM = (*(name for name in TRANSFORMS if name.endswith(("_a", "_b"))), "observe_a", "condition", "operator",
              "global_a_layout", "global_b_layout")


def check_keywords(call: str, components: dict[str, Any], refused: tuple[str, ...] = ()) -> None:
    """Raise TypeError for a keyword that the call does not take."""
    known = [name for name in KEYWORDS if name not in (*PLAIN, "order", *refused)]
    unknown = sorted(name for name, value in components.items() if name not in known and value is not None)
    if unknown:
        raise TypeError(f"{call}() got keywords {', '.join(unknown)}; of components it takes {', '.join(known)}")


def meet(ranks: Ranks, call: str, tensor: torch.Tensor, facts: Callable[[], dict[str, Any]], components: dict[str, Any],
         make: Callable[[], Made]) -> Made:
    """All ranks make the same call, and each of them can compute it: or all refuse, and nothing has been launched.

    ``facts`` gives what all ranks have alike beside the components, and raises what is wrong with this rank's arguments.
    ``make`` is called where the ranks have not agreed on these facts yet; what it returned is returned for all later calls.
    These exchange nothing, unless torch.distributed's debug level says so (``TORCH_DISTRIBUTED_DEBUG=INFO``): a rank that
    repeats a known call while another makes a new one is found by the timeout otherwise.
    """
    try:
        statement = statement_of(call, tensor, facts(), components)
        if tensor.is_cuda and ranks.backend(tensor.device) == "nccl":
            statement[GPU] = gpu_text(tensor.device)
        key = tuple(statement.items())
        known = key in ranks.agreed
        if known and dist.get_debug_level() == dist.DebugLevel.OFF:
            agreed: Made = ranks.agreed[key]
            return agreed
        made = ranks.agreed[key] if known else make()
    except Exception as error:
        ranks.refuse(error)
        raise
    ranks.agree(statement)
    ranks.agreed[key] = made
    return made


def planned(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None, conf: Config | None,
            components: dict[str, Any]) -> Plan:
    """The plan of a product of tensors, compiled: it raises all that is wrong with one."""
    return plan(a, b, c, conf, out=out, **components)


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None, conf: Config | None,
             components: dict[str, Any]) -> Any:
    """`gemmkit.matmul` of tensors, as a tensor."""
    return matmul(a, b, c, conf, out=out, **components)


def new(like: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype | torch.dtype) -> Any:
    """An uninitialised tensor on the device of another."""
    return torch.empty(shape, dtype=dtype if isinstance(dtype, torch.dtype) else dtype_to_torch(dtype), device=like.device)


# --------------------------------------------------------------------------------------------------
# Calls that come again: of arrays of the same kinds, with the same components.
#
# The ranks have agreed on such a call, and it is planned: what is left are the launches and the stream's commands. Looked
# up so, a call of two ranks takes a fifth of the host's time.

_A_LAYOUT = "global_a_layout"


class Repeated:
    """One call with all that it rests on: these components are read anew when their code or their arrays' memory change."""

    def __init__(self, device: torch.device, conf: Config | None, components: dict[str, Any], rule: object = None):
        self.device, self.conf, self._rule = device, conf, rule
        self.components = {name: value for name, value in components.items() if value is not None}
        self._frozen = self._read()

    def stands(self) -> bool:
        return all(found is known for found, known in zip(self._read(), self._frozen))

    def _read(self) -> list[Frozen]:
        """What is known of the components. (Looked at, not read: one that stands is the same object again.)"""
        of_conf = {} if self.conf is None else {name: getattr(self.conf, name) for name in PARTS}
        given = *self.components.items(), *of_conf.items(), ("combine", self._rule)
        return [kept.frozen(value, name) for name, value in given if isinstance(value, Component)]


def key_of_call(arrays: tuple[Any, ...], conf: Config | None, components: dict[str, Any],
                *more: object) -> tuple[Any, ...] | None:
    """What a call of device arrays is known by; None where an array is of no type that was multiplied yet, or something
    cannot be looked up. `Repeated` keeps the components, so that their ids stay their own."""
    kinds: list[Any] = []
    if any(isinstance(x, list) for x in more):           # lengths
        return None
    for x in arrays:
        keyed = None if x is None else KEYS.get(type(x))
        if keyed is None and x is not None:
            return None
        at, kind = (0, None) if keyed is None else keyed(x, "")
        kinds.append((kind, at & 15))
    return (*kinds, id(conf), *more, *((name, id(value)) for name, value in components.items()))


def known_call(ranks: Ranks, key: tuple[Any, ...] | None) -> Any:
    """The call of this key, where nothing has to be asked: neither the other ranks, nor what its components are now."""
    found = ranks.repeated.get(key)
    if found is None or current_mode() is not None or torch.cuda.is_current_stream_capturing():
        return None
    if found.device.index != torch.cuda.current_device() or dist.get_debug_level() != dist.DebugLevel.OFF:
        return None
    if not found.stands():
        del ranks.repeated[key]
        return None
    ranks.why_plain = None
    return found


def remember(ranks: Ranks, key: tuple[Any, ...] | None, call: Any) -> Any:
    """The call, which `known_call` finds from then on."""
    if key is None:
        return call
    return ranks.repeated.keep(key, call)


class PlannedProduct:
    """A product of a call, of operands of one kind: planned when it is computed a second time."""

    def __init__(self, conf: Config | None, components: dict[str, Any]):
        self.conf, self.components = conf, components
        self._plan: Plan | None = None
        self._is_known = False

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        if self._plan is None:
            if not self._is_known:
                self._is_known = True
                return multiply(a, b, c, out, self.conf, self.components)
            self._plan = plan(a, b, c, self.conf, out=out, **self.components)
        return self._plan(a, b, c, out=out)

    def into(self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, begin: int, end: int,
             first: int) -> None:
        """Rows ``begin`` to ``end`` of A into as many of ``out``, from ``first`` on, on a stream's handle. ``out`` is the
        call's own, and the rows are always these. (Slices cost the host as much as launches.)"""
        if self._plan is None:
            self(a[begin:end], b, None, out[first:first + end - begin])
        else:
            self._plan.launch(stream, (out.data_ptr() + first * out.stride(0) * out.element_size(),
                                       a.data_ptr() + begin * a.stride(0) * a.element_size(), b.data_ptr(), 0))


class JoinedProduct(PlannedProduct):
    """The same, of an A whose rows lie in several arrays (`gemmkit.layouts.Concat`), wherever these lie."""

    def __init__(self, conf: Config | None, components: dict[str, Any]):
        super().__init__(conf, components)
        self._at = Cache()

    def of_parts(self, parts: tuple[Any, ...], b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor) -> Any:
        places = (*(part.data_ptr() for part in parts), 0 if out is None else out.data_ptr())
        found = self._at.get(places)
        if found is None:
            a = Concat(*parts, axis=0)
            if not self._is_known:
                self._is_known = True
                return multiply(a, b, c, out, self.conf, self.components)
            found = self._planned_at(a, b, c, out)
            self._at.keep(places, found)
        return found(parts[0], b, c, out)

    def _planned_at(self, a: Concat, b: Any, c: Any, out: Any) -> Any:
        """The plan with A's parts where they are now, which may overlap nothing that is written."""
        if self._plan is None:
            self._plan = plan(a, b, c, self.conf, out=out, **self.components)
            self._plan.forget_arrays((_A_LAYOUT,))               # a part's memory is the caller's to free
        frozen = {_A_LAYOUT: kept.frozen(a.layout, _A_LAYOUT)}
        brought = self._plan.with_components(frozen, {_A_LAYOUT: a.layout}, a.array, b, c, out)
        return lambda first, b, c, out: self._plan.run(brought, first, b, c, out, None)


# --------------------------------------------------------------------------------------------------
# Partial sums of ranks that share out K, and how they become rows of D: merged in the order of ranks, then finished.

#: Components that see a row's number, or rows together: A is then multiplied as a whole, not rank by rank.
_OF_ROWS = tuple(name for name in BEFORE_SUM if name.endswith("_a") or name in ("condition", "global_a_layout"))
#: Transforms of D, in the order in which a kernel applies them.
_OF_D = "transform_regs_to_shared_d", "transform_shared_to_global_d"


class ReductionRule(NamedTuple):
    """How a call's partial sums are merged: of which dtype they travel, in which they are added, and by which rule."""

    travels: np.dtype
    adds: np.dtype
    rule: Any
    result: np.dtype
    gates: Any = None                  # of this rank's own rows, where peers may push theirs


def before_sum(components: dict[str, Any]) -> dict[str, Any]:
    """The components of the partial products."""
    return {name: value for name, value in components.items() if name in BEFORE_SUM}


def given(components: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in components.items() if value is not None}


def sees_rows(conf: Config | None, components: dict[str, Any]) -> bool:
    """Whether a component before the sum sees rows of the whole A."""
    return conf is not None or any(components.get(name) is not None for name in _OF_ROWS)


def is_fused(a: torch.Tensor, c: torch.Tensor | None, conf: Config | None, components: dict[str, Any]) -> bool:
    """Whether this rank's own rows are one product with the merge in its epilogue, behind a gate: nothing stands between
    sums and epilogue, and every tile has a k-tile that waits."""
    between = any(components.get(name) is not None for name in (*_OF_D, "global_b_layout"))
    return c is None and a.shape[1] > 0 and not between and not sees_rows(conf, components)


def in_rank_order(parts: Any, how: ReductionRule, own: int | None, follows: bool = False) -> InRankOrder:
    """The epilogue that merges the ranks' partial sums; ``own`` is the rank whose sums the product itself has."""
    travels = None if own is None else how.travels
    ranks, rows, columns = parts.shape
    return InRankOrder(parts.view(ranks * rows, columns), rows, how.rule, how.adds, ranks, follows,
                       travels, -1 if own is None else own)


def with_own(parts: Any, how: ReductionRule, own: int, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a product of this rank's own rows that takes the others' partial sums."""
    epilogue: Any = components.get("epilogue")
    if parts.shape[0] == 2:
        merging: Any = WithOther(parts[1 - own], how.rule, how.adds, how.travels, own == 0)
    else:
        merging = in_rank_order(parts, how, own)
    return {**given(components), "epilogue": merging if epilogue is None else merging | epilogue}


def finishing(parts: object, how: ReductionRule, follows: bool, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a product of K = 0 that merges partial sums and finishes them; ``follows``: a C."""
    after = {name: value for name, value in given(components).items() if name not in BEFORE_SUM}
    merging: Any = in_rank_order(parts, how, None, follows)
    for name in _OF_D:                                   # in a kernel they stand before the epilogue, which merges here
        if name in after:
            merging = merging | OfTransform(after.pop(name))
    epilogue = after.pop("epilogue", None)
    return {**after, "epilogue": merging if epilogue is None else merging | epilogue}


def nothing(parts: Any, how: ReductionRule) -> tuple[Any, Any]:
    """Operands of K = 0, of which the merge is the epilogue."""
    return new(parts, (parts.shape[1], 0), how.adds), new(parts, (0, parts.shape[2]), how.adds)
