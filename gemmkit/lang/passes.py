"""Branches on what is known when a kernel is compiled are decided before Numba infers types.

Of ``if spec.is_cluster:`` in device code one side is compiled, as with ``if constexpr`` in C++. In Python, and so in the
emulator, it is an ordinary ``if``.

Known are constants, static fields and properties of components, elements of tuples that are one of these, tiles' sizes, and
comparisons, ``not``, ``and``, ``or``, ``len`` and whole-number arithmetic of what is known, and atoms that decide by types
(``decided``, for example `gemmkit.lang.registers.is_pairwise`). All that a decision rests on is
in the kernel's key: types hold it (`ComponentType`, literals), or the function's text does (`gemmkit.lang.fingerprint`).
"""

from __future__ import annotations

import copy
import enum
import operator
from collections import Counter
from collections.abc import Callable
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import numpy as np

from gemmkit.lang import numba_hooks as nb
from gemmkit.lang.numba_hooks import Context, types
from gemmkit.lang.numba_hooks import numba_ir as ir
from gemmkit.lang.references import is_fixed, is_library
from gemmkit.lang.scalars import WeakInt

# --------------------------------------------------------------------------------------------------
# Assertions in device code: checked in the emulator, and nothing when compiled, as under ``python -O``.
#
# A GPU cannot say which assertion failed. Compiled as Python has them they would end a thread early, its results missing.

class Assertions(nb.FunctionPass):
    """Takes the ways that end in an assertion's error for never taken."""

    _name = "gemmkit_assertions"

    def __init__(self) -> None:
        nb.FunctionPass.__init__(self)

    def run_pass(self, state: nb.StateDict) -> bool:
        blocks = state.func_ir.blocks
        failing = {label for label, block in blocks.items() if any(map(_is_error, block.body))}
        changed = False
        for block in blocks.values():
            last = block.body[-1]
            if isinstance(last, ir.Branch) and failing & {last.truebr, last.falsebr}:
                block.body[-1] = ir.Jump(last.falsebr if last.truebr in failing else last.truebr, last.loc)
                changed = True
        if changed:
            forget_unreached(blocks)
        return changed


nb.register_pass(mutates_CFG=True, analysis_only=False)(Assertions)


def _is_error(statement: ir.Stmt) -> bool:
    return (isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Global)
            and statement.value.value is AssertionError)


def forget_unreached(blocks: dict[int, Any]) -> None:
    """Drop the blocks to which no way leads from the first."""
    reached, left = set(), [min(blocks)]
    while left:
        label = left.pop()
        if label not in reached:
            reached.add(label)
            left += blocks[label].body[-1].get_targets()
    for label in set(blocks) - reached:
        del blocks[label]


# --------------------------------------------------------------------------------------------------
# Loops over tuples whose values may be of several types, written out before types are inferred.
#
# ``for v in (x, 2, n):`` and ``for f in (first, second):`` have a body for each value, each with types of its own, as
# Python has. A literal stays one: in ``for k in (1, 2): s += k`` nothing widens an integer ``s``. Arguments of one type
# remain loops.

MOST = 32                                                     # values of a tuple
BLOCKS = 2000                                                 # of a function


def unroll(func_ir: ir.FunctionIR, args: tuple) -> bool:
    """Write out every loop over a tuple of known length that may have values of several types; whether there was one."""
    found = False
    while _unroll_one(func_ir, args):
        found = True
    return found


def _unroll_one(func_ir: ir.FunctionIR, args: tuple) -> bool:
    heads = {label: s for label, block in func_ir.blocks.items() for s in block.body if _is(s, "iternext")}
    if not heads or len(func_ir.blocks) > BLOCKS:
        return False
    for loop in nb.compute_cfg_from_blocks(func_ir.blocks).loops().values():
        following = heads.get(loop.header)
        if following is None or not isinstance(func_ir.blocks[loop.header].body[-1], ir.Branch):
            continue
        iterator = _iterator(func_ir, following.value.value)
        count = None if iterator is None else _count(func_ir, iterator.value.value, args)
        if count is not None and count <= MOST:
            _write_out(func_ir, loop, iterator, count)
            forget_unreached(func_ir.blocks)
            func_ir._definitions = nb.build_definitions(func_ir.blocks)
            return True
    return False


def _is(statement: ir.Stmt, op: str) -> bool:
    return isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr) and statement.value.op == op


def _definition(func_ir: ir.FunctionIR, variable: ir.Var) -> Any:
    try:
        return func_ir.get_definition(variable)
    except KeyError:
        return None


def _iterator(func_ir: ir.FunctionIR, variable: ir.Var) -> Any:
    """The statement that makes a loop's iterator."""
    made = _definition(func_ir, variable)
    return next((s for block in func_ir.blocks.values() for s in block.body if _is(s, "getiter") and s.value is made), None)


def _count(func_ir: ir.FunctionIR, values: Any, args: tuple) -> int | None:
    """How many values a tuple has that may be of several types; None for what is no such tuple."""
    made = _definition(func_ir, values)
    if isinstance(made, ir.Expr) and made.op == "build_tuple":
        return len(made.items)
    if isinstance(made, (ir.Const, ir.Global, ir.FreeVar)) and isinstance(made.value, tuple):
        return len(made.value)
    if isinstance(made, ir.Arg) and made.index < len(args) and isinstance(args[made.index], types.BaseTuple):
        ty = args[made.index]
        return len(ty.types) if len(set(ty.types)) > 1 else None
    return None


def _write_out(func_ir: ir.FunctionIR, loop: Any, iterator: ir.Assign, count: int) -> None:
    """A copy of the loop's blocks for each value, one behind the other; the iterator is not made."""
    values = iterator.value.value
    iterator.value = ir.Const(None, iterator.loc)
    blocks, label = func_ir.blocks, max(func_ir.blocks) + 1
    own = _temporaries(blocks, loop.body)
    heads = [label + n * len(loop.body) for n in range(count)]
    scope, loc = blocks[loop.header].scope, blocks[loop.header].loc
    kept = scope.redefine("$unrolled", loc)
    for n, head in enumerate(heads):
        after = heads[n + 1] if n + 1 < count else blocks[loop.header].body[-1].falsebr
        rest = iter(range(head + 1, head + len(loop.body)))
        labels = {old: head if old == loop.header else next(rest) for old in sorted(loop.body)}
        made = {new: _copied(blocks[old]) for old, new in labels.items()}
        made[head] = _headed(made[head], kept, n)
        targets = {**labels, loop.header: after}
        for block in made.values():
            block.body[-1] = _redirected(block.body[-1], targets)
        nb.replace_vars(made, {name: scope.redefine(name, loc) for name in own})
        blocks.update(made)
    first = heads[0] if heads else blocks[loop.header].body[-1].falsebr
    for entry in loop.entries:
        block = blocks[entry]
        block.body[-1:] = [ir.Assign(values, kept, loc), _redirected(block.body[-1], {loop.header: first})]


def _temporaries(blocks: dict[int, Any], body: Any) -> set[str]:
    """The interpreter's own names that nothing outside the loop reads or assigns."""
    inside, outside = (
        {v.name for label, block in blocks.items() if (label in body) is within for s in block.body for v in s.list_vars()}
        for within in (True, False))
    return {name for name in inside - outside if name.startswith("$")}


def _copied(block: ir.Block) -> Any:
    out = block.copy()
    out.body = []
    for statement in block.body:
        statement = copy.copy(statement)
        if isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr):
            statement.value = ir.Expr(statement.value.op, statement.value.loc, **statement.value._kws)
        out.body.append(statement)
    return out


def _headed(block: ir.Block, values: Any, n: int) -> Any:
    """The loop's first block with the n-th value in place of the iterator's next."""
    body = []
    for statement in block.body:
        if _is(statement, "iternext") or _is(statement, "pair_second"):
            continue
        if _is(statement, "pair_first"):
            at = block.scope.redefine("$place", statement.loc)
            body.append(ir.Assign(ir.Const(WeakInt(n), statement.loc), at, statement.loc))
            statement.value = ir.Expr.getitem(values, at, statement.loc)
        body.append(statement)
    body[-1] = ir.Jump(body[-1].truebr, body[-1].loc)
    block.body = body
    return block


def _redirected(last: ir.Stmt, targets: dict[int, int]) -> Any:
    if isinstance(last, ir.Jump):
        return ir.Jump(targets.get(last.target, last.target), last.loc)
    if isinstance(last, ir.Branch):
        return ir.Branch(last.cond, targets.get(last.truebr, last.truebr), targets.get(last.falsebr, last.falsebr), last.loc)
    return last


LARGEST = 2**31                        # whole numbers stay below it, as coordinates do

_COMPARISONS = {operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, operator.is_, operator.is_not}
_ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod}


class UnknownValue(Exception):
    """What a variable holds is not known when its function is compiled."""


class KnownType:
    """A value of which the type is known: an argument, or part of one."""

    def __init__(self, ty: types.Type):
        self.ty = ty


class StaticBranches(nb.FunctionPass):
    """Makes jumps of the branches that are decided, and forgets what is then not reached."""

    _name = "gemmkit_static_branches"

    def __init__(self) -> None:
        nb.FunctionPass.__init__(self)

    def run_pass(self, state: nb.StateDict) -> bool:
        changed = not is_library(state.func_id.func) and unroll(state.func_ir, state.args)
        while _decide(state.func_ir, state.args, state.typingctx):      # what a side that is gone assigned is known then
            changed = True
        return changed


nb.register_pass(mutates_CFG=True, analysis_only=False)(StaticBranches)


def _decide(func_ir: ir.FunctionIR, args: tuple, context: Any) -> bool:
    found = False
    for block in func_ir.blocks.values():
        branch = block.body[-1]
        if isinstance(branch, ir.Branch):
            reader = _Reader(func_ir, args, context)
            try:
                value = _truth(reader.value(branch.cond))
            except UnknownValue:
                continue
            block.body[-1] = ir.Jump(branch.truebr if value else branch.falsebr, branch.loc)
            _replace(func_ir.blocks, reader.truths)
            found = True
    if found:
        forget_unreached(func_ir.blocks)
        _forget_overwritten(func_ir.blocks)
        func_ir._definitions = nb.build_definitions(func_ir.blocks)
    return found


def _replace(blocks: dict[int, Any], truths: dict[int, bool]) -> None:
    """Put constants in the place of a condition's parts: Numba would compile its own functions to compare strings."""
    for block in blocks.values():
        for statement in block.body:
            if isinstance(statement, ir.Assign) and id(statement.value) in truths:
                statement.value = ir.Const(truths[id(statement.value)], statement.loc)


def _forget_overwritten(blocks: dict[int, Any]) -> None:
    """Of ``both = first and second`` each side assigns to one name of the stack, and `first` is gone where it is decided."""
    entered = Counter(target for block in blocks.values() for target in block.body[-1].get_targets())
    for block in blocks.values():
        last = block.body[-1]
        if isinstance(last, ir.Jump) and entered[last.target] == 1 and blocks[last.target] is not block:
            following = blocks[last.target].body
            assigned = {name for s in following if (name := _stacked(s))}
            read = {v.name for s in following for v in s.list_vars() if _stacked(s) != v.name}
            block.body = [s for s in block.body if _stacked(s) not in assigned - read]


def _stacked(statement: ir.Stmt) -> str | None:
    """The name on the interpreter's stack that a statement assigns to."""
    name = statement.target.name if isinstance(statement, ir.Assign) else ""
    return name if name.startswith("$phi") else None


class _Reader:
    """Reads variables of a function; ``truths`` are the comparisons that it met, by the ids of their expressions."""

    def __init__(self, func_ir: ir.FunctionIR, args: tuple, context: Any):
        self.func_ir, self.args, self.context = func_ir, args, context
        self.truths: dict[int, bool] = {}

    def value(self, variable: ir.Var) -> Any:
        """The value of a variable; raises Unknown where it has none yet."""
        found = self.read(variable)
        if isinstance(found, KnownType):
            raise UnknownValue
        return found

    def read(self, variable: ir.Var) -> Any:
        """The value of a variable, or `KnownType` its type."""
        try:
            definition = self.func_ir.get_definition(variable)  # refuses a variable that is assigned more than once
        except KeyError:
            raise UnknownValue from None
        if isinstance(definition, (ir.Const, ir.Global, ir.FreeVar)):
            return definition.value
        if isinstance(definition, ir.Arg) and definition.index < len(self.args):
            return of_type(self.args[definition.index])
        if not isinstance(definition, ir.Expr):
            raise UnknownValue
        if definition.op == "getattr":
            return _attribute(self.read(definition.value), definition.attr)
        if definition.op == "getitem":
            return _item(self.read(definition.value), self.value(definition.index))
        found = self._evaluated(definition)
        if isinstance(found, bool):
            self.truths[id(definition)] = found
        return found

    def _evaluated(self, expression: ir.Expr) -> Any:
        if expression.op == "unary" and expression.fn in ("not", operator.not_):
            return not _truth(self.value(expression.value))
        if expression.op == "binop":
            return _combined(expression.fn, self.value(expression.lhs), self.value(expression.rhs))
        if expression.op != "call" or expression.kws or expression.vararg is not None:
            raise UnknownValue
        function = self.value(expression.func)
        decided = getattr(function, "decided", None)       # an atom whose result follows from its arguments' types
        if decided is not None:
            return decided(self.context, *map(self.read, expression.args))
        if len(expression.args) != 1:
            raise UnknownValue
        argument = expression.args[0]
        if function is bool:
            return _truth(self.value(argument))
        if function is len:
            return _length(self.read(argument))
        raise UnknownValue


def of_type(ty: types.Type) -> Any:
    if isinstance(ty, types.Literal):
        return ty.literal_value
    return None if isinstance(ty, types.NoneType) else KnownType(ty)


def _attribute(base: Any, name: str) -> Any:
    """An attribute of a component, a named tuple or a tile, or of the value of a static field."""
    if not isinstance(base, KnownType):
        if isinstance(base, (type, ModuleType)):           # a class's or module's: the pass for these has made constants
            raise UnknownValue
        return asked(base, name)
    ty = base.ty
    if isinstance(ty, types.BaseNamedTuple) and name in ty.fields:
        return of_type(ty.types[ty.fields.index(name)])
    known = getattr(ty, "known_attribute", None)           # of a component, a tile, a tile's size
    if known is None:
        raise UnknownValue
    return known(name)


def _item(base: Any, n: Any) -> Any:
    """An element of a tuple, or of a tile's size."""
    try:
        if not isinstance(base, KnownType):
            return base[n]
        if hasattr(base.ty, "known_item"):
            return base.ty.known_item(n)
        if isinstance(base.ty, types.BaseTuple):
            return of_type(base.ty.types[n])
    except Exception:
        raise UnknownValue from None
    raise UnknownValue


def asked(value: Any, name: str) -> Any:
    try:
        return getattr(value, name)
    except Exception:                                          # a property's: type inference meets it again, and reports it
        raise UnknownValue from None


def _combined(function: Any, left: Any, right: Any) -> Any:
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in (left, right))
    if function not in _COMPARISONS and not (function in _ARITHMETIC and whole):
        raise UnknownValue
    try:
        found = function(left, right)
    except Exception:
        raise UnknownValue from None
    if function in _ARITHMETIC and abs(found) >= LARGEST:
        raise UnknownValue
    return bool(found) if isinstance(found, np.bool_) else found


def _length(value: Any) -> int:
    if isinstance(value, KnownType) and isinstance(value.ty, types.BaseTuple):
        return len(value.ty)
    if isinstance(value, tuple):
        return len(value)
    raise UnknownValue


def _truth(value: Any) -> bool:
    """Whether a number or None is true; other values are left to type inference."""
    if value is None or isinstance(value, (bool, int, float, np.bool_)):
        return bool(value)
    raise UnknownValue


# --------------------------------------------------------------------------------------------------
# Captured values as an argument: their struct, and the pass that reads captured names from it instead of the closure.

ARGUMENT = "gemmkit_captures"


class CapturesType(types.Type):
    """The struct of a function's captured values."""

    def __init__(self, members: dict[str, Any]):
        self.members = members
        super().__init__("captures(" + ", ".join(f"{k}: {t}" for k, t in members.items()) + ")")

    @property
    def key(self) -> Any:
        """The types themselves: names of two closures may be alike."""
        return tuple(self.members.items())

    def known_attribute(self, name: str) -> Any:
        """What is known before types are inferred (:mod:`gemmkit.lang.passes`)."""
        return of_type(self.members[name])


nb.kept_as(CapturesType, lambda ty: list(ty.members.items()))


@nb.attributes_of(CapturesType)
def _captured_type(ty: CapturesType, attr: str) -> Any:
    return ty.members.get(attr)


@nb.lowering_registry.lower_getattr_generic(CapturesType)
def _captures_getattr(context: Context, builder: ir.IRBuilder, ty: CapturesType, value: ir.Value, attr: str) -> Any:
    return getattr(nb.cgutils.create_struct_proxy(ty)(context, builder, value=value), attr)


class CapturesToArguments(nb.FunctionPass):
    """Reads captured names from an extra argument instead of the closure."""

    _name = "gemmkit_captures"

    def __init__(self) -> None:
        nb.FunctionPass.__init__(self)

    def run_pass(self, state: nb.StateDict) -> bool:
        first = state.args[0] if state.args else None
        if not isinstance(first, CapturesType):
            return False
        _bind(state.func_ir, tuple(first.members))
        return True


nb.register_pass(mutates_CFG=False, analysis_only=False)(CapturesToArguments)


def _bind(func_ir: ir.FunctionIR, names: tuple[str, ...]) -> None:
    """One argument more in front, and captured names read from it."""
    block = func_ir.blocks[min(func_ir.blocks)]
    scope, loc = block.scope, block.loc
    struct = scope.redefine(ARGUMENT, loc)
    for each in func_ir.blocks.values():
        for statement in each.body:
            if not isinstance(statement, ir.Assign):
                continue
            value = statement.value
            if isinstance(value, ir.Arg):
                statement.value = ir.Arg(value.name, value.index + 1, value.loc)
            elif isinstance(value, (ir.FreeVar, ir.Global)) and value.name in names:
                statement.value = ir.Expr.getattr(struct, value.name, value.loc)
    block.body.insert(0, ir.Assign(ir.Arg(ARGUMENT, 0, loc), struct, loc))
    func_ir.arg_names = (ARGUMENT, *func_ir.arg_names)
    func_ir.arg_count += 1
    func_ir._definitions = nb.build_definitions(func_ir.blocks)  # or branches on them would be decided by what cells held


# --------------------------------------------------------------------------------------------------
# Inner functions that device code hands on: ``apply(lambda x, i: x + scale, values)``, which captured run-time values.
#
# Numba inlines an inner function where it is called by name, and cannot hand one on that captured what is not a constant.
# The pass here makes a value of it, the struct of what it captured; what calls it gives it that struct (`ClosureType`). A
# variable is captured by value, so it may not change before the function is handed on: where it may, Numba is left to
# refuse it.

class InnerFunctions(nb.FunctionPass):
    """Makes values of the inner functions that are arguments of calls."""

    _name = "gemmkit_inner_functions"
    #: The atom that makes a function's inner one, of its code, of captured values; `gemmkit.lang.functions` gives it.
    atom: Callable[[FunctionType, CodeType], Any]

    def __init__(self) -> None:
        nb.FunctionPass.__init__(self)

    def run_pass(self, state: nb.StateDict) -> bool:
        function = state.func_id.func
        if not any(isinstance(constant, CodeType) for constant in function.__code__.co_consts):
            return False
        found = False
        for block in state.func_ir.blocks.values():
            made = [n for n, statement in enumerate(block.body) if _is_inner(statement)]
            for n in reversed(made):                           # what is put in front moves those behind alone
                found |= _make_value(state.func_ir, function, block, n)
        return found


nb.register_pass(mutates_CFG=False, analysis_only=False)(InnerFunctions)


def _is_inner(statement: ir.Stmt) -> bool:
    value = getattr(statement, "value", None)
    return isinstance(value, ir.Expr) and value.op == "make_function" and value.defaults is None


def _make_value(func_ir: ir.FunctionIR, function: FunctionType, block: ir.Block, n: int) -> bool:
    """Put ``capture(variables)`` in the place of an inner function that is an argument further down its block."""
    statement = block.body[n]
    code, loc, name = statement.value.code, statement.loc, statement.target.name
    code = func_ir.get_definition(code).value if isinstance(code, ir.Var) else code
    captured = [] if statement.value.closure is None else func_ir.get_definition(statement.value.closure).items
    uses = [other for each in func_ir.blocks.values() for other in each.body
            if other is not statement and any(v.name == name for v in other.list_vars())]
    if len(uses) != 1 or uses[0] not in block.body[n:] or not _is_argument(uses[0], name):
        return False
    between = block.body[n + 1:block.body.index(uses[0])]
    names = {_source(func_ir, variable) for variable in captured}
    if any(isinstance(other, ir.Assign) and other.target.name in names for other in between):
        return False
    capture = block.scope.redefine("$capture", loc)
    atom = ir.Global("capture", InnerFunctions.atom(function, code), loc)
    block.body[n:n + 1] = [ir.Assign(atom, capture, loc),
                           ir.Assign(ir.Expr.call(capture, captured, (), loc), statement.target, loc)]
    func_ir._definitions[capture.name].append(atom)
    func_ir._definitions[name] = [block.body[n + 1].value]
    return True


def _is_argument(statement: ir.Stmt, name: str) -> bool:
    call = getattr(statement, "value", None)
    return isinstance(call, ir.Expr) and call.op == "call" and call.func.name != name


def _source(func_ir: ir.FunctionIR, variable: ir.Var) -> str:
    """The variable that a captured one is read from."""
    definitions = func_ir._definitions[variable.name]
    return definitions[0].name if len(definitions) == 1 and isinstance(definitions[0], ir.Var) else variable.name


# --------------------------------------------------------------------------------------------------
# The compiler pass for what a function reads from modules and classes.

class ModuleAttributes(nb.FunctionPass):
    """What a function reads from a module or class becomes what its own globals would be: ``math.pi`` is a weak constant,
    ``np.float32`` a conversion, ``helpers.f`` and ``Base.method`` are device functions."""

    _name = "gemmkit_module_attributes"
    #: What a value that a function's code names becomes, by function, name and value; whether it may be one that changes in
    #: place. Set by `gemmkit.lang.functions`, which makes device functions.
    prepared: ClassVar[Any]

    def __init__(self) -> None:
        nb.FunctionPass.__init__(self)

    def run_pass(self, state: nb.StateDict) -> bool:
        changed = False
        for block in state.func_ir.blocks.values():
            for statement in block.body:
                if isinstance(statement, ir.Assign) and _is_getattr(statement.value):
                    holder = _module(state.func_ir, statement.value.value)
                    value = getattr(holder, statement.value.attr, None)
                    of_user = holder is not None and not is_fixed(type(holder) if isinstance(holder, enum.Enum) else holder)
                    prepared = self.prepared(state.func_id.func, statement.value.attr, value, of_user)
                    if prepared is not value:
                        statement.value = (ir.Const(prepared, statement.loc) if isinstance(prepared, (int, float, complex))
                                           else ir.Global(statement.value.attr, prepared, statement.loc))
                        changed = True
        if changed:
            _forget_classes(state.func_ir)
        return changed


def _forget_classes(func_ir: ir.FunctionIR) -> None:
    """Blank out the classes that nothing but a replaced attribute was read from: Numba knows no type of them, and none of
    those that are read from a module."""
    statements = [s for block in func_ir.blocks.values() for s in block.body]
    for statement in statements:
        if isinstance(statement, ir.Assign) and isinstance(_class_read(func_ir, statement.value), type):
            name = statement.target.name
            if not any(v.name == name for s in statements if s is not statement for v in s.list_vars()):
                statement.value = ir.Const(None, statement.loc)


def _class_read(func_ir: ir.FunctionIR, value: Any) -> Any:
    """What an expression reads, if it is a global or an attribute of a module or class; else None."""
    if isinstance(value, (ir.Global, ir.FreeVar)):
        return value.value
    return getattr(_module(func_ir, value.value), value.attr, None) if _is_getattr(value) else None


def _is_getattr(value: Any) -> bool:
    return isinstance(value, ir.Expr) and value.op == "getattr"


def _module(func_ir: ir.FunctionIR, variable: ir.Var) -> ModuleType | type | enum.Enum | None:
    """The module or class that a variable of the code is, or the member of an enumeration, if it is one."""
    try:
        definition = func_ir.get_definition(variable)
    except KeyError:
        return None
    if isinstance(definition, (ir.Global, ir.FreeVar)):
        value = definition.value
    elif _is_getattr(definition):
        value = getattr(_module(func_ir, definition.value), definition.attr, None)
    else:
        return None
    return value if isinstance(value, (ModuleType, type, enum.Enum)) else None


nb.register_pass(mutates_CFG=False, analysis_only=False)(ModuleAttributes)
