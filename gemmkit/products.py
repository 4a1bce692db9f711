"""Products of two matrices: a call finds its plan, or makes one, and launches it.

`gemmkit.matmul`, stacks of matrices and contractions come down to `multiply`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemmkit import kept
from gemmkit.components import Component
from gemmkit.config import Config
from gemmkit.configure import sizes_given
from gemmkit.emulator.mode import current_mode, world
from gemmkit.matrices import Sizes
from gemmkit.planning import Plan
from gemmkit.problem import KEYWORDS, PLAIN
from gemmkit.runtime.arrays import alignment, describe
from gemmkit.runtime.recognition import KEYS, key_if_given, key_of

__all__ = ["forget_plans", "forgotten_with_plans", "multiply"]

class Known(NamedTuple):
    """A plan, what is kept so that ids in its key stay its own, where a call's components are put, and the addresses of
    arrays that were found to share no memory that they must not."""

    plan: Plan
    conf: Any
    slots: tuple[int, ...]                      # both of calls with components alone
    fit: set[tuple[Any, ...]]


_plans: dict[Any, Known] = {}                   # by what decides how a call is computed
_seen: dict[Any, Known] = {}                    # the same plans by what is quickly seen of device arrays and components
_kinds: dict[Any, Any] = {}                     # of arrays that have been described
_elsewhere: list[dict[Any, Any]] = []           # of contractions and groups
_LIMIT = 4096                                   # plans kept in each; beyond it the memory starts anew

Otherwise = Callable[[Any, Any, Any, Any, Any, Any, dict[str, Any]], Any]


def multiply(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any],
             otherwise: Otherwise | None = None) -> Any:
    """`gemmkit.matmul` of two matrices.

    Where there is no plan yet ``otherwise`` is asked first, with the same arguments: what it returns is the result, unless
    that is None.
    """
    if current_mode() is not None:
        if keywords:
            return _with_components(None, a, b, c, conf, out, stream, keywords, otherwise)
        return _planned(None, a, b, c, conf, out, stream, otherwise)
    at_a, key_a = KEYS.get(type(a), key_of)(a, "a")
    at_b, key_b = KEYS.get(type(b), key_of)(b, "b")
    if not keywords and c is None and out is None:
        key: Any = key_a, at_a & 15, key_b, at_b & 15, id(conf)                  # & 15: the alignment's class
    else:
        at_c, key_c = key_if_given(c, "c")
        at_out, key_out = key_if_given(out, "out")
        key = key_a, at_a & 15, key_b, at_b & 15, id(conf), key_c, at_c & 15, key_out, at_out & 15
        if keywords:
            more, brought = _quick_components(keywords)
            key = None if more is None else (*key, *more)
            known = _seen.get(key)
            if known is None or (known.plan.stands is not None and not known.plan.stands()):
                return _with_components(key, a, b, c, conf, out, stream, keywords, otherwise)
            if out is None and c is None and stream is None:
                return known.plan.launch_new(a, at_a, at_b, known.slots, brought)
            at = at_a, at_b, at_c, at_out
            if out is None or (*at, *brought) not in known.fit:
                return _with_components(key, a, b, c, conf, out, stream, keywords, otherwise)
            known.plan.launch_with(known.plan.stream(a, stream), at, known.slots, brought)
            return out
    known = _seen.get(key)
    if known is None:
        return _planned(key, a, b, c, conf, out, stream, otherwise)
    made = known.plan
    if made.stands is not None:
        made.current()                                                           # the conf's code may not be what it was
    if c is None and out is None and stream is None:
        return made.launch_new(a, at_a, at_b)
    return made.run(None, a, b, c, out, stream)


def _quick_components(keywords: dict[str, Any]) -> tuple[list[Any] | None, tuple[Any, ...]]:
    """What keywords are known by, and what their components bring; None where one says more than that."""
    key: list[Any] = []
    brought: list[Any] = []
    for name, value in keywords.items():
        key.append(name)
        if isinstance(value, Component):
            kept.seen(value, key, brought)
        elif value is None or (name in PLAIN and isinstance(value, (str, type, np.dtype))):
            key.append(value)
        else:
            return None, ()
    return key, tuple(brought)


def _planned(key: Any, a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any,
             otherwise: Otherwise | None) -> Any:
    """A call that is not known by the ``key`` of what is quickly seen, which finds its plan from then on."""
    kind = (_kind(a, "a"), _kind(b, "b"), c is not None and _kind(c, "c"), out is not None and _kind(out, "out"),
            id(conf), world())
    known = _plans.get(kind)
    if known is None:
        other = otherwise and otherwise(a, b, c, conf, out, stream, {})
        if other is not None:
            return other
        known = _remember(_plans, kind, Known(Plan(a, b, c, out, conf, {}), conf, (), set()))
    if key is not None:
        _remember(_seen, key, known)
    return known.plan(a, b, c, out=out, stream=stream)           # which looks whether the conf's code is what it was


def forget_plans() -> None:
    """Plan every product anew: mappings have been tuned."""
    for plans in (_plans, _seen, *_elsewhere):
        plans.clear()


def forgotten_with_plans(plans: dict[Any, Any]) -> None:
    """Have `forget_plans` clear another memory of plans, too."""
    _elsewhere.append(plans)


def _kind(x: Any, name: str) -> Any:
    """What decides how an array is computed with: all but its address and stream."""
    at, key = KEYS.get(type(x), key_of)(x, name)
    found = _kinds.get((key, at & 15))
    if found is None:
        info = describe(x, name)
        found = type(x), info[1:7], alignment(info) if len(info.shape) == 2 else info[0] & 15
        if len(_kinds) >= _LIMIT:
            _kinds.clear()
        _kinds[key, at & 15] = found
    return found


def _remember(plans: dict[Any, Known], key: Any, known: Known) -> Known:
    if len(plans) >= _LIMIT:
        plans.clear()
    plans[key] = known                              # with the conf, so that its id stays its own
    return known


def _with_components(quick: Any, a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any,
                     keywords: dict[str, Any], otherwise: Otherwise | None) -> Any:
    """A call with components, which are frozen; it is known by the key ``quick`` from then on, where that says all of it."""
    given = keywords
    keywords = {name: value for name, value in keywords.items() if value is not None or name not in KEYWORDS}
    frozen = {name: kept.frozen(value) for name, value in keywords.items() if isinstance(value, Component)}
    sizes = keywords.get("gemm_shape")
    sizes = (sizes_given(sizes.gemm_shape), sizes.told) if isinstance(sizes, Sizes) else sizes_given(sizes)
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
        tuple((name, f.kind, f.fingerprint, tuple((i.shape, i.strides, i.device) for i in f.arrays))
              for name, f in frozen.items()))
    known = None if current_mode() is not None else _plans.get(key)
    if known is None or (known.plan.stands is not None and not known.plan.stands()):
        other = otherwise and otherwise(a, b, c, conf, out, stream, keywords)
        if other is not None:
            return other
        known = _remember(_plans, key, Known(Plan(a, b, c, out, conf, keywords), conf, (), set()))
        if current_mode() is None:
            known.plan.forget_arrays(frozen)        # those of the conf are kept by the conf
    made = known.plan
    made.check_components(frozen, keywords, a, b, c, out)
    values: list[Any] | None = None
    for name, f in frozen.items():
        leaves = made.leaves(name, keywords[name], f)
        if leaves:
            values = values or list(made.values)
            values[made.ranges[name]] = leaves
    found = made.run(None if values is None else tuple(values), a, b, c, out, stream)
    if quick is not None:
        _recognise(quick, known, keywords, given, a, b, c, out)
    return found


def _recognise(quick: Any, known: Known, keywords: dict[str, Any], given: dict[str, Any], a: Any, b: Any, c: Any,
               out: Any) -> None:
    """Have a call found by ``quick``, and its addresses known to be right."""
    _, brought = _quick_components(given)
    found = _seen.get(quick)
    if found is None or found.plan is not known.plan:
        slots = known.plan.slots_of({name: x for name, x in keywords.items() if isinstance(x, Component)}, brought)
        if slots is None:
            return
        found = _remember(_seen, quick, Known(known.plan, known.conf, slots, set()))
    if out is not None:
        if len(found.fit) >= _LIMIT:
            found.fit.clear()
        found.fit.add((*(key_if_given(x, name)[0] for x, name in ((a, "a"), (b, "b"), (c, "c"), (out, "out"))), *brought))
