"""How device functions call each other, in LLVM's code, and what of gemmkit's memory loading Numba leaves alone."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from llvmlite import ir

import gemmkit as gk
from gemmkit import inspection, layouts, operators
from gemmkit.lang import calls, functions
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.device import H100

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
def test_a_call_compares_its_status_once(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    to_asm = compiling.to_asm

    def seen(library: object, cc: tuple) -> str:
        texts.extend(map(str, library.modules))               # type: ignore[attr-defined]
        return to_asm(library, cc)

    monkeypatch.setattr(compiling, "to_asm", seen)
    functions._forget_all()                                   # other tests compile the same functions, and count them
    inspection.compile_config(CONF, device=H100)
    functions._forget_all()
    ours = [name for text in texts for name in re.findall(r'(%"[^"]*") = call i32 @"_ZN7gemmkit', text)]
    assert len(ours) > 20
    for text in texts:
        for name in re.findall(r'(%"[^"]*") = call i32 @"_ZN7gemmkit', text):
            assert len(re.findall(rf"icmp \w+ i32 {re.escape(name)},", text)) == 1
    assert not any('call void @"llvm.dbg.' in text for text in texts)


PROGRAM = """
import gemmkit
from gemmkit.lang import fingerprint, later
kept = fingerprint._outsides
later.load()
assert fingerprint._outsides is kept
"""


def test_what_was_read_is_kept_when_numba_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
