"""Loops over tuples whose values may be of several types, written out before types are inferred.

``for v in (x, 2, n):`` and ``for f in (first, second):`` have a body for each value, each with types of its own, as Python
has. A literal stays one: in ``for k in (1, 2): s += k`` nothing widens an integer ``s``. Arguments of one type remain loops.
"""

from __future__ import annotations

import copy
from typing import Any

from gemmkit.lang.assertions import forget_unreached
from gemmkit.lang.numba_hooks import build_definitions, compute_cfg_from_blocks, replace_vars, types
from gemmkit.lang.numba_hooks import numba_ir as ir
from gemmkit.lang.weak import WeakInt

MOST = 32                                                     # values of a tuple
BLOCKS = 2000                                                 # of a function


def unroll(func_ir: Any, args: tuple) -> bool:
    """Write out every loop over a tuple of known length that may have values of several types; whether there was one."""
    found = False
    while _unroll_one(func_ir, args):
        found = True
    return found


def _unroll_one(func_ir: Any, args: tuple) -> bool:
    heads = {label: s for label, block in func_ir.blocks.items() for s in block.body if _is(s, "iternext")}
    if not heads or len(func_ir.blocks) > BLOCKS:
        return False
    for loop in compute_cfg_from_blocks(func_ir.blocks).loops().values():
        following = heads.get(loop.header)
        if following is None or not isinstance(func_ir.blocks[loop.header].body[-1], ir.Branch):
            continue
        iterator = _iterator(func_ir, following.value.value)
        count = None if iterator is None else _count(func_ir, iterator.value.value, args)
        if count is not None and count <= MOST:
            _write_out(func_ir, loop, iterator, count)
            forget_unreached(func_ir.blocks)
            func_ir._definitions = build_definitions(func_ir.blocks)
            return True
    return False


def _is(statement: Any, op: str) -> bool:
    return isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr) and statement.value.op == op


def _definition(func_ir: Any, variable: Any) -> Any:
    try:
        return func_ir.get_definition(variable)
    except KeyError:
        return None


def _iterator(func_ir: Any, variable: Any) -> Any:
    """The statement that makes a loop's iterator."""
    made = _definition(func_ir, variable)
    return next((s for block in func_ir.blocks.values() for s in block.body if _is(s, "getiter") and s.value is made), None)


def _count(func_ir: Any, values: Any, args: tuple) -> int | None:
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


def _write_out(func_ir: Any, loop: Any, iterator: Any, count: int) -> None:
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
        replace_vars(made, {name: scope.redefine(name, loc) for name in own})
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


def _copied(block: Any) -> Any:
    out = block.copy()
    out.body = []
    for statement in block.body:
        statement = copy.copy(statement)
        if isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Expr):
            statement.value = ir.Expr(statement.value.op, statement.value.loc, **statement.value._kws)
        out.body.append(statement)
    return out


def _headed(block: Any, values: Any, n: int) -> Any:
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


def _redirected(last: Any, targets: dict[int, int]) -> Any:
    if isinstance(last, ir.Jump):
        return ir.Jump(targets.get(last.target, last.target), last.loc)
    if isinstance(last, ir.Branch):
        return ir.Branch(last.cond, targets.get(last.truebr, last.truebr), targets.get(last.falsebr, last.falsebr), last.loc)
    return last
