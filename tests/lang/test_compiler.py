"""What gemmkit changes of numba-cuda: no code, no answer, nothing of other people's kernels; how device functions call each
other."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
from abc import ABCMeta
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llvmlite import ir as ir_of_calls
from numba.cuda import cgutils as numba_cgutils
from numba.cuda import lowering as numba_lowering
from numba.cuda import types as types_of_calls
from numba.cuda import types as types_of_shortcuts
from numba.cuda.core import base, ir
from numba.cuda.core.postproc import PostProcessor

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.components import freeze
from gemmkit.lang import compile, deferred, functions, lowering
from gemmkit.lang import lowering as calls
from gemmkit.lang.compile import contexts
from gemmkit.lang.numba_hooks import operation, signature, types
from gemmkit.plans import ahead
from gemmkit.runtime import compile as compiling
from gemmkit.runtime import compile as nvvm
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import H100
from tests.support.lang.on_host import host_function
from tests.support.patches import Seeded

# ==========================================================================================================================
# Functions compile without what surrounds the work; what somebody relies on is still done.

ROOT = Path(__file__).resolve().parents[2]
OUT = freeze(np.zeros(16, "f4")).type


def ptx(kernel: Any, *arguments: Any) -> str:
    return to_ptx(kernel, (OUT, *(freeze(a).type for a in arguments)), 32, H100)


def loops(out: Any) -> None:
    i = 0
    while i < 16:
        i += 1
        if out[i - 1] > 3:
            continue                                           # two ways back to the head of the loop
        if out[i - 1] < -3:
            break
        out[i - 1] = 1


@pytest.mark.compile
@pytest.mark.parametrize("enabled", [True, False])
def test_the_garbage_collector_is_as_it_was(enabled: bool) -> None:
    """Also after an error, and Numba's own functions are analysed as ever."""
    def wrong(out: Any) -> None:
        out[0] = out.nothing

    analyse = PostProcessor.run
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert ".visible .entry" in ptx(loops)
        assert gc.isenabled() == enabled and PostProcessor.run is analyse
        with pytest.raises(Exception, match="nothing"):
            ptx(wrong)
        assert gc.isenabled() == enabled and PostProcessor.run is analyse
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.compile
def test_an_operation_registered_after_a_compilation_is_found() -> None:
    def uses(out: Any) -> None:
        out[0] = divmod(out[0], out)

    ptx(loops)

    @operation(divmod)
    def _divmod(context: Any, *args: Any) -> Any:
        if len(args) != 2 or not isinstance(args[1], type(OUT)):
            return None
        return signature(types.float32, *args), lambda c, b, s, v: b.fadd(v[0], v[0])

    assert ".visible .entry" in ptx(uses)


SCRIPT = """
import sys
from tests.lang.test_compiler import loops, ptx
ptx(loops)
assert "scipy.linalg" not in sys.modules
assert not any(getattr(f, "__qualname__", "").startswith("_absent") for f in sys.meta_path)
import scipy.linalg
assert scipy.linalg.det([[2.0]]) == 2.0
"""


@pytest.mark.compile
@pytest.mark.kin(3)
def test_scipy_is_not_loaded_and_can_be() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_module_is_absent_in_one_thread_for_the_time_being() -> None:
    import importlib
    import threading

    outcomes = []
    name = "colorsys"
    sys.modules.pop(name, None)
    with compile._absent(name):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(name)
        other = threading.Thread(target=lambda: outcomes.append(importlib.import_module(name)))
        other.start()
        other.join()
    assert outcomes and importlib.import_module(name) is outcomes[0]


class _Node:
    """Refers to itself: only the collector frees it."""

    __slots__ = ("itself",)
    alive = 0

    def __init__(self) -> None:
        self.itself = self
        _Node.alive += 1

    def __del__(self) -> None:
        _Node.alive -= 1


@pytest.fixture
def walks(replaced: Seeded) -> Iterator[list[str]]:
    """The collector's walks from now on, the first when a thousand objects were set aside."""
    seen: list[str] = []

    def noted(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            seen.append(phase)

    for name, value in dict(_LEAST=1000, _made=0, _alive=0).items():
        replaced(deferred, name, value)
    gc.callbacks.append(noted)
    yield seen
    gc.callbacks.remove(noted)


def leave(objects: int) -> None:
    """What a compilation does."""
    with deferred.without_collections():
        assert not gc.isenabled()
        for _ in range(objects):
            _Node()


def test_what_compilations_leave_is_found(walks: list[str]) -> None:
    """Not at once, but before it is much; and the collector runs again, over all objects."""
    frozen = gc.get_freeze_count()                             # (Python 3.12 begins with some)
    for number in range(1, 4):
        leave(300)
        assert _Node.alive >= 300 * number and not walks
    leave(300)
    assert _Node.alive == 0 and len(walks) == 1
    assert gc.isenabled() and gc.get_freeze_count() == frozen


def test_a_walk_waits_until_as_much_was_made_as_is_alive(walks: list[str], replaced: Seeded) -> None:
    replaced(gc, "collect", lambda: walks.append("asked for"))
    leave(1200)
    assert len(walks) == 1 and deferred._alive > 10_000          # after the first it is known what is alive
    replaced(deferred, "_alive", 10_000)
    for walked in (1, 1, 2):
        leave(4000)
        assert len(walks) == walked


@pytest.mark.usefixtures("quick_collections")
def test_frozen_objects_stay_frozen(walks: list[str]) -> None:
    gc.collect()
    gc.freeze()
    try:
        frozen, before = gc.get_freeze_count(), len(walks)
        for _ in range(4):
            leave(300)
        assert gc.get_freeze_count() > frozen // 2 and len(walks) == before + 1
    finally:
        gc.unfreeze()


def inner_function(out: Any) -> None:
    def twice(y: float) -> float:
        return y + y

    out[0] = twice(out[1])


def no_inner_function(out: Any) -> None:
    out[0] = out[1] + out[1]


@pytest.mark.compile
def test_inner_functions_are_inlined() -> None:
    """What has one goes through Numba's own pass; what has none through the short one. The code is the same."""
    one, other = (re.findall(r"^\t((?:ld|add|mul|fma|st|ret)\b.*);", ptx(f), re.MULTILINE)
                  for f in (inner_function, no_inner_function))
    assert one == other and [line.split(".")[0] for line in one] == ["ld", "ld", "add", "st", "ret"]


# ==========================================================================================================================
# What a first call leaves out changes no answer of Numba's, and no code.

CONF = gk.get_config(operator=operators.FPUOp(M=16, N=16), global_a_layout=layouts.RowMajor("float32"), device=H100)


def recursive(value: Any) -> list:
    """Numba's ``Inst._rec_list_vars``, as it is written there."""
    if isinstance(value, ir.var_types):
        return [value]
    if isinstance(value, ir.inst_types):
        return recursive(value._kws if isinstance(value, ir.Expr) else vars(value))
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [found for each in values for found in recursive(each)]


@pytest.mark.kin(1)
@pytest.mark.compile
def test_variables_are_those_that_numba_finds(replaced: Seeded) -> None:
    """In every function of a kernel: which ones a statement names, and which need no slot. These are Numba's, read in one
    block alone, and those whose readers no way reaches past the assignment."""
    ours, seen, more = lowering.Lower._find_singly_assigned_variable, [], set()

    def find(self: Any) -> None:
        numba_lowering.Lower._find_singly_assigned_variable(self)
        numbas = self._singly_assigned_vars
        ours(self)
        found = self._singly_assigned_vars
        more.update(found - numbas)
        seen.append(numbas <= found and all(_comes_first(self.blocks, name) for name in found - numbas)
                    and all(s.list_vars() == recursive(vars(s)) for block in self.blocks.values() for s in block.body))

    replaced(lowering.Lower, "_find_singly_assigned_variable", find)
    ahead.compile_config(CONF, device=H100)
    assert len(seen) > 20 and all(seen) and len(more) > 20


def _comes_first(blocks: dict, name: str) -> bool:
    """Whether a variable is assigned once, in a block without which no way leads from the first to any of its readers."""
    where = [label for label, block in blocks.items() for s in block.find_insts(ir.Assign) if s.target.name == name]
    reached, ways = set(), [next(iter(blocks))]
    while ways:
        label = ways.pop()
        if label not in reached and label not in where:
            reached.add(label)
            ways += blocks[label].terminator.get_targets()
    return len(where) == 1 and not any(name in {v.name for v in s.list_vars()} for label in reached for s in blocks[label].body)


@pytest.mark.compile
def test_ptx_is_numbas(replaced: Seeded) -> None:
    """NVVM makes the same of each module once, without NVRTC and without the mathematical functions that nothing calls."""
    made: list[str] = []
    to_asm = nvvm.to_asm

    def both(library: Any, cc: tuple) -> str:
        made.append(to_asm(library, cc))
        library._llvm_strs = [nvvm._without_variables(str(module)) for module in library.modules]
        made.extend(library.get_asm_strs(cc=cc))
        return made[0]

    replaced(nvvm, "to_asm", both)
    ahead.compile_config(CONF, device=H100)
    assert len(made) == 2 and made[0] == made[1]


def test_numba_types_have_no_virtual_subclasses() -> None:
    """So Python's own ``isinstance`` answers as theirs did."""
    classes = [cls for cls in vars(types_of_shortcuts).values() if isinstance(cls, type) and issubclass(cls, types_of_shortcuts.Type)]
    values = [types_of_shortcuts.int32, types_of_shortcuts.float64, types_of_shortcuts.boolean, types_of_shortcuts.UniTuple(types_of_shortcuts.int8, 2), types_of_shortcuts.literal(3), types_of_shortcuts.none]
    assert len(classes) > 40
    for cls in classes:
        assert [isinstance(v, cls) for v in values] == [ABCMeta.__instancecheck__(cls, v) for v in values]
        assert [issubclass(c, cls) for c in classes] == [ABCMeta.__subclasscheck__(cls, c) for c in classes]


def test_parameters_called_loc() -> None:
    assert base._has_loc is compile._has_loc
    for function in (lambda a, loc: 0, lambda a: [a for loc in a], lambda a, *, loc=None: 0, base.BaseContext.cast, compile.install):
        assert compile._has_loc(function) == compile._by_signature(function)


PROGRAM = """
import gc
from gemmkit.lang import deferred as later
walks = []
gc.callbacks.append(lambda phase, info: walks.append(phase))
gc.collect(); walks.clear()
later.load()
assert gc.isenabled() and len(walks) <= 2, walks
from tests.lang.test_compiler import CONF, ahead, H100
ahead.compile_config(CONF, device=H100)
assert "libnvrtc.so" not in open("/proc/self/maps").read()
"""


@pytest.mark.compile
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.kin(3)
def test_a_first_call_neither_collects_while_it_loads_nor_loads_nvrtc() -> None:
    assert deferred._State.loaded
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


# ==========================================================================================================================
# How device functions call each other, and structs without slots, in LLVM's code; and what of gemmkit's memory loading Numba
# leaves alone.

I32, F32 = ir_of_calls.IntType(32), ir_of_calls.FloatType()


def test_what_is_handed_over_as_it_is() -> None:
    many = ir_of_calls.ArrayType(F32, 64)
    assert all(map(calls._is_whole, (I32, F32, ir_of_calls.PointerType(I32), many, ir_of_calls.ArrayType(many, 2))))
    pair = ir_of_calls.LiteralStructType([I32, I32])
    assert not any(map(calls._is_whole, (ir_of_calls.ArrayType(I32, 2), pair, ir_of_calls.LiteralStructType([]), ir_of_calls.ArrayType(pair, 64))))


def test_what_is_empty() -> None:
    nothing = ir_of_calls.LiteralStructType([])
    assert calls.is_empty(nothing) and calls.is_empty(ir_of_calls.LiteralStructType([nothing, nothing]))
    assert not any(map(calls.is_empty, (I32, ir_of_calls.LiteralStructType([nothing, I32]))))


@pytest.mark.kin(1)
@pytest.mark.compile
def test_a_call_has_no_status(replaced: Seeded) -> None:
    texts: list[str] = []
    to_asm = compiling.to_asm

    def seen(library: object, cc: tuple) -> str:
        texts.extend(map(str, library.modules))               # type: ignore[attr-defined]
        return to_asm(library, cc)

    replaced(compiling, "to_asm", seen)
    functions._forget_all()                                   # other tests compile the same functions, and count them
    ahead.compile_config(CONF, device=H100)
    functions._forget_all()
    found = [kind for text in texts for kind in re.findall(r'call (\S+) @"_ZN7gemmkit', text)]
    assert len(found) > 20 and set(found) == {"void"}
    assert not any('call void @"llvm.dbg.' in text for text in texts)


PROGRAM_CALLS = """
import gemmkit
from gemmkit.lang import deferred as later, fingerprint
kept = fingerprint._outsides
later.load()
assert fingerprint._outsides is kept
"""


@pytest.mark.kin(3)
def test_what_was_read_is_kept_when_numba_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM_CALLS], check=True)


# -- structs without slots ----------------------------------------------------------------------------------------------

@pytest.mark.kin(1)
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
    module = ir_of_calls.Module()
    function = ir_of_calls.Function(module, ir_of_calls.FunctionType(I32, [I32] * 3), "drawn")
    builder = lowering._Builder(function.append_basic_block("entry"))
    pair = type("Drawn", (struct,), {"_fe_type": types_of_calls.Pair(types_of_calls.int32, types_of_calls.int32)})(context, builder)
    pair.first, pair.second = function.args[1], function.args[2]
    for n, (kind, to, taken) in enumerate(drawn):
        def put(to: int = to, taken: int = taken) -> None:
            value = (pair.first, pair.second, *function.args[1:])[taken]
            name = ("first", "second")[to % 2]
            setattr(pair, name, builder.add(builder.mul(getattr(pair, name), ir_of_calls.Constant(I32, 3)), value))

        if kind == 0:
            put()
        elif kind == 1:
            builder.load(pair._getpointer())
        else:
            bit = builder.and_(builder.lshr(function.args[0], ir_of_calls.Constant(I32, n % 3)), ir_of_calls.Constant(I32, 1))
            with builder.if_then(builder.icmp_unsigned("!=", bit, ir_of_calls.Constant(I32, 0))):
                put()
    whole = pair._getvalue()
    builder.ret(builder.xor(builder.extract_value(whole, 0), builder.mul(builder.extract_value(whole, 1), ir_of_calls.Constant(I32, 7))))
    return host_function(str(module), "drawn", 3)


def test_what_was_put_in_comes_out() -> None:
    function = ir_of_calls.Function(ir_of_calls.Module(), ir_of_calls.FunctionType(I32, [I32, I32]), "f")
    builder = lowering._Builder(function.append_basic_block("entry"))
    inner = ir_of_calls.LiteralStructType([I32, I32])
    a, b = function.args
    of_two = builder.insert_value(builder.insert_value(ir_of_calls.Constant(inner, None), a, 0), b, 1)
    whole = builder.insert_value(ir_of_calls.Constant(ir_of_calls.LiteralStructType([inner, I32]), ir_of_calls.Undefined), of_two, 0)
    assert builder.extract_value(whole, [0, 1]) is b and builder.extract_value(whole, 0) is of_two
    assert builder.extract_value(builder.insert_value(whole, a, [0, 1]), [0, 0]) is a
    assert str(builder.extract_value(whole, 1)) == "i32 undef"
    assert str(builder.extract_value(ir_of_calls.Constant(inner, [ir_of_calls.Constant(I32, 4), ir_of_calls.Constant(I32, 5)]), 1)) == "i32 5"
    changed = builder.insert_value(whole, a, [0, 0])
    assert isinstance(builder.extract_value(changed, 0), ir_of_calls.ExtractValue)              # a part of it is another one


# ==========================================================================================================================
# Other people's numba-cuda kernels are typed just as they were, gemmkit imported or not.

#: Run in a process of its own: prints the types that numba-cuda gives to plain functions.
PROGRAM_FOREIGN = """
import json, math, sys
if sys.argv[1] == "with":
    import gemmkit
    from gemmkit import operators, layouts
    from gemmkit.lang.functions import device
    from numba.cuda import types
    device(lambda x: x * 2 + 1.0 if x > 0 else 0).compile((types.float32,))       # and its machinery used
import numpy as np
from numba import cuda
from numba.cuda import types

def loop(x):
    total = 0
    for i in range(x):
        total += i
    return total

def accumulate(x):
    total = 0
    for i in range(4):
        total += x * 2
    return total

FUNCTIONS = {
    "x + 1.0": lambda x: x + 1.0, "x * 2": lambda x: x * 2, "x - 1": lambda x: x - 1, "-x": lambda x: -x,
    "x // 3": lambda x: x // 3, "x % 4": lambda x: x % 4, "x / 2": lambda x: x / 2, "x ** 2": lambda x: x ** 2,
    "min": lambda x: min(x, 1), "max": lambda x: max(x, 0.5), "ternary": lambda x: x if x > 0 else 0,
    "constants": lambda x: 1.0 if x > 0 else 2, "compare": lambda x: x < 2.5, "abs": lambda x: abs(x),
    "pow": lambda x: math.pow(x, 2.0), "exp": lambda x: math.exp(x), "pi": lambda x: x * math.pi,
    "np.float32": lambda x: np.float32(x), "float": lambda x: float(x), "int": lambda x: int(x),
    "bool": lambda x: bool(x), "tuple": lambda x: (x, 1, 2.0)[0], "item": lambda x: (x, x)[1], "len": lambda x: len((x, x)),
    "accumulate": accumulate,
}
out = {}
for ty in (types.float32, types.float64, types.int32, types.int64, types.uint8):
    for name, function in {**FUNCTIONS, **({"loop": loop} if isinstance(ty, types.Integer) else {})}.items():
        _, result = cuda.compile(function, (ty,), cc=(9, 0), device=True, output="ptx")
        out[f"{name} of {ty}"] = str(result)
print(json.dumps(out))
"""


def types_in_a_process(how: str) -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM_FOREIGN, how], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    return dict(json.loads(done.stdout))


@pytest.mark.thorough
def test_plain_functions_keep_their_types() -> None:
    alone, beside = types_in_a_process("without"), types_in_a_process("with")
    assert beside == alone
    assert alone["x + 1.0 of float32"] == alone["x * 2 of float32"] == "float64" and alone["x - 1 of int32"] == "int64"


def test_captures_of_closures_with_names_alike_are_other_types() -> None:
    """Texts of closures are cut to their last letters in names; Numba takes types of one key for one."""
    from gemmkit.lang.functions import ClosureType
    from gemmkit.lang.passes import CapturesType

    inner = functions.device(lambda x: x)
    nothing, number = CapturesType({}), CapturesType({"x": types_of_calls.int32})
    one, other = (ClosureType(inner, f"{word}_part.<lambda>", word, of) for word, of in (("row", nothing), ("column", number)))
    assert one.name == other.name and one != other
    assert CapturesType({"f": one}) != CapturesType({"f": other})
