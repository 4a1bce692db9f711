"""Figures of the source tree that a redesign is judged by: lines, long parameter lists, specs, `choose`, import cycles.

    python -m tools.house                    of this tree
    python -m tools.house --commit REV       of this tree beside a commit's

Nothing is imported from what is counted: a commit's files are read from git.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
#: Libraries below the framework: a compiler, an instruction set, a machine and a driver layer.
BELOW = ("lang", "device", "ptx", "emulator", "runtime")
MOST_LINES, MANY_PARAMETERS = 400, 8

Sources = Mapping[str, str]                                # by path, from the root of the repository


def of_tree() -> Sources:
    return {str(path.relative_to(ROOT).as_posix()): path.read_text() for path in sorted(ROOT.glob("gemmkit/**/*.py"))}


def of_commit(revision: str) -> Sources:
    """The files of a commit; raises subprocess.CalledProcessError for an unknown one."""
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout

    names = git("ls-tree", "-r", "--name-only", revision, "gemmkit").splitlines()
    return {name: git("show", f"{revision}:{name}") for name in names if name.endswith(".py")}


def figures(sources: Sources) -> dict[str, int]:
    """What is counted, by its name."""
    trees = {path: ast.parse(text) for path, text in sources.items()}
    kernels = [tree for path, tree in trees.items() if path.startswith("gemmkit/kernels/")]
    lines = {path: text.count("\n") for path, text in sources.items()}
    functions = [node for tree in kernels for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    parameters = [len(parameters_of(function)) for function in functions]
    calls = [node.func.id for tree in kernels for node in ast.walk(tree)
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return {
        "lines": sum(lines.values()),
        "lines above device, ptx, emulator and runtime": sum(
            count for path, count in lines.items() if path.split("/")[1] not in BELOW),
        "lines in kernels": sum(count for path, count in lines.items() if path.startswith("gemmkit/kernels/")),
        f"files over {MOST_LINES} lines": sum(count > MOST_LINES for count in lines.values()),
        "functions in kernels": len(functions),
        f"functions in kernels with {MANY_PARAMETERS} parameters or more": sum(n >= MANY_PARAMETERS for n in parameters),
        "most parameters": max(parameters, default=0),
        "fields and properties of specs": sum(_members(tree) for tree in kernels),
        "calls of choose in kernels": calls.count("choose"),
        "files that import each other": sum(map(len, cycles(imports(trees)))),
        "largest group of them": max(map(len, cycles(imports(trees))), default=0),
    }


def parameters_of(function: ast.FunctionDef) -> list[str]:
    return [one.arg for one in function.args.posonlyargs + function.args.args + function.args.kwonlyargs]


def long_lists(sources: Sources) -> list[str]:
    """The functions in kernels that have many parameters, and these."""
    return [f"{path}:{node.lineno} {node.name}({', '.join(parameters_of(node))})"
            for path, text in sources.items() if path.startswith("gemmkit/kernels/") for node in ast.walk(ast.parse(text))
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
        statements = ast.walk(tree) if PurePosixPath(path).name == "__init__.py" else _statements(tree.body)
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


# -- the command ------------------------------------------------------------------------------------------------------

def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", help="show this commit's figures beside")
    parser.add_argument("--cycles", action="store_true", help="list the files that import each other")
    parser.add_argument("--parameters", action="store_true", help="list the functions in kernels that have many parameters")
    given = parser.parse_args(arguments)
    now = of_tree()
    columns = [figures(sources) for sources in (*([of_commit(given.commit)] if given.commit else ()), now)]
    for name in columns[-1]:
        print(f"{name:58s}" + "".join(f"{column[name]:10,}" for column in columns))
    if given.cycles:
        for group in cycles(imports({path: ast.parse(text) for path, text in now.items()})):
            print(" <-> ".join(group))
    if given.parameters:
        print(*long_lists(now), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
