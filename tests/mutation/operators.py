"""Operators of mutation: what may be wrong with a kernel, as changes of its syntax tree.

An operator is given a place in a function and yields nodes that may stand there instead. It goes by patterns (a call of something
that is called a fence, a comparison, a name that says stage), so that it survives new files, names and lines.

>>> tree = ast.parse("def f(empty, stage):\\n    fence()\\n    arrive(empty, stage)").body[0]
>>> [ast.unparse(node) for place in places(tree) for node in OPERATORS["statement dropped"](place)]
['pass', 'pass']
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

SYNC = re.compile(r"wait|barrier|fence|arrive|commit|expect|init|give|take|settle|change_|fill_|copy_|produce|exchange|gather")
MOVES = "put|store|load|send|start|multiply|split|turn|receive|find|hold"
PHASE, STAGE = re.compile(r"phase|parity|turned$|^turn$"), re.compile(r"stage$|^previous$")
SLOT = re.compile("slot$")                             # a named tuple of both
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass
class Place:
    """A node of a function, and where it hangs; ``statement`` is the one that it is in."""

    function: ast.FunctionDef
    parent: ast.AST
    field: str
    at: int | None
    node: Any
    statement: ast.stmt

    @property
    def next(self) -> Any:
        """The statement that follows in the same body."""
        body = getattr(self.parent, self.field)
        return body[self.at + 1] if self.at is not None and self.at + 1 < len(body) else None

    def put(self, node: ast.AST) -> None:
        """Puts something else there."""
        ast.copy_location(node, self.node)
        if isinstance(node, ast.Module):               # two statements for this one and the next
            getattr(self.parent, self.field)[self.at:self.at + 2] = node.body         # type: ignore[operator]
        elif self.at is None:
            setattr(self.parent, self.field, node)
        else:
            getattr(self.parent, self.field)[self.at] = node
        ast.fix_missing_locations(self.function)


def places(function: ast.FunctionDef) -> Iterator[Place]:
    """All places in the body of a function, without its docstring and the functions in it."""
    body = function.body
    first = int(isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant))
    for at in range(first, len(body)):
        yield from _below(function, function, "body", at, body[at], body[at])


def _below(function: ast.FunctionDef, parent: ast.AST, field: str, at: int | None, node: ast.AST,
           statement: ast.stmt) -> Iterator[Place]:
    if isinstance(node, FUNCTIONS):
        return
    statement = node if isinstance(node, ast.stmt) else statement
    yield Place(function, parent, field, at, node, statement)
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "ctx", "op", "ops", "format_spec", "targets", "target") or isinstance(
                node, (ast.JoinedStr, ast.Raise)):
            continue
        children = value if isinstance(value, list) else [value]
        for n, child in enumerate(children):
            if isinstance(child, ast.AST):
                yield from _below(function, node, name, n if isinstance(value, list) else None, child, statement)


def name_of(call: ast.AST) -> str:
    """What is called, without what it is found in."""
    if not isinstance(call, ast.Call):
        return ""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _is_call(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)


def _is_argument(place: Place, pattern: re.Pattern[str]) -> bool:
    return (isinstance(place.parent, ast.Call) and place.field == "args" and pattern.search(label_of(place.node)) is not None)


def label_of(node: ast.AST) -> str:
    """The name of a variable, or of a named tuple's field: ``slot.stage`` is a stage."""
    if isinstance(node, ast.Name):
        return node.id
    is_field = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id != "spec"
    return node.attr if is_field and isinstance(node, ast.Attribute) else ""


def _calls(node: Any) -> Iterator[str]:
    """The names of what a statement calls; of a static branch (``if spec.a_masks:``) those of its sides, which are simple."""
    if isinstance(node, ast.If):
        if all(isinstance(inner, (ast.Expr, ast.Assign)) for inner in node.body + node.orelse):
            for inner in node.body + node.orelse:
                yield from _calls(inner)
    elif isinstance(node.value, ast.Call):
        yield name_of(node.value)


def _is_sync(node: Any) -> bool:
    return not isinstance(node, ast.Assign) and any(SYNC.search(name) for name in _calls(node))


def _has_effect(node: Any) -> bool:
    """Whether a statement synchronises, or starts or moves something."""
    return any(re.search(f"{SYNC.pattern}|{MOVES}", name) for name in _calls(node))


# -- synchronisation --------------------------------------------------------------------------------------------------

def statement_dropped(place: Place) -> Iterator[ast.AST]:
    """A call whose result nobody uses: barriers, fences, waits, arrivals, copies, stores."""
    if _is_call(place.node):
        yield ast.Pass()


def wait_dropped(place: Place) -> Iterator[ast.AST]:
    """A wait (or what pins registers) that returns what it is given."""
    node = place.node
    if isinstance(node, ast.Call) and re.search("wait|settle", name_of(node)) and not _is_call(place.parent) and not isinstance(
            place.parent, ast.Expr):
        yield node.args[-1]


def order_changed(place: Place) -> Iterator[ast.AST]:
    """A fence, wait or arrival and a neighbour that synchronises or moves something change places."""
    simple = (ast.Expr, ast.Assign, ast.If)
    if isinstance(place.node, simple) and isinstance(place.next, simple) and (
            (_is_sync(place.node) and _has_effect(place.next)) or (_has_effect(place.node) and _is_sync(place.next))):
        yield ast.Module([place.next, place.node], [])


def done_twice(place: Place) -> Iterator[ast.AST]:
    """An arrival or a commit more than there should be."""
    if _is_call(place.node) and re.search("arrive|expect|commit|give_back", name_of(place.node.value)):
        yield ast.If(ast.Constant(True), [place.node, copy.deepcopy(place.node)], [])


def phase_flipped(place: Place) -> Iterator[ast.AST]:
    if _is_argument(place, PHASE):
        yield ast.BinOp(place.node, ast.BitXor(), ast.Constant(1))
    if _is_argument(place, SLOT):
        slot = ast.unparse(place.node)
        yield ast.parse(f"{slot}._replace(phase={slot}.phase ^ 1)", mode="eval").body


def stage_shifted(place: Place) -> Iterator[ast.AST]:
    """The next stage in place of this one."""
    if any(a.arg == "spec" for a in place.function.args.args):
        if _is_argument(place, STAGE):
            yield ast.parse(f"({ast.unparse(place.node)} + 1) % spec.stages", mode="eval").body
        if _is_argument(place, SLOT):
            slot = ast.unparse(place.node)
            yield ast.parse(f"{slot}._replace(stage=({slot}.stage + 1) % spec.stages)", mode="eval").body


def count_changed(place: Place) -> Iterator[ast.AST]:
    """How many arrive, how many bytes come, how many groups may be pending: one more, one less."""
    if (isinstance(place.parent, ast.Call) and place.field == "args" and place.at == _counted(name_of(place.parent))):
        for step in (ast.Add(), ast.Sub()):
            yield ast.BinOp(place.node, step, ast.Constant(1))


def _counted(name: str) -> int:
    if re.search("wgmma_wait|tma_wait", name):
        return 0
    if re.search("named_", name):
        return -1                                      # a number of threads has other multiples
    return 2 if re.search("mbarrier_(init|expect)", name) else -1


def threads_changed(place: Place) -> Iterator[ast.AST]:
    """A warp more at a named barrier."""
    if isinstance(place.parent, ast.Call) and place.field == "args" and place.at == 1 and name_of(
            place.parent).startswith("named_"):
        yield ast.BinOp(place.node, ast.Add(), ast.Constant(32))


# -- who, and how often -----------------------------------------------------------------------------------------------

def always(place: Place) -> Iterator[ast.AST]:
    """A condition that is not asked: every thread, every element."""
    if isinstance(place.node, (ast.If, ast.While)) and isinstance(place.node, ast.If) and not isinstance(
            place.node.test, ast.Constant):
        changed = copy.copy(place.node)
        changed.test = ast.Constant(True)
        yield changed


def never(place: Place) -> Iterator[ast.AST]:
    if isinstance(place.node, ast.If) and not isinstance(place.node.test, ast.Constant):
        changed = copy.copy(place.node)
        changed.test = ast.Constant(False)
        yield changed


def half_a_condition(place: Place) -> Iterator[ast.AST]:
    """A mask without one of its parts."""
    if isinstance(place.node, ast.BoolOp):
        for n in range(len(place.node.values)):
            rest = place.node.values[:n] + place.node.values[n + 1:]
            yield rest[0] if len(rest) == 1 else ast.BoolOp(place.node.op, rest)


def bound_shifted(place: Place) -> Iterator[ast.AST]:
    """A comparison that takes one more or one less: ``<`` and ``<=``, ``>`` and ``>=``; equal and not."""
    swapped: dict[type, Any] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
                                ast.NotEq: ast.Eq}
    if isinstance(place.node, ast.Compare) and type(place.node.ops[0]) in swapped:
        yield ast.Compare(place.node.left, [swapped[type(place.node.ops[0])](), *place.node.ops[1:]], place.node.comparators)


def round_dropped(place: Place) -> Iterator[ast.AST]:
    """A loop without its last round, or an unrolled one."""
    if isinstance(place.parent, ast.Call) and place.field == "args" and (
            (name_of(place.parent) == "range" and place.at == len(place.parent.args) - 1 and len(place.parent.args) < 3)
            or (name_of(place.parent) in ("fold", "generate") and place.at == 0)):
        yield ast.BinOp(place.node, ast.Sub(), ast.Constant(1))


def update_dropped(place: Place) -> Iterator[ast.AST]:
    """What goes on from round to round stays as it is."""
    node = place.node
    if isinstance(node, ast.AugAssign):
        yield ast.Pass()
    if isinstance(node, ast.Assign) and place.parent is not place.function:
        known = {a.arg for a in place.function.args.args}
        known |= {x.id for s in ast.walk(place.function) if isinstance(s, ast.Assign) and s.lineno < node.lineno
                  for t in s.targets for x in ast.walk(t) if isinstance(x, ast.Name)}
        names = [x.id for t in node.targets for x in ast.walk(t) if isinstance(x, ast.Name)]
        if names and all(name in known for name in names):
            yield ast.Pass()


# -- where ------------------------------------------------------------------------------------------------------------

def limit_dropped(place: Place) -> Iterator[ast.AST]:
    """``min`` or ``max`` of one thing."""
    if isinstance(place.node, ast.Call) and name_of(place.node) in ("min", "max") and place.node.args:
        yield place.node.args[0]


def term_dropped(place: Place) -> Iterator[ast.AST]:
    """An offset, a factor or a modulus that is not there."""
    if isinstance(place.node, ast.BinOp) and isinstance(place.node.op, (ast.Add, ast.Sub, ast.Mult, ast.Mod)):
        yield place.node.left
        if not isinstance(place.node.op, (ast.Mod, ast.Sub)):
            yield place.node.right


def sign_changed(place: Place) -> Iterator[ast.AST]:
    if isinstance(place.node, ast.BinOp) and isinstance(place.node.op, (ast.Add, ast.Sub)):
        yield ast.BinOp(place.node.left, ast.Sub() if isinstance(place.node.op, ast.Add) else ast.Add(), place.node.right)


def constant_changed(place: Place) -> Iterator[ast.AST]:
    """One more."""
    if isinstance(place.node, ast.Constant) and type(place.node.value) is int:
        yield ast.Constant(place.node.value + 1)


def flag_changed(place: Place) -> Iterator[ast.AST]:
    if isinstance(place.node, ast.Constant) and type(place.node.value) is bool and not isinstance(place.parent, ast.If):
        yield ast.Constant(not place.node.value)


def operands_swapped(place: Place) -> Iterator[ast.AST]:
    """Two names that follow each other in a call, a pair or a subtraction."""
    node = place.node
    if isinstance(node, ast.Call) and name_of(node) not in ("min", "max"):
        values, field = node.args, "args"
    elif isinstance(node, ast.Tuple):
        values, field = node.elts, "elts"
    else:
        return
    for n in range(len(values) - 1):
        one, other = values[n:n + 2]
        if {label_of(one), label_of(other)} in PAIRS:
            changed = copy.copy(node)
            setattr(changed, field, [*values[:n], other, one, *values[n + 2:]])
            yield changed


PAIRS = [{"full", "empty"}, {"m", "n"}, {"i", "j"}, {"row", "column"}, {"along", "across"}, {"stage", "phase"}, {"m", "k"},
         {"rows", "columns"}, {"k", "n"}, {"a", "b"}, {"begin", "count"}, {"map_a", "map_b"}, {"at_i", "at_j"}, {"k", "rank"},
         {"a_shared", "b_shared"}, {"block_m", "block_n"}, {"tile_m", "tile_n"}, {"landed", "empty"}, {"first", "second"},
         {"group", "rank"}, {"block_m", "block_k"}, {"fragment", "tile"}, {"group", "stage"}, {"j", "i"}]

Operator = Callable[[Place], Iterator[ast.AST]]

SYNCHRONISATION: dict[str, Operator] = {
    "statement dropped": statement_dropped, "wait dropped": wait_dropped, "order changed": order_changed,
    "done twice": done_twice, "phase flipped": phase_flipped, "stage shifted": stage_shifted, "count changed": count_changed,
    "threads changed": threads_changed,
}
OTHERS: dict[str, Operator] = {
    "always": always, "never": never, "half a condition": half_a_condition, "bound shifted": bound_shifted,
    "round dropped": round_dropped, "update dropped": update_dropped, "limit dropped": limit_dropped,
    "term dropped": term_dropped, "sign changed": sign_changed, "constant changed": constant_changed,
    "flag changed": flag_changed, "operands swapped": operands_swapped,
}
OPERATORS = {**SYNCHRONISATION, **OTHERS}
