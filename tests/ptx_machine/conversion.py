"""``cvt``: between integers and floats of all widths, with directions of rounding and saturation."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.ptx.mma import rounded_to_tf32
from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.integers import saturated
from tests.ptx_machine.kinds import BF16, KINDS, Kind
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import Operation, effect, operation
from tests.ptx_machine.rounding import F64, directed, flushed, narrowed, odd

WHOLE: dict[str, Any] = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
MODES = ("rn", "rz", "rm", "rp")


@operation("cvt")
def cvt(i: Instruction) -> Operation:
    if i.has("tf32"):
        i.only("rna", "tf32")
        return Operation([KINDS["f32"]], KINDS["b32"], lambda x: rounded_to_tf32(x).view(np.uint32))
    if i.has("e4m3x2"):
        i.only("rn", "e4m3x2")
        return Operation([KINDS["b16"]], KINDS["b32"], halves_of_float8)
    i.only(*MODES, *WHOLE, "sat", "ftz")
    if len(i.kinds) == 2:
        to, of = i.kinds
        return Operation([of], to, converter(i, of, to))
    raise UnknownInstruction("unknown types", i)


def converter(i: Instruction, of: Kind, to: Kind) -> Any:
    mode, whole = i.one_of(*MODES, default="rn"), i.one_of(*WHOLE, default="none")
    if of.is_float and to.is_float:
        return lambda x: float_to_float(x, to, mode, WHOLE.get(whole), i)
    if of.is_float:
        return lambda x: float_to_integer(flushed(x) if i.has("ftz") else x, to, WHOLE[whole])
    if to.is_float:
        return lambda x: limited(integer_to_float(x, to, mode), i)
    if i.has("sat"):
        wide = np.dtype("u8") if not of.is_signed and of.bits == 64 else np.dtype("i8")
        return lambda x: _clipped(x.astype(wide), to)
    return lambda x: x.astype(to.dtype)


def halves_of_float8(x: np.ndarray) -> np.ndarray:
    """Two float8_e4m3fn in 16 bits as two float16 in 32."""
    pairs = np.ascontiguousarray(x, np.uint16)[..., None].view(ml_dtypes.float8_e4m3fn)
    return pairs.astype(np.float16).view(np.uint32)[..., 0]


def _clipped(x: np.ndarray, to: Kind) -> np.ndarray:
    limits = np.iinfo(to.dtype)
    if x.dtype == np.uint64:
        return np.minimum(x, np.uint64(limits.max)).astype(to.dtype)
    return np.maximum(x, 0).astype(to.dtype) if to.bits == 64 and not to.is_signed else saturated(x, to)


def limited(x: np.ndarray, i: Instruction) -> np.ndarray:
    if not i.has("sat"):
        return x
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1))).astype(x.dtype)


def float_to_float(x: np.ndarray, to: Kind, mode: str, whole: Any, i: Instruction) -> np.ndarray:
    if i.has("ftz"):
        x = flushed(x) if x.dtype == np.float32 else x
    if whole is not None:
        x = whole(x.astype(F64)).astype(x.dtype)
    if to.dtype == x.dtype:
        return limited(x, i)
    if to.bits == 64 or (to.bits == 32 and x.dtype.itemsize == 2) or (mode == "rn" and x.dtype == np.float32):
        out = x.astype(to.dtype)
    else:
        out = np.reshape(narrowed(x.astype(F64), to.dtype, mode), np.shape(x))
    return limited(flushed(out) if i.has("ftz") and to.bits == 32 else out, i)


def float_to_integer(x: np.ndarray, to: Kind, whole: Any) -> np.ndarray:
    """What is out of range becomes the nearest in range, NaN 0."""
    x = whole(x.astype(F64))
    limits = np.iinfo(to.dtype)
    low, high = float(limits.min), float(limits.max)
    inside = (x > low) & (x < high)
    out = np.where(inside, x, 0.0).astype(to.dtype)
    return np.where(x >= high, to.dtype.type(limits.max), np.where(x <= low, to.dtype.type(limits.min), out))


def integer_to_float(x: np.ndarray, to: Kind, mode: str) -> np.ndarray:
    if mode == "rn" and to.bits > 16:
        return x.astype(to.dtype)
    near = x.astype(F64)
    if x.dtype.itemsize < 8:
        left = np.zeros_like(near)
    else:                                                              # what float64 leaves of 64 bits, from their two halves
        upper = (x >> 32).astype(F64) * 2.0**32
        left = (upper - near) + (x & x.dtype.type(0xFFFFFFFF)).astype(F64)
    if to.bits == 64:
        return directed(near, left, mode)
    return np.reshape(narrowed(odd(near, left), to.dtype, mode), np.shape(x))


@effect("cvt")
def cvt_packed(machine: Any, i: Instruction) -> Any:
    """``cvt.rn.f16x2.f32 d, a, b``: a is the upper half. All others are plain operations."""
    if not i.kinds or i.kinds[0].lanes == 1 or len(i.operands) != 3:
        return machine._operation(i)
    to, of = i.kinds
    half = {np.dtype("f2"): KINDS["f16"], BF16: KINDS["bf16"]}[to.dtype]
    i.only(*MODES, "sat", "ftz", "relu")
    put, convert = machine.writer(i.operands[0], KINDS["b32"], i), converter(i, of, half)
    high, low = (machine.reader(x, of, i) for x in i.operands[1:])

    def act(mask: Any) -> None:
        words = [np.broadcast_to(convert(x()), (machine.count,)) for x in (low, high)]
        if i.has("relu"):
            words = [np.where(w < 0, w.dtype.type(0), w) for w in words]                      # NaN stays NaN
        a, b = (np.ascontiguousarray(w).view(np.uint16).astype(np.uint32) for w in words)
        put(a | b << np.uint32(16), mask)

    return act
