"""The end of a function is in its code once, as it is written.

Python 3.12 and later copy a short end (a call and the return, for example) to every jump that leads there. Threads of a warp
that take different ways then meet a barrier at different instructions, and one that is ``.aligned`` (`bar.sync`,
`barrier.cluster`, wgmma's) waits for ever:

    if thread_index() == 0:
        produce(sizes, map_a, map_b)
    cluster_barrier()                  # 3.12: one copy for thread 0, one for the other threads of its warp

Copies are known by their places: they are ends of blocks that do the same at the same lines and columns, up to the names of
intermediate values. All jump to one of them again. What an end takes from before may differ from way to way, as in
``return of_warp(found if lane_index() < 8 else identity)``: each way assigns it to one variable, as Python 3.11's code does.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from gemmkit.lang.numba_hooks import FunctionPass, register_pass
from gemmkit.lang.numba_hooks import numba_ir as ir


class Use(NamedTuple):
    """Where one end takes a variable and the other end another one: an element of an expression of the one's."""

    holder: Any
    key: Any
    ours: Any
    theirs: Any


class Endings(FunctionPass):
    """Joins the copies of a function's end."""

    _name = "gemmkit_endings"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        blocks, place = state.func_ir.blocks, _places(state.func_id.code)
        ends = [label for label, block in blocks.items() if isinstance(block.body[-1], ir.Return)]
        changed = False
        while ends:
            first = ends.pop(0)
            for other in list(ends):
                count, uses = _common(blocks[first].body, blocks[other].body, place)
                if count and any(_calls(statement) for statement in blocks[first].body[-count:]):
                    first = _join(blocks, first, other, count, uses)
                    ends.remove(other)
                    changed = True
        return changed


register_pass(mutates_CFG=True, analysis_only=False)(Endings)


def _calls(statement: Any) -> bool:
    """Whether it does more than name a value and return it."""
    if isinstance(statement, ir.Assign):
        return isinstance(statement.value, ir.Expr) and statement.value.op != "cast"
    return not isinstance(statement, ir.Return)


def _places(code: Any) -> Callable[[Any], Any]:
    """What tells where in the source a statement is: lines and columns, by the bytecode's offset in an intermediate's name.
    Numba counts offsets from 2 on. Python 3.10 has no columns, and copies nothing."""
    positions = list(code.co_positions()) if hasattr(code, "co_positions") else []

    def place(statement: Any) -> Any:
        found = re.match(r"\$(\d+)", statement.target.name) if isinstance(statement, ir.Assign) else None
        at = int(found[1]) // 2 - 1 if found else len(positions)
        return positions[at] if at < len(positions) else statement.loc.line

    return place


def _common(one: list, other: list, place: Callable[[Any], Any]) -> tuple[int, list[Use]]:
    """How many statements at the ends of two blocks do the same, and what of it they take from before that differs."""
    wanted: list[Use] = []             # taken, and not assigned yet
    found, uses = 0, list[Use]()
    for count, (x, y) in enumerate(zip(reversed(one), reversed(other), strict=False), 1):
        if type(x) is not type(y) or (_calls(x) and place(x) != place(y)):       # a return's line is Python's choice
            break
        if isinstance(x, ir.Assign):
            met = [use for use in wanted if x.target.name == use.ours.name or y.target.name == use.theirs.name]
            if not _same_name(x.target, y.target) or any(
                    (use.ours.name, use.theirs.name) != (x.target.name, y.target.name) for use in met):
                break
            wanted = [use for use in wanted if use not in met]
            same = _same(x.value, y.value, wanted, x, "value")
        elif isinstance(x, ir.Return):
            same = _same(x.value, y.value, wanted, x, "value")
        else:
            same = (isinstance(x, (ir.SetItem, ir.StaticSetItem, ir.SetAttr))
                    and all(_same(value, getattr(y, name), wanted, x, name) for name, value in _fields(x)))
        if not same:
            break
        if all(isinstance(use.holder, (dict, list)) for use in wanted):
            found, uses = count, list(wanted)
    return found, uses


def _fields(statement: Any) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(statement).items() if name != "loc"]


def _is_intermediate(variable: Any) -> bool:
    return str(variable.name).startswith("$")


def _same_name(x: Any, y: Any) -> bool:
    return (_is_intermediate(x) and _is_intermediate(y)) or x.name == y.name


def _same(x: Any, y: Any, wanted: list[Use], holder: Any, key: Any) -> bool:
    """Whether values are the same if the variables are that they take from before, which are added to ``wanted``."""
    if isinstance(x, ir.Var) and isinstance(y, ir.Var):
        if _is_intermediate(x) or x.name != y.name:
            wanted.append(Use(holder, key, x, y))
        return True
    if type(x) is not type(y):
        return False
    if isinstance(x, ir.Expr):
        return x.op == y.op and _same(x._kws, y._kws, wanted, x, "")
    if isinstance(x, (ir.Global, ir.FreeVar)):
        return x.name == y.name and x.value is y.value
    if isinstance(x, ir.Const):
        return type(x.value) is type(y.value) and bool(x.value == y.value)
    if isinstance(x, dict):
        return x.keys() == y.keys() and all(_same(value, y[name], wanted, x, name) for name, value in x.items())
    if isinstance(x, (tuple, list)):
        return len(x) == len(y) and all(_same(a, b, wanted, x, n) for n, (a, b) in enumerate(zip(x, y, strict=True)))
    return bool(x is y or (isinstance(x, (str, int, bool)) and x == y))


def _join(blocks: dict[int, Any], first: int, other: int, count: int, uses: list[Use]) -> int:
    """The last ``count`` statements of both in one block; returns its label. What differs in its ``uses`` is a variable that
    both assign."""
    label = max(blocks) + 1
    end = blocks[label] = ir.Block(blocks[first].scope, blocks[first].body[-count].loc)
    end.body = blocks[first].body[-count:]
    for block in (blocks[first], blocks[other]):
        at = block.body[-count].loc
        block.body[-count:] = [ir.Jump(label, at)]
    for n, use in enumerate(uses):
        name = f"$end{label}.{n}"
        for block, value in ((blocks[first], use.ours), (blocks[other], use.theirs)):
            at = block.body[-1].loc
            block.body.insert(-1, ir.Assign(value, block.scope.get_or_define(name, at), at))
        use.holder[use.key] = end.scope.get_or_define(name, end.loc)
    return label
