"""Products of two matrices: a call finds its plan, or makes one, and launches it.

`gemmkit.matmul`, stacks of matrices and contractions come down to `multiply`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemmkit import kept
from gemmkit.components import Component
from gemmkit.config import Config, sizes_given
from gemmkit.emulator.mode import current_mode, world
from gemmkit.launch import KnownCall, cache
from gemmkit.matrices import Sizes
from gemmkit.planning import Plan
from gemmkit.problem import KEYWORDS, PLAIN
from gemmkit.runtime.arrays import alignment, describe
from gemmkit.runtime.recognition import KEYS, key_if_given, key_of


class Known(NamedTuple):
    """A plan, and the configuration whose id is in its key."""

    plan: Plan
    conf: Any


_plans = cache()                                # by what decides how a call is computed
_seen = cache()                                 # calls of these plans, by what is quickly seen of arrays and components
_kinds = cache()                                # of arrays that have been described

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
    if not keywords and c is None and out is None:                               # (a function less)
        at_a, key_a = KEYS.get(type(a), key_of)(a, "a")
        at_b, key_b = KEYS.get(type(b), key_of)(b, "b")
        key: Any = key_a, at_a & 15, key_b, at_b & 15, id(conf)                  # & 15: the alignment's class
        at_out, brought = 0, (at_a, at_b, 0)
    else:
        key, at_out, brought = _quickly(a, b, c, conf, out, keywords)
    known: KnownCall | None = _seen.get(key)
    if known is not None:
        found = known.again(a, at_out, brought, out, stream)
        if found is not None:
            return found
    if keywords:
        return _with_components(key, a, b, c, conf, out, stream, keywords, otherwise)
    return _planned(key, a, b, c, conf, out, stream, otherwise)


def known_call(a: Any, b: Any, out: Any, keywords: dict[str, Any]) -> tuple[KnownCall | None, tuple[Any, ...]]:
    """What is known of such a call of device arrays (None where it has to be looked at), and what it brings."""
    key, _, brought = _quickly(a, b, None, None, out, keywords)
    return _seen.get(key), brought


def _quickly(a: Any, b: Any, c: Any, conf: Config | None, out: Any,
             keywords: dict[str, Any]) -> tuple[Any, int, tuple[Any, ...]]:
    """What a call is known by (None where a component says more than that), out's address, and what else it brings."""
    at_a, key_a = KEYS.get(type(a), key_of)(a, "a")
    at_b, key_b = KEYS.get(type(b), key_of)(b, "b")
    key: Any = key_a, at_a & 15, key_b, at_b & 15, id(conf)
    if not keywords and c is None and out is None:
        return key, 0, (at_a, at_b, 0)
    at_c, key_c = key_if_given(c, "c")
    at_out, key_out = key_if_given(out, "out")
    key = *key, key_c, at_c & 15, key_out, at_out & 15
    if not keywords:
        return key, at_out, (at_a, at_b, at_c)
    more, brought = _quick_components(keywords)
    return None if more is None else (*key, *more), at_out, (at_a, at_b, at_c, *brought)


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
    known: Known | None = _plans.get(kind)
    if known is None:
        other = otherwise and otherwise(a, b, c, conf, out, stream, {})
        if other is not None:
            return other
        known = _plans.keep(kind, Known(Plan(a, b, c, out, conf, {}), conf))
    assert known is not None
    found = known.plan(a, b, c, out=out, stream=stream)          # which looks whether the conf's code is what it was
    _recognise(key, known, {}, {}, a, b, c, out)
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
        known = _plans.keep(key, Known(Plan(a, b, c, out, conf, keywords), conf))
        if current_mode() is None:
            known.plan.forget_arrays(frozen)        # those of the conf are kept by the conf
    brought = known.plan.with_components(frozen, keywords, a, b, c, out)
    found = known.plan.run(brought, a, b, c, out, stream)
    _recognise(quick, known, keywords, given, a, b, c, out)
    return found


def _recognise(quick: Any, known: Known, keywords: dict[str, Any], given: dict[str, Any], a: Any, b: Any, c: Any,
               out: Any) -> None:
    """Have a call found by ``quick`` from then on, and its addresses known to be right."""
    if quick is None:
        return
    _, brought = _quick_components(given)
    found: KnownCall | None = _seen.get(quick)
    if found is None or found.stands is not known.plan.stands:
        found = known.plan.known({name: x for name, x in keywords.items() if isinstance(x, Component)}, brought, known.conf)
        if found is None:
            return
        _seen.keep(quick, found)
    if out is not None:
        at_out, *others = (key_if_given(x, name)[0] for name, x in (("out", out), ("a", a), ("b", b), ("c", c)))
        found.allow(at_out, *others, *brought)
