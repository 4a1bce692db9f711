"""What the verifier looks at: a derived text with its syntax tree, its constants, and the blocks that its passes have placed."""

from __future__ import annotations

import ast
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.kernels.collectives.pipeline import Pipeline
from gemmkit.programs import collectives, multistage, pieces
from gemmkit.programs import plan as plans
from gemmkit.tuning.problems import choose


class Unsound(AssertionError):
    """What a pass has handed on is wrong."""


def expect(holds: object, said: str) -> None:
    if not holds:
        raise Unsound(said)


class Text:
    """A derived text, and what its constants are."""

    def __init__(self, plan: plans.ProgramPlan):
        self.plan, self.tree = plan, ast.parse(plan.text)
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        self.constants = {name: value for name, value in vars(plan.module).items() if not name.startswith("__")}
        self.nodes = [*ast.walk(self.tree)]
        self._said: dict[ast.AST, str] = {}
        self._parts: dict[ast.AST, list[ast.expr]] = {}

    def said(self, node: ast.AST) -> str:
        """A node as code. (Walks ask thousands of times for each of a text's nodes.)"""
        found = self._said.get(node)
        if found is None:
            found = self._said[node] = ast.unparse(node)
        return found

    def parts(self, node: ast.AST) -> list[ast.expr]:
        """The expressions that an expression is made of."""
        found = self._parts.get(node)
        if found is None:
            found = self._parts[node] = [x for x in ast.iter_child_nodes(node) if isinstance(x, ast.expr)]
        return found

    def of_kind(self, *kinds: type) -> dict[str, Any]:
        return {name: value for name, value in self.constants.items() if isinstance(value, kinds)}

    @cached_property
    def tiles(self) -> dict[str, Any]:
        return self.of_kind(collectives.StagedTile, multistage.CopiedTile)

    @cached_property
    def rings(self) -> dict[str, Any]:
        return self.of_kind(Pipeline, multistage.CopyRing)

    @cached_property
    def rings_of_tiles(self) -> dict[str, str]:
        """Which ring a tile's stages are in; "" for those that threads copy once a tile."""
        return {name: ring for ring, names in self.tiles_of_rings.items() for name in names}

    @cached_property
    def tiles_of_rings(self) -> dict[str, list[str]]:
        return tiles_of_rings(self)

    @cached_property
    def index_functions(self) -> dict[str, Any]:
        """The functions that compute with places, as Python."""
        known: dict[str, Any] = {"udiv": lambda x, y: int(x) // int(y), "blocks": lambda x, y: -(-x // y), "grid_x": lambda: self.grid}
        known |= {name: value for name, value in self.constants.items() if name in ("order", "cluster", "ROWS")}
        wanted = [f for name, f in self.functions.items() if name in INDEXING]
        known |= {f.__name__: f for f in (collectives.begin_of, collectives.piece_at, pieces.piece_of_tile)}
        exec(compile(ast.Module(wanted, []), self.plan.name, "exec"), known)
        return {f.name: known[f.name] for f in wanted}

    def parameters(self, function: str) -> list[str]:
        """Of a function of the text; of another none."""
        return [arg.arg for arg in self.functions[function].args.args] if function in self.functions else []

    @cached_property
    def sizes_of_parts(self) -> list[int]:
        """Where the parts of 64 rows each begin that a warpgroup has of a tile."""
        parts = max((getattr(product, "parts", 1) for product in self.of_kind(collectives.Product, multistage.MmaProduct).values()), default=1)
        return [64 * self.constants["WARPGROUPS"].consumers * n for n in range(parts)]

    @cached_property
    def blocks(self) -> list[Staged]:
        return staged_blocks(self.plan)

    grid = 1                           # blocks, in a walk


INDEXING = ("tiles", "place", "with_rows", "following", "first_round", "turn_at", "first_seen", "end_seen", "free_from", "free_to")


def is_recurrence(plan: plans.ProgramPlan) -> bool:
    """The second kernel of its own has no resizing, and takes blocks."""
    return isinstance(plan.resizing, plans.RecurrenceResizing) or (plan.resizing is None and not plan.is_of_rows)


def resizing_of(plan: plans.ProgramPlan) -> Any:
    resizing: Any = plan.resizing
    if is_recurrence(plan):
        return plan
    return resizing.problem if isinstance(resizing, plans.GridResizing) else resizing.made.problem


class Staged(NamedTuple):
    """A block as the places say: its dimensions, how long they are, its array and its stacks."""

    name: str
    array: str
    dtype: np.dtype
    dims: tuple[Any, Any]
    size: tuple[int, int]
    stacks: tuple[Any, ...]


def staged_blocks(plan: plans.ProgramPlan) -> list[Staged]:
    resizing: Any = plan.resizing
    if isinstance(resizing, plans.GridResizing):
        blocks = choose(resizing.problem, plan.device).spec[1].blocks
        return [Staged(t.name, t.parameter.name, np.dtype(t.parameter.dtype), t.dims, (blocks[t.dims[0].name], blocks[t.dims[1].name]), t.stacks)
                for rounds in resizing.problem.places.loops for t in rounds.tiles]
    choice = resizing.made.choice
    return [Staged(b.name, b.parameter.name, np.dtype(b.parameter.dtype), b.dims, choice.held(b), b.stacks)
            for ring in resizing.made.places.rings for b in ring.blocks]


def in_turn(plan: plans.ProgramPlan) -> bool:
    """Whether products go one after the other, whose blocks fill a ring's stages in turn."""
    return isinstance(plan.resizing, plans.ChainResizing) and plan.resizing.made.chain.is_straight


def held(tile: Any) -> tuple[int, int]:
    """Lines and columns of a tile as it lies in a stage: in whole steps of 16 of a product's K, and in whole lines."""
    return -(-tile.lines // 16) * 16, -(-tile.columns // tile.line) * tile.line


def bytes_of(tile: Any) -> int:
    lines, columns = held(tile)
    return lines * columns * int(tile.dtype.itemsize)


#: The methods that fill a stage, and which argument of them is the ring.
LOADS = {"load": 2, "load_part": 2, "load_pages": 6}


def tiles_of_rings(text: Text) -> dict[str, list[str]]:
    """By the rings' names, the tiles that are loaded into them: read in the text."""
    out: dict[str, list[str]] = {ring: [] for ring in text.rings}
    for node in text.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in (*LOADS, "copy"):
            tile = ast.unparse(node.func.value)
            ring = ast.unparse(node.args[LOADS.get(node.func.attr, 3)])
            if tile in text.tiles and (node.func.attr != "copy" or isinstance(text.tiles[tile], pieces.NamedTile)):
                expect(ring in out, f"{tile} is loaded into {ring}, which is no ring")
                expect(all(tile not in others for name, others in out.items() if name != ring), f"{tile} is loaded into two rings")
                out[ring] += [] if tile in out[ring] else [tile]
    if text.of_kind(multistage.CopyRing):              # which stages are written is said where copies are called
        functions = {name: [ast.unparse(x.func.value) for x in ast.walk(f) if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)
                            and x.func.attr in ("copy", "copy_pages")] for name, f in text.functions.items() if name.startswith("copy_blocks")}
        if in_turn(text.plan):
            out["ring"] = list(dict.fromkeys(ast.unparse(x.func.value) for x in ast.walk(text.functions["kernel"])
                                             if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr == "copy"
                                             and ast.unparse(x.args[-1]) != "of_tile"))
        for name, tiles in functions.items():
            ring = "ring" + name.removeprefix("copy_blocks")
            expect(ring in out, f"{name}: there is no {ring}")
            out[ring] += tiles
        lone = [name for name in text.tiles if not any(name in tiles for tiles in out.values())]
        return {**out, "": lone} if lone else out
    loose = [name for name in text.tiles if not any(name in tiles for tiles in out.values())]
    expect(not loose, f"{', '.join(loose)} is never loaded")
    return out
