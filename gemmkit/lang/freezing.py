"""Arrays, numbers and functions as kernel arguments. (`gemmkit.components.freeze` does it for components as well.)"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gemmkit.lang.closures import captured, captured_at, closure_kind
from gemmkit.lang.fingerprint import read_closure
from gemmkit.lang.guards import Fact, Guards
from gemmkit.lang.kinds import number_kind, scalar_kind, view_kind
from gemmkit.lang.records import Record
from gemmkit.runtime.arrays import ArrayInfo, alignment, check_aligned, info_of, part_bytes, unit_axis


@dataclasses.dataclass
class Frozen:
    """A value as a kernel argument: its kind, its fingerprint, and the numbers to pass.

    ``leaves`` are (format code, value) pairs in the order in which Numba flattens the argument; ``arrays`` are the
    ArrayInfos among them, for checks of device and overlap. ``guards`` tell whether the code and the constants are still
    those of the fingerprint, ``captures`` whether functions still refer to the same arrays and NumPy scalars. ``places`` are
    where its functions are written: of two lambdas of one text each is reported at its own line.
    """

    kind: Any
    fingerprint: str
    leaves: list[tuple[str, Any]]
    arrays: list[ArrayInfo]
    guards: tuple[Guards, ...] = ()
    captures: tuple[Fact, ...] = ()
    places: tuple[Any, ...] = ()

    @property
    def facts(self) -> list[Fact]:
        """All that it rests on: of code and constants, and where functions refer to what they captured."""
        return [*(fact for held in self.guards for fact in held.facts), *self.captures]

    @property
    def type(self) -> Any:
        """Its Numba type, which is made here."""
        return self.kind.type


def freeze_runtime(value: Any, name: str, readonly: bool = False) -> Frozen:
    """An array or a NumPy scalar: what is an argument by itself. Raises TypeError, naming it, for a dtype that device code
    does not have, and ValueError for an array whose address is no multiple of its elements'."""
    try:
        if isinstance(value, np.generic):
            return freeze_scalar(value)
        info = info_of(value, name)
        frozen = freeze_array(info, readonly=readonly)
    except TypeError as error:
        raise TypeError(str(error) if str(error).startswith(name) else f"{name}: {error}") from None
    if frozen.kind.alignment < part_bytes(info.dtype):
        check_aligned(info, name)
    return frozen


def freeze_array(info: ArrayInfo, unit: int | bool | None = True, align: int | None = None,
                 readonly: bool = False) -> Frozen:
    """An array as a view. ``unit`` is the axis of stride 1 (True: find one); a ``readonly`` one cannot be assigned to."""
    if unit is True:
        unit = unit_axis(info)
    align = alignment(info, unit) if align is None else align
    is_wide = any(extent >= 2**31 for extent in info.shape)
    made = view_kind(info.dtype, len(info.shape), unit, align, is_wide, readonly)
    leaves: list[tuple[str, Any]] = [("u64", info.pointer)]
    leaves += [("i64" if is_wide else "i32", extent) for extent in info.shape]
    leaves += [("i64", info.strides[axis]) for axis in made.strided_axes]
    return Frozen(made, str(made), leaves, [info])


def freeze_scalar(value: Any) -> Frozen:
    if isinstance(value, np.generic):
        made = scalar_kind(value.dtype)
        if value.dtype.kind == "c":
            part = f"f{4 * value.dtype.itemsize}"
            return Frozen(made, str(made), [(part, float(value.real)), (part, float(value.imag))], [])
        kind = {"f": "f", "i": "i", "u": "u", "b": "u"}.get(value.dtype.kind)
        if kind is None or (value.dtype.itemsize == 2 and kind == "f"):
            return Frozen(made, str(made), [("u16", int(value.view(np.uint16)))], [])
        code = f"{kind}{8 * value.dtype.itemsize}"
        return Frozen(made, str(made), [(code, value.item() if kind != "u" else int(value))], [])
    if isinstance(value, bool):
        return Frozen(number_kind("bool"), "bool", [("u8", int(value))], [])
    if isinstance(value, int):
        return (Frozen(number_kind("i32"), "index", [("i32", value)], []) if -2**31 <= value < 2**31
                else Frozen(number_kind("i64"), "int64", [("i64", value)], []))
    if isinstance(value, float):
        return Frozen(number_kind("f64"), "weak float64", [("f64", value)], [])
    if isinstance(value, Record):
        made = scalar_kind(value.dtype)
        return Frozen(made, str(made), [leaf for part in value for leaf in freeze_scalar(part).leaves], [])
    raise TypeError(f"{value!r} ({type(value).__name__}) is not a number that a kernel can take")


def freeze_function(function: Any, name: str) -> Frozen:
    """A function: what it captured are its arguments, and its text the constant."""
    values = captured(function)
    frozen = {key: freeze_runtime(value, f"{name}'s captured {key}", readonly=True) for key, value in values.items()}
    function = getattr(function, "__wrapped__", function)                      # a device function's
    reading = read_closure(function, values.keys())
    text, place = "function:" + reading.text, (function.__code__.co_filename, function.__code__.co_firstlineno)
    made = closure_kind(function, text, place, {key: f.kind for key, f in frozen.items()})
    leaves = [leaf for f in frozen.values() for leaf in f.leaves]
    arrays = [info for f in frozen.values() for info in f.arrays]
    text += "".join(f",{k}:{f.fingerprint}" for k, f in frozen.items())
    return Frozen(made, text, leaves, arrays, (reading.guards,),
                  tuple(captured_at(function, key) for key in values), (place,))
