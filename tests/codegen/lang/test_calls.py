"""How device functions call each other, and structs without slots, in LLVM's code; and what of gemmkit's memory loading Numba
leaves alone."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from llvmlite import ir
from numba.cuda import cgutils as numba_cgutils
from numba.cuda import types

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.lang import functions, lowering
from gemmkit.lang import lowering as calls
from gemmkit.lang.compile import contexts
from gemmkit.plans import ahead
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.device import H100
from tests.support.lang.on_host import host_function

I32, F32 = ir.IntType(32), ir.FloatType()
CONF = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"), device=H100)


def test_what_is_handed_over_as_it_is() -> None:
    many = ir.ArrayType(F32, 64)
    assert all(map(calls._is_whole, (I32, F32, ir.PointerType(I32), many, ir.ArrayType(many, 2))))
    pair = ir.LiteralStructType([I32, I32])
    assert not any(map(calls._is_whole, (ir.ArrayType(I32, 2), pair, ir.LiteralStructType([]), ir.ArrayType(pair, 64))))


def test_what_is_empty() -> None:
    nothing = ir.LiteralStructType([])
    assert calls.is_empty(nothing) and calls.is_empty(ir.LiteralStructType([nothing, nothing]))
    assert not any(map(calls.is_empty, (I32, ir.LiteralStructType([nothing, I32]))))


@pytest.mark.compile
def test_a_call_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    to_asm = compiling.to_asm

    def seen(library: object, cc: tuple) -> str:
        texts.extend(map(str, library.modules))               # type: ignore[attr-defined]
        return to_asm(library, cc)

    monkeypatch.setattr(compiling, "to_asm", seen)
    functions._forget_all()                                   # other tests compile the same functions, and count them
    ahead.compile_config(CONF, device=H100)
    functions._forget_all()
    found = [kind for text in texts for kind in re.findall(r'call (\S+) @"_ZN7gemmkit', text)]
    assert len(found) > 20 and set(found) == {"void"}
    assert not any('call void @"llvm.dbg.' in text for text in texts)


PROGRAM = """
import gemmkit
from gemmkit.lang import deferred as later, fingerprint
kept = fingerprint._outsides
later.load()
assert fingerprint._outsides is kept
"""


def test_what_was_read_is_kept_when_numba_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


# -- structs without slots ----------------------------------------------------------------------------------------------

def test_fields_set_on_different_ways() -> None:
    """Drawn functions set and read a struct's fields in blocks that depend on an argument: what comes out is what slots give."""
    generator = np.random.default_rng(42)
    for _ in range(60):
        drawn = generator.integers(0, 4, (6, 3)).tolist()
        made = {struct: _compiled_fields(struct, drawn) for struct in (numba_cgutils.ValueStructProxy, lowering._Fields)}
        for given in range(8):
            first, second = (call(given, 3, 5) for call in made.values())
            assert first == second, (drawn, given)


def _compiled_fields(struct: type, drawn: list) -> Any:
    """A function of three integers: for each of the drawn lines a field is set from another one, or from an argument, if a
    bit of the first argument says so, or always."""
    _, context = contexts()
    module = ir.Module()
    function = ir.Function(module, ir.FunctionType(I32, [I32] * 3), "drawn")
    builder = lowering._Builder(function.append_basic_block("entry"))
    pair = type("Drawn", (struct,), {"_fe_type": types.Pair(types.int32, types.int32)})(context, builder)
    pair.first, pair.second = function.args[1], function.args[2]
    for n, (kind, to, taken) in enumerate(drawn):
        def put(to: int = to, taken: int = taken) -> None:
            value = (pair.first, pair.second, *function.args[1:])[taken]
            name = ("first", "second")[to % 2]
            setattr(pair, name, builder.add(builder.mul(getattr(pair, name), ir.Constant(I32, 3)), value))

        if kind == 0:
            put()
        elif kind == 1:
            builder.load(pair._getpointer())
        else:
            bit = builder.and_(builder.lshr(function.args[0], ir.Constant(I32, n % 3)), ir.Constant(I32, 1))
            with builder.if_then(builder.icmp_unsigned("!=", bit, ir.Constant(I32, 0))):
                put()
    whole = pair._getvalue()
    builder.ret(builder.xor(builder.extract_value(whole, 0), builder.mul(builder.extract_value(whole, 1), ir.Constant(I32, 7))))
    return host_function(str(module), "drawn", 3)


def test_what_was_put_in_comes_out() -> None:
    function = ir.Function(ir.Module(), ir.FunctionType(I32, [I32, I32]), "f")
    builder = lowering._Builder(function.append_basic_block("entry"))
    inner = ir.LiteralStructType([I32, I32])
    a, b = function.args
    of_two = builder.insert_value(builder.insert_value(ir.Constant(inner, None), a, 0), b, 1)
    whole = builder.insert_value(ir.Constant(ir.LiteralStructType([inner, I32]), ir.Undefined), of_two, 0)
    assert builder.extract_value(whole, [0, 1]) is b and builder.extract_value(whole, 0) is of_two
    assert builder.extract_value(builder.insert_value(whole, a, [0, 1]), [0, 0]) is a
    assert str(builder.extract_value(whole, 1)) == "i32 undef"
    assert str(builder.extract_value(ir.Constant(inner, [ir.Constant(I32, 4), ir.Constant(I32, 5)]), 1)) == "i32 5"
    changed = builder.insert_value(whole, a, [0, 0])
    assert isinstance(builder.extract_value(changed, 0), ir.ExtractValue)              # a part of it is another one
