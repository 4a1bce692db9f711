"""What a drawn program has, told from its tree, for counting."""

from __future__ import annotations

from collections import defaultdict

from tests.drawn_programs.grammar import Case
from tests.drawn_programs.syntax import Cell, Expr, Loop, Once, Put, Store, expressions, statements

__all__ = ["features"]

NAMES = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=", "and": "&", "or": "|", "not": "~", "abs": "abs", "power": "**", "rowmax": "max of rows", "rowmin": "min of rows",
         "div": "a division", "max": "maximum", "min": "minimum", "sum": "sums", "cast": "astype", "place": "a place in an expression"}


def features(case: Case) -> set[str]:
    source, found = case.source, set(case.tags) | {case.machine, f"by {case.how}"}
    roles = defaultdict[str, set[str]](set)
    for held in statements(source.loop):
        for x in expressions(held) if not hasattr(held, "body") else ():
            if x.op in ("sqrt", "rsqrt", "log", "exp", "tanh", "finite", "where", "mean", "masked", *NAMES):
                found.add(NAMES.get(x.op, x.op))
            if x.op == "scalar":
                found.add("a number")
            if x.op in ("lt", "le", "gt", "ge", "eq", "ne"):
                found |= {f"a condition on {y}" for y in _kinds(x)}
        if isinstance(held, Put):
            found.add("[:] =")
        if isinstance(held, Cell):
            found.add("a copied cell" if isinstance(held.begin, Expr) else "full" if held.begin else "zeros")
        if isinstance(held, Once):
            found.add("once")
        if isinstance(held, Loop):
            given = {word for word, x in (("start=", held.start), ("stop=", held.stop)) if x is not None}
            found |= given | ({"start= and stop="} if len(given) == 2 else set())
            found |= {f"start= of {word}" for word in ("packed", "paged") if "start=" in given and any(
                cut.word == word and o.axis.startswith(cut.name) for cut in source.cuts for o in held.over)}
            found |= {f"{word} an expression" for word, x in (("start=", held.start), ("stop=", held.stop)) if x is not None and x.args}
        for part in (getattr(held, "value", None), getattr(held, "begin", None)):
            if isinstance(part, Expr):
                _roles(part, roles)
    products = sum(x.op == "dot" for x in expressions(source.loop))
    found.add(f"{products} products")
    if len({x for y in statements(source.loop) if isinstance(y, Loop) and y.kind == "sequential" for x in y.over}) > 1:
        found.add("two loops")
    for has in roles.values():
        found |= {f"an array as {role}" for role in has}
        found.add(f"an array in {len(has)} roles" if len(has) > 1 else "arrays in one role")
        if {"left", "right"} <= has:
            found.add("an array as left and right operand")
        if has & {"left", "right"} and has - {"left", "right", "summed"}:
            found.add("an operand that is read again")
    found |= {f"{array.dtype} {array.role}" for array in source.arrays}
    stores = [x for x in statements(source.loop) if isinstance(x, Store)]
    found.add(f"{len(stores)} results")
    stacks = [o for o in source.loop.over if o.stack]
    if stacks:
        found.add("a stack")
    if len(stacks) > 1:
        found |= {"several stacks", f"{len(stacks)} stacks and pieces"}
    found |= {f"a size of {name}" for name, test in (("0", lambda x: x == 0), ("1", lambda x: x == 1), ("more than 128", lambda x: x > 128))
              if any(test(size) for size in case.sizes.values())}
    mapping = case.mapping
    if mapping is None:
        found.add("the default mapping")
    else:
        found |= {f"Mapping({name}=)" for name in ("stages", "cluster", "band", "splits", "descending", "ahead", "turns", "lazy")
                  if getattr(mapping, name) not in (None, 0, {}) and (name != "cluster" or mapping.cluster)}
        found |= {f"blocks of {index}" for index in mapping.blocks} | {f"{mapping.warpgroups or 'any'} warpgroups", mapping.kernel or "any kernel"}
    return found


def _kinds(x: Expr) -> set[str]:
    inner = [y for y in expressions(x) if not y.args]
    kinds = {"place": "places", "load": "arrays", "scalar": "numbers of a call"}
    return {kinds[y.op] for y in inner if y.op in kinds} | ({"values"} if any(y.op == "name" for y in inner) else set())


def _roles(x: Expr, roles: dict[str, set[str]], role: str = "") -> None:
    if x.op == "load":
        name, indices = x.data
        whole = "both" if len(x.dims) == 2 else "a row" if x.dims[:1] == ("m",) else "a column" if x.dims else "one number"
        roles[name].add(role or f"elements by {whole}")
    elif x.op == "dot":
        _roles(x.args[0], roles, "left")
        _roles(x.args[1], roles, "right")
    else:
        inner = role if x.op == "transpose" else "summed" if x.op == "sum" and x.args[0].op in ("load", "transpose") else ""
        for y in x.args:
            _roles(y, roles, inner)


