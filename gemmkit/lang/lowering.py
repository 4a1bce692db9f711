"""From typed intermediate code to LLVM's: Numba's lowering, in values in place of slots on the stack.

A kernel is a hundred small functions, and NVVM inlines all of them before it simplifies any. NVVM meets what a function says
too much again in each of its places: of a float32 kernel NVVM met 253,000 lines with 18,700 slots, and took them apart for 5
of a first call's 12 seconds. Now they are 92,000 lines with 4,000 slots, and the machine code is the same (tools.sass_gate).

* A variable that is assigned once, on all ways to what reads it, is a value (Numba: within one block alone).
* A struct's fields are taken from a value and put into one (Numba: through a slot that is zeroed twice).
* A field of a struct that was put together here is the value that was put in; parts that nothing reads are left out.
* A slot is not read before each assignment, nor described to a debugger. (Numba does both: it would drop a reference.)

The zeroes where a function begins, and what is done when a slot is gone, stay: without them LLVM makes other code of some
kernels.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils, itanium_mangler, types
from numba.cuda.core import ir as numba_ir
from numba.cuda.core.analysis import compute_cfg_from_blocks, must_use_alloca
from numba.cuda.core.callconv import CUDACallConv, Status
from numba.cuda.core.errors import LoweringError, new_error_context
from numba.cuda.core.funcdesc import FunctionDescriptor
from numba.cuda.debuginfo import CUDADIBuilder
from numba.cuda.lowering import CUDALower
from numba.cuda.target import CUDATargetContext

from gemmkit.lang.numba_hooks import compiles_users, inlines_calls

# --------------------------------------------------------------------------------------------------
# How one device function calls another: without a status.
#
# Numba hands over every number of every tuple by itself, and returns a status, which each caller compares and hands on.
# Device code raises nothing, so here a function returns nothing but its result, and large arrays are handed over as they
# are. NVVM inlines all calls, and statuses were half of the time that it took.
#
# A result has a place on the stack that its caller gives, as Numba's have: of results that are values NVVM makes other
# code, in a third less time (tools.sass_gate: 17 % slower where A lies across K in registers, 29 % with tiles staged for
# clusters).

_MANY = 32                             # numbers of an array


def is_empty(ty: ir.Type) -> bool:
    """Whether values of an LLVM type hold nothing."""
    return isinstance(ty, ir.LiteralStructType) and all(map(is_empty, ty.elements))


def _is_whole(ty: ir.Type) -> bool:
    """Whether an argument is handed over as it is: a number, a pointer, or an array of many."""
    is_array, count = isinstance(ty, ir.ArrayType), 1
    while isinstance(ty, ir.ArrayType):
        count, ty = count * ty.count, ty.element
    return not isinstance(ty, ir.LiteralStructType) and (count >= _MANY or not is_array)


class Calls(CUDACallConv):
    """The calling convention of device functions. A name needs no types of arguments: its number in this process tells two
    forms of one function apart."""

    needs_env = False

    def __init__(self, context: CUDATargetContext):
        super().__init__(context)
        self._packers: dict[Any, Any] = {}

    def mangler(self, name: str, argtypes: tuple, *, abi_tags: tuple = (), uid: int | None = None) -> str:
        return str(itanium_mangler.mangle(name, (), uid=uid))

    def _packer(self, ty: types.Type) -> Any:
        """What takes an argument apart, or None where it is whole."""
        if ty not in self._packers:
            whole = _is_whole(self.context.get_value_type(ty))
            self._packers[ty] = None if whole else self._get_arg_packer((ty,))
        return self._packers[ty]

    def get_function_type(self, restype: types.Type, argtypes: tuple) -> Any:
        given: list = [self._result_type(restype).as_pointer()]
        for ty in argtypes:
            packer = self._packer(ty)
            given += [self.context.get_value_type(ty)] if packer is None else packer.argument_types
        return ir.FunctionType(ir.VoidType(), given)

    def _result_type(self, ty: types.Type) -> Any:
        return self.context.get_value_type(ty) if isinstance(ty, types.Optional) else self.get_return_type(ty).pointee

    def decorate_function(self, fn: ir.Function, args: Any, fe_argtypes: tuple, noalias: bool = False) -> None:
        pass                                                  # names for a debugger

    def decode_arguments(self, builder: ir.IRBuilder, argtypes: tuple, func: ir.Function) -> tuple:
        given = iter(self.get_arguments(func))
        return tuple(value for ty in argtypes for value in self._decoded(builder, self._packer(ty), given))

    def _decoded(self, builder: ir.IRBuilder, packer: Any, given: Iterator) -> Any:
        if packer is None:
            return (next(given),)
        return packer.from_arguments(builder, tuple(next(given) for _ in packer.argument_types))

    # -- results ------------------------------------------------------------------------------------------------------

    def return_value(self, builder: ir.IRBuilder, retval: ir.Value) -> None:
        builder.store(retval, builder.function.args[0])
        builder.ret_void()

    def return_optional_value(self, builder: ir.IRBuilder, retty: types.Type, valty: types.Type, value: ir.Value) -> None:
        self.return_value(builder, self.context.cast(builder, value, valty, retty))

    def return_user_exc(self, builder: ir.IRBuilder, *_given: object, **_keywords: object) -> None:
        """For an index beyond a tuple's end, which the emulator reports: what comes back says nothing."""
        builder.ret_void()

    def return_status_propagate(self, builder: ir.IRBuilder, status: Status) -> None:
        """Of one of Numba's own functions: there is nothing to be handed on."""

    def call_function(self, builder: ir.IRBuilder, callee: ir.Function, resty: types.Type, argtys: tuple,
                      args: Sequence[ir.Value]) -> tuple[Any, Any]:
        given: list = []
        for ty, value in zip(argtys, args):
            packer = self._packer(ty)
            given += [value] if packer is None else packer.as_arguments(builder, [value])
        steps = _steps.get(callee.name)
        if steps is not None and not isinstance(resty, types.Optional):
            return None, self.context.get_returned_value(builder, resty, builder.put(*steps, given))
        place = cgutils.alloca_once(builder, callee.args[0].type.pointee)
        builder.call(callee, [place, *given])
        result = builder.load(place)
        if isinstance(resty, types.Optional):                 # Numba puts it together again
            made = self.context.make_helper(builder, resty, value=result)
            is_none = builder.not_(cgutils.as_bool_bit(builder, made.valid))
            return Status(code=None, is_error=cgutils.false_bit, is_ok=None, is_none=is_none, is_stop_iteration=None,
                          is_python_exc=None, is_user_exc=None, excinfoptr=None), made.data
        return None, self.context.get_returned_value(builder, resty, result)


class Lower(CUDALower):
    """Lowering without a debugger's variables, and with one look at each assignment."""

    _disable_sroa_like_opt = False

    def setup_function(self, fndesc: FunctionDescriptor) -> None:
        super().setup_function(fndesc)
        self.builder.__class__ = _InPlace if inlines_calls() else _Builder

    def lower_normal_function(self, fndesc: FunctionDescriptor) -> None:
        super().lower_normal_function(fndesc)
        if inlines_calls() and not compiles_users():            # (users' functions keep their lines)
            _note_steps(self.function)

    def post_lower(self) -> None:
        super().post_lower()
        _leave_out_unread(self.function)

    def lower_block(self, block: numba_ir.Block) -> None:
        """Numba's, which makes a context for an error at every statement, and its text for a log."""
        self.pre_block(block)
        for statement in block.body:
            self.loc = statement.loc
            try:
                self.lower_inst(statement)
            except Exception:
                with new_error_context('lowering "{inst}" at {loc}', inst=statement, loc=self.loc,
                                       errcls_=partial(LoweringError, loc=self.loc)):
                    raise
        self.post_block(block)

    def lower_inst(self, statement: numba_ir.Stmt) -> Any:
        if type(statement) is not numba_ir.Assign:
            return super().lower_inst(statement)
        self.debuginfo.mark_location(self.builder, self._adjust_line_if_prologue(self.loc.line))
        value = self.lower_assign(self.typeof(statement.target.name), statement)
        argument = None
        if isinstance(statement.value, numba_ir.arg_types):
            self.debuginfo.mark_location(self.builder, self.defn_loc.line)
            argument = statement.value.index + 1
        self.storevar(value, statement.target.name, argidx=argument)
        return None

    # -- variables ---------------------------------------------------------------------------------------------------

    def loadvar(self, name: str) -> Any:
        value = self._blk_local_varmap.get(name)
        return super().loadvar(name) if value is None else value

    def storevar(self, value: ir.Value, name: str, argidx: int | None = None) -> None:
        if self.context.enable_nrt:
            super().storevar(value, name, argidx)
        elif name in self._singly_assigned_vars:
            self._blk_local_varmap[name] = value
        elif is_empty(value.type) and name not in self.varmap:
            self._blk_local_varmap[name] = ir.Constant(value.type, ir.Undefined)     # in all blocks
        else:
            slot = self.getvar(name)
            if value.type != slot.type.pointee:
                raise AssertionError(f"{name} of type {slot.type.pointee} is assigned {value.type}")
            self.builder.store(value, slot)

    def delvar(self, name: str) -> None:
        if self.context.enable_nrt or name not in self._blk_local_varmap:
            super().delvar(name)

    def _find_singly_assigned_variable(self) -> None:
        """Those that are values and need no slot: they are assigned once, before all that reads them, in a block that comes
        before each of the readers' blocks on every way."""
        assigned: Counter[str] = Counter()
        outside: set[str] = must_use_alloca(self.blocks)      # read in its own block before it is assigned
        where: dict[str, Any] = {}
        readers: dict[str, set[Any]] = {}
        for label, block in self.blocks.items():
            here: set[str] = set()
            for statement in block.body:
                for name in _read_by(statement) - here:
                    readers.setdefault(name, set()).add(label)
                if isinstance(statement, numba_ir.assign_types):
                    name = statement.target.name
                    assigned[name] += 1
                    where[name] = label
                    here.add(name)
        single = {name for name, times in assigned.items() if times == 1 and name not in outside}
        across = [name for name in single if name in readers]
        if across:
            order = {label: n for n, label in enumerate(self.blocks)}
            dominators = compute_cfg_from_blocks(self.blocks).dominators()
            single.difference_update(name for name in across if not all(
                where[name] != label and where[name] in dominators[label] and order[where[name]] < order[label]
                for label in readers[name]))
        self._singly_assigned_vars = single
        self._blk_local_varmap: dict[str, Any] = {}


def _read_by(statement: numba_ir.Stmt) -> set[str]:
    """The names of the variables that a statement reads, or is the end of."""
    if isinstance(statement, numba_ir.del_types):
        return {statement.value}
    if isinstance(statement, numba_ir.assign_types):
        if isinstance(statement.value, numba_ir.var_types):
            return {statement.value.name}
        if not isinstance(statement.value, numba_ir.inst_types):
            return set()
        statement = statement.value
    return {variable.name for variable in statement.list_vars()}


# -- values --------------------------------------------------------------------------------------------------------------

class _Builder(ir.IRBuilder):
    """What is taken from a struct that was put together here is what was put into it."""

    def extract_value(self, agg: ir.Value, idx: int | tuple[int, ...], name: str = "") -> Any:
        at = list(idx) if isinstance(idx, (tuple, list)) else [idx]
        while at:
            if type(agg) is ir.Constant and not isinstance(agg.constant, str):
                agg, at = _part(agg, at[0]), at[1:]
                continue
            if type(agg) is not ir.InsertValue:
                break
            put = list(agg.indices)
            if put == at[:len(put)]:
                agg, at = agg.value, at[len(put):]
            elif put[:len(at)] != at:
                agg = agg.aggregate
            else:                                              # a part of what is wanted
                break
        return super().extract_value(agg, at, name) if at else agg


# In kernels that say so (``inlines_calls``), a function of few steps that goes straight on is put in place of its calls.
# NVVM met 110,000 lines of a float32 kernel and 214,000 of min-plus, for 1.5 and 2.4 seconds. Now it meets 41,000 for 1.0
# second, and the machine code is the same. Other kernels would have other code: LLVM unrolls loops by how long they are
# before it simplifies them.

_STEPS = 20
_steps: dict[str, tuple[list, Any]] = {}                      # of functions, by name; and which step is the result
_NEUTRAL = {"add": 0, "sub": 0, "or_": 0, "lshr": 0, "ashr": 0, "mul": 1, "udiv": 1, "sdiv": 1, "and_": None, "urem": None}
_PURE = {*(name.rstrip("_") for name in _NEUTRAL), "insertvalue", "extractvalue"}


class _InPlace(_Builder):
    """A builder of unrolled kernels: what is known of integers is left out."""

    def put(self, steps: list, result: int | ir.Value, given: Sequence[ir.Value]) -> Any:
        """The result of a function, whose steps are put here."""
        values = [None, *given]
        for step, places in steps:
            values.append(self._again(step, [values[at] if type(at) is int else at for at in places]))
        return values[result] if type(result) is int else result

    def _again(self, step: ir.Instruction, given: list) -> Any:
        if type(step) in (ir.InsertValue, ir.ExtractValue):
            return getattr(self, step.opname.replace("value", "_value"))(*given, step.indices)
        if type(step) is ir.GEPInstr:
            return self.gep(given[0], given[1:], step.inbounds)
        if step.opname in _PURE:
            return getattr(self, step.opname + "_" * (step.opname in ("and", "or")))(*given, flags=step.flags)
        if given and type(given[0]) is tuple:                  # an intrinsic
            given[0] = cgutils.get_or_insert_function(self.module, *given[0])
        made = copy(step)
        made.parent, made.operands, made.metadata = self.block, given, {}
        made.name = ""
        self._insert(made)
        return made


def _simplified(name: str) -> Any:
    make, neutral = getattr(ir.IRBuilder, name), _NEUTRAL[name]

    def operation(self: _InPlace, x: ir.Value, y: ir.Value, *rest: object, **more: object) -> Any:
        m, n = (each.constant if type(each) is ir.Constant else None for each in (x, y))
        if n is not None and n == neutral:
            return x
        if m == 0 and name != "sub":
            return y if name in ("add", "or_") else ir.Constant(x.type, 0)
        return ir.Constant(x.type, 0) if n == 0 and name in ("mul", "and_") else make(self, x, y, *rest, **more)

    return operation


for _name in _NEUTRAL:
    setattr(_InPlace, _name, _simplified(_name))


def _note_steps(function: ir.Function) -> None:
    """Keep a function's steps if they can be put in place of its calls."""
    body, block = [], function.blocks[0]
    for _ in function.blocks:
        body += block.instructions
        if type(body[-1]) is not ir.Branch:
            break
        block = body.pop().operands[0]
    results = [each for each in body if type(each) is ir.StoreInstr and each.operands[1] is function.args[0]]
    if type(body[-1]) is not ir.Ret or len(results) != 1:
        return
    readers, kept = Counter(id(value) for each in body for value in each.operands), []
    for each in reversed(body[:-1]):
        if each.opname in _PURE and not readers[id(each)]:
            readers.subtract(map(id, each.operands))
        elif each is not results[0]:
            kept.append(each)
    places: dict[int, Any] = {id(argument): n for n, argument in enumerate(function.args) if n}
    steps: list = []
    for each in reversed(kept):
        given = [(x.ftype, x.name) if type(x) is ir.Function and x.name.startswith("llvm.") else places.get(id(x), x)
                 for x in each.operands]
        if type(each) in (ir.AllocaInstr, ir.PhiInstr) or not all(type(x) in _KNOWN for x in given):
            return
        places[id(each)] = len(function.args) + len(steps)
        steps.append((copy(each), given))
        vars(steps[-1][0]).update(dict.fromkeys(("parent", "operands", "pointer", "aggregate", "value")))
    result = places.get(id(results[0].operands[0]), results[0].operands[0])
    if len(steps) <= _STEPS and type(result) in _KNOWN:
        _steps[function.name] = steps, result


_KNOWN = (int, tuple, ir.Constant, ir.InlineAsm)


def _part(constant: ir.Constant, n: int) -> Any:
    held = constant.constant
    if held is not None and held is not ir.Undefined:
        held = held[n]
    return held if isinstance(held, ir.Constant) else ir.Constant(constant.type.elements[n], held)


def _leave_out_unread(function: ir.Function) -> None:
    """Drop the parts of structs that nothing reads, but for one in each block: LLVM executes a block of few instructions on
    all ways, and chooses afterwards, where an instruction that it does not count as cheap is not in it. It looks before it
    has dropped any; of blocks without one int8 products have 1024 instructions in place of 680 (tools.sass_gate)."""
    readers = Counter(id(value) for block in function.blocks for each in block.instructions for value in _operands(each))
    for block in reversed(function.blocks):
        kept, has_one = [], False
        for each in reversed(block.instructions):
            if isinstance(each, (ir.InsertValue, ir.ExtractValue)) and not readers[id(each)]:
                if has_one:
                    readers.subtract(map(id, _operands(each)))
                    continue
                has_one = True
            kept.append(each)
        block.instructions[:] = reversed(kept)


def _operands(instruction: ir.Instruction) -> Any:
    return [value for value, _ in instruction.incomings] if isinstance(instruction, ir.PhiInstr) else instruction.operands


class _Fields(cgutils.ValueStructProxy):
    """A struct's fields without a slot, as long as code goes straight on. Where one is set in another block, or a pointer is
    asked for, there is a slot from then on; it is filled at the end of the block that made the struct."""

    _slot: Any = None
    _value: Any

    def __init__(self, context: CUDATargetContext, builder: ir.IRBuilder, value: ir.Value | None = None,
                 ref: ir.Value | None = None):
        self._fields = None
        if ref is not None:
            super().__init__(context, builder, value=value, ref=ref)
            self._slot = self._value
            return
        self._context, self._builder = context, builder
        self._datamodel = context.data_model_manager[self._fe_type]
        self._be_type = self._get_be_type(self._datamodel)
        if value is not None and value.type != self._be_type:
            raise AssertionError(f"a struct of {self._be_type} is given {value.type}")
        self._fields, self._block = ir.Constant(self._be_type, None) if value is None else value, builder.block

    def _is_straight(self) -> bool:
        """Whether there is no slot, and none is needed to set a field."""
        if self._slot is None and self._builder.block is not self._block:
            self._getpointer()
        return self._slot is None

    def __getitem__(self, index: int) -> Any:
        return self._builder.extract_value(self._fields, index) if self._slot is None else super().__getitem__(index)

    def __setitem__(self, index: int, value: ir.Value) -> None:
        if self._is_straight() and value.type == self._be_type.elements[index]:
            self._fields = self._builder.insert_value(self._fields, value, index)
        else:                                                  # (pointers into other spaces are converted there)
            self._getpointer()
            super().__setitem__(index, value)

    def _getvalue(self) -> Any:
        return self._fields if self._slot is None else super()._getvalue()

    def _setvalue(self, value: ir.Value) -> None:
        if self._is_straight():
            self._fields = value
        else:
            super()._setvalue(value)

    def _getpointer(self) -> Any:
        if self._slot is None:
            slot = cgutils.alloca_once(self._builder, self._be_type)
            with self._builder.goto_block(self._block):
                self._builder.store(self._fields, slot)
            self._slot = self._value = self._outer_ref = slot
        return self._outer_ref

    def _get_ptr_by_index(self, index: int) -> Any:
        self._getpointer()
        return super()._get_ptr_by_index(index)


def _slot_of_value(builder: ir.IRBuilder, value: ir.Value, name: str = "", zfill: bool = False) -> Any:
    """``cgutils.alloca_once_value``, which zeroes the slot before it stores the value."""
    line, builder.debug_metadata = builder.debug_metadata, None
    with builder.goto_entry_block():
        slot = builder.alloca(value.type)
    builder.debug_metadata = line
    builder.store(value, slot)
    return slot


_OURS = {"alloca_once_value": _slot_of_value, "ValueStructProxy": _Fields, "_struct_proxy_cache": {}}


@contextlib.contextmanager
def in_values() -> Iterator[None]:
    """What is lowered has these structs and slots; the caller holds Numba's compiler lock."""
    before = {name: getattr(cgutils, name) for name in _OURS}                                # compilations nest
    vars(cgutils).update(_OURS)
    try:
        yield
    finally:
        vars(cgutils).update(before)


# -- lines ---------------------------------------------------------------------------------------------------------------

class Lines(CUDADIBuilder):
    """Line numbers for profilers, and nothing for a debugger."""

    def __init__(self, *args: object, **keywords: object):
        super().__init__(*args, **keywords)
        self._locations: dict[tuple[int, int], Any] = {}

    def _di_subroutine_type(self, line: int, function: ir.Function, argmap: dict) -> Any:
        return self.module.add_debug_info("DISubroutineType", {"types": self.module.add_metadata([])})

    def _di_location(self, line: int) -> Any:
        key = len(self.subprograms), line
        found = self._locations.get(key)
        if found is None:
            found = self._locations[key] = super()._di_location(line)
        return found

    def mark_variable(self, *args: object, **keywords: object) -> None:
        pass

    def update_variable(self, *args: object, **keywords: object) -> None:
        pass
