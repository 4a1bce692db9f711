"""From typed intermediate code to LLVM's: Numba's lowering, without what it writes for a debugger and for reference counts.

Of each variable that lives in several blocks Numba reads what its slot held, to drop a reference, before each assignment; a
slot for a value is zeroed before it is stored to; a component that is all compile-time has a slot, too. None of that is in
the machine code, and it is left out here. The zeroes where a function begins, and what is done when a variable is gone,
stay: without them LLVM makes other code of some kernels (tools.sass_gate).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any

from llvmlite import ir
from numba.cuda import cgutils
from numba.cuda.core import ir as numba_ir
from numba.cuda.core.analysis import must_use_alloca
from numba.cuda.core.errors import LoweringError, new_error_context
from numba.cuda.debuginfo import CUDADIBuilder
from numba.cuda.lowering import CUDALower

from gemmkit.lang.calls import is_empty

__all__ = ["Lines", "Lower", "plain_slots"]


class Lower(CUDALower):
    """Lowering without a debugger's variables, and with one look at each assignment. Numba finds what is assigned once by
    looking through a block's statements for every variable (2 %)."""

    _disable_sroa_like_opt = False

    def lower_block(self, block: Any) -> None:
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

    def lower_inst(self, statement: Any) -> Any:
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

    def storevar(self, value: Any, name: str, argidx: Any = None) -> None:
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
        assigned: Counter[str] = Counter()
        outside: set[str] = must_use_alloca(self.blocks)      # read in another block than it is assigned in, or before
        for block in self.blocks.values():
            here: set[str] = set()
            for statement in block.body:
                is_assignment = isinstance(statement, numba_ir.assign_types)
                outside |= _read_by(statement) - here
                if is_assignment:
                    assigned[statement.target.name] += 1
                    here.add(statement.target.name)
        self._singly_assigned_vars = {name for name, times in assigned.items() if times == 1 and name not in outside}
        self._blk_local_varmap: dict[str, Any] = {}


def _read_by(statement: Any) -> set[str]:
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


# -- slots ---------------------------------------------------------------------------------------------------------------

def _slot_of_value(builder: Any, value: Any, name: str = "", zfill: bool = False) -> Any:
    """``cgutils.alloca_once_value``, which zeroes the slot before it stores the value."""
    line, builder.debug_metadata = builder.debug_metadata, None
    with builder.goto_entry_block():
        slot = builder.alloca(value.type)
    builder.debug_metadata = line
    builder.store(value, slot)
    return slot


@contextlib.contextmanager
def plain_slots() -> Iterator[None]:
    """What is lowered has these slots; the caller holds Numba's compiler lock."""
    before, cgutils.alloca_once_value = cgutils.alloca_once_value, _slot_of_value           # compilations nest
    try:
        yield
    finally:
        cgutils.alloca_once_value = before


# -- lines ---------------------------------------------------------------------------------------------------------------

class Lines(CUDADIBuilder):
    """Line numbers for profilers, and nothing for a debugger."""

    def __init__(self, *args: Any, **keywords: Any):
        super().__init__(*args, **keywords)
        self._locations: dict[tuple[int, int], Any] = {}

    def _di_subroutine_type(self, line: int, function: Any, argmap: dict) -> Any:
        return self.module.add_debug_info("DISubroutineType", {"types": self.module.add_metadata([])})

    def _di_location(self, line: int) -> Any:
        key = len(self.subprograms), line
        found = self._locations.get(key)
        if found is None:
            found = self._locations[key] = super()._di_location(line)
        return found

    def mark_variable(self, *args: Any, **keywords: Any) -> None:
        pass

    def update_variable(self, *args: Any, **keywords: Any) -> None:
        pass
