"""A function of rows as text: a kernel in gemmkit's dialect, in the words of `gemmkit.kernels.rows.row`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gemmkit.kernels.rows.row import Held, Source
from gemmkit.kernels.rows.team import Team, WarpTeam
from gemmkit.programs.interpreter import CONDITIONS
from gemmkit.programs.printed import EARLY, Printed
from gemmkit.programs.rows.elements import COLUMN, DTYPES, PART, Element, bare
from gemmkit.programs.rows.form import RowProgram, is_row, is_vector
from gemmkit.programs.rows.steps import Fold, Load, Map, Moments, Named, Put, Step, Steps
from gemmkit.programs.trace import Value

WORDS = ("along", "largest", "mapped", "moments", "put_into", "put_one", "row_of", "smallest", "total")
IMPORTS = [
    ("gemmkit.components", "Component"), ("gemmkit.components", "Scalar"), ("gemmkit.kernels.rows.row", "Held"),
    ("gemmkit.kernels.rows.row", "Rows"), ("gemmkit.kernels.rows.row", "Streamed"),
    *(("gemmkit.kernels.rows.row", word) for word in WORDS),
    ("gemmkit.kernels.rows.team", "BlockTeam"), ("gemmkit.kernels.rows.team", "WarpTeam"),
    ("gemmkit.component_products", "matrix_of"), ("gemmkit.lang.values", "convert"),
    ("gemmkit.programs.collectives", "blocks"),
    *(("gemmkit.ptx.approximate", name) for name in ("exp2", "log2", "reciprocal")),
    ("gemmkit.ptx.arithmetic", "difference"), ("gemmkit.ptx.special", "udiv"),
    *(("gemmkit.ptx.warpgroup", name) for name in ("grid_launch_dependents", "grid_wait"))]
FOLDED = dict(rowsum="total", rowmean="total", rowmax="largest", rowmin="smallest")
CALLED = dict(rowsum="whole", rowmean="mean", rowmax="top", rowmin="low", variance="variance", reciprocal="over")
LONG = 70                              # characters of an expression, beyond which it is a function of its own
ALWAYS = {"Component", "Scalar", "Rows", "blocks"}
#: What a text calls its own things: arrays, numbers and indices of programs are called otherwise.
OWN_NAMES = frozenset({name for _, name in IMPORTS} | set(DTYPES.values()) | {
    COLUMN, "ROWS", "SHARED_BYTES", "Sizes", "columns", "dataclass", "index", "kernel", "math", "max", "min", "np", "sizes",
    "tiles"})


@dataclass
class Printer:
    program: RowProgram
    steps: Steps
    dtypes: dict[str, np.dtype]
    taken: set[str]
    needs: set[str] = field(default_factory=lambda: set(ALWAYS))
    lines: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    names: dict[Value, str] = field(default_factory=dict)
    elements: dict[Value, str] = field(default_factory=dict)
    first: str = ""

    # -- names --------------------------------------------------------------------------------------------------------

    def unique(self, wanted: str) -> str:
        wanted = wanted.replace(PART, "value_")
        name, n = wanted, 1
        while name in self.taken:
            n += 1
            name = f"{wanted}_{n}"
        self.taken.add(name)
        return name

    def name(self, x: Value) -> str:
        """What a value of the row is called, or an element of a row or of an array by columns."""
        if not is_row(x):
            self.row(x)
            return self.elements[x]
        if x not in self.names:
            if x.op == "scalar":
                self.names[x] = str(x.data)            # an argument's name, which is its own
            else:
                # (A reciprocal with its argument's name is the rewriter's, not the user's.)
                given = "" if x.op == "reciprocal" and x.name == x.args[0].name else x.name
                plain = f"{x.data[0].name}_value" if x.op == "load" else given or CALLED.get(x.op, "value")
                self.names[x] = self.unique(plain)
        return self.names[x]

    def row(self, x: Value) -> str:
        """What the row is called, or the array that stands beside it: made by a line of its own the first time."""
        if x in self.names:
            return self.names[x]
        if x.op == "load":
            name = x.data[0].name                      # within a function it is the element's
            self.elements[x] = name if name not in self.elements.values() else self.unique(name)
        else:
            self.elements[x] = self.unique(x.name or "value")
        self.names[x] = self.unique(f"{self.elements[x]}_row")
        if x.op == "load" and not is_vector(x):
            self.lines.append(f"{self.names[x]} = {self.call('along', self.first, self.array(x))}")
        return self.names[x]

    def array(self, x: Value) -> str:
        """An array without its stack."""
        parameter, key = x.data
        stacks = [index.name for index in key if index.stack]
        return self.call("matrix_of", parameter.name, f"({stacks[0]},)") if stacks else str(parameter.name)

    def call(self, word: str, *arguments: str) -> str:
        self.needs.add(word)
        return f"{word}({', '.join(arguments)})"

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self, step: Step) -> None:
        x = step.value
        if isinstance(step, Load):
            name = self.row(x)
            made = (self.call("row_of", self.first, self.array(x)) if self.first else
                    f"ROWS.load({self.array(x)}, {self.program.rows.name}, sizes.columns)")
            self.first = self.first or name
            self.lines.append(f"{name} = {made}")
        elif isinstance(step, Moments):
            pair = [self.moment(op, x) for op in ("rowmean", "variance")]
            self.lines.append(f"{', '.join(pair)} = {self.call('moments', self.row(x))}")
        elif isinstance(step, Fold):
            self.fold(x)
        elif isinstance(step, Map):
            made = self.over("mapped", x, "", True)
            self.lines.append(f"{self.row(x)} = {made}")
        elif isinstance(step, Named):
            self.lines += self.named(x)
        elif isinstance(step, Put):
            self.put(step)

    def moment(self, op: str, row: Value) -> str:
        found = [x for x in self.steps.named if x.op == op and x.args[0] is row]
        return self.name(found[0]) if found else self.unique(CALLED[op])

    def fold(self, x: Value) -> None:
        made = self.over(FOLDED[x.op], x.args[0], f"of_{self.name(x)}")
        if x.op == "rowmean":
            self.needs |= {"convert", "F32"}
            made += " / convert(F32, sizes.columns)"
        self.lines.append(f"{self.name(x)} = {made}")

    def named(self, x: Value) -> list[str]:
        if x.op == "scalar":
            return [f"{self.name(x)} = sizes.{x.data}"]
        if x.op == "load":
            self.needs |= {"convert", "F32"}
            at = ", ".join(index.name for index in x.data[1])
            return [f"{self.name(x)} = convert(F32, {x.data[0].name}[{at}])"]
        made = self.element(x, True)
        text = made.text
        if x.op not in CONDITIONS and not made.is_float(x):
            self.needs |= {"convert", "F32"}
            text = f"convert(F32, {text})"
        return [*made.lines, f"{self.name(x)} = {text}"]

    def element(self, x: Value, is_made: bool) -> Element:
        made = Element(self.steps, x, self.name, is_made)
        self.needs |= made.needs
        return made

    def over(self, word: str, x: Value, called: str, is_made: bool = False, *given: str) -> str:
        """A word of rows with a function of elements: the first row that it needs, and those beside it."""
        made = self.element(x, is_made)
        rows = sorted(made.rows, key=lambda row: not is_vector(row))
        if not rows or not is_vector(rows[0]):         # the first row says where the elements are
            main, beside, names = self.first, rows, ["_"]
        else:
            main, beside, names = self.row(rows[0]), rows[1:], [self.name(rows[0])]
        parameters = ", ".join([*names, COLUMN, *map(self.name, beside)])
        text = made.text
        if made.lines or len(text) > LONG:
            f = self.unique(called or f"make_{self.elements.get(x, 'value')}")
            arguments = ", ".join([parameters, *made.outside])
            self.functions += ["", "", f"def {f}({arguments}):", *(f"    {line}" for line in made.lines),
                               f"    return {made.text}"]
            text = f"{f}({arguments})"
        tuples = [f"({', '.join(map(self.row, beside))}{',' if len(beside) == 1 else ''})"] if beside else []
        return self.call(word, main, *given, f"lambda {parameters}: {text}", *tuples)

    def put(self, step: Put) -> None:
        x, parameter = step.value, step.store.parameter
        kind = self.dtypes[parameter.name].name
        stack = self.program.stack
        out = parameter.name if stack is None else self.call("matrix_of", parameter.name, f"({stack.name},)")
        self.needs.add(DTYPES[kind])
        if len(parameter.shape) > len(self.program.indices):
            self.lines.append(self.over("put_into", x, f"element_of_{parameter.name}", False, out, DTYPES[kind]))
            return
        made = self.element(x, False)
        self.needs.add("convert")
        value = f"convert({DTYPES[kind]}, {bare(made.text)})"
        self.lines += [*made.lines, self.call("put_one", self.first, out, value)]


def printed(title: str, program: RowProgram, steps: Steps, threads: tuple[Team, Source, int], dtypes: dict[str, np.dtype],
            scalars: list[str], early: bool) -> Printed:
    """Print the kernel. ``dtypes``: of all arrays, by their names. ``early``: its launch may begin before the kernel before
    has ended."""
    team, source, vector = threads
    rows, stack = program.rows.name, program.stack
    tile = [index.name for index in program.indices]
    printer = Printer(program, steps, dtypes, {*OWN_NAMES, *dtypes, *scalars, *tile})
    for step in steps.order:
        printer.step(step)
    begin = EARLY if early else ()
    printer.needs |= {"F32", *(line.removesuffix("()") for line in begin), type(team).__name__, type(source).__name__,
                      *(["udiv"] if stack is not None else [])}
    outs = [store.parameter.name for store in program.stores]
    reads = [name for name in dtypes if name in program.reads]
    used = [name for name in scalars if any(x.op == "scalar" and x.data == name for x in steps.named)]
    imports: dict[str, list[str]] = {}
    for module, word in IMPORTS:
        if word in printer.needs:
            imports.setdefault(module, []).append(word)
    at = [f"{rows} = ROWS.team.row()", f"if {rows} < sizes.{rows}:"]
    if stack is not None:
        at = ["index = ROWS.team.row()", f"if index < sizes.{stack.name} * sizes.{rows}:",
              f"    {stack.name} = udiv(index, sizes.{rows})", f"    {rows} = index - {stack.name} * sizes.{rows}"]
    lines = [
        f'"""{title}"""', "", *(["import math"] if "math" in printer.needs else []), "from dataclasses import dataclass", "",
        "import numpy as np", "",
        *(f"from {module} import {', '.join(words)}" for module, words in imports.items()), "",
        *(f'{short} = np.dtype("{kind}")' for kind, short in DTYPES.items() if short in printer.needs),
        f"ROWS = Rows({shown_team(team)}, {shown_source(source)}, vector={vector}, dtype=F32)",
        f"SHARED_BYTES = {team.shared_bytes}", "", "",
        "@dataclass(frozen=True)", "class Sizes(Component):",
        *(f"    {name}: Scalar" for name in (*tile, "columns", *used)), "", "",
        f"def kernel({', '.join(['sizes', *outs, *reads])}):", *(f"    {line}" for line in (*begin, *at)),
        *(f"        {line}" for line in printer.lines), "", "",
        "def tiles(sizes):", f"    return blocks({' * '.join(f'sizes.{name}' for name in tile)}, ROWS.team.rows)",
        *printer.functions]
    return Printed("\n".join(lines) + "\n", (), tuple(outs), tuple(reads), (*tile, "columns"), tuple(tile), tuple(used),
                   team.block)


def shown_team(team: Team) -> str:
    return f"WarpTeam(1, F32, {team.rows})" if isinstance(team, WarpTeam) else f"BlockTeam({team.warps}, F32)"


def shown_source(source: Source) -> str:
    return f"Held(pieces={source.pieces}, whole={source.whole})" if isinstance(source, Held) else "Streamed()"
