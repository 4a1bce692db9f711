"""PTX text as data: a program with its parameters, variables and instructions.

A label belongs to the instruction behind it. Registers and labels inside braces (inline assembly) are renamed, so that all names of
a program are different.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np

from tests.ptx_machine.faults import PtxError, UnknownInstruction
from tests.ptx_machine.kinds import KINDS, Kind, kind_of


@dataclass(frozen=True)
class Instruction:
    """``@guard name.modifiers operands``; ``line`` counts from 1 in the PTX, ``source`` is the place in Python."""

    name: str
    modifiers: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str = ""                     # "%p1" or "!%p1"
    line: int = 0
    source: str = ""

    def __str__(self) -> str:
        guard = f"@{self.guard} " if self.guard else ""
        text = f"{guard}{'.'.join((self.name, *self.modifiers))} {', '.join(self.operands)};"
        return f"PTX line {self.line}: {text}" + (f"\n  from {self.source}" if self.source else "")

    @property
    def kinds(self) -> list[Kind]:
        """The types among its modifiers."""
        return [KINDS[m] for m in self.modifiers if m in KINDS]

    @property
    def kind(self) -> Kind:
        """Its (last) type."""
        return kind_of(self.modifiers[-1] if self.modifiers else "", self)

    def has(self, modifier: str) -> bool:
        return modifier in self.modifiers

    def one_of(self, *modifiers: str, default: str = "") -> str:
        """The modifier of these that it has."""
        found = [m for m in self.modifiers if m in modifiers]
        if len(found) > 1 or not (found or default):
            raise UnknownInstruction(f"needs one of {', '.join(modifiers)}", self)
        return found[0] if found else default

    def only(self, *modifiers: str) -> None:
        """Refuse it if it has modifiers other than these and types."""
        for m in self.modifiers:
            if m not in modifiers and m not in KINDS:
                raise UnknownInstruction(f"unknown modifier .{m}", self)


@dataclass(frozen=True)
class Variable:
    """Memory that the text declares: its initial ``data``, or none."""

    name: str
    space: str                          # shared, local, const or global
    size: int
    align: int
    data: bytes | None = None


@dataclass
class Program:
    parameters: dict[str, Kind] = field(default_factory=dict)
    registers: dict[str, Kind] = field(default_factory=dict)
    variables: list[Variable] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    threads: int | None = None          # of .maxntid


_VARIABLE = re.compile(r"(?:\.(?:extern|common|visible|weak)\s+)?\.(global|const|shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)"
                       r"(\[\d*\])?(?:\s*=\s*(.*))?$", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)(?:\s+\.ptr[\w\s.]*?)?\s+(\w+)(\[\d+\])?")


def parse(ptx: str) -> Program:
    """The only kernel of a PTX text.

    >>> program = parse('''
    ... .visible .entry twice(.param .u64 twice_param_0)
    ... {
    ...     .reg .b32 %r<3>;
    ...     .reg .b64 %rd<2>;
    ...     ld.param.u64 %rd1, [twice_param_0];
    ...     ld.global.u32 %r1, [%rd1+4];
    ...     shl.b32 %r2, %r1, 1;
    ... $L__exit:
    ...     ret;
    ... }''')
    >>> [instruction.name for instruction in program.instructions], program.labels
    (['ld', 'ld', 'shl', 'ret'], {'$L__exit': 3})
    """
    text = re.sub(r"/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), re.sub(r"//[^\n]*", "", ptx), flags=re.DOTALL)
    entry = text.find(".entry")
    if entry < 0 or re.search(r"\.func\b", text):
        raise UnknownInstruction("the PTX has no entry, or functions beside it; one kernel with everything inlined is run")
    files = dict(re.findall(r"^\s*\.file\s+(\d+)\s+\"([^\"]*)\"", text, re.MULTILINE))
    program = Program()
    head, body, after = _split(text, entry)
    for kind, name, array in _PARAMETER.findall(head):
        if array:
            raise UnknownInstruction(f"parameter {name} is no number")
        program.parameters[name] = kind_of(kind)
    threads = re.search(r"\.maxntid\s+(\d+)", head)
    program.threads = int(threads[1]) if threads else None
    for statement in re.sub(r"^\s*\.(version|target|address_size|file|loc).*$", "", text[:entry], flags=re.MULTILINE).split(";"):
        _declare(program, " ".join(statement.split()))
    _Body(program, files).read(body, text.count("\n", 0, after) + 1)
    return program


def _split(text: str, entry: int) -> tuple[str, str, int]:
    """(what is before the entry's braces, what is in them, where that begins)."""
    begin = text.index("{", entry)
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[entry:begin], text[begin + 1:at], begin + 1
    raise PtxError("the entry's braces are not closed")


def _declare(program: Program, statement: str) -> None:
    found = _VARIABLE.search(statement)
    if found is None or "NumbaEnv" in statement:
        return
    space, align, kind, name, extent, data = found.groups()
    element = kind_of(kind)
    count = int(extent[1:-1] or 0) if extent else 1
    values = None if data is None else [int(x, 0) for x in data.strip("{} ").split(",")]
    raw = None
    if values is not None:
        values += [0] * (count - len(values))
        raw = np.array([v & (1 << element.bits) - 1 for v in values], element.unsigned).tobytes()
    program.variables.append(Variable(name, space, count * element.size, int(align or element.size), raw))


class _Body:
    """Statements of a kernel, one after the other."""

    def __init__(self, program: Program, files: dict[str, str]):
        self.program, self.files, self.source = program, files, ""
        self.scopes: list[dict[str, str]] = []
        self.count = 0

    def read(self, text: str, line: int) -> None:
        at = 0
        while at < len(text):
            here = text[at]
            if here.isspace():
                line += here == "\n"
                at += 1
                continue
            location = re.compile(r"\.loc\s+(\d+)\s+(\d+)[^\n]*|\.pragma[^;]*;|\.(section|file)[^\n]*").match(text, at)
            if location:
                if location[1]:
                    self.source = f"{self.files.get(location[1], '?')}:{location[2]}"
                at = location.end()
                continue
            if here in "{}":
                if here == "{":
                    self.scopes.append({})
                    self.labels(text[at + 1:text.index("}", at)])
                else:
                    self.scopes.pop()
                at += 1
                continue
            label = re.compile(r"([\w$%]+)\s*:").match(text, at)
            if label:
                self.program.labels[self.renamed(label[1])] = len(self.program.instructions)
                at = label.end()
                continue
            end = text.index(";", at)
            self.statement(" ".join(text[at:end].split()), line)
            line += text.count("\n", at, end)
            at = end + 1

    def statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            _, kind, names = text.split(None, 2)
            for name in names.split(","):
                self.register(name.strip(), kind_of(kind[1:]))
        elif text.startswith("."):
            _declare(self.program, text)
        else:
            self.program.instructions.append(self.instruction(text, line))

    def register(self, name: str, kind: Kind) -> None:
        many = re.fullmatch(r"(.*)<(\d+)>", name)
        for n in [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [name]:
            if self.scopes:
                self.count += 1
                self.scopes[-1][n] = n = f"{n}@{self.count}"
            self.program.registers[n] = kind

    def labels(self, text: str) -> None:
        """Those of a scope that has just begun."""
        for name in re.findall(r"(?:^|[;{])\s*([\w$%]+)\s*:(?!:)", text):
            self.count += 1
            self.scopes[-1][name] = f"{name}@{self.count}"

    def instruction(self, text: str, line: int) -> Instruction:
        guard = re.match(r"@(!?)\s*([\w%$]+)\s+", text)
        if guard:
            text = text[guard.end():]
        opcode, _, rest = text.partition(" ")
        name, *modifiers = opcode.replace("::", "__").split(".")
        operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", rest)
        return Instruction(name, tuple(modifiers), tuple(self.renamed(x.strip()) for x in operands),
                           self.renamed(f"{guard[1]}{guard[2]}") if guard else "", line, self.source)

    def renamed(self, operand: str) -> str:
        names = {old: new for scope in self.scopes for old, new in scope.items()}
        return re.sub(r"[%$\w]+", lambda m: names.get(m[0], m[0]), operand) if names else operand


def immediate(text: str, kind: Kind) -> np.ndarray | None:
    """A literal as an array without axes; None if the text is no literal."""
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        bits, size = int(text[2:], 16), 32
    elif re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        bits, size = int(text[2:], 16), 64
    elif re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?", text):
        bits, size = int(text.rstrip("U"), 0), kind.bits
    else:
        return None
    if size != kind.bits:
        raise PtxError(f"{text} is no literal of .{kind.name}")
    return np.array(bits & (1 << kind.bits) - 1, kind.unsigned)


__all__ = ["Instruction", "Program", "Variable", "immediate", "parse"]
