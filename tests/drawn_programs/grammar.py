"""The grammar: tiles of rows and columns, chains of products in tiles of whole rows, and functions of rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

import gemmkit as gk
from tests.drawn_programs.pieces import in_pieces, page_sizes, widened
from tests.drawn_programs.slips import slipped
from tests.drawn_programs.syntax import (
    Add,
    Array,
    Cell,
    Cut,
    Expr,
    Let,
    Loop,
    Once,
    Over,
    Put,
    Source,
    Statement,
    Store,
    expressions,
    number,
    rewritten,
    statements,
)

__all__ = ["Case", "drawn"]

WIDE = 264, 320, 384, 512                                              # whose columns two warpgroups share
WIDTHS = 3, 8, 16, 20, 24, 32, 36, 40, 48, 50, 56, 72, 80, 96, 100, 104, 112, 136, 160     # of heads and layers
SMALL, MIDDLE = (1, 2, 3, 5, 7, 8, 9, 13, 16, 17, 24, 31, 33, 40), (48, 63, 64, 65, 70, 81, 96, 97, 100, 127, 128, 129)
LARGE = (130, 150, 191, 192, 200, 255, 256, 257, 299, 300)
OPERANDS, ELEMENTS, RESULTS = list("abcuvwxq"), ["bias", "scale", "gate", "shift", "extra", "gamma", "beta", "third"], list("deyzro")
STRANGE = ["slot", "i", "rows", "tile", "ring", "at_once", "u_tile", "a_by_b", "sizes", "max", "columns"]       # texts have some of these


@dataclass(frozen=True)
class Case:
    """``machine``: emulator, or ptx, which needs a kernel without wgmma. ``how``: by a plan, or by a call."""

    source: Source
    sizes: dict[str, int]
    mapping: gk.Mapping | None
    seed: int
    machine: str = "emulator"
    how: str = "plan"
    slip: str = ""
    tags: frozenset[str] = field(default=frozenset())


class Drawing:
    """What a program has so far. Classes of sizes that are ``merged`` are one: an axis of the one can stand for the other's."""

    def __init__(self, seed: int, number: int, large: bool = False):
        self.rng = np.random.default_rng((seed, number))
        self.more = np.random.default_rng((seed, number, 1))   # of what came later, so that earlier programs stay what they are
        self.late = np.random.default_rng((seed, number, 2))   # of several stacks and pieces
        self.last = np.random.default_rng((seed, number, 3))   # of pages, and of where rounds begin
        self.new = np.random.default_rng((seed, number, 4))    # of wide heads, of sums beside products, of elements without rows
        self.types = np.random.default_rng((seed, number, 5))  # of operands of other types, and of largest elements beside products
        self.updates = np.random.default_rng((seed, number, 6))        # of results that are read before they are stored
        self.operands = ""                                     # their type, if it is another one than other arrays'
        self.grouped = False                                   # whether neighbours of the stack share matrices
        self.halved: set[str] = set()                          # other stacks whose neighbours do
        self.arrays: list[Array] = []
        self.numbers: dict[str, float] = {}
        self.merged: dict[str, str] = {}
        self.large, self.sizes = large, dict[str, int]()
        self.dtype = self.pick("float16", "float16", "float16", "bfloat16")
        self.classes: dict[str, str] = {}                      # of indices
        self.stack = self.chance(0.25)
        self.tags: set[str] = set()
        self.lets = 0

    # -- chance -------------------------------------------------------------------------------------------------------

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, *given: Any) -> Any:
        return given[self.rng.integers(len(given))]

    def size(self) -> int:
        p = self.rng.random()
        if p < 0.015:
            return 0
        if self.large and p < 0.5:
            return int(self.rng.integers(1, 1000))
        return int(self.pick(*(SMALL if p < 0.6 else MIDDLE if p < 0.9 else LARGE)))

    def constant(self, *given: float) -> Expr:
        return number(self.pick(*(given or (0.5, 0.25, 1.0, 2.0, -1.0, 1.5, 0.125))))

    # -- arguments ----------------------------------------------------------------------------------------------------

    def of(self, name: str) -> str:
        """A class, as it is merged."""
        return self.merged.get(name, name)

    def array(self, dims: tuple[str, ...], role: str, dtype: str = "", style: str = "normal", reuse: float = 0.5, scale: float = 0.25) -> Array:
        """An array with these axes: one that is there in another role, or a new one."""
        dims = tuple(map(self.of, dims))
        scale = 2.0 if role == "operand" and self.operands == "int8" else scale
        dtype = dtype or (self.operands or self.dtype if role == "operand" else self.pick("float32", self.dtype, "float16", "bfloat16"))
        known = [x for x in self.arrays if x.dims == dims and x.role in ("operand", "element") and x.style == style
                 and (role != "operand" or x.dtype == dtype)]
        if known and self.chance(reuse):
            found: Array = self.pick(*known)
            if role == "operand" and found.role != "operand":
                self.arrays[self.arrays.index(found)] = found = replace(found, role="operand", pitch=8)
            return found
        pool = [x for x in (OPERANDS if role == "operand" else RESULTS if role == "result" else ELEMENTS)
                if x not in [held.name for held in self.arrays]]
        name = pool[0] if pool else f"more{len(self.arrays)}"
        if role == "element" and self.chance(0.006):
            name = self.pick(*(x for x in STRANGE if x not in [held.name for held in self.arrays]))
        pitch = 8 if role == "operand" and not self.chance(0.02) else int(self.pick(1, 1, 8, 8, 8, 0, -2))
        made = Array(name, dims, dtype, style, scale, pitch, role)
        self.arrays.append(made)
        return made

    def scalar(self, *values: float) -> Expr:
        if len(self.numbers) > 2 or (self.numbers and self.chance(0.5)):
            return Expr("scalar", (), self.pick(*self.numbers))
        name = next(x for x in ("alpha", "temperature", "limit", "offset") if x not in self.numbers)
        self.numbers[name] = float(np.float32(self.pick(*values, 0.5, 0.125, 1.0, 0.75, 3.0, -0.5)))
        return Expr("scalar", (), name)

    def load(self, array: Array, *indices: str) -> Expr:
        dims = (*(x for x in indices if x not in ("h", "h // 2")), *(f"*{x}" for x in array.dims[len(indices):]))
        return Expr("load", (), (array.name, indices), dims)

    def stacked(self, p: float = 0.6) -> tuple[str, ...]:
        return ("h",) if self.stack and self.chance(p) else ()

    def element(self, indices: tuple[str, ...], whole: tuple[str, ...] = (), **more: Any) -> Expr:
        """Elements of an array by these indices, and all of the axes ``whole``."""
        stack = self.stacked(0.4)
        dims = (*("H" for _ in stack), *(self.classes[x] for x in indices), *whole)
        return self.load(self.array(dims, "element", **{"scale": 0.5, **more}), *stack, *indices)

    # -- expressions --------------------------------------------------------------------------------------------------

    def make(self, op: str, *args: Expr, data: Any = None) -> Expr:
        first = (args[1], args[0], *args[2:]) if op == "where" else args
        dims = tuple(dict.fromkeys(dim for x in sorted(first, key=lambda x: -len(x.dims)) for dim in x.dims))
        return Expr(op, args, data, dims)

    def computed(self, leaves: list[Callable[[], Expr]], depth: int, dims: tuple[str, ...]) -> Expr:
        """An element-wise expression whose size stays moderate."""
        if depth <= 0 or self.chance(0.15):
            return self.pick(*leaves)()
        x = self.computed(leaves, depth - 1, dims)
        if self.more.random() < 0.12:
            return self.called(x, dims)
        kind = self.rng.integers(16)
        make, constant = self.make, self.constant
        if kind < 5:
            y = self.computed(leaves, depth - 2, dims)
            return [lambda: make("add", x, y), lambda: make("sub", x, y), lambda: make("mul", make("mul", x, number(0.5)), y),
                    lambda: make("div", x, make("add", make("mul", y, y), number(0.5))),
                    lambda: make(self.pick("max", "min"), x, y)][kind]()
        if kind == 5:
            return make("where", self.condition(x, leaves, dims), x, self.pick(*leaves)() if self.chance(0.5) else constant(0.0, -1.0, 0.5))
        if kind == 6:
            return make(self.pick("mul", "add", "sub", "max", "min"), *self.pick((x, self.scalar()), (self.scalar(), x)))
        if kind == 7:
            self.tags.add("divided by a number")
            return make("div", x, self.scalar())
        if kind == 8:
            return make("div", self.scalar(), make("add", make("mul", x, x), number(0.5)))
        return [lambda: make("exp", make("min", x, constant(1.0, 2.0, 0.0))), lambda: make("tanh", x),
                lambda: make(self.pick("sqrt", "rsqrt", "log"), make("add", make("mul", x, x), constant(0.5, 1.0, 0.25))),
                lambda: make("neg", x), lambda: make("max", x, number(0.0)),
                lambda: make("abs", x), lambda: make("power", make("min", make("max", x, number(-2.0)), number(2.0)), data=int(self.pick(2, 2, 3, 4)))][kind - 9]()

    def called(self, x: Expr, dims: tuple[str, ...]) -> Expr:
        """Functions of numbers that programs call, and what came with them."""
        self.tags.add("a called function")
        make, kind = self.make, self.more.integers(8)
        if kind == 0:
            return make("called", x, data="leaky")
        if kind == 1:
            return make("called", x, data="stepped")
        if kind == 2 and x.dims:
            return make("where", make("asked", x, data="between"), x, number(0.5))
        if kind == 3:
            places = [dim for dim in dims if not dim.startswith("*")]
            at: Any = Expr("place", (), places[0], (places[0],))
            if len(places) > 1 and self.more.random() < 0.5:
                other = Expr("place", (), places[1], (places[1],))
                at = make("abs", make("sub", at, other))
            return make("add", x, make("called", at, data="looked_up"))
        if kind == 4:
            return make("erf", x)
        if kind == 5:
            return make("root", make("abs", make("max", make("min", x, number(4.0)), number(-4.0))),
                        data=float((0.75, 1.5)[self.more.integers(2)]))
        if kind == 6 and self.stack:
            return make("add", x, make("mul", number(0.25), Expr("place", (), "h")))
        if kind == 7 and self.stack:
            self.grouped = True
            self.tags.add("a group of a stack")
            return make("add", x, self.load(self.array(("G",), "element", self.pick_later("float32", "float16"), scale=0.5), "h // 2"))
        return make("called", x, data="leaky")

    def pick_later(self, *given: Any) -> Any:
        return given[self.more.integers(len(given))]

    def condition(self, x: Expr, leaves: list[Callable[[], Expr]], dims: tuple[str, ...]) -> Expr:
        """Of values, and of places, which are written as such where ``x`` is not all of a tile."""
        kind = self.rng.integers(8)
        if not x.dims:                                         # of numbers of Python's there is no condition
            x = next(y for y in (leaf() for leaf in leaves) if y.dims)
        if kind == 0 and len(dims) == 2 and not dims[1].startswith("*"):
            return self.seen(*dims)
        if kind == 1:
            made = self.make(self.pick("and", "and", "or"), self.condition(x, leaves, dims), self.condition(x, leaves, dims))
            return self.make("not", made) if self.chance(0.15) else made
        op = self.pick("lt", "le", "gt", "ge")
        if kind == 2:
            place = [dim for dim in dims if not dim.startswith("*")]
            if place:
                return self.make(self.pick("lt", "le", "gt", "ge", "eq", "ne"), Expr("place", (), place[0], (place[0],)),
                                 self.constant(0.0, 3.0, 16.0, 40.0))
        if kind == 3:
            return self.make(op, self.scalar(0.0), x)
        if kind == 4:
            self.tags.add("== of arrays")
            one = self.element(dims[:1], style="whole", scale=1.0)
            return self.make(self.pick("eq", "ne"), one, self.constant(0.0, 1.0, -1.0))
        if kind == 5:
            return self.make(op, *self.pick((x, self.pick(*leaves)()), (self.pick(*leaves)(), x)))
        return self.make(op, x, self.constant(0.0, 0.5, -0.25))

    def seen(self, m: str, n: str) -> Expr:
        """A condition of the places of a row and a column."""
        make = self.make
        at_m, at_n = Expr("place", (), m, (m,)), Expr("place", (), n, (n,))
        distance = make("sub", at_m, at_n)
        kind = self.rng.integers(8)
        if kind == 0:
            return make(*self.pick(("le", at_n, at_m), ("lt", at_n, at_m), ("ge", at_m, at_n), ("gt", at_n, at_m)))
        if kind == 1:
            return make("and", make("le", at_n, at_m), make("lt", distance, self.constant(8.0, 40.0, 1.0, 100.0)))
        if kind == 2:
            return make("and", make("lt", make("sub", at_n, at_m), self.constant(30.0, 100.0)), make("le", distance, self.constant(5.0, 90.0)))
        if kind == 3:
            return make(self.pick("eq", "ne", "le"), at_m, at_n)
        if kind == 4:
            return make("le", make("mul", at_n, at_n), make("add", make("mul", at_m, at_m), number(5.0)))
        if kind == 5:
            self.tags.add("== of arrays")
            one, other = (self.element((x,), style="whole", scale=1.0, dtype=self.pick("int32", "float32", "float16")) if not x.startswith("*") else None for x in (m, n))
            if one is not None and other is not None:
                return make(self.pick("eq", "ne"), one, other)
        if kind == 6:
            return make("lt", at_n, make("add", make("mul", self.constant(2.0, 1.0), at_m), self.constant(30.0, 1.0)))
        if kind == 7 and not m.startswith("*"):
            return make(self.pick("lt", "ge"), at_n, self.element((m,), style="places", scale=1.0, dtype=self.pick("float32", "int32", "int32")))
        return make("le", at_n, at_m)

    def hidden(self, x: Expr, m: str, n: str, other: float) -> Expr:
        condition = self.seen(m, n)
        is_function = x.dims == (m, n) and (n.startswith("*") or self.chance(0.6))
        return self.make("where", condition, x, number(other), data=is_function)

    def let(self, body: list[Statement], value: Expr, name: str = "") -> Expr:
        """The value by a local name."""
        self.lets += 1
        name = name or f"t{self.lets}"
        body.append(Let(name, value))
        return Expr("name", (), name, value.dims)

    def cell(self, body: list[Statement], name: str, dims: tuple[str, ...], begin: float | Expr = 0.0) -> Expr:
        body.append(Cell(name, dims, tuple(dims), begin))
        return Expr("name", (), name, dims)

    def store(self, indices: tuple[str, ...], whole: tuple[str, ...], value: Expr, only: str = "") -> Statement:
        dims = (*(self.classes[x] for x in indices), *whole)
        dtype = self.pick("float16", "float32", "float32", "bfloat16", self.dtype)
        out = self.array(dims, "result", dtype, reuse=0.0)
        if not only and (whole or "chain" not in self.tags) and self.updates.random() < 0.12:
            self.tags.add("a result in place")
            self.arrays[-1] = out = replace(out, style="held")
            value = self.make("add", value, self.make("mul", number(0.5), self.load(out, *indices)))
        made = Store(out.name, indices, value)
        return Once(only, (made,)) if only else made

    # -- the whole ----------------------------------------------------------------------------------------------------

    def finished(self, tile: tuple[str, ...], body: list[Statement]) -> Source:
        """With the axes that loops go along and cells have, as arrays have them."""
        tile, body, chosen = (widened if "chain" in self.tags else in_pieces)(self, tile, body)
        counted = {"h", "layer", *(chosen.stacks if chosen else ())}
        loop = Loop("parallel", tuple(Over(x, self.classes[x], "") for x in tile), tuple(body))
        stored = {x.array: x.indices for x in statements(loop) if isinstance(x, Store)}            # with stacks that came later
        loop = rewritten(loop, lambda x: replace(x, data=(x.data[0], stored[x.data[0]])) if x.op == "load" and x.data[0] in stored else x)
        uses: dict[str, list[str]] = {}
        known = {x.name: x for x in self.arrays}

        def use(name: str, indices: tuple[str, ...]) -> None:
            array, rank = known[name], len(known[name].dims)
            for at, dim in enumerate((*indices, *(f"*{x}" for x in array.dims[len(indices):]))):
                if " // " in dim:
                    continue
                if dim == "piece":
                    axis = ""
                elif dim in counted:
                    axis = "count" if at == 0 and rank > 1 else f"counts[{at}]" if at < rank - 2 else ""
                else:
                    axis = {1: "columns", 2: "rows"}.get(rank - at, "")
                if axis:
                    uses.setdefault(dim, []).extend([f"{name}.{axis}"] * (8 if array.role == "operand" else 1))

        for x in expressions(loop):
            if x.op == "load":
                use(*x.data)
        for held in statements(loop):
            if isinstance(held, Store):
                use(held.array, held.indices)
        axes = {dim: self.pick(*found) for dim, found in uses.items()}
        cuts: dict[str, Cut] = {}
        pieces: dict[str, tuple[str, str]] = {}
        if chosen is not None:
            both = [x for x in known.values() if x.dims[:2] == tuple(self.classes[y] for y in chosen.stacks[:2]) and len(x.dims) == 4]
            if len(chosen.stacks) > 1 and both and self.late.random() < 0.6:
                axes |= {index: f"{both[0].name}.counts[{at}]" for at, index in enumerate(chosen.stacks[:2])}
            for index, cut in chosen.cuts.items():
                cuts.setdefault(cut.name, cut if cut.axis else replace(cut, axis=axes[index]))
                pieces[index], which = (cut.offsets, chosen.which[index]), chosen.which[index]
                axes[index] = f"{cut.name}.rows" if index == "m" else f"{cut.name}[{which}]"
            if "piece" in chosen.stacks:
                axes["piece"] = f"{next(iter(chosen.cuts.values())).name}.count"

        def settle(x: Statement) -> Statement:
            if isinstance(x, Loop):
                over = tuple(replace(o, axis=axes.get(o.index, f"nothing_{o.index}"), stack=o.index in counted,
                                     piece=pieces.get(o.index, ())) for o in x.over)
                return replace(x, over=over, body=tuple(map(settle, x.body)))
            if isinstance(x, Cell):
                return replace(x, shape=tuple(axes[dim] if dim.startswith("*") else dim for dim in x.dims))
            return x

        made = settle(loop)
        assert isinstance(made, Loop)
        used = {x.data[0] for x in expressions(made) if x.op == "load"} | {x.array for x in statements(made) if isinstance(x, Store)}
        used |= {cut.offsets for cut in cuts.values()}
        numbers = {x.data for x in expressions(made) if x.op == "scalar"}
        arrays = [x for x in self.arrays if x.name in used]
        order = [x for x in arrays if x.role != "result"] + [x for x in arrays if x.role == "result"]
        told = None
        kept = {name: value for name, value in self.numbers.items() if name in numbers}
        if kept and self.chance(0.3):
            self.tags.add("a plan's numbers are others")
            told = {name: float(np.float32(value * self.pick(0.5, 4.0, 1.0, -1.0))) for name, value in kept.items()}
        return Source(tuple(order), made, kept, told, cuts=tuple(cuts.values()))


def merge(of: Drawing, *pairs: tuple[str, str, float]) -> None:
    """Each class is another one with a chance."""
    for one, other, p in pairs:
        if of.chance(p):
            of.merged[one] = of.of(other)


# -- tiles of rows and columns ----------------------------------------------------------------------------------------------


def begins(of: Drawing, dims: tuple[str, ...], number: float) -> float | Expr:
    """What a cell of a tile begins with: a number, or elements of an array."""
    return of.element(dims) if of.last.random() < 0.2 else number


def tile_program(of: Drawing) -> Source:
    merge(of, ("N", "M", 0.25), ("K", "M", 0.15), ("K", "N", 0.12), ("J", "K", 0.2))
    of.classes = {"h": "H", "m": of.of("M"), "n": of.of("N"), "k": of.of("K"), "j": of.of("J")}
    tile = ("h", "m", "n") if of.stack else ("m", "n")
    body: list[Statement] = []
    if of.types.random() < 0.15:
        of.operands = str(of.types.choice(["float32", "int8", "float8_e4m3fn", "float8_e5m2"]))
        of.tags.add(f"operands of {of.operands}")
    least = bool(of.types.random() < 0.5)
    most = of.cell(body, "most", ("m",), math.inf if least else -math.inf) if of.types.random() < 0.12 else None
    kept = False
    cells = [of.cell(body, "acc", ("m", "n"), begins(of, ("m", "n"), of.pick(0.0, 0.0, 0.0, 1.0)))]
    if of.chance(0.3):
        cells.append(of.cell(body, "other", ("m", "n"), begins(of, ("m", "n"), 0.0)))
    rows = of.cell(body, "sums", ("m",), of.pick(0.0, 0.5)) if of.chance(0.25) else None
    columns = of.cell(body, "right", ("n",)) if of.chance(0.2) else None
    loops = ["k"] if of.chance(0.85) else ["k", "j"]
    products = 0
    for index in loops:
        inside: list[Statement] = []
        left: list[Expr] = []
        right: list[Expr] = []
        for cell in cells if index == "k" else cells[:1]:
            for _ in range(2 if products < 2 and of.chance(0.15) else 1):
                left.append(operand(of, "m", index, left))
                right.append(operand(of, index, "n", right))
                products += 1
                inside.append(Add(cell.data, of.make("dot", left[-1], right[-1])))
                inside[-1] = Add(cell.data, Expr("dot", (left[-1], right[-1]), None, ("m", "n")))
        if rows is not None:
            plain = [x for x in left if x.op == "load"]
            if of.new.random() < 0.3:                          # of an array that no product takes
                of.tags.add("sums beside products")
                plain = [of.load(of.array((of.classes["m"], of.classes[index]), "operand", reuse=0.0), "m", index)]
            if plain or of.chance(0.1):
                x = of.pick(*(plain or left))
                inside.append(Add("sums", Expr("sum", (x,), 1, ("m",))))
        blocks = [x for x in left if x.op in ("load", "transpose") and "tf32" not in str(x)]
        if most is not None and blocks:
            kept = True
            of.tags.add("smallest elements beside products" if least else "largest elements beside products")
            found = Expr("rowmin" if least else "rowmax", (blocks[int(of.types.integers(len(blocks)))],), 1, ("m",))
            inside.append(Put("most", of.make("min" if least else "max", most, found)))
        if columns is not None:
            x = right[0]
            if of.new.random() < 0.3:
                of.tags.add("sums beside products")
                pair = (index, "n") if right[0].op == "load" else ("n", index)
                x = of.load(of.array((of.classes[pair[0]], of.classes[pair[1]]), "operand", reuse=0.0), *pair)
                x = x if right[0].op == "load" else Expr("transpose", (x,), None, (index, "n"))
            x, axis = (x.args[0], 1) if x.op == "transpose" else (x, 0)
            inside.append(Add("right", Expr("sum", (x,), axis, ("n",))))
        if of.chance(0.04):
            acc = cells[0]
            inside.append(Put("acc", of.make(of.pick("min", "max"), acc, of.constant(0.5, 5.0, 50.0))))
        stop = of.load(of.array(("H",), "length", "int32", "lengths"), "h") if of.stack and of.chance(0.04) else None
        body.append(Loop("sequential", (Over(index, of.classes[index], ""),), tuple(inside), stop))
    has_rows = rows is not None and any(isinstance(x, Add) and x.name == "sums" for x in statements(Loop("", (), tuple(body))))
    leaves: list[Callable[[], Expr]] = [lambda: of.pick(*cells)] * 5
    leaves += [lambda: of.element(("m",)), lambda: of.element(("n",)), lambda: of.element(("m", "n")), of.constant]
    if has_rows and rows is not None:
        leaves += [lambda: of.make("mul", rows, number(0.25))]
    if columns is not None:
        leaves += [lambda: of.make("mul", columns, number(0.25))]
    if kept and most is not None:
        leaves += [lambda: of.make("max", of.make("min", most, number(4.0)), number(-4.0))]
    if of.stack:
        leaves += [lambda: of.load(of.array(("H",), "element", scale=0.5), "h")]
    if of.chance(0.1):
        leaves += [lambda: Expr("place", (), "m", ("m",)), lambda: of.make("mul", Expr("place", (), "n", ("n",)), number(0.0625))]
    for n in range(2 if of.chance(0.25) else 1):
        value = of.pick(*cells) if of.chance(0.15) else of.computed(leaves, int(of.rng.integers(1, 4)), ("m", "n"))
        if of.chance(0.15):
            value = of.hidden(value, "m", "n", of.pick(0.0, -1.0)) if value.dims == ("m", "n") else value
        if not any(x.op == "name" and x.data in ("acc", "other") for x in expressions(value)) and of.chance(0.95):
            value = of.make("add", cells[n % len(cells)], value)
        if of.chance(0.4):
            value = of.let(body, value)
        body.append(of.store(tile, (), value))
    if has_rows and rows is not None and of.chance(0.7):
        value = of.make(of.pick("mul", "add"), rows, of.element(("m",))) if of.chance(0.5) else rows
        body.append(of.store(tile[:-1], (), value, "n"))
    if kept and most is not None and of.types.random() < 0.7:
        body.append(of.store(tile[:-1], (), most, "n"))
    if columns is not None and of.chance(0.7):
        value = of.make(of.pick("mul", "add"), columns, of.element(("n",))) if of.chance(0.5) else columns
        body.append(of.store((*tile[:-2], "n"), (), value, "m"))
    return of.finished(tile, body)


def operand(of: Drawing, one: str, other: str, before: list[Expr]) -> Expr:
    """A block of (one, other), as it lies or transposed; the same as another product's, or of another array."""
    if before and of.chance(0.4):
        return of.pick(*before)
    stack = of.stacked()
    h = ("H",) if stack else ()
    def read(x: Expr) -> Expr:
        return Expr("cast", (x,), ("'tf32'", "tf32"), x.dims) if of.operands == "float32" else x

    if of.chance(0.7):
        return read(of.load(of.array((*h, of.classes[one], of.classes[other]), "operand"), *stack, one, other))
    x = of.load(of.array((*h, of.classes[other], of.classes[one]), "operand"), *stack, other, one)
    return Expr("transpose", (read(x),), None, (one, other))


# -- chains -----------------------------------------------------------------------------------------------------------------


def chain_program(of: Drawing) -> Source:
    kind = of.pick(*["online"] * 5, *["plain"] * 4, *["saturating"] * 2, "backward", "decaying", "normalised", "mlp", "gemm", "gemm", "last")
    of.tags.add(f"chain: {kind}")
    if kind == "mlp":
        return mlp_program(of)
    if kind == "gemm":
        return row_gemm_program(of)
    merge(of, ("N", "M", 0.3), ("C", "D", 0.5))
    of.classes = {"h": "H", "m": of.of("M"), "n": of.of("N")}
    tile = ("h", "m") if of.stack else ("m",)
    body: list[Statement] = []
    inside: list[Statement] = []
    h = ("H",) if of.stack else ()
    stack = ("h",) if of.stack else ()
    make = of.make

    def block(index: str, width: str, scale: float) -> Expr:
        stacked = not of.stack or of.chance(0.85)
        array = of.array((*(h if stacked else ()), of.classes[index], width), "operand", style=of.pick("normal", "normal", "growing"), scale=scale)
        return of.load(array, *(stack if stacked else ()), index)

    def product(scale: float) -> Expr:
        q, k = block("m", "D", 1.0), block("n", "D", scale)
        return Expr("dot", (q, Expr("transpose", (k,), None, k.dims[::-1])), None, ("m", "n"))

    out = of.cell(body, "out", ("m", f"*{of.of('C')}")) if kind != "last" or of.chance(0.5) else None
    total = of.cell(body, "total", ("m",)) if of.chance(0.6) or kind in ("online", "normalised") or out is None else None
    best = None
    if kind in ("online", "normalised"):
        best = of.cell(body, "best", ("m",), -math.inf)
    elif of.chance(0.25):
        best = of.cell(body, "best", ("m",), -math.inf)
    least = of.cell(body, "least", ("m",), of.pick(math.inf, 100.0)) if of.chance(0.1) else None

    s = product(0.25)
    factor = of.rng.integers(4)
    s = [lambda: s, lambda: make("mul", of.constant(0.125, 0.5), s), lambda: make("mul", of.scalar(0.125, 0.25), s),
         lambda: make("div", s, of.scalar(4.0, 8.0))][factor]()
    s = of.let(inside, s, "s")
    if of.chance(0.15):
        gate = of.let(inside, product(0.25), "gated")
        s = of.let(inside, make(of.pick("mul", "add", "max"), make("tanh", s), gate))
    leaves: list[Callable[[], Expr]] = [lambda: s] * 5
    leaves += [lambda: of.element(("m",)), lambda: of.element(("n",)), lambda: of.element(("m", "n")), of.constant]
    if of.stack:
        leaves += [lambda: of.load(of.array(("H",), "element", scale=0.5), "h")]
    if of.chance(0.15):
        leaves += [lambda: make("mul", make("sub", Expr("place", (), "m", ("m",)), Expr("place", (), "n", ("n",))), number(0.0625))]
    if of.chance(0.5):
        value = of.computed(leaves, int(of.rng.integers(1, 3)), ("m", "n"))
        if set(value.dims) != {"m", "n"} or value.dims != ("m", "n"):
            value = make("add", s, value)
        s = of.let(inside, value)
        leaves[:5] = [lambda: s] * 5
    if of.chance(0.35):
        of.tags.add("masked rounds")
        s = of.let(inside, of.hidden(s, "m", "n", -math.inf if kind in ("online", "normalised") else of.pick(0.0, 0.0, -1.0)))

    def top_of(x: Expr) -> Expr:
        return Expr("rowmax", (x,), 1, ("m",))

    def sum_of(x: Expr) -> Expr:
        return Expr("sum", (x,), 1, ("m",))

    def by_values(p: Expr) -> Expr:
        v = block("n", of.of("C"), 1.0)
        given = p if of.chance(0.1) else make("cast", p, data=(f"{v.data[0]}.dtype", of.dtype))
        return Expr("dot", (given, v), None, ("m", v.dims[1]))

    if kind in ("online", "normalised"):
        assert total is not None and best is not None and out is not None
        top = of.let(inside, make("max", best, top_of(s)), "top")
        zero = of.let(inside, make("finite", top), "zero") if of.chance(0.85) else top
        p = of.let(inside, make("exp", make("sub", s, zero)), "p")
        shrink = of.let(inside, make("exp", make("sub", best, zero)), "shrink")
        if kind == "online":
            inside.append(Put("total", make("add", make("mul", total, shrink), sum_of(p))))
            inside.append(Put("out", make("add", make("mul", out, shrink), by_values(p))))
        else:
            before = of.let(inside, make("mul", total, shrink), "before_now")
            now = of.let(inside, make("add", before, sum_of(p)), "now")
            inside.append(Put("out", make("div", make("add", make("mul", out, before), by_values(p)), now)))
            inside.append(Put("total", now))
        inside.append(Put("best", top))
    else:
        p = of.let(inside, make("tanh", s) if of.chance(0.4) else make("min", s, number(8.0)) if of.chance(0.5) else
                   make("exp", make("min", s, number(1.0))), "p")
        if out is not None:
            more = by_values(p)
            if kind == "saturating":
                capped = make("min", make("add", out, more), of.constant(0.5, 5.0, 50.0, 50000.0))
                inside.append(Put("out", make("max", capped, number(-5.0)) if of.chance(0.3) else capped))
            elif kind == "decaying":
                rate = of.constant(0.5, 0.75) if of.chance(0.5) else of.scalar(0.5)
                inside.append(Put("out", make("add", make("mul", out, rate), more)))
            elif kind == "last" and of.chance(0.5):
                inside.append(Put("out", more))
            else:
                inside.append(Add("out", more))
        if total is not None:
            if kind == "saturating" and of.chance(0.7):
                inside.append(Put("total", make(of.pick("min", "max"), make("add", total, sum_of(p)), of.constant(1.0, 5.0, 500.0, 50000.0))))
            elif kind == "last":
                inside.append(Put("total", sum_of(p)))
            elif kind == "decaying":
                inside.append(Put("total", make("add", make("mul", total, of.constant(0.5, 0.25)), sum_of(p))))
            else:
                inside.append(Add("total", sum_of(p)))
        if best is not None:
            inside.append(Put("best", make("max", best, top_of(of.pick(s, p)))))
    if least is not None:
        inside.append(Put("least", make("min", least, Expr("rowmin", (s if kind != "online" else p,), 1, ("m",)))))
    second = None
    if kind == "backward" and out is not None:               # an operand of one product is another's, and what it is made of a third's
        do = block("n", of.of("C"), 1.0)
        more = Expr("dot", (block("m", of.of("C"), 0.25), Expr("transpose", (do,), None, do.dims[::-1])), None, ("m", "n"))
        ds = of.let(inside, make("mul", p, make("sub", of.let(inside, more), of.element(("n",)))), "ds")
        k = block("n", "D", 0.25)
        second = of.cell(body, "second", ("m", "*D"))
        inside.append(Add("second", Expr("dot", (make("cast", ds, data=(f"{k.data[0]}.dtype", of.dtype)), k), None, ("m", "*D"))))
    elif out is not None and of.chance(0.12):
        second = of.cell(body, "second", out.dims)
        inside.append(Add("second", by_values(make("mul", p, number(0.5)) if of.chance(0.5) else p)))
    stop = None
    if of.stack and of.chance(0.25):
        of.tags.add("lengths")
        stop = of.load(of.array(("H",), "length", of.pick("int32", "int64"), "lengths"), "h")
    body.append(Loop("sequential", (Over("n", of.classes["n"], ""),), tuple(inside), stop))
    chain_end(of, body, tile, kind, out, second, total, best, least)
    return of.finished(tile, body)


def chain_end(of: Drawing, body: list[Statement], tile: tuple[str, ...], kind: str, out: Expr | None, second: Expr | None, total: Expr | None,
              best: Expr | None, least: Expr | None) -> None:
    make, c = of.make, of.of("C")
    rows = [x for x in (total, best, least) if x is not None]
    if out is not None:
        value = make("div", out, total) if kind == "online" and total is not None else out
        if of.chance(0.4):
            leaves: list[Callable[[], Expr]] = [lambda: of.element(("m",), (c,)), lambda: of.element((), (c,)), lambda: of.element(("m",)), of.constant]
            leaves += [lambda: make("mul", of.pick(*rows), number(0.0625))] if total is not None and best is None and least is None else []
            value = make("add", value, of.computed([lambda: value, *leaves], int(of.rng.integers(0, 3)), out.dims))
        if of.chance(0.3):
            h = ("H",) if of.stack else ()
            x = of.load(of.array((*h, of.classes["m"], c), "element", reuse=0.9), *tile)
            value = make(of.pick("add", "add", "mul"), value, x)
        body.append(of.store(tile, (c,), value))
    if second is not None:
        body.append(of.store(tile, (second.dims[1][1:],), second))
    for x in rows:
        if out is None or of.chance(0.35):
            value = x
            if x is best and total is not None and kind == "online" and of.chance(0.6):
                value = make("add", x, make("log", total))
            body.append(of.store(tile, (), value))


def mlp_program(of: Drawing) -> Source:
    merge(of, ("L", "M", 0.05))
    of.stack, of.classes = False, {"m": of.of("M"), "layer": of.of("L")}
    x, w = of.array(("M", "D"), "operand", scale=1.0), of.array(("L", "D", "D"), "operand", scale=0.125)
    body: list[Statement] = []
    h = of.cell(body, "state", ("m", "*D"), of.load(x, "m"))
    weights = of.load(w, "layer")
    weights = replace(weights, dims=("*D", "*D"))
    dot: Expr = Expr("dot", (h, weights), None, ("m", "*D"))
    leaves: list[Callable[[], Expr]] = [lambda: of.load(of.array(("L", "D"), "element", scale=0.5), "layer"), lambda: of.element((), ("D",)),
                                        lambda: of.element(("m",)), of.constant]
    value = of.make("add", dot, of.pick(*leaves)()) if of.chance(0.7) else dot
    value = of.make("max", value, number(0.0)) if of.chance(0.5) else of.make("tanh", value) if of.chance(0.6) else of.make("mul", value, of.scalar())
    value = of.make("cast", value, data=(f"{x.name}.dtype", of.dtype))
    body.append(Loop("sequential", (Over("layer", of.classes["layer"], ""),), (Put("state", value),)))
    end = of.make("add", h, of.load(of.array(("M", "D"), "element", reuse=0.9), "m")) if of.chance(0.3) else h
    body.append(of.store(("m",), ("D",), end))
    return of.finished(("m",), body)


def row_gemm_program(of: Drawing) -> Source:
    """A product whose rows are whole, so that they can be reduced before they are stored."""
    merge(of, ("K", "M", 0.2), ("C", "K", 0.1))
    of.classes = {"h": "H", "m": of.of("M"), "k": of.of("K")}
    tile = ("h", "m") if of.stack else ("m",)
    body: list[Statement] = []
    c = of.of("C")
    acc = of.cell(body, "acc", ("m", f"*{c}"))
    stacks = [of.stacked(), of.stacked()]
    h = [("H",) if x else () for x in stacks]
    a = of.load(of.array((*h[0], of.of("M"), of.of("K")), "operand"), *stacks[0], "m", "k")
    b = of.load(of.array((*h[1], of.of("K"), c), "operand"), *stacks[1], "k")
    body.append(Loop("sequential", (Over("k", of.classes["k"], ""),), (Add("acc", Expr("dot", (a, b), None, acc.dims)),)))
    leaves: list[Callable[[], Expr]] = [lambda: acc] * 4 + [lambda: of.element((), (c,)), lambda: of.element(("m",)), of.constant]
    t = of.let(body, of.computed(leaves, int(of.rng.integers(0, 3)), acc.dims), "t")
    if t.dims != acc.dims:
        t = of.let(body, of.make("add", acc, t))
    value = t
    if of.chance(0.5):
        top = of.let(body, Expr("rowmax", (t,), 1, ("m",)), "top")
        p = of.let(body, of.make("exp", of.make("sub", t, top)), "p")
        value = of.make("div", p, Expr("sum", (p,), 1, ("m",)))
        if of.chance(0.5):
            body.append(of.store(tile, (), top))
    elif of.chance(0.5):
        fold = of.pick("sum", "rowmax", "rowmin", "mean")
        r = of.let(body, Expr(fold, (t,), 1, ("m",)), "r")
        value = of.make("sub", t, r)
    if of.chance(0.3):
        value = of.make("add", value, of.load(of.array((*(("H",) if of.stack else ()), of.classes["m"], c), "element", reuse=0.9), *tile))
    body.append(of.store(tile, (c,), value))
    return of.finished(tile, body)


# -- functions of rows ------------------------------------------------------------------------------------------------------


def row_program(of: Drawing) -> Source:
    merge(of, ("C", "M", 0.1))
    of.classes = {"h": "H", "m": of.of("M")}
    tile, c = ("h", "m") if of.stack else ("m",), of.of("C")
    h = ("H",) if of.stack else ()
    body: list[Statement] = []
    whole = ("m", f"*{c}")
    kinds = "float16", "bfloat16", "float32"

    def row() -> Expr:
        return of.load(of.array((*h, of.classes["m"], c), "element", of.pick(*kinds), of.pick("normal", "positive"), scale=1.0), *tile)

    x = row()
    vectors: list[Expr] = [x]
    values: list[Expr] = []
    leaves: list[Callable[[], Expr]] = [lambda: of.pick(*vectors)] * 5
    leaves += [row, lambda: of.element((), (c,), dtype=of.pick(*kinds)), lambda: of.element(("m",), dtype=of.pick(*kinds)), of.constant,
               lambda: of.pick(*values, number(0.5))]
    if of.stack:
        leaves += [lambda: of.load(of.array(("H",), "element", of.pick(*kinds), scale=0.5), "h")]
    for _ in range(int(of.rng.integers(1, 5))):
        value = of.computed(leaves, int(of.rng.integers(1, 4)), whole)
        if value.dims != whole:
            value = of.make("add", vectors[-1], value)
        if of.chance(0.12):
            value = of.hidden(value, *whole, of.pick(0.0, -1.0))
        if of.chance(0.08):
            value = of.make("cast", value, data=("'bfloat16'", "bfloat16"))
        vectors.append(of.let(body, value))
        if of.chance(0.6):
            fold = of.pick("sum", "rowmax", "rowmin", "mean")
            found = Expr(fold, (of.pick(*vectors),), 1, ("m",))
            values.append(of.let(body, of.make("mul", found, number(0.0625)) if fold == "sum" else found))
    if of.chance(0.25):
        t = vectors[-1]
        top = of.let(body, Expr("rowmax", (t,), 1, ("m",)))
        p = of.let(body, of.make("exp", of.make("sub", t, top)))
        vectors.append(of.let(body, of.make("div", p, Expr("sum", (p,), 1, ("m",)))))
    if of.chance(0.2):
        cell = of.cell(body, "state", whole, x)
        body.append(Put("state", of.make("add", cell, of.pick(*vectors))))
        body.append(Add("state", of.pick(*vectors)))
        vectors.append(cell)
    body.append(of.store(tile, (c,), vectors[-1]))
    if of.chance(0.3):
        body.append(of.store(tile, (c,), of.pick(*vectors)))
    if values and of.chance(0.5):
        body.append(of.store(tile, (), of.pick(*values)))
    return of.finished(tile, body)


def element_program(of: Drawing) -> Source:
    """Element by element, in tiles of rows and columns that multiply nothing."""
    merge(of, ("N", "M", 0.1))
    of.tags.add("elements")
    of.classes = {"h": "H", "m": of.of("M"), "n": of.of("N")}
    tile, kinds = ("h", "m", "n") if of.stack else ("m", "n"), ("float16", "bfloat16", "float32")
    h, stack = (("H",), ("h",)) if of.stack else ((), ())
    body: list[Statement] = []

    def matrix() -> Expr:
        return of.load(of.array((*h, of.classes["m"], of.classes["n"]), "element", of.pick(*kinds), scale=1.0), *stack, "m", "n")

    leaves: list[Callable[[], Expr]] = [matrix] * 4
    leaves += [lambda: of.element(("m",), dtype=of.pick(*kinds)), lambda: of.element(("n",), dtype=of.pick(*kinds)), of.constant]
    for _ in range(2 if of.chance(0.3) else 1):
        value = of.make("add", matrix(), of.computed(leaves, int(of.rng.integers(1, 4)), ("m", "n")))
        if of.chance(0.2):
            value = of.hidden(value, "m", "n", of.pick(0.0, -1.0))
        body.append(of.store(tile, (), value))
    if of.chance(0.3):
        body.append(of.store(tile[:-1], (), of.make("mul", of.element(("m",), dtype=of.pick(*kinds)), number(0.5)), "n"))
    return of.finished(tile, body)


# -- mappings ---------------------------------------------------------------------------------------------------------------


def mapping_of(of: Drawing, form: str, kernel: str) -> gk.Mapping | None:
    if form == "rows" or of.chance(0.15 if kernel else 0.25):
        return gk.Mapping(kernel=kernel) if kernel and form != "rows" else None
    tma, pick = kernel != "multistage", of.pick
    blocks, more = dict[str, int](), dict[str, Any](kernel=kernel)
    if form == "tile":
        if of.chance(0.8):
            blocks["n"] = pick(64, 64, 128) if not of.chance(0.03) else pick(32, 96)
        if of.chance(0.4):
            blocks["k"] = pick(64, 64, 128) if tma else pick(32, 64)
        more["stages"] = pick(0, 0, 2, 3, 4)
        if tma and of.chance(0.2):
            more["cluster"] = pick({"m": 2}, {"n": 2}, {"m": 2, "n": 2})
        if of.chance(0.1):
            more["band"] = pick(1, 2, 5)
    else:
        index = "n" if "n" in of.classes else "k" if "k" in of.classes else ""
        if index and of.chance(0.7):
            blocks[index] = pick(32, 48, 64) if index == "n" else pick(64, 32) if not tma else 64
        more["stages"] = pick(0, 0, 2, 3)
        more["descending"] = pick(None, None, None, False)
        if tma:
            more["ahead"] = pick(None, None, None, False)
            more["turns"] = pick(None, None, None, False)
            if of.chance(0.1):
                more["cluster"] = {"m": 2}
        if of.chance(0.2):
            more["splits"] = pick(1, 2, 3, 5, 18, 33)
        if of.chance(0.1):
            more["lazy"] = pick(True, False)
    more["warpgroups"] = pick(0, 1, 1, 2)
    return gk.Mapping(blocks, **more)


def of_pieces(of: Drawing, mapping: gk.Mapping | None) -> gk.Mapping | None:
    """Mostly without what tiles of packed rows, and pages, refuse."""
    if mapping is None:
        return None
    if "pages" in of.tags and of.last.random() < 0.9:
        mapping = replace(mapping, cluster={}, blocks={**mapping.blocks, **({"n": 32} if mapping.blocks.get("n") == 48 else {})})
    if "packed rows" in of.tags and of.late.random() < 0.85:
        mapping = replace(mapping, splits=0, cluster={})
    if mapping.kernel != "multistage" and of.late.random() < 0.1:
        mapping = replace(mapping, across=False)
    return mapping


def drawn(seed: int, number: int, large: bool = False) -> Case:
    """The case of this number. ``large``: with sizes for a GPU."""
    of = Drawing(seed, number, large)
    form = of.pick("tile", "tile", "tile", "chain", "chain", "chain", "rows")
    machine = "ptx" if of.chance(0.1) and not large else "emulator"
    kernel = "multistage" if machine == "ptx" or of.chance(0.3) else ""
    of.tags.add(form)
    by_element = form == "rows" and of.new.random() < 0.4
    source = {"tile": tile_program, "chain": chain_program, "rows": element_program if by_element else row_program}[form](of)
    sizes = {of.of(name): of.size() for name in "MNKJ"}
    narrow = form == "chain" and not of.chance(0.05)
    for name in "DC":
        if of.of(name) == name:
            sizes[name] = int(of.pick(64, 64, 64, 128) if kernel == "" else of.pick(32, 64, 64, 96)) if narrow else of.size()
            if narrow and of.more.random() < 0.6:              # most are no whole lines
                sizes[name] = int(of.more.choice(WIDTHS))
            if form == "chain" and machine != "ptx" and of.new.random() < 0.08:
                sizes[name] = int(of.new.choice(WIDE))
                of.tags.add("wide")
    sizes["H"], sizes["L"] = int(of.pick(1, 2, 2, 3)), sizes.get("L", int(of.pick(1, 2, 3)))
    sizes["B"], sizes["P"] = int(of.late.choice([1, 2, 2, 3])), int(of.late.choice([1, 2, 3, 3, 4, 5, 7] if not large else [1, 3, 17, 40]))
    if of.late.random() < 0.02:
        sizes["P"] = 0
    if of.grouped or "h" in of.halved:
        sizes["H"], sizes["G"] = 2 * sizes["H"], sizes["H"]
    if "batch" in of.halved:
        sizes["B"], sizes["A"] = 2 * sizes["B"], sizes["B"]
    if of.of("C") in ("M", "K") and narrow:
        sizes[of.of("C")] = int(of.pick(64, 128))
        if of.more.random() < 0.6:
            sizes[of.of("C")] = int(of.more.choice(WIDTHS))
    if machine == "ptx":
        sizes = {name: min(size, 70) if name not in "DC" or size > 128 else size for name, size in sizes.items()}
    sizes |= page_sizes(of)
    mapping = mapping_of(of, form, kernel)
    if form == "chain":
        mapping = of_pieces(of, mapping)
    case = Case(source, sizes, mapping, int(of.rng.integers(2**31)), machine, of.pick("plan", "plan", "call"), "",
                frozenset(of.tags))
    if of.chance(0.12):
        return slipped(case, of.rng)
    return case
