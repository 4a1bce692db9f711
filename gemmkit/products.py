"""Products of two matrices: a call finds its plan, or makes one, and launches it.

`gemmkit.matmul`, stacks of matrices and contractions come down to `multiply`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemmkit import kept
from gemmkit.components import Component
from gemmkit.config import Config
from gemmkit.configure import sizes_given
from gemmkit.emulator.mode import current_mode, world
from gemmkit.matrices import Sizes
from gemmkit.planning import Plan
from gemmkit.runtime.arrays import alignment, describe
from gemmkit.runtime.recognition import KEYS, key_of

__all__ = ["forget_plans", "forgotten_with_plans", "multiply"]

_plans: dict[Any, tuple[Plan, Any]] = {}        # by what decides how a call is computed
_seen: dict[Any, tuple[Plan, Any]] = {}         # the same plans by what is quickly seen of device arrays
_kinds: dict[Any, Any] = {}                     # of arrays that have been described
_elsewhere: list[dict[Any, Any]] = []           # of contractions and groups
PLAIN = "gemm_shape", "dtype", "precision"                   # keywords that are no components
_LIMIT = 4096                                   # plans kept in each; beyond it the memory starts anew

Otherwise = Callable[[Any, Any, Any, Any, Any, Any, dict[str, Any]], Any]


def multiply(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any],
             otherwise: Otherwise | None = None) -> Any:
    """`gemmkit.matmul` of two matrices.

    Where there is no plan yet ``otherwise`` is asked first, with the same arguments: what it returns is the result, unless
    that is None.
    """
    if keywords:
        return _with_components(a, b, c, conf, out, stream, keywords, otherwise)
    if current_mode() is not None:
        return _planned(None, a, b, c, conf, out, stream, otherwise)
    at_a, key_a = KEYS.get(type(a), key_of)(a, "a")
    at_b, key_b = KEYS.get(type(b), key_of)(b, "b")
    if c is None and out is None:
        key: Any = key_a, at_a & 15, key_b, at_b & 15, id(conf)                  # & 15: the alignment's class
    else:
        key = key_a, at_a & 15, key_b, at_b & 15, id(conf), _quick(c, "c"), _quick(out, "out")
    known = _seen.get(key)
    if known is None:
        return _planned(key, a, b, c, conf, out, stream, otherwise)
    made = known[0]
    if made.stands is not None:
        made.current()                                                           # the conf's code may not be what it was
    if c is None and out is None and stream is None:
        return made.launch_new(a, at_a, at_b)
    return made.run(None, a, b, c, out, stream)


def _quick(x: Any, name: str) -> Any:
    if x is None:
        return None
    at, key = KEYS.get(type(x), key_of)(x, name)
    return key, at & 15


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
        known = _remember(_plans, kind, Plan(a, b, c, out, conf, {}), conf)
    if key is not None:
        _remember(_seen, key, *known)
    return known[0](a, b, c, out=out, stream=stream)              # which looks whether the conf's code is what it was


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


def _remember(plans: dict[Any, tuple[Plan, Any]], key: Any, made: Plan, conf: Any) -> tuple[Plan, Any]:
    if len(plans) >= _LIMIT:
        plans.clear()
    plans[key] = found = (made, conf)               # conf is kept, so that its id stays its own
    return found


def _with_components(a: Any, b: Any, c: Any, conf: Config | None, out: Any, stream: Any, keywords: dict[str, Any],
                     otherwise: Otherwise | None) -> Any:
    frozen = {name: kept.frozen(value) for name, value in keywords.items() if isinstance(value, Component)}
    sizes = keywords.get("gemm_shape")
    sizes = (sizes_given(sizes.gemm_shape), sizes.told) if isinstance(sizes, Sizes) else sizes_given(sizes)
    plain = sizes, *(repr(keywords.get(name)) for name in PLAIN[1:])
    if set(frozen) != set(keywords) - set(PLAIN):      # None and the like: resolved anew each time
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
    if known is None or (known[0].stands is not None and not known[0].stands()):
        other = otherwise and otherwise(a, b, c, conf, out, stream, keywords)
        if other is not None:
            return other
        known = _remember(_plans, key, Plan(a, b, c, out, conf, keywords), conf)
        if current_mode() is None:
            known[0].forget_arrays(frozen)      # those of the conf are kept by the conf
    made = known[0]
    made.check_components(frozen, keywords, a, b, c, out)
    values: list[Any] | None = None
    for name, f in frozen.items():
        leaves = made.leaves(name, keywords[name], f)
        if leaves:
            values = values or list(made.values)
            values[made.ranges[name]] = leaves
    return made.run(None if values is None else tuple(values), a, b, c, out, stream)
