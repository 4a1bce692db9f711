"""Runs what Numba makes of device code on this machine's processor: its LLVM code, with the few PTX instructions and library
functions of arithmetic in it replaced. So the values of device code can be compared without a GPU."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Callable, Sequence
from ctypes import util
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from gemmkit.lang.functions import device
from gemmkit.lang.number_rules import BOOL

_ASM = re.compile(r'asm\s+(?:sideeffect\s+)?"([^"]*)", "[^"]*"\s*\(')

#: The PTX instructions of arithmetic, in LLVM.
_PRELUDE = """
declare float @llvm.maximum.f32(float, float)
declare float @llvm.minimum.f32(float, float)
define i32 @divided(i32 %a, i32 %b) { %n = icmp eq i32 %b, -1
  %z = icmp eq i32 %b, 0
  %o = or i1 %n, %z
  %s = select i1 %o, i32 1, i32 %b
  %q = sdiv i32 %a, %s
  %m = sub i32 0, %q
  %r = select i1 %n, i32 %m, i32 %q
  ret i32 %r }
declare float @cvt_f32_f16(i16)
declare i16 @cvt_rn_f16_f32(float)
declare i16 @cvt_rn_f16_f64(double)
define i16 @cvt_rn_bf16_f32(float %x) { %i = bitcast float %x to i32
  %s = lshr i32 %i, 16
  %odd = and i32 %s, 1
  %b = add i32 %odd, 32767
  %r = add i32 %i, %b
  %t = lshr i32 %r, 16
  %nan = fcmp uno float %x, 0.0
  %o = select i1 %nan, i32 32704, i32 %t
  %w = trunc i32 %o to i16
  ret i16 %w }
define float @max_NaN_f32(float %a, float %b) { %r = call float @llvm.maximum.f32(float %a, float %b)
  ret float %r }
define float @min_NaN_f32(float %a, float %b) { %r = call float @llvm.minimum.f32(float %a, float %b)
  ret float %r }
""" + "".join(f"""
define i{bits} @max_s{bits}(i{bits} %a, i{bits} %b) {{ %c = icmp sgt i{bits} %a, %b
  %r = select i1 %c, i{bits} %a, i{bits} %b
  ret i{bits} %r }}
""" for bits in (32, 64)) + "".join(f"""
define i16 @{name}_NaN_f16(i16 %a, i16 %b) {{ %x = call float @cvt_f32_f16(i16 %a)
  %y = call float @cvt_f32_f16(i16 %b)
  %m = call float @llvm.{full}.f32(float %x, float %y)
  %r = call i16 @cvt_rn_f16_f32(float %m)
  ret i16 %r }}
define i16 @{name}_NaN_bf16(i16 %a, i16 %b) {{ %p = zext i16 %a to i32
  %q = shl i32 %p, 16
  %x = bitcast i32 %q to float
  %s = zext i16 %b to i32
  %t = shl i32 %s, 16
  %y = bitcast i32 %t to float
  %m = call float @llvm.{full}.f32(float %x, float %y)
  %r = call i16 @cvt_rn_bf16_f32(float %m)
  ret i16 %r }}
""" for name, full in (("max", "maximum"), ("min", "minimum"))) + "".join(f"""
define i16 @{name}_rn_f16(i16 %a, i16 %b) {{ %x = call float @cvt_f32_f16(i16 %a)
  %y = call float @cvt_f32_f16(i16 %b)
  %m = f{name} float %x, %y
  %r = call i16 @cvt_rn_f16_f32(float %m)
  ret i16 %r }}
""" for name in ("add", "sub", "mul"))

def _bits_of_half(x: float) -> int:
    with np.errstate(all="ignore"):
        return int(np.float64(x).astype(np.float16).view(np.uint16))


#: Conversions of float16, which processors have not all: a float32 is a float64, and both are rounded once.
_HALF = {"cvt_f32_f16": ctypes.CFUNCTYPE(ctypes.c_float, ctypes.c_uint16)(lambda x: float(np.uint16(x).view(np.float16))),
         "cvt_rn_f16_f32": ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_float)(_bits_of_half),
         "cvt_rn_f16_f64": ctypes.CFUNCTYPE(ctypes.c_uint16, ctypes.c_double)(_bits_of_half)}

_TESTS = {f"__nv_{name}": ctypes.CFUNCTYPE(ctypes.c_int32, kind)(test) for names, kind in (
    (("isnanf", "isinff", "finitef"), ctypes.c_float), (("isnand", "isinfd", "isfinited"), ctypes.c_double))
    for name, test in zip(names, (math.isnan, math.isinf, math.isfinite))}

_ready: list[Any] = []


def _machine() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(opt=1, codemodel="large", jit=True)


def _engine() -> Any:
    if not _ready:
        libm = ctypes.CDLL(util.find_library("m"))
        for name in ("acos acosh asin asinh atan atan2 atanh copysign cos cosh erf erfc exp expm1 fabs floor ceil trunc fmod hypot "
                     "ldexp lgamma llrint tgamma log log10 log1p log2 pow rint sin sinh sqrt tan tanh round").split():
            for suffix in ("", "f"):
                llvm.add_symbol(f"__nv_{name}{suffix}", ctypes.cast(getattr(libm, name + suffix), ctypes.c_void_p).value)
        for name, callback in (_HALF | _TESTS).items():
            llvm.add_symbol(name, ctypes.cast(callback, ctypes.c_void_p).value)
        _ready.extend([llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine()), libm])
    return _ready[0]


def _portable(text: str) -> str:
    """LLVM code for any processor: no target, no debug information, opaque pointers, no inline assembly."""
    text = re.sub(r"^(target|attributes|!).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r",? ![a-z]+ ![0-9]+", "", text)
    text = _ASM.sub(lambda match: "@" + re.sub(r"[^A-Za-z0-9]", "_", match[1].split(" ")[0]) + "(", text)
    # coordinates divided by zero: a GPU gives some number, this processor ends the process
    text = re.sub(r"= sdiv i32 (\S+), (\S+)", r"= call i32 @divided(i32 \1, i32 \2)", text)
    for _ in range(3):
        text = re.sub(r"(\{[^{}]*\}|\[[^\[\]]*\]|\b(?:i\d+|float|double|ptr|%\"[^\"]*\"))\*", "ptr", text)
    text = re.sub(r"^(declare|define) (.*?) ?(alwaysinline|noinline|nounwind|readnone| )*$", r"\1 \2", text, flags=re.MULTILINE)
    return text


_C = {"?": ctypes.c_int8, **{f"{k}{n}": getattr(ctypes, f"c_{'u' if k == 'u' else ''}int{8 * n}") for k in "iu" for n in (1, 2, 4, 8)},
      "f4": ctypes.c_float, "f8": ctypes.c_double}


def _field(dtype: np.dtype) -> Any:
    if dtype == BOOL:
        return ctypes.c_int8
    found = _C.get(dtype.str[1:])
    return found if found is not None else ctypes.c_uint16    # narrow floats, as their bits


def host_function(text: str, name: str, count: int) -> Callable[..., int]:
    """A function of LLVM's code, of so many integers, as one of Python's."""
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(text), _machine())
    engine.finalize_object()
    call = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int32] * count)(engine.get_function_address(name))
    call.engine = engine                                      # type: ignore[attr-defined]
    return call


def on_host(function: Callable[..., tuple], types: Sequence[Any], operands: Sequence[np.dtype],
            results: Sequence[np.dtype]) -> Callable[..., list]:
    """The device code of a function that returns a tuple, callable with NumPy scalars of ``operands``; it gives those of
    ``results``."""
    engine = _engine()
    compiled = device(function).compile(tuple(types))
    text = "\n".join(module for module in [compiled.library.get_llvm_str()])
    module = llvm.parse_assembly(_portable(text) + _missing(_PRELUDE))
    module.verify()
    unknown = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")
               and llvm.address_of_symbol(f.name) is None]
    if unknown:                                               # calling one would end the process
        raise NotImplementedError(f"{', '.join(unknown)} on this machine")
    engine.add_module(module)
    engine.finalize_object()
    address = engine.get_function_address(compiled.fndesc.llvm_func_name)
    record = type("Results", (ctypes.Structure,), {"_fields_": [(f"r{n}", _field(d)) for n, d in enumerate(results)]})
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[_field(d) for d in operands])(address)

    def run(*values: Any) -> list:
        out = record()
        given = [int(v) if d == BOOL or (_field(d) is not ctypes.c_uint16 and d.kind in "iu") else
                 float(v) if d.str[1:] in ("f4", "f8") else int(np.asarray(v, d).view(np.uint16)) for v, d in zip(values, operands)]
        call(ctypes.addressof(out), *given)
        return [_scalar(getattr(out, f"r{n}"), d) for n, d in enumerate(results)]

    run.module = module                                       # type: ignore[attr-defined]
    return run


def _missing(prelude: str) -> str:
    return re.sub(r"^define ", "define internal ", prelude, flags=re.MULTILINE)


def _scalar(value: Any, dtype: np.dtype) -> Any:
    if dtype == BOOL:
        return np.bool_(value)
    if _field(dtype) is ctypes.c_uint16 and dtype != np.uint16:
        return np.uint16(value).view(dtype)
    return dtype.type(value)


__all__ = ["on_host"]
