"""``torch.compile(model, backend="gemmkit")``: products of a graph and what stands around them as gemmkit's calls.

    compiled = torch.compile(model, backend="gemmkit")
    print(gemmkit.torch.explain(model, x))       # what was fused, as the code of each epilogue, and what was left and why

Inductor compiles the graph. Before it fuses element-wise operations, `Lowering` looks at the graph of aten's operations,
forward and backward alike: of each product it finds what can be computed from D's elements one by one, writes that as an
epilogue, and puts one call of ``gemmkit::fused`` there. Inductor keeps it as a call of an extern kernel, and fuses the rest.

The operator takes the epilogue as text, so that a graph which PyTorch caches is whole: the process that loads it needs
gemmkit and nothing that was made while the graph was compiled.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from operator import getitem
from typing import Any, NamedTuple

import torch
import torch._dynamo
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true as is_known
from torch.utils import _pytree

from gemmkit.emulator import current_mode
from gemmkit.torch import operators
from gemmkit.torch.attention import replaced
from gemmkit.torch.operators import COMPARISONS, FUSED, LINES, REDUCED
from gemmkit.torch.product import NARROW, is_here, is_measured, node_of

aten, prims = torch.ops.aten, torch.ops.prims
log = logging.getLogger(__name__)


class LeftAlone(Exception):
    """Why something stays PyTorch's."""


# --------------------------------------------------------------------------------------------------
# What is looked for in a graph.

FLOATS = *NARROW, torch.float32, torch.float64
#: Those that change an element's dtype alone, and those that change its place in a shape alone.
CASTS = frozenset((prims.convert_element_type.default, aten._to_copy.default))
VIEWS = frozenset((aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
                   aten.squeeze.dim, aten.squeeze.dims))
#: Reductions of rows, and their names among gemmkit's; a mean is a sum.
REDUCTIONS = {aten.sum.dim_IntList: "sum", aten.mean.dim: "sum", aten.amax.default: "max", aten.amin.default: "min"}
SQUARES = frozenset((aten.pow.Tensor_Scalar, aten.square.default, aten.mul.Tensor))
PRODUCTS = {aten.mm.default: (0, 1), aten.addmm.default: (1, 2), aten.bmm.default: (0, 1), aten.baddbmm.default: (1, 2)}


def _literal(value: object) -> str:
    """A number of a graph as text that may stand beside any operator."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise LeftAlone(f"an argument is {value!r}")
    if math.isfinite(value):
        return repr(value) if value >= 0 else f"({value!r})"
    return "math.nan" if value != value else "math.inf" if value > 0 else "(-math.inf)"


# --------------------------------------------------------------------------------------------------
# A product in a graph, and what is computed from its elements one by one.

def _value(node: object) -> Any:
    return node.meta.get("val") if isinstance(node, Node) else None


def _same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    return len(one) == len(other) and all(is_known(x == y) for x, y in zip(one, other))


class Region(NamedTuple):
    """Products of one A, and operations on their results, the last of which alone is used elsewhere; or, instead of it or
    beside it, what its rows are reduced to by ``reduction``, one of gemmkit's by name. Nodes are in the graph's order."""

    roots: list[Node]
    nodes: list[Node]
    operands: dict[Node, str]          # how each lies along D
    reduced: Node | None = None
    reduction: str = ""
    stores: bool = True

    @property
    def output(self) -> Node:
        return self.nodes[-1]


class Regions:
    """Finds regions in a graph."""

    def __init__(self, graph: Graph, reduces: bool):
        self.reduces = reduces                             # beside a result, too
        self.order = {node: n for n, node in enumerate(graph.nodes)}

    def region(self, roots: list[Node]) -> Region | None:
        """The largest region of these products; None where no result comes of all of them."""
        if any(self._operands_of(root, set(), roots) is None for root in roots):
            return None
        inside, operands = self._reachable(roots)
        last_first = sorted(inside, key=self.order.__getitem__, reverse=True)

        def made(nodes: set[Node], reduced: Node | None = None, reduction: str = "", stores: bool = True) -> Region:
            ordered = sorted(nodes, key=self.order.__getitem__)
            return Region(roots, ordered, {x: operands[x] for node in ordered for x in node.all_input_nodes
                                           if x in operands and x not in nodes}, reduced, reduction, stores)

        for output in last_first:                          # nothing but a reduction of rows
            user = next(iter(output.users), None)
            if len(roots) == len(output.users) == 1 and self._reduction(user):         # (a `Fold` has a D)
                nodes = self._before(output, inside)
                if self._is_closed(nodes, output, roots):
                    return made(nodes, user, self._reduction(user), False)
        for output in last_first:
            nodes = self._before(output, inside)
            if self._is_result(output, roots) and self._is_closed(nodes, output, roots):
                return made(nodes, *self._beside(output) if self.reduces else ())
        return None

    @staticmethod
    def _is_closed(nodes: set[Node], output: Node, roots: list[Node]) -> bool:
        """Whether nothing but the output is used by others."""
        return all(root in nodes for root in roots) and all(
            user in nodes for node in nodes if node is not output for user in node.users)

    @staticmethod
    def _reduction(node: Node | None) -> str:
        """gemmkit's reduction that a node is, of the last axis; "" if it is none."""
        if not isinstance(node, Node) or node.target not in REDUCTIONS or _value(node.args[0]).dim() < 2:
            return ""
        axes, value = node.args[1] if len(node.args) > 1 else None, _value(node)
        ndim = _value(node.args[0]).dim()
        is_last = isinstance(axes, (list, tuple)) and [axis % ndim for axis in axes] == [ndim - 1]
        is_one_symbol = sum(not isinstance(size, int) for size in value.shape) < 2
        wide = value.dtype == torch.float64 and _value(node.args[0]).dtype != torch.float64
        return REDUCTIONS[node.target] if is_last and is_one_symbol and value.dtype in FLOATS and not wide else ""

    def _beside(self, output: Node) -> tuple[Node, str, bool] | tuple[()]:
        """A reduction of the output's rows, or of their squares, which is computed beside the output."""
        todo, wide = list(output.users), [output]
        while todo:
            node = todo.pop()
            if node.target in CASTS and _value(node).dtype.is_floating_point:
                wide.append(node)
                todo += node.users
        for node in wide:
            for user in node.users:
                if self._reduction(user):
                    return user, self._reduction(user), True
                square = user.target in SQUARES and all(x in (node, 2, 2.0) for x in user.args) and (
                    user.target is not aten.mul.Tensor or user.args[0] is user.args[1])
                for after in user.users if square else ():
                    if self._reduction(after) == "sum":
                        return after, "sumsq", True
        return ()

    def _reachable(self, roots: list[Node]) -> tuple[set[Node], dict[Node, str]]:
        """All operations that take results of the products and operands that do not depend on them, and these operands."""
        inside, operands, seen = set(roots), {}, set(roots)
        for root in roots:
            operands.update(self._operands_of(root, inside, roots) or {})         # (`region` has asked)
        queue: list[tuple[int, Node]] = []

        def add(node: Node) -> None:
            for user in node.users:
                if user not in seen and user in self.order:
                    seen.add(user)
                    heapq.heappush(queue, (self.order[user], user))

        for root in roots:
            add(root)
        while queue:
            node = heapq.heappop(queue)[1]
            found = self._operands_of(node, inside, roots)
            if found is not None:
                inside.add(node)
                operands.update(found)
                add(node)
        return inside, operands

    def _operands_of(self, node: Node, inside: set[Node], roots: list[Node]) -> dict[Node, str] | None:
        """What a node of the region would read beside the region; None for one that cannot be in it."""
        value = _value(node)
        if not isinstance(value, torch.Tensor) or node.kwargs.get("out") is not None:
            return None
        root = _value(roots[0])
        if node in roots:
            return self._operands(node, [node.args[0]] if PRODUCTS[node.target][0] else [], value.shape, roots)
        if value.dtype not in (*FLOATS, torch.bool) or (value.dtype == torch.float64 and root.dtype != torch.float64):
            return None
        if node.target in CASTS:
            return {} if value.dtype != torch.bool and node.args[0] in inside and not set(node.kwargs) - {"dtype"} else None
        if node.target in VIEWS:
            same = root.dim() == 2 and value.dim() and is_known(value.shape[-1] == root.shape[-1])
            return {} if same and node.args[0] in inside else None
        if node.target not in LINES:
            return None
        mine = [x for x in node.all_input_nodes if x in inside]
        if not mine or not all(_same(_value(x).shape, value.shape) for x in mine):
            return None
        numbers = node.args[1:] if node.target is aten.where.self else node.args            # a truth is no number
        if (value.dtype == torch.bool) != (node.target in COMPARISONS) or any(
                x in mine and _value(x).dtype == torch.bool for x in numbers):
            return None
        try:
            LINES[node.target](*map(_text_of, node.args), **{k: str(v) for k, v in node.kwargs.items()})
        except (LeftAlone, TypeError, ValueError):
            return None
        return self._operands(node, [x for x in node.all_input_nodes if x not in inside], value.shape, roots)

    def _operands(self, node: Node, given: Sequence[Any], shape: Sequence[int], roots: list[Node]) -> dict[Node, str] | None:
        found = {}
        for x in given:
            if constant(x) is not None:
                continue
            lies = _lies(_value(x), shape, _value(roots[0]))
            if lies is None or self._depends(x, roots):
                return None
            found[x] = lies
        return found

    def _depends(self, node: Node, roots: list[Node]) -> bool:
        """Whether a node is computed of the products."""
        first = min(self.order[root] for root in roots)
        todo, seen = [node], {node}
        while todo:
            x = todo.pop()
            if x in roots:
                return True
            for y in x.all_input_nodes:
                if self.order[y] >= first and y not in seen:
                    seen.add(y)
                    todo.append(y)
        return False

    @staticmethod
    def _before(output: Node, inside: set[Node]) -> set[Node]:
        nodes, todo = {output}, [output]
        while todo:
            for x in todo.pop().all_input_nodes:
                if x in inside and x not in nodes:
                    nodes.add(x)
                    todo.append(x)
        return nodes

    @staticmethod
    def _is_result(node: Node, roots: list[Node]) -> bool:
        """Whether a node may be D: a float in C order, and no wider than the products if something is still computed of it,
        because Inductor widens what it reads."""
        value, step = _value(node), 1
        for size, stride in zip(reversed(value.shape), reversed(value.stride())):
            if not is_known(stride == step) and not is_known(size == 1):
                return False
            step = step * size
        dtype = value.dtype
        is_wide = dtype.itemsize > _value(roots[0]).dtype.itemsize
        return bool(dtype.is_floating_point) and not (is_wide and any(user.op != "output" for user in node.users))


def _text_of(x: object) -> str:
    return "x" if isinstance(x, Node) else "" if x is None else _literal(x)


def constant(node: object) -> str | None:
    """The text of a number that is a node of its own; None for another node."""
    if not isinstance(node, Node) or node.target not in (aten.full.default, aten.scalar_tensor.default):
        return None
    value = node.args[1 if node.target is aten.full.default else 0]
    return _literal(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _lies(value: object, shape: Sequence[int], root: torch.Tensor) -> str | None:
    """How an operand lies along results of ``shape``, which has the elements of ``root``, the product's own; None where an
    epilogue does not read it."""
    if not isinstance(value, torch.Tensor) or value.device != root.device or value.dtype not in FLOATS or (
            value.dtype == torch.float64 != root.dtype):
        return None
    if not value.dim() or all(is_known(x == 1) for x in value.shape):
        return "number"
    if value.dim() == len(shape) and _same(value.shape, shape):
        return "matrix"
    if is_known(value.shape[-1] == shape[-1]) and all(is_known(x == 1) for x in value.shape[:-1]):
        return "columns"
    if root.dim() == 2 and value.dim() == len(shape) and is_known(value.shape[-1] == 1) and _same(value.shape[:-1],
                                                                                                  shape[:-1]):
        return "rows"
    return None


# --------------------------------------------------------------------------------------------------
# The text of a region: stages of an epilogue, each of which reads at most one array of D's shape.

class _Step(NamedTuple):
    name: str
    text: str
    reads: frozenset[str]              # earlier steps and products
    operands: tuple[str, ...]          # by name


def _shorter(node: Node) -> tuple[Any, str]:
    """What a shorter function computes a node of, and its name: GELU, also as Inductor writes it, and 1 + tanh(x)."""
    def parts(x: Any, target: object, constant: float) -> Any:
        """What a node computes with a constant."""
        is_one = isinstance(x, Node) and x.target is target and len(x.args) == 2 and not x.kwargs
        return x.args[0] if is_one and not isinstance(x.args[1], Node) and abs(x.args[1] - constant) < 1e-9 else None

    if node.target is aten.gelu.default:
        return node.args[0], "gelu_tanh_of_16_bits" if node.kwargs.get("approximate") == "tanh" else "gelu_of_16_bits"
    after = parts(node, aten.add.Tensor, 1.0)
    if isinstance(after, Node) and after.target is aten.tanh.default:
        return after.args[0], "one_plus_tanh"
    for one, other in (node.args, node.args[::-1]) if node.target is aten.mul.Tensor else ():
        x, after = parts(one, aten.mul.Tensor, 0.5), parts(other, aten.add.Tensor, 1.0)
        if x is not None and isinstance(after, Node) and after.target is aten.erf.default and (
                parts(after.args[0], aten.mul.Tensor, math.sqrt(0.5)) is x):
            return x, "gelu_of_16_bits"
    return None, ""


_INDEX = {"number": "[0]", "columns": "[n]", "rows": "[m]"}


class Text:
    """An epilogue of a region, as text. ``operands`` are its arguments."""

    def __init__(self, region: Region):
        self.region = region
        self.wide = "float64" if _value(region.roots[0]).dtype == torch.float64 else "float32"
        self.operands: list[Node] = []
        self.lies: dict[str, str] = {}
        self.names: dict[Node, str] = {}
        self.steps: list[_Step] = []
        self.products = [f"x{n}" if len(region.roots) > 1 else "x" for n in range(len(region.roots))]
        self.is_narrow = _value(region.roots[0]).dtype in NARROW
        for node in region.nodes:
            self._add(node)
        self.steps = self._needed()
        self.whole = self._written()

    def _add(self, node: Node) -> None:
        if node in self.region.roots:
            product = self.products[self.region.roots.index(node)]
            self.names[node] = product
            if PRODUCTS[node.target][0]:
                alpha, beta = (_literal(node.kwargs.get(name, 1)) for name in ("alpha", "beta"))
                c = node.args[0] if node.kwargs.get("beta", 1) else None        # with 0 it is not read, and may hold NaN
                more = "" if c is None else f" + {'' if beta == '1' else f'{beta} * '}{self._argument(c)}"
                self._step(node, (product if alpha == "1" else f"{product} * {alpha}") + more, [node, c])
        elif node.target in CASTS or node.target in VIEWS:
            self.names[node] = self.names[node.args[0]]
        elif self.is_narrow and (short := _shorter(node))[0] in self.names:
            self._step(node, f"{short[1]}({self.names[short[0]]})", short[:1])
        else:
            texts = [self._argument(x) if isinstance(x, Node) else "" if x is None else _literal(x) for x in node.args]
            options = {name: x if isinstance(x, str) else _literal(x) for name, x in node.kwargs.items()}
            self._step(node, LINES[node.target](*texts, **options), node.all_input_nodes)

    def _argument(self, node: Node) -> str:
        if node in self.names:
            return self.names[node]
        text = constant(node)
        if text is not None:
            return text
        if node not in self.operands:
            self.operands.append(node)
            self.lies[f"p{len(self.operands) - 1}"] = self.region.operands[node]
        return self._read(f"p{self.operands.index(node)}")

    def _step(self, node: Node, text: str, inputs: Sequence[Any]) -> None:
        reads = frozenset(self.names[x] for x in inputs if x in self.names)
        operands = tuple(dict.fromkeys(f"p{self.operands.index(x)}" for x in inputs if x in self.operands))
        name = f"y{len(self.steps)}"
        self.steps.append(_Step(name, text, reads, operands))
        self.names[node] = name

    def _needed(self) -> list[_Step]:
        """The steps that the output is computed of."""
        found: list[_Step] = []
        names = {self.names[self.region.output]}
        for step in reversed(self.steps):
            if step.name in names:
                names |= step.reads
                found.append(step)
        return found[::-1]

    # -- stages -------------------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator[list[_Step]]:
        """The steps, cut where a single value goes on."""
        part: list[_Step] = []
        for n, step in enumerate(self.steps):
            part.append(step)
            later = frozenset().union(*(x.reads for x in self.steps[n + 1:]))
            if later <= {x.name for x in self.steps[n:]}:
                yield part
                part = []

    def _groups(self) -> list[list[_Step]]:
        """Parts put together, so that a group reads one array of D's shape if it can, and a sum is a group of its own."""
        groups: list[list[_Step]] = []
        for part in self._parts():
            join = bool(groups) and not (self._is_sum(part) or self._is_sum(groups[-1]))
            if join and self._matrices(groups[-1]) and self._matrices(part):
                join = False
            if join or (groups and len(self.products) > 1 and len(groups) == 1 and not self._matrices(part)):
                groups[-1] = groups[-1] + part
            else:
                groups.append(part)
        return groups

    def _matrices(self, steps: list[_Step]) -> list[str]:
        return list(dict.fromkeys(p for step in steps for p in step.operands if self.lies[p] == "matrix"))

    def _is_sum(self, steps: list[_Step]) -> bool:
        """Whether steps are one value plus an operand: a stage that gemmkit has."""
        if len(steps) != 1 or len(steps[0].operands) != 1 or self.lies[steps[0].operands[0]] == "number":
            return False
        (before,), read = steps[0].reads or ("",), self._read(steps[0].operands[0])
        return steps[0].text in (f"{before} + {read}", f"{read} + {before}")

    def _read(self, name: str) -> str:
        return f"{self.wide}({name}{_INDEX.get(self.lies[name], '[m, n]')})"

    def _written(self) -> str:
        if not self.steps and self.region.reduced is None:
            return ""
        lines, stages, before = [], [], self.products
        for n, steps in enumerate(self._groups()):
            is_fold = n == 0 and len(self.products) > 1
            if self._is_sum(steps) and not is_fold:
                operand = steps[0].operands[0]
                along = ', along="M"' if self.lies[operand] == "rows" else ""
                stages.append(f"Residual({operand})" if self.lies[operand] == "matrix" else f"Bias({operand}{along})")
            else:
                matrices = [] if is_fold else self._matrices(steps)[:1]
                lines += self._function(f"f{n}", before, matrices, steps)
                stages.append(f"Fold(f{n})" if is_fold else f"Binary({matrices[0]}, f=f{n})" if matrices
                              else f"Elementwise(f{n})")
            before = [steps[-1].name]
        if self.region.reduced is not None:
            stages.append(f'RowReduce(rows, "{self.region.reduction}")')
        arguments = [f"p{n}" for n in range(len(self.operands))] + ["rows"] * (self.region.reduced is not None)
        return "\n".join([f"def epilogue({', '.join(arguments)}):", *lines, f"    return {' | '.join(stages)}"])

    def _function(self, name: str, before: list[str], matrices: list[str], steps: list[_Step]) -> list[str]:
        body = [(step.name, step.text) for step in steps]
        values = list(before)
        for n, matrix in enumerate(matrices):
            body = [(left, text.replace(self._read(matrix), f"{self.wide}(z{n})")) for left, text in body]
            values.append(f"z{n}")
        places = ["m", "n"] if any(f"[{at}]" in text for _, text in body for at in ("m", "n", "m, n")) else []
        head = f"    def {name}({', '.join(values + places)}):"
        *most, last = body
        return [head, *(f"        {left} = {text}" for left, text in most), f"        return {last[1]}"]


# --------------------------------------------------------------------------------------------------
# The pass: which products are taken, and the graph with gemmkit's calls in it.

class LoweredProduct(NamedTuple):
    """What became of a product: its operation and sizes, the epilogue's text if it was taken, and why it was not."""

    product: str
    epilogue: str
    why: str


class Lowering(CustomGraphPass):
    """Inductor's pass over a graph of aten's operations. ``take`` is "faster", for what is expected to be no slower than
    PyTorch's, or "all", for whatever can be taken; ``entries`` is told what became of each product."""

    def __init__(self, take: str, entries: list[LoweredProduct], before: Sequence[Callable[[Graph], None]] = ()):
        self.take, self.entries, self.before = take, entries, before           # passes of the user's, which come before

    def __call__(self, graph: Graph) -> None:
        for one in self.before:
            one(graph)
        begun = len(self.entries)
        products = [node for node in graph.nodes if node.target in PRODUCTS]
        gone: set[Node] = set()
        for node in products:
            if node not in gone:
                gone.update(self._one(graph, node, [x for x in products if x is not node and x not in gone
                                                    and _is_same(_a(x), _a(node))]))
        operators.factors_apart(graph)
        for entry in self.entries[begun:]:
            log.info("%s: %s", entry.product, entry.why or f"fused\n{entry.epilogue}")

    def uuid(self) -> Any:
        """What PyTorch's caches of graphs know the pass by: this code, what it may compute with, and the user's passes."""
        others = [one.uuid() if isinstance(one, CustomGraphPass) else None for one in self.before]
        if None in others:
            return None                                # its graphs are not cached
        return get_hash_for_files((__file__, operators.__file__), repr((self.take, others, current_mode() is not None)))

    def _one(self, graph: Graph, node: Node, others: list[Node]) -> list[Node]:
        """Take a product, with others of the same A where something is computed of both; the products that were taken."""
        about = _about(node)
        try:
            _check(node, self.take)
            finder = Regions(graph, self.take == "all")
            for other in others:
                if _is_like(node, other):
                    region = finder.region([node, other])
                    if region is not None:
                        break
            else:
                region = finder.region([node])
            if region is None:
                raise LeftAlone("nothing of it can be computed element by element")
            text = Text(region)
            _check_speed(region, self.take)
        except LeftAlone as why:
            self.entries.append(LoweredProduct(about, "", str(why)))
            return []
        self._replace(graph, region, text)
        self.entries.append(LoweredProduct(about, text.whole, ""))
        return region.roots

    def _replace(self, graph: Graph, region: Region, text: Text) -> None:
        output, reduced, (root, *_) = region.output, region.reduced, region.roots
        first = PRODUCTS[root.target][0]
        with graph.inserting_before(output):
            operands = [self._laid(graph, x, region.operands[x], _value(root)) for x in text.operands]
            gathered = _gathered(root.args[first])
            a = (root.args[first], None) if gathered is None else _index(graph, *gathered)
            given = *a, [x.args[first + 1] for x in region.roots], operands
            how: dict[str, Any] = {"epilogue": text.whole, "dtype": _value(output).dtype}
            if reduced is None:
                call = node_of(graph, FUSED, given, how)
            else:
                both = node_of(graph, REDUCED, given, {**how, "stores": region.stores})
                call, rows = (node_of(graph, getitem, (both, n)) for n in range(2))
                if reduced.target is aten.mean.dim:
                    rows = node_of(graph, aten.div.Tensor, (rows, _value(root).shape[-1]))
                rows = node_of(graph, aten.reshape.default, (rows, [x if isinstance(x, int) else -1
                                                                  for x in _value(reduced).shape]))
                if _value(rows).dtype != _value(reduced).dtype:
                    rows = node_of(graph, prims.convert_element_type.default, (rows, _value(reduced).dtype))
            if region.stores and not _same(_value(call).shape, _value(output).shape):
                view = next(x for x in region.nodes if x.target in VIEWS and _same(_value(x).shape, _value(output).shape))
                call = node_of(graph, aten.reshape.default, (call, _sizes(graph, view)))
        if reduced is not None:
            reduced.replace_all_uses_with(rows)
            graph.erase_node(reduced)
        if region.stores:
            output.replace_all_uses_with(call)
        unused = [*region.nodes]
        if gathered is not None:
            unused = [*_views(root.args[first], gathered[0]), *unused]
        for node in reversed(unused):
            graph.erase_node(node)

    @staticmethod
    def _laid(graph: Graph, node: Node, lies: str, root: torch.Tensor) -> Node:
        """An operand as the epilogue reads it: a vector, or a matrix of D's shape."""
        value = _value(node)
        if lies == "matrix":
            return node if value.dim() == root.dim() else node_of(graph, aten.reshape.default, (node, [-1, root.shape[-1]]))
        return node if value.dim() == 1 else node_of(graph, aten.reshape.default, (node, [-1]))


def _gathered(a: Node) -> tuple[Node, Node, Node] | None:
    """The node that gathers rows of a matrix, for this product alone, the matrix and the index; None for another A."""
    while isinstance(a, Node) and a.target in VIEWS and len(a.users) == 1:
        a = a.args[0]
    if not isinstance(a, Node) or len(a.users) != 1 or _value(a) is None:
        return None
    if a.target is aten.embedding.default:
        table, index = a.args[:2]
    elif a.target is aten.index.Tensor and len(a.args[1]) == 1:
        table, (index,) = a.args
    else:
        return None
    rows = _value(table)
    fits = rows.dim() == 2 and rows.stride(1) == 1 and isinstance(rows.shape[0], int) and rows.shape[0] < 2**31
    return (a, table, index) if fits and _value(index).dtype in (torch.int32, torch.int64) else None


def _views(a: Node, gather: Node) -> list[Node]:
    """The node that gathers and the views of it, which are A, in their order."""
    return [a] if a is gather else [*_views(a.args[0], gather), a]


def _index(graph: Graph, gather: Node, table: Node, index: Node) -> tuple[Node, Node]:
    """A matrix, and the index of its rows as int32. PyTorch makes it, of whole numbers in their order: its checks stay."""
    value = _value(table)
    how = dict(start=0, step=1, dtype=torch.int32, device=value.device, requires_grad=False)
    places = node_of(graph, prims.iota.default, (value.shape[0],), how, value)
    if gather.target is aten.embedding.default:
        found = node_of(graph, aten.embedding.default, (node_of(graph, aten.reshape.default, (places, [-1, 1])), index))
    else:
        found = node_of(graph, aten.index.Tensor, (places, [index]))
    return table, node_of(graph, aten.reshape.default, (found, [-1]))


def _sizes(graph: Graph, view: Node) -> Any:
    """The shape that a view has in the graph, whose symbols are nodes."""
    if view.target in (aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims):
        shape = list(_value(view).shape)
        unknown = [n for n, size in enumerate(shape) if not isinstance(size, int)]
        return [-1 if n in unknown else size for n, size in enumerate(shape)]
    return view.args[1]


def _a(product: Node) -> Any:
    return product.args[PRODUCTS[product.target][0]]


def _is_same(x: object, y: object) -> bool:
    """Whether nodes are one tensor, as it is or seen through the same views."""
    return x is y or (isinstance(x, Node) and isinstance(y, Node) and x.target is y.target and x.target in VIEWS
                      and x.args[1:] == y.args[1:] and _is_same(x.args[0], y.args[0]))


def _about(node: Node) -> str:
    a, b = (_value(node.args[PRODUCTS[node.target][0] + n]) for n in range(2))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return str(node.target)
    sizes = " x ".join(map(str, (*a.shape[:-1], b.shape[-1], a.shape[-1])))
    return f"{node.target.overloadpacket.__name__} {sizes} {str(a.dtype).removeprefix('torch.')}"


def _is_like(node: Node, other: Node) -> bool:
    """Whether products may be one, of a B with columns of both."""
    if node.target is not other.target or node.target is not aten.mm.default:
        return False
    b, c = _value(node.args[1]), _value(other.args[1])
    return b.dtype == c.dtype and _same(b.shape, c.shape)


def _check(node: Node, take: str) -> None:
    """Raise LeftAlone for a product that gemmkit does not compute as PyTorch does."""
    first = PRODUCTS[node.target][0]
    a, b, d = _value(node.args[first]), _value(node.args[first + 1]), _value(node)
    if not all(isinstance(x, torch.Tensor) for x in (a, b, d)):
        raise LeftAlone("its operands have no known shapes")
    if a.dtype not in (FLOATS if take == "all" else NARROW) or not a.dtype == b.dtype == d.dtype:
        raise LeftAlone(f"operands of {a.dtype}")
    if not is_here(a):
        raise LeftAlone(f"tensors on {a.device}")
    if a.dtype == torch.float32 and a.is_cuda and torch.backends.cuda.matmul.allow_tf32:
        raise LeftAlone("products of float32 may be TF32's")
    if not all(is_known(x > 0) for x in (*a.shape, b.shape[-1])) or not all(isinstance(x, int) for x in b.shape):
        raise LeftAlone("sizes that are 0, or not known")


#: What a block computes of D on Hopper, and how many waves of blocks hide what an epilogue does.
_TILE, _WAVES, _PROCESSORS = (128, 256), 2, 132


def _check_speed(region: Region, take: str) -> None:
    """Raise LeftAlone for what is not known to be as fast as PyTorch's, by the rows of docs/how_to/compile.md."""
    if take == "all":
        return
    root = region.roots[0]
    if not is_measured(_value(root)):
        raise LeftAlone("the GPU is no Hopper, for which alone it is known what is faster")
    if _gathered(_a(root)) is not None or not region.stores:
        raise LeftAlone("gathered rows and reductions without D have not been measured beside Inductor's")
    if all(node in region.roots or node.target in VIEWS or node.target in CASTS for node in region.nodes):
        raise LeftAlone("nothing is fused that cuBLAS does not compute, too")
    if any(lies == "matrix" and (x.target in LINES or x.target in CASTS) and set(x.users) <= set(region.nodes)
           for x, lies in region.operands.items()):
        raise LeftAlone("a kernel of Inductor's computes an operand for it alone, and would compute this as well")
    if len(region.roots) == 1 and not all(map(_is_read_whole, region.output.users)):
        raise LeftAlone("a kernel of Inductor's reads the result, and computes this as well")
    *stack, rows, columns = (size if isinstance(size, int) else size.node.hint or 0 for size in _value(root).shape)
    count = math.prod(stack) * -(-rows // _TILE[0]) * -(-columns * len(region.roots) // _TILE[1])
    if count < _WAVES * _processors(_value(root).device):
        raise LeftAlone(f"D of {rows} x {columns} has too few tiles to hide an epilogue")


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _PROCESSORS


def _is_read_whole(user: Node) -> bool:
    """Whether a user of a result takes it from memory: a product, attention, a caller, or a view that is taken so."""
    if user.target in VIEWS or user.target in (aten.permute.default, aten.t.default, aten.transpose.int):
        return all(map(_is_read_whole, user.users))
    return user.op == "output" or user.target in PRODUCTS or getattr(user.target, "namespace", "") == "gemmkit"


# --------------------------------------------------------------------------------------------------
# The backend.

def backend(graph: GraphModule, inputs: Sequence[Any], *, mode: str | None = None,
            options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """What ``torch.compile(backend="gemmkit")`` calls.

    Args:
        graph, inputs: as PyTorch gives them.
        mode: as ``torch.compile`` has it for Inductor: "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs".
        options: ``"gemmkit.take"`` (`Lowering`); all others are Inductor's.

    Raises ValueError for an option that is none of gemmkit's.
    """
    return _compiled(graph, inputs, mode, options, [])


def _compiled(graph: GraphModule, inputs: Sequence[Any], mode: str | None, options: dict[str, Any] | None,
              entries: list[LoweredProduct]) -> Callable[..., Any]:
    """`backend`, which tells ``entries`` what becomes of products."""
    from torch._inductor import config, list_mode_options
    from torch._inductor.compile_fx import compile_fx

    given = dict(options or {})
    take = given.pop("gemmkit.take", "faster")
    if any(name.startswith("gemmkit.") for name in given) or take not in ("all", "faster"):
        raise ValueError(f"options={options!r}: of gemmkit's there is gemmkit.take, which is 'faster' or 'all'")
    patches = {**(list_mode_options(mode) if mode else {}), **given}
    for what, why in replaced(graph, take == "all"):
        entries.append(LoweredProduct(what, "" if why else "attention", why))
    users = patches.get("post_grad_custom_pre_pass", config.post_grad_custom_pre_pass) or ()
    patches["post_grad_custom_pre_pass"] = Lowering(take, entries, users if isinstance(users, (list, tuple)) else (users,))
    return compile_fx(graph, inputs, config_patches=patches)                  # type: ignore[no-any-return]


class LoweringReport(NamedTuple):
    """What the backend makes of a function: a `LoweredProduct` for each product, in the order of the graphs, and how many
    graphs Dynamo made of it (1 of a function without a graph break)."""

    entries: list[LoweredProduct]
    graphs: int

    @property
    def fused(self) -> list[LoweredProduct]:
        return [x for x in self.entries if not x.why]

    @property
    def left(self) -> list[LoweredProduct]:
        return [x for x in self.entries if x.why]

    def __str__(self) -> str:
        taken = [f"{x.product}\n{x.epilogue or 'without an epilogue'}" for x in self.fused]
        left = [f"{x.product}: left to PyTorch, {x.why}" for x in self.left]
        graphs = f"{self.graphs} graph{'s' * (self.graphs != 1)}"
        return "\n\n".join([graphs, *taken, *(["\n".join(left)] if left else [])])


def explain(function: Callable[..., Any], *args: object, options: dict[str, Any] | None = None,
            **keywords: object) -> LoweringReport:
    """Compile and call a function or a module as ``torch.compile(backend="gemmkit")`` does at its first call, and say what
    became of its products, of the gradient's as well if a result requires one.

    Args:
        function: as ``torch.compile`` takes it; it is called once with ``args`` and ``keywords``.
        options: as ``torch.compile`` takes them.

    Returns: an `LoweringReport`. ``print`` shows each epilogue's code.

    >>> import torch, gemmkit as gk, gemmkit.torch
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.ReLU()).half()
    >>> with gk.emulate(), torch.no_grad():
    ...     print(gk.torch.explain(model, torch.ones(4, 4).half(), options={"gemmkit.take": "all"}))
    1 graph
    <BLANKLINE>
    mm 4 x 4 x 4 float16
    def epilogue():
        def f0(x):
            return relu(x)
        return Elementwise(f0)
    """
    entries, count = list[LoweredProduct](), 0

    def seen(graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        nonlocal count
        count += 1
        return _compiled(graph, inputs, None, {"force_disable_caches": True, **(options or {})}, entries)

    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):       # whatever other sizes were compiled before
        found = torch.compile(getattr(function, "_orig_mod", function), backend=seen)(*args, **keywords)
    results = [x for x in _pytree.tree_leaves(found) if isinstance(x, torch.Tensor) and x.requires_grad]
    if results:
        torch.autograd.grad(results, _leaves(results), [torch.zeros_like(x) for x in results], allow_unused=True)
    return LoweringReport(entries, count)


def _leaves(results: Sequence[torch.Tensor]) -> list[Any]:
    """The tensors whose gradients a backward pass would add to."""
    todo, seen, found = [x.grad_fn for x in results], set(), []
    while todo:
        function = todo.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        if hasattr(function, "variable"):
            found.append(function.variable)
        todo += [x for x, _ in function.next_functions]
    return found


if "gemmkit" not in torch._dynamo.list_backends(exclude_tags=()):
    torch._dynamo.register_backend(compiler_fn=backend, name="gemmkit")
