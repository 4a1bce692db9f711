"""Faults: an operator of mutation at one of the places where it finds something; listed, and put into the running code.

A fault is put in by giving a function (wherever it has been imported to by now) the code of the changed syntax tree. Lines stay
what they were, so errors show them.
"""

from __future__ import annotations

import ast
import gc
import importlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import gemmkit
from tests.mutation.operators import OPERATORS, SYNCHRONISATION, Place, name_of, places

ROOT = Path(gemmkit.__file__).parent
LAYERS = ("layouts/plain.py", "operators/wgmma.py", "operators/algebra.py", "operators/mma.py", "operators/fpu.py", "programs/collectives.py",
          "programs/multistage.py")
ATOMS = ("gemmkit.ptx.barriers", "gemmkit.ptx.tma", "gemmkit.ptx.wgmma")      # run, and not changed
# What runs on the host alone, and the order of tiles, of which any is right: these have tests of their own.
HOST = {"config.py", "masks.py"}
HOST_NAMES = {
    "CopyWidth", "MultistageChainPrinter", "MultistageConsumer", "MultistagePrinter", "OperandArrays", "Columns", "Families", "Grouped", "Hilbert", "KernelFamily", "TensorMapSlot", "ProductMapping", "Maps", "NamedBarriers",
    "Order", "Quantised", "Request", "SharedMemory", "Simt", "Sm80", "Sm90", "_ahead", "_chunks", "_copy_parts",
    "_exchange", "_fetches_a", "_fits", "_is_column", "_laid_out", "_mainloop", "_of_operand", "_pipeline",
    "_row_exchange", "_sent", "_shared", "_validate_algebra", "_validate_d", "_validate_one_stage", "_validate_operand",
    "_validate_roles", "_validate_splits", "_validate_tiles", "_with_mn_major_a", "_with_a_deinterleaved",
    "_with_a_transformed", "_with_producer", "_with_routes", "blocks_of", "check_sizes", "check_splits", "divides",
    "mappings", "maps", "refusal", "rule", "spec_of", "specialise", "validate", "validate_lines", "validate_tiles",
    "validate_transforms", "why_not",
}
HOST_FUNCTIONS = {"of", "refuses", "refuses_array", "refuses_tma", "goes_with", "map_spec", "dealt", "in_panels", "whole",
                  "store_of", "vector_length", "rows_apart", "tiles", "grid", "blocks", "laid_out", "_permutable",
                  "permuted_along_k", "is_whole", "bytes_of", "at_once", "_widths", "copies_of", "route", "division", "resident", "streamed",
                  "most_blocks", "instead", "shared_axis", "loads_numbers"}
# Of how many places (functions, of the others) one is tried.
ONE_IN = {"statement dropped": 2, "stage shifted": 8, "phase flipped": 3, "order changed": 4, "done twice": 4, "count changed": 2,
          "others": 6}


@dataclass(frozen=True)
class Fault:
    """``operator`` at the ``number``-th place where it finds something in a function; ``line`` and ``before`` are its statement."""

    module: str
    function: str
    operator: str
    number: int
    line: int
    before: str

    def __str__(self) -> str:
        return f"{self.module.removeprefix('gemmkit.')}.{self.function}:{self.line} {self.operator}: {self.before}"


def modules() -> list[str]:
    """The kernels' modules and the layers of device code beneath them."""
    kernels = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "kernels").rglob("[a-z]*.py")
                     if path.name not in HOST)
    files = [*kernels, *LAYERS]
    return [f"gemmkit.{file[:-3].replace('/', '.')}" for file in files]


@cache
def tree_of(module: str) -> ast.Module:
    return ast.parse(path_of(module).read_text())


def digest() -> int:
    """Of all that a product of the battery may run."""
    crc, tests = 0, Path(__file__).parent.parent
    for path in sorted(path for folder in (ROOT, *(tests / name for name in ("support", "kernels", "functions", "epilogues", "mutation")))
                       for path in folder.rglob("*.py")):
        crc = zlib.crc32(path.read_bytes(), crc)
    return crc


def path_of(module: str) -> Path:
    return Path(importlib.import_module(module).__file__ or "")


def functions(tree: ast.Module, stem: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods of a file (``stem``: its name), by qualified name; without those that build and describe objects on the host, or decide what is
    refused, and those that only prefetch: a hint, without which only time is lost."""
    left_out = _deciding(tree)
    for node in tree.body:
        name = getattr(node, "name", "")
        if name in HOST_NAMES or f"{stem}.{name}" in HOST_NAMES:
            continue
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        for member in members:
            if not isinstance(member, ast.FunctionDef) or member.name in HOST_FUNCTIONS or member.name.startswith("prefetch"):
                continue
            if node is member:
                if member.name not in left_out:
                    yield member.name, member
            elif not member.name.startswith("__") and not _decides(member):
                yield f"{node.name}.{member.name}", member             # type: ignore[attr-defined]


def _decides(function: ast.FunctionDef) -> bool:
    """Whether it says why something is refused: returns a sentence or None, or raises ConfigError (`rule` does)."""
    says = function.returns is not None and ast.unparse(function.returns) == "str | None"
    return says or any(name_of(node) in ("ConfigError", "rule") for node in ast.walk(function))


def _deciding(tree: ast.Module) -> set[str]:
    """The functions of a module that decide what is refused, and those that only these name."""
    known = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    deciding = {name for name, function in known.items() if _decides(function)}
    while True:
        others = {name for node in tree.body if getattr(node, "name", "") not in deciding for name in _names(node)}
        more = {name for function in deciding for name in _names(known[function]) & known.keys()} - others - deciding
        if not more:
            return deciding
        deciding |= more


def _names(node: ast.AST) -> set[str]:
    """What a statement refers to; a list of what is exported does not count."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)}


def _found(function: ast.FunctionDef, operator: str) -> Iterator[tuple[Place, ast.AST]]:
    for place in places(function):
        for node in OPERATORS[operator](place):
            yield place, node


@cache
def faults(every: bool = False) -> tuple[Fault, ...]:
    """Most of synchronisation; of each other operator one in a fourth of the functions; or, with ``every``, all there are."""
    out: list[Fault] = []
    for module in modules():
        for name, function in functions(tree_of(module), module.rpartition(".")[2]):
            for operator in OPERATORS:
                found = [Fault(module, name, operator, n, place.statement.lineno,
                               ast.unparse(place.statement).split("\n")[0])
                         for n, (place, _) in enumerate(_found(function, operator))]
                out += found if every else list(_drawn(found))
    return tuple(out)


def _drawn(found: list[Fault]) -> Iterator[Fault]:
    """The same draw every time, whatever is listed before."""
    for fault in found:
        draw = zlib.crc32(f"{fault.module}.{fault.function} {fault.operator}".encode())
        if fault.operator in SYNCHRONISATION:
            if (draw + fault.number) % ONE_IN.get(fault.operator, 1) == 0:
                yield fault
        elif draw % ONE_IN["others"] == 0 and draw // ONE_IN["others"] % len(found) == fault.number:
            yield fault


def put_in(fault: Fault) -> str:
    """Puts the fault into this process, for good; returns the statement as it then is."""
    tree = ast.parse(path_of(fault.module).read_text())
    function = dict(functions(tree))[fault.function]
    place, node = list(_found(function, fault.operator))[fault.number]
    place.put(node)
    _replace(fault.module, compile(tree, str(path_of(fault.module)), "exec"), {function.lineno} | {
        d.lineno for d in function.decorator_list})
    shown = node if isinstance(node, (ast.stmt, ast.Module)) else place.statement
    return " ".join(ast.unparse(shown).split())


def _replace(module: str, code: CodeType, lines: set[int] | None = None) -> None:
    """Gives the live functions of a module the code of another compilation (those that begin at ``lines``)."""
    path, new = str(path_of(module)), {}
    todo: list[Any] = [code]
    while todo:
        one = todo.pop()
        new[one.co_name, one.co_firstlineno] = one
        todo += [x for x in one.co_consts if isinstance(x, CodeType)]
    replaced = 0
    for f in gc.get_objects():
        if isinstance(f, FunctionType) and f.__code__.co_filename == path:
            there = new.get((f.__code__.co_name, f.__code__.co_firstlineno))
            if there is not None and (lines is None or there.co_firstlineno in lines):
                f.__code__ = there
                replaced += 1
    assert replaced, f"{module}: no function begins at {lines}"


def instrument(seen: set) -> None:
    """From now on, statements of all `modules` that run are entered in ``seen``, as (module, line); of the atoms, too: which of
    them a product reaches tells what `choose` has chosen there."""
    import builtins

    builtins.__statement__ = seen.add                  # type: ignore[attr-defined]
    for module in (*modules(), *ATOMS):
        tree = ast.parse(path_of(module).read_text())
        marked = [_mark(function, module) for _, function in functions(tree)]
        if marked:                                     # a module may define named tuples alone
            _replace(module, compile(ast.fix_missing_locations(tree), str(path_of(module)), "exec"))


def _mark(node: Any, module: str) -> None:
    for field in ("body", "orelse"):
        body = getattr(node, field, None)
        if not isinstance(body, list) or isinstance(node, ast.Lambda):
            continue
        marked: list[ast.stmt] = []
        for statement in body:
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                _mark(statement, module)
            call = ast.parse(f"__statement__(({module!r}, {statement.lineno}))").body[0]
            ast.copy_location(call, statement)
            for child in ast.walk(call):
                ast.copy_location(child, statement)
            marked += [call, statement]
        setattr(node, field, marked)
