"""Figures of the source tree that a redesign is judged by: lines, rooms, imports that run upwards, long parameter lists,
launches, and what a process loads and calls.

    python -m tools.house                    of this tree beside its budget; 1 is returned where it is over
    python -m tools.house --commit REV       of this tree beside a commit's
    python -m tools.house --upwards          the imports that run upwards, too

Files are read, a commit's from git. What an import loads and a first product calls is counted in processes of this tree.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Libraries below the framework: a compiler, an instruction set, a machine and a driver layer.
BELOW = ("lang", "device", "ptx", "emulator", "runtime")
MOST_LINES, MANY_PARAMETERS = 800, 8
#: What the tree may have: numbers go down, or up with a reason in the commit that raises them.
BUDGET: dict[str, Any] = json.loads((ROOT / "tests" / "conformance" / "budget.json").read_text(encoding="utf-8"))
IN_A_CYCLE = 8                         # files that may import each other, if they are of one room

#: The rooms of the house, from the top: imports run down. Files lie in the room that names them or their folder.
ROOMS: dict[str, tuple[str, ...]] = {
    "torch, cupy, distributed": ("torch/", "cupy/", "distributed/"),
    "tools": ("tools/",),
    "specs": ("specs/",),
    "tuner": ("tuner/",),
    "functions": ("functions/", "blas"),
    "programs": ("programs/",),
    "plans": ("plans/",),
    "tuning": ("tuning/",),
    "configurations": ("kernels/config",),
    "epilogues": ("epilogues/",),
    "kernels": ("kernels/",),
    "scores, activations": ("epilogues/activations", "epilogues/fast", "kernels/masks"),
    "operators": ("operators/",),
    "transforms": ("transforms/",),
    "layouts": ("layouts/",),
    "tiling": ("tiling",),
    "ptx": ("ptx/",),
    "emulator": ("emulator/",),
    "runtime": ("runtime/",),
    "components": ("components", "lang/component_products"),
    "lang": ("lang/",),
    "arrays, devices": ("lang/deferred", "lang/references", "runtime/array_info", "runtime/arrays", "runtime/device",
                        "shapes"),
}

Sources = Mapping[str, str]                                # by path, from the root of the repository


def of_tree() -> Sources:
    return {str(path.relative_to(ROOT).as_posix()): path.read_text() for path in sorted(ROOT.glob("gemmkit/**/*.py"))}


def of_commit(revision: str) -> Sources:
    """The files of a commit; raises subprocess.CalledProcessError for an unknown one."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    names = git("ls-tree", "-r", "--name-only", revision, "gemmkit").splitlines()
    return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All of a file: a dozen figures go through them, and to find them takes longer than to look at them."""
    return tuple(ast.walk(tree))


def classes(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The files that define a public class of each name."""
    found: dict[str, set[str]] = {}
    for path, tree in trees.items():
        for node in nodes(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path)
    return found


@cache
def banned(source: str) -> list[str]:
    """The names of a file that the budget bans: within f-strings and comments too where they stand alone."""
    found = {token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME}
    found |= {part for node in nodes(parsed(source)) if isinstance(node, ast.ImportFrom)
              for part in (node.module or "").split(".")}
    return sorted(found & set(BUDGET["banned"]))


def limits() -> dict[str, int]:
    """How much the tree may have of some `figures`."""
    lines = BUDGET["lines"]
    return {"entries": BUDGET["entries"], "files": BUDGET["files"], f"files over {MOST_LINES} lines": 0,
            "lines": lines["all"], "public names of two classes": 0, "banned names": 0,
            "import cycles between rooms": 0, "largest group of them": IN_A_CYCLE, "imports that run upwards": 0,
            "parameters annotated Any": BUDGET["parameters annotated Any"],
            **{f"lines in the room {room}": lines[room] for room in ROOMS}}


def figures(sources: Sources) -> dict[str, int]:
    """What is counted, by its name."""
    trees = {path: parsed(text) for path, text in sources.items()}
    graph = imports(trees)
    groups = cycles(graph)
    kernels = [tree for path, tree in trees.items() if path.startswith("gemmkit/kernels/")]
    lines = {path: text.count("\n") for path, text in sources.items()}
    functions = [node for tree in kernels for node in nodes(tree) if isinstance(node, ast.FunctionDef)]
    parameters = [len(parameters_of(function)) for function in functions]
    calls = [node.func.id for tree in kernels for node in nodes(tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {
        "entries": len({path.split("/")[1] for path in sources if path.count("/") == 1 or path.endswith("/__init__.py")}),
        "files": len(sources),
        "lines": sum(lines.values()),
        "lines above device, ptx, emulator and runtime": sum(
            count for path, count in lines.items() if path.split("/")[1] not in BELOW),
        "lines in kernels": sum(count for path, count in lines.items() if path.startswith("gemmkit/kernels/")),
        f"files over {MOST_LINES} lines": sum(count > MOST_LINES for count in lines.values()),
        "public names of two classes": sum(len(where) > 1 for where in classes(trees).values()),
        "functions in kernels": len(functions),
        f"functions in kernels with {MANY_PARAMETERS} parameters or more": sum(n >= MANY_PARAMETERS for n in parameters),
        "most parameters": max(parameters, default=0),
        "fields and properties of specs": sum(_members(tree) for tree in kernels),
        "calls of choose in kernels": calls.count("choose"),
        "banned names": sum(len(banned(text)) for text in sources.values()),
        "files that import each other": sum(map(len, groups)),
        "largest group of them": max(map(len, groups), default=0),
        "import cycles between rooms": sum(len(set(map(room_of, group))) > 1 for group in groups),
        "imports that run upwards": len(upwards(graph)),
        "implementations of a launch": sum(map(_binds, trees.values())),
        "functions that choose a mapping": sum(_choosers(tree) for path, tree in trees.items() if _may_choose(path)),
        "loops that compile again where code has changed": sum(map(_compiles_again, trees.values())),
        "parameters annotated Any": sum(untyped(trees).values()),
        **{f"lines in the room {room}": sum(n for path, n in lines.items() if room_of(path) == room) for room in ROOMS},
    }


def room_of(path: str) -> str | None:
    """The room of a file; None for what has none: public names."""
    parts = path.removeprefix("gemmkit/").removesuffix(".py").split("/")
    return _PLACES.get("/".join(parts)) or _PLACES.get(f"{parts[0]}/")


_PLACES = {place: room for room, places in ROOMS.items() for place in places}


def upwards(graph: Mapping[str, Collection[str]]) -> list[tuple[str, str]]:
    """The imports that run from a room to one above it, of files that have rooms."""
    rank = {room: place for place, room in enumerate(ROOMS)}
    return [(path, other) for path in sorted(graph) for other in sorted(graph[path])
            if (room := room_of(path)) and (above := room_of(other)) and rank[room] > rank[above]]


def _binds(tree: ast.Module) -> int:
    """Whether a file has kernels of its own bound: it calls a `Launchable`'s ``bind()``, and no `Launch` does it. (That of
    `Launchable` itself asks the one that it is in another grid.)"""
    if any(isinstance(node, ast.ClassDef) and node.name == "Launchable" for node in nodes(tree)):
        return 0
    bound = [node for node in nodes(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
             and node.func.attr == "bind" and not node.args and not node.keywords]
    return int(bool(bound))


def _compiles_again(tree: ast.Module) -> int:
    """Handlers of `CodeChanged`."""
    return sum(isinstance(node, ast.ExceptHandler) and node.type is not None and "CodeChanged" in ast.unparse(node.type)
               for node in nodes(tree))


CHOOSERS = re.compile(r"_?(choice|choos\w*|chosen\w*|mapping|\w*mapping_of\w*|best_\w+|dealt|allocate)$")


def _may_choose(path: str) -> bool:
    """Whether functions choose mappings there: in what plans and tunes, in programs and in families of kernels; neither in
    device code, nor in what shows a choice, nor in the tuner, which times all."""
    return (room_of(path) in ("functions", "plans", "tuning", "programs")
            or (path.startswith("gemmkit/kernels/") and PurePosixPath(path).stem in ("mapping", "family", "select")))


def _choosers(tree: ast.Module) -> int:
    """Functions that are called as if they chose, and ask no `choose`; and those that go on to another mapping where one is
    refused."""
    functions = [node for node in nodes(tree) if isinstance(node, ast.FunctionDef)
                 and not any(isinstance(one, ast.Name) and one.id.endswith("property") for one in node.decorator_list)]
    return sum((CHOOSERS.match(node.name) is not None and not _asks(node)) or _goes_on(node) for node in functions)


def _asks(function: ast.FunctionDef) -> bool:
    return any(isinstance(node, ast.Call) and ast.unparse(node.func) == "choose" for node in ast.walk(function))


def _goes_on(function: ast.FunctionDef) -> bool:
    """Whether a handler of ConfigError calls something in its place, or lets a loop go on with more than an error that is
    told."""
    inside = list(ast.walk(function))
    tries = [node for node in inside if isinstance(node, ast.Try)]
    for tried in tries:
        is_in_loop = any(tried in ast.walk(loop) for loop in inside if isinstance(loop, (ast.For, ast.While)))
        for handler in tried.handlers:
            if handler.type is None or "ConfigError" not in ast.unparse(handler.type):
                continue
            rest = [one for one in handler.body if not isinstance(one, ast.Raise)
                    and not (isinstance(one, ast.If) and all(isinstance(x, ast.Raise) for x in one.body))]
            if any((isinstance(one, ast.Return) and isinstance(one.value, ast.Call)) or is_in_loop for one in rest):
                return True
    return False


def parameters_of(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in function.args.posonlyargs + function.args.args + function.args.kwonlyargs]


def untyped(trees: Mapping[str, ast.Module]) -> dict[str, int]:
    """How many parameters of each file's functions are annotated ``Any``, which says nothing of them."""
    return {path: sum(isinstance(node, ast.arg) and isinstance(node.annotation, ast.Name) and node.annotation.id == "Any"
                      for node in nodes(tree)) for path, tree in trees.items()}


def long_lists(sources: Sources) -> list[str]:
    """The functions in kernels that have many parameters, and these."""
    return [f"{path}:{node.lineno} {node.name}({', '.join(parameters_of(node))})"
            for path, text in sources.items() if path.startswith("gemmkit/kernels/") for node in nodes(parsed(text))
            if isinstance(node, ast.FunctionDef) and len(parameters_of(node)) >= MANY_PARAMETERS]


def _members(tree: ast.Module) -> int:
    """Fields and properties of the classes whose names say that they specify a kernel or its roles."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.endswith(("Spec", "Roles"))]
    return sum(isinstance(member, ast.AnnAssign) or (isinstance(member, ast.FunctionDef) and any(
        isinstance(d, ast.Name) and d.id.endswith("property") for d in member.decorator_list))
        for cls in classes for member in cls.body)


# -- imports ----------------------------------------------------------------------------------------------------------

def imports(trees: Mapping[str, ast.Module]) -> dict[str, set[str]]:
    """The files that each file imports: within functions, too (that hides a cycle, it ends none), not for types alone.

    What a package imports for types are its public names, which are imported when they are asked for."""
    files = {_module(path): path for path in trees}
    out: dict[str, set[str]] = {}
    for path, tree in trees.items():
        statements = nodes(tree) if PurePosixPath(path).name == "__init__.py" else _statements(tree.body)
        names = {name for node in statements for name in _imported(node, path, files)}
        out[path] = {files[name] for name in names if name in files} - {path}
    return out


def _module(path: str) -> str:
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _statements(node.orelse)
        else:
            for part in ("body", "orelse", "handlers", "finalbody"):
                inner = getattr(node, part, [])
                yield from _statements([x for x in inner if isinstance(x, ast.stmt)] if part != "handlers" else
                                       [statement for handler in inner for statement in handler.body])


def _imported(node: ast.AST, path: str, modules: Collection[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        package = PurePosixPath(path).parts[:-node.level] if node.level else ()
        base = ".".join([*package, *([node.module] if node.module else [])])
        for alias in node.names:                           # a package itself counts where something of its own is taken
            module = f"{base}.{alias.name}"
            yield module if module in modules else base


def cycles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of files each of which reaches the others by imports (Tarjan's strongly connected components)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in number:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], number[other])
        if low[node] == number[node]:
            group = [stack.pop()]
            while group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return sorted(found)


# -- what a process does -------------------------------------------------------------------------------------------------

LOADS = """
    import json, sys, time
    import numpy
    begin = time.process_time()
    import gemmkit
    spent = time.process_time() - begin
    loaded = [name for name in sys.modules if name.partition(".")[0] == "gemmkit"]
    print(json.dumps({"modules loaded by import gemmkit": len(loaded),
                      "milliseconds of it, NumPy being there": round(spent * 1e3)}))
"""
CALLS = """
    import importlib, json, sys
    import gemmkit
    from bench import stand_ins

    for name in sys.argv[1:]:
        importlib.import_module(name)
    files, calls = set(), 0

    def count(frame, event, argument):
        global calls
        name = frame.f_code.co_filename
        if event == "call" and "/gemmkit/" in name:
            calls += 1
            files.add(name)

    with stand_ins.gpu(), stand_ins.library("cupy") as make:
        a, b = make(512, 512), make(512, 512)
        sys.setprofile(count)
        gemmkit.matmul(a, b)
        sys.setprofile(None)
        loaded = [name for name in sys.modules if name.partition(".")[0] == "gemmkit"]
    print(json.dumps({"loaded": loaded, "files": len(files), "calls": calls}))
"""


def measured() -> dict[str, int]:
    """What processes of this tree load and call, where there is no GPU: stand-ins take its place.

    Calls are counted with all modules loaded that they need: else the making of classes is among them."""
    first = _run(CALLS)
    again = _run(CALLS, *first["loaded"])
    return {**_run(LOADS), "modules loaded by a first f16 matmul": len(first["loaded"]),
            "files that it passes through": again["files"], "calls into gemmkit that it makes": again["calls"]}


def _run(program: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program), *arguments], cwd=ROOT, check=True, text=True,
                          stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)})
    found: dict[str, Any] = json.loads(done.stdout)
    return found


# -- the command ------------------------------------------------------------------------------------------------------

def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="show this commit's figures beside")
    parser.add_argument("--cycles", action="store_true", help="list the files that import each other")
    parser.add_argument("--upwards", action="store_true", help="list the imports that run upwards")
    parser.add_argument("--parameters", action="store_true", help="list the functions in kernels that have many parameters")
    given = parser.parse_args(arguments)
    now = of_tree()
    columns = [figures(sources) for sources in (*([of_commit(given.commit)] if given.commit else ()), now)]
    columns[-1] |= measured()
    allowed = limits()
    over = {name for name, limit in allowed.items() if columns[-1][name] > limit}
    heads = [*([given.commit[:9]] if given.commit else ()), "tree", "budget"]
    print(" " * 58 + "".join(f"{head:>10s}" for head in heads))
    for name in columns[-1]:
        numbers = [column.get(name) for column in (*columns, allowed)]
        print(f"{name:58s}" + "".join(f"{'-' if n is None else format(n, ','):>10s}" for n in numbers)
              + "  over" * (name in over))
    if given.cycles:
        for group in cycles(imports({path: parsed(text) for path, text in now.items()})):
            print(" <-> ".join(group))
    if given.upwards:
        for path, other in upwards(imports({path: parsed(text) for path, text in now.items()})):
            print(f"{path} ({room_of(path)}) imports {other} ({room_of(other)})")
    if given.parameters:
        print(*long_lists(now), sep="\n")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
