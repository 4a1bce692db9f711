"""Calls that come again: of arrays of the same kinds, with the same components.

The ranks have agreed on such a call, and it is planned: what is left are the launches and the stream's commands. Looked up
so, a call of two ranks takes a fifth of the host's time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from gemmkit import kept
from gemmkit.compiled import PARTS
from gemmkit.components import Component
from gemmkit.config import Config
from gemmkit.distributed.calls import multiply
from gemmkit.distributed.ranks import Ranks
from gemmkit.emulator.mode import current_mode
from gemmkit.joined import Concat
from gemmkit.lang.freezing import Frozen
from gemmkit.launch import Cache
from gemmkit.planning import Plan, plan
from gemmkit.runtime.recognition import KEYS

_A_LAYOUT = "global_a_layout"


class Repeated:
    """One call with all that it rests on: these components are read anew when their code or their arrays' memory change."""

    def __init__(self, device: Any, conf: Config | None, components: dict[str, Any], rule: Any = None):
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


def key_of_call(arrays: tuple[Any, ...], conf: Any, components: dict[str, Any], *more: Any) -> tuple[Any, ...] | None:
    """What a call of device arrays is known by; None where an array is of no type that was multiplied yet, or something
    cannot be looked up. `Repeated` keeps the components, so that their ids stay their own."""
    kinds: list[Any] = []
    if any(isinstance(x, list) for x in more):           # lengths
        return None
    for x in arrays:
        keyed = None if x is None else KEYS.get(type(x))
        if keyed is None and x is not None:
            return None
        at, kind = (0, None) if keyed is None else keyed(x)
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


class Product:
    """A product of a call, of operands of one kind: planned when it is computed a second time."""

    def __init__(self, conf: Config | None, components: dict[str, Any]):
        self.conf, self.components = conf, components
        self._plan: Plan | None = None
        self._is_known = False

    def __call__(self, a: Any, b: Any, c: Any, out: Any) -> Any:
        if self._plan is None:
            if not self._is_known:
                self._is_known = True
                return multiply(a, b, c, out, self.conf, self.components)
            self._plan = plan(a, b, c, self.conf, out=out, **self.components)
        return self._plan(a, b, c, out=out)

    def into(self, stream: int, a: Any, b: Any, out: Any, begin: int, end: int, first: int) -> None:
        """Rows ``begin`` to ``end`` of A into as many of ``out``, from ``first`` on, on a stream's handle. ``out`` is the
        call's own, and the rows are always these. (Slices cost the host as much as launches.)"""
        if self._plan is None:
            self(a[begin:end], b, None, out[first:first + end - begin])
        else:
            self._plan.launch(stream, (out.data_ptr() + first * out.stride(0) * out.element_size(),
                                       a.data_ptr() + begin * a.stride(0) * a.element_size(), b.data_ptr(), 0))


class JoinedProduct(Product):
    """The same, of an A whose rows lie in several arrays (`gemmkit.Concat`), wherever these lie."""

    def __init__(self, conf: Config | None, components: dict[str, Any]):
        super().__init__(conf, components)
        self._at = Cache()

    def of_parts(self, parts: tuple[Any, ...], b: Any, c: Any, out: Any) -> Any:
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
