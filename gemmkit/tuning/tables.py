"""Which table chooses the mapping of a product: the first that has one for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gemmkit.layouts import ArrayLayout
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning import boxes, gathered, hopper, mappings, multistage_mappings, quantised, winners
from gemmkit.tuning.candidates import Candidate

__all__ = ["chosen"]


def chosen(layouts: dict[str, ArrayLayout | None], infos: dict[str, ArrayInfo | None], fields: dict[str, Any],
           sizes: tuple[int, int, int], device: DeviceInfo, products: int,
           candidate: Candidate | None) -> tuple[str, Any] | None:
    """The table's name and its operator and fields, for what is given in ``fields``; None where `get_config` completes them.
    A ``candidate`` that is being tried goes before all tables."""
    a, b = layouts["a"], layouts["b"]
    assert a is not None and b is not None
    given = a, b, infos, fields, sizes, device, products
    is_open = fields.get("operator") is None and mappings.applies(a.dtype, b.dtype, fields, device)
    asked: dict[str, Callable[[], Any]] = {
        "winners": lambda: winners.choice(*given) if layouts["d"] is None or layouts["d"].dtype == a.dtype else None,
        "boxes": lambda: boxes.choice(*given),
        "quantised": lambda: quantised.choice(*given),
        "multistage": lambda: multistage_mappings.choice(a, b, fields, sizes, device, products),
        "gathered": lambda: gathered.choice(*given),
        "hopper": lambda: hopper.choice(*given, c=layouts["c"], d=layouts["d"]) if is_open else None}
    if candidate is not None:
        asked = {"candidate": partial(candidate.choice, a, b, fields, device)}
    elif fields.get("observe_a") is not None:
        asked = {"hopper": asked["hopper"]}
    for name, ask in asked.items():
        found = ask()
        if found is not None:
            return name, found
    return None
