"""Chains in more tiles than rows: of several stacks, such as batch and heads, and of rows that are packed. Rounds of rows in pages, and
rounds that begin at a row of the tile's own.

A chain that is drawn for tiles of rows gets more indices. Each array has some of them or none: a stack's, ``q[b, h, m]``, one that
neighbours share, ``k[h // 2, n]``, and a piece's, ``w[i, n]``. Arrays of packed rows have the rows of all pieces, and need no index of one.
Those of rows in pages have one of the page, ``k[n.page, h, n]``. Rounds begin and end at whole numbers, ``start=starts[h] - 7``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.drawn_programs.syntax import Array, Cut, Expr, Let, Loop, Once, Statement, Store, expressions, number, rewritten

if TYPE_CHECKING:
    from tests.drawn_programs.grammar import Drawing

__all__ = ["Chosen", "cut_points", "in_pieces", "page_sizes", "table_of", "widened"]

CLASSES = {"batch": "B", "h": "H", "piece": "P"}               # of indices that are counted one by one
HALVES = {"batch": "A", "h": "G"}                          # how many pairs of neighbours there are


@dataclass
class Chosen:
    """``stacks``: all indices of a tile before its rows, in order; ``cuts`` by the index that goes along a piece; ``which``: the index that
    says which piece it is, as it is written."""

    stacks: tuple[str, ...]
    cuts: dict[str, Cut]
    which: dict[str, str]


def cut_points(rng: np.random.Generator, pieces: int, rows: int, style: str) -> np.ndarray:
    """Offsets of pieces of rows: some are empty, some of one row, some of several tiles; rows before the first and behind the last are of
    none. ``style`` "keys": pieces may also overlap and end before they begin, as nothing is stored by them; "far": offsets that point beyond
    the rows, in front and behind."""
    found = np.sort(rng.integers(0, rows + 1, pieces + 1))
    if rng.random() < 0.7:
        found[0] = 0
    if rng.random() < 0.7 and pieces:
        found[-1] = rows
    for n in range(1, pieces):
        kind = rng.random()
        found[n] = found[n - 1] if kind < 0.2 else min(found[n - 1] + 1, rows) if kind < 0.35 else max(found[n - 1], found[n])
    if style == "far":
        found[0], found[-1] = (-5, rows + 40) if pieces else (0, 0)
    if style == "keys":
        rng.shuffle(found)
    return found


def widened(of: Drawing, tile: tuple[str, ...], body: list[Statement]) -> tuple[tuple[str, ...], list[Statement], Chosen | None]:
    """The tile's indices and the statements of a chain, in more tiles, with pages and with bounds of rounds; None for one without these."""
    tile, body, chosen = in_more_tiles(of, tile, body)
    body, chosen = in_pages(of, tile, body, chosen)
    return tile, with_bounds(of, tile, body, chosen), chosen


def in_pieces(of: Drawing, tile: tuple[str, ...], body: list[Statement]) -> tuple[tuple[str, ...], list[Statement], Chosen | None]:
    """Tiles of rows and columns whose rows, or whose rounds, go along pieces: arrays without rows of the pieces may have a matrix, or a line,
    of each."""
    rng, loops = of.late, [x for x in body if isinstance(x, Loop)]
    if "tile" not in of.tags or tile != ("m", "n") or rng.random() > 0.4:
        return tile, body, None
    along = loops[0].over[0].index if len(loops) == 1 and rng.random() < 0.4 else "m"
    of.classes |= {"piece": "P"}
    of.tags.add(f"pieces in tiles of columns, of {'rows' if along == 'm' else 'rounds'}")
    kind, style, pitch = ("int32", "int64")[rng.integers(2)], "far" if rng.random() < 0.06 else "rows", 1 + (rng.random() < 0.25)
    of.arrays.append(Array("offsets", ("P",), kind, style, 1.0, pitch, "offsets", of.classes[along]))
    chosen = Chosen(("piece",), {along: Cut("in_some", "", "offsets")}, {along: "piece"})
    loads: dict[str, set[tuple[str, ...]]] = {}
    for x in (y for held in body for y in expressions(held)):
        if x.op == "load":
            loads.setdefault(x.data[0], set()).add(x.data[1])
    of_each, turned = set[str](), set[str]()
    for n, array in enumerate(of.arrays):
        read = loads.get(array.name, set())
        if read and not any(along in key for key in read) and array.role in ("operand", "element") and rng.random() < 0.7:
            of_each.add(array.name)
            of.arrays[n] = replace(array, dims=("P", *array.dims))
        elif read and all(key[1:] == (along,) for key in read) and rng.random() < 0.9:
            turned.add(array.name)                     # pieces are of an array's rows
            of.arrays[n] = replace(array, dims=array.dims[::-1])

    def changed(x: Expr) -> Expr:
        if x.op == "transpose" and x.args[0].op == "transpose":
            return x.args[0].args[0]
        if x.op != "load" or x.data[0] not in of_each | turned:
            return x
        name, key = x.data
        if name in of_each:
            return replace(x, data=(name, ("piece", *key)))
        return Expr("transpose", (replace(x, data=(name, key[::-1]), dims=key[::-1]),), None, key)

    def settle(x: Statement) -> Statement:
        if isinstance(x, Store) and along != "m":
            known = next(a for a in of.arrays if a.name == x.array)
            of.arrays[of.arrays.index(known)] = replace(known, dims=("P", *known.dims))
            return replace(x, indices=("piece", *x.indices))
        return replace(x, body=tuple(map(settle, x.body))) if isinstance(x, Once) else x

    return ("piece", *tile), [settle(rewritten(x, changed)) for x in body], chosen


def in_more_tiles(of: Drawing, tile: tuple[str, ...], body: list[Statement]) -> tuple[tuple[str, ...], list[Statement], Chosen | None]:
    rng = of.late

    def chance(p: float) -> bool:
        return bool(rng.random() < p)

    def pick(*given: Any) -> Any:
        return given[rng.integers(len(given))]

    kind = rng.random()
    if kind < 0.45:
        return tile, body, None
    has_stacks, has_pieces = kind < 0.62 or kind > 0.88, kind >= 0.62
    stacks = [x for x in ("batch", "h") if has_stacks or x in tile]
    rounds = next((x.over[0].index for x in body if isinstance(x, Loop)), "")
    rows_are_cut = has_pieces and not (stacks and chance(0.3))
    keys_are_cut = has_pieces and (not rows_are_cut or chance(0.65)) and (rounds == "n" or (rounds == "k" and chance(0.15)))
    if rows_are_cut:
        stacks.append("piece")
    if chance(0.3):
        stacks = [str(x) for x in rng.permutation(stacks)]
    chosen = Chosen(tuple(stacks), {}, {})
    of.classes |= {x: CLASSES[x] for x in stacks}

    def offsets(index: str, which: str) -> None:
        base, _, half = which.partition(" // ")
        dims = (HALVES[base] if half else CLASSES[base],)
        style = "far" if chance(0.06) else "keys" if index != "m" and chance(0.08) else "rows"
        made = Array(f"offsets_{index}", dims, pick("int32", "int64"), style, 1.0, pick(1, 1, 1, 2), "offsets", of.classes[index])
        of.arrays.append(made)
        chosen.cuts[index], chosen.which[index] = Cut(f"packed_{index}", "", made.name), which

    if rows_are_cut:
        of.tags.add("packed rows")
        offsets("m", "piece")
    if keys_are_cut:
        which = "piece" if rows_are_cut and not chance(0.1) else pick(*(x for x in stacks if x != "piece" or rows_are_cut))
        if which in HALVES and chance(0.25):
            which = halved(of, which)
        if which == "piece" and of.classes["m"] == of.classes[rounds] and chance(0.7):
            of.tags.add("rounds along the pieces of rows")
            chosen.cuts[rounds], chosen.which[rounds] = chosen.cuts["m"], "piece"
        else:
            of.tags.add(f"rounds along pieces, by {'those of rows' if which == 'piece' else 'a stack'}")
            offsets(rounds, which)

    prefixes = prefixes_of(of, tile, body, chosen, rounds, chance, pick)

    def changed(x: Expr) -> Expr:
        if x.op == "load":
            return replace(x, data=(x.data[0], (*prefixes[x.data[0]], *rest_of(x.data[1]))))
        if x.op == "where" and x.dims == ("m", "n") and {y.data for y in expressions(x.args[0]) if y.op == "place"} == {"m", "n"} and chance(0.5 if len(chosen.stacks) < 3 else 0.05):
            aligned = pick("lower right", "lower right", "upper left")
            left, right = pick((None, 0), (None, 0), (20, 10), (70, 0), (3, 40))
            return Expr("masked", x.args[1:], (left, right, aligned), x.dims)
        return x

    def settle(x: Statement) -> Statement:
        if isinstance(x, Store):
            known = next(a for a in of.arrays if a.name == x.array)
            ahead = [y for y in chosen.stacks if y != "piece"]
            ahead = [str(y) for y in rng.permutation(ahead)] if chance(0.15) else ahead
            of.arrays[of.arrays.index(known)] = replace(known, dims=(*(CLASSES[y] for y in ahead), *(d for d in known.dims if d != "H")))
            value = x.value
            if chance(0.3):
                index = pick(*chosen.stacks, "m")
                place = Expr("place", (), index, (index,) if index == "m" else ())
                value = of.make("add", value, of.make("mul", number(0.125), place))
            return replace(x, indices=(*ahead, *rest_of(x.indices)), value=value)
        if isinstance(x, Let) and x.name == "s" and chance(0.25):
            of.tags.add("a bias of a piece or a stack")
            index = pick(*chosen.stacks)
            bias = Array(f"bias_of_{index}", (CLASSES[index],), pick("float32", "float16"), "normal", 0.5, 1)
            of.arrays.append(bias)
            return replace(x, value=of.make("add", x.value, Expr("load", (), (bias.name, (index,)), ())))
        if isinstance(x, Loop):
            stop = None if x.over[0].index in chosen.cuts and chance(0.97) else x.stop
            return replace(x, body=tuple(map(settle, x.body)), stop=stop)
        return replace(x, body=tuple(map(settle, x.body))) if isinstance(x, Once) else x

    made = [settle(rewritten(x, changed)) for x in body]
    return (*chosen.stacks, "m"), made, chosen


# -- pages, and where rounds begin -----------------------------------------------------------------------------------------------


def page_sizes(of: Drawing) -> dict[str, int]:
    """Rows of a page, pages of a sequence and of a cache, and how many rows a sequence has then."""
    if "pages" not in of.tags:
        return {}
    rows = int(of.last.choice([8, 8, 16, 16, 32, 64, 64, 12], p=[.15, .15, .15, .15, .15, .12, .12, .01]))
    each = int(of.last.integers(1, max(2, 140 // rows)))
    return {"R": rows, "T": each, "Q": int(of.last.integers(1, 3 * each + 1)), "N": rows * each}


def table_of(rng: np.random.Generator, shape: tuple[int, ...], pages: int) -> np.ndarray:
    """Any pages, some of them of several sequences, or twice."""
    return rng.integers(0, pages, shape)


def in_pages(of: Drawing, tile: tuple[str, ...], body: list[Statement], chosen: Chosen | None) -> tuple[list[Statement], Chosen | None]:
    """Some of the operands that rounds go along lie in pages, a line of a table for each of a stack's."""
    rounds = next((x.over[0].index for x in body if isinstance(x, Loop)), "")
    stacks = [x for x in tile if x in HALVES]
    if of.last.random() > 0.6 or rounds != "n" or not stacks or of.classes["n"] != "N" or (chosen is not None and "n" in chosen.cuts):
        return body, chosen
    loads: dict[str, set[tuple[str, ...]]] = {}
    for x in (y for held in body for y in expressions(held)):
        if x.op == "load":
            loads.setdefault(x.data[0], set()).add(x.data[1])
    found = [x for x in of.arrays if x.role == "operand" and len(loads.get(x.name, ())) == 1 and next(iter(loads[x.name]))[-1:] == ("n",)
             and len(next(iter(loads[x.name]))) == len(x.dims) - 1 and of.last.random() < 0.85]
    if not found:
        return body, chosen
    of.tags.add("pages")
    which = stacks[of.last.integers(len(stacks))]
    if of.last.random() < 0.25:
        which = halved(of, which)
    base, _, half = which.partition(" // ")
    table = Array("table", ((HALVES if half else CLASSES)[base], "T"), "int32" if of.last.random() < 0.5 else "int64", role="table", cuts="Q")
    for operand in found:
        of.arrays[of.arrays.index(operand)] = replace(operand, dims=("Q", *operand.dims[:-2], "R", operand.dims[-1]))
    of.arrays.append(table)
    chosen = chosen or Chosen(tuple(stacks), {}, {})
    chosen.cuts["n"], chosen.which["n"] = Cut("in_pages", found[0].name, table.name, "paged"), which
    names = {x.name for x in found}

    def changed(x: Expr) -> Expr:
        return replace(x, data=(x.data[0], ("n.page", *x.data[1]))) if x.op == "load" and x.data[0] in names else x

    return [rewritten(x, changed) for x in body], chosen


def with_bounds(of: Drawing, tile: tuple[str, ...], body: list[Statement], chosen: Chosen | None) -> list[Statement]:
    """Rounds with a start, which is a whole number made of elements, places and numbers, and with an end of that kind."""
    rng, stacks = of.last, [x for x in tile if x in CLASSES]

    def leaf() -> Expr:
        if not stacks or rng.random() < 0.15:
            return Expr("whole", (), int(rng.choice([0, 5, 16, 32, 70])))
        which = stacks[rng.integers(len(stacks))]
        if rng.random() < 0.1:
            return Expr("place", (), which)
        classes = CLASSES
        if which in HALVES and rng.random() < 0.2:
            which, classes = halved(of, which), HALVES
        name = f"counted{sum(x.name.startswith('counted') for x in of.arrays)}"
        dims = (classes[which.partition(" ")[0]],)
        known = next((x for x in of.arrays if x.role == "length" and x.dims == dims and rng.random() < 0.5), None)
        made = known or Array(name, dims, "int32" if rng.random() < 0.5 else "int64", "lengths", 1.0, 1, "length")
        if known is None:
            of.arrays.append(made)
        return Expr("load", (), (made.name, (which,)))

    def bound() -> Expr:
        x = leaf()
        for _ in range(int(rng.choice([0, 0, 1, 1, 2]))):
            op = str(rng.choice(["sub", "sub", "add", "max", "min", "mul"]))
            other = Expr("whole", (), int(rng.choice([1, 3, 20, 64]))) if rng.random() < 0.6 else leaf()
            if x.op == other.op == "whole":            # of Python's numbers gp.maximum has a program's value
                continue
            x = of.make(op, x, Expr("whole", (), 2) if op == "mul" else other)
        return of.make("neg", x) if rng.random() < 0.04 else x

    def settle(x: Statement) -> Statement:
        if not isinstance(x, Loop) or x.over[0].index not in ("n", "k") or rng.random() > 0.4:
            return x
        is_cut = chosen is not None and x.over[0].index in chosen.cuts and chosen.cuts[x.over[0].index].word == "packed"
        start = bound() if x.over[0].index == "n" or rng.random() < 0.2 else None
        stop = bound() if x.stop is None and rng.random() < (0.03 if is_cut else 0.6) else x.stop
        return replace(x, start=start, stop=stop)

    return [settle(x) for x in body]


def rest_of(indices: tuple[str, ...]) -> tuple[str, ...]:
    """Without those of a stack, which are first."""
    return tuple(x for x in indices if x.partition(" // ")[0] not in CLASSES)


def halved(of: Drawing, index: str) -> str:
    of.halved.add(index)
    return f"{index} // 2"


def prefixes_of(of: Drawing, tile: tuple[str, ...], body: list[Statement], chosen: Chosen, rounds: str, chance: Callable[[float], bool],
                pick: Callable[..., Any]) -> dict[str, tuple[str, ...]]:
    """By array: the indices of stacks and pieces that it is read by. One operand is of all stacks, so that loops have axes."""
    loads: dict[str, set[str]] = {}
    for x in (y for held in body for y in expressions(held)):
        if x.op == "load":
            loads.setdefault(x.data[0], set()).update(x.data[1])
    whole = pick(*(x.name for x in of.arrays if x.role == "operand" and x.name in loads))
    found: dict[str, tuple[str, ...]] = {}
    for n, array in enumerate(of.arrays):
        read = loads.get(array.name)
        if read is None:
            continue
        packed = (read | {""}) & {"m", *(x for x in chosen.cuts)}
        indices = [x for x in chosen.stacks if (x in read if x == "h" and "h" in tile else chance(0.03 if x == "piece" and packed else 0.35 if x == "piece" else 0.6))
                   or (array.name == whole and x != "piece")]
        if chance(0.1):
            indices = indices[::-1]
        if "h // 2" in read:                           # it was drawn so
            indices = [*(x for x in indices if x != "h"), "h // 2"]
        elif array.name != whole:
            indices = [halved(of, x) if x in HALVES and chance(0.2) else x for x in indices]
        own = tuple(d for d in array.dims if d not in ("H", "G"))
        dims = [HALVES[x.partition(" ")[0]] if " // " in x else CLASSES[x] for x in indices]
        of.arrays[n] = replace(array, dims=(*dims, *own))
        found[array.name] = tuple(indices)
    return found
