"""Legal calls as code: shapes, dtypes, strides and alignments of every array, structure, components, stacks, groups."""

from __future__ import annotations

import linecache
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import gemmkit as gk
from gemmkit import blas, epilogues, layouts, operators, transforms
from gemmkit.layouts.quantised import quantise
from tests.drawn_programs import grammar as programs
from tests.drawn_programs.syntax import printed

FLOATS, OTHERS = ("f2", "bf2", "f4", "f8"), ("i1", "u1", "i2", "i4", "i8", "?", "c8", "c16")
FEW = (0, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65)
MANY = (96, 100, 127, 128, 129, 192, 250, 256, 257, 384, 512, 513, 1000, 1024, 1030, 1536, 2048, 4096, 4104, 8192, 16384)
LARGEST = 2**27                        # elements of an array: its memory is never touched


class Case(NamedTuple):
    """``code`` is evaluated with the names of `scope`."""

    kind: str
    code: str


def view(dtype: str, *shape: int, order: tuple[int, ...] = (), steps: tuple[int, ...] = (), pad: int = 0,
         offset: int = 0) -> np.ndarray:
    """An array that nobody has written: ``order`` has its axes, the slowest first, ``steps`` how far apart elements are along
    each (0: all are one; negative: backwards), ``pad`` the elements behind the fastest axis, ``offset`` those before."""
    kind = np.dtype(getattr(ml_dtypes, {"bf2": "bfloat16"}.get(dtype, dtype), dtype))
    order, steps = order or tuple(range(len(shape))), steps or (1,) * len(shape)
    strides, size, first = [0] * len(shape), 1, offset
    for n, axis in enumerate(reversed(order)):
        extent, step = max(1, shape[axis]), steps[axis]
        strides[axis] = size * step
        first += (extent - 1) * size * abs(step) if step < 0 else 0
        size *= extent * abs(step) if step else 1
        size += pad if n == 0 else 0
    memory = np.empty(size + offset, kind)
    return np.ndarray(shape, kind, memory, first * kind.itemsize, tuple(stride * kind.itemsize for stride in strides))


def scope() -> dict[str, Any]:
    return dict(view=view, gk=gk, np=np, blas=blas, epilogues=epilogues, layouts=layouts, operators=operators, quantise=quantise,
                transforms=transforms, Hankel=Hankel, program=program)


@dataclass(frozen=True)
class Hankel(layouts.Layout):
    """A layout of the caller's own, which cannot tell its extents."""

    def element(self, data: Any, i: int, j: int, shape: Any) -> Any:
        return data[i + j]


class Drawing:
    """One case's random choices."""

    def __init__(self, seed: int, number: int):
        self.rng = np.random.default_rng((seed, number))

    def one(self, of: Any) -> Any:
        return of[int(self.rng.integers(len(of)))]

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def size(self, few: float = 0.5) -> int:
        return int(self.one(FEW) if self.chance(few) else self.one(MANY))

    def sizes(self) -> tuple[int, int, int]:
        few = self.one((0.1, 0.5, 0.9))
        while True:
            M, N, K = (self.size(few) for _ in range(3))
            if max(M * N, M * K, N * K) <= LARGEST // 2:
                return M, N, K

    def dtypes(self) -> tuple[str, str]:
        """Those of A and B."""
        a = self.one(FLOATS) if self.chance(0.75) else self.one(OTHERS)
        if self.chance(0.9):
            return a, a
        pairs = (("f4", "f8"), ("f2", "f4"), ("i1", "u1"), ("c8", "f4"), ("f8", "c16"), ("?", "f4"), ("i4", "f8"), ("f4", "bf2"))
        return self.one(pairs)

    def view(self, dtype: str, shape: tuple[int, ...], written: bool = False) -> str:
        """An array of any strides and alignment; one that is ``written`` has elements of its own."""
        parts = [f"view({dtype!r}", *map(str, shape)]
        if len(shape) > 1 and self.chance(0.5):
            order = [*range(len(shape))]
            if self.chance(0.6):
                order[-2:] = order[:-3:-1]
            else:
                self.rng.shuffle(order)
            parts.append(f"order={tuple(map(int, order))}")
        if self.chance(0.25):
            kinds = (1, 1, 1, 2, 3, -1) if written else (1, 1, 1, 2, -1, 0)
            parts.append(f"steps={tuple(self.one(kinds) for _ in shape)}")
        if self.chance(0.3):
            parts.append(f"pad={self.one((1, 2, 3, 4, 5, 8, 13))}")
        if self.chance(0.25):
            parts.append(f"offset={self.one((1, 2, 3, 4, 8))}")
        return ", ".join(parts) + ")"

    def stack(self) -> tuple[int, ...]:
        return tuple(int(self.one((1, 1, 2, 3, 5, 12))) for _ in range(self.one((1, 1, 2, 2, 3))))

    def part(self, stack: tuple[int, ...]) -> tuple[int, ...]:
        """A stack that broadcasts to this one."""
        kept = stack[int(self.rng.integers(len(stack) + 1)):] if self.chance(0.4) else stack
        return tuple(1 if self.chance(0.2) else n for n in kept)


def result_of(a: str, b: str) -> str:
    """NumPy's result type of two of the names here."""
    names = {"bf2": ml_dtypes.bfloat16}
    found = np.result_type(*(np.dtype(names.get(x, x)) for x in (a, b)))
    return "bf2" if found == ml_dtypes.bfloat16 else found.kind + str(found.itemsize) if found.kind != "b" else "?"


def wider(draw: Drawing, result: str) -> str:
    """A dtype that holds a result of this one."""
    return draw.one({"f2": ("f2", "f2", "f4", "f8"), "bf2": ("bf2", "bf2", "f4"), "f4": ("f4", "f4", "f8")}.get(result, (result,)))


# -- components ----------------------------------------------------------------------------------------------------------

EPILOGUES = (
    "epilogues.ReLU()", "epilogues.GELU()", "epilogues.SiLU()", "epilogues.Tanh()", "epilogues.Clamp(0.0, 6.0)",
    "epilogues.Elementwise(lambda x, m, n: x * 2 + n)", "epilogues.Scale(2.0)", "epilogues.Scale(0.5) | epilogues.ReLU()",
    "epilogues.CausalMask(0.0)", "epilogues.Where(lambda m, n: m > n, 0.0)")
ROWS = ("epilogues.Softmax()", "epilogues.RMSNorm(view('f4', {N}))", "epilogues.LayerNorm(view('f4', {N}), view('f4', {N}))")
TRANSFORMED = "transforms.Map(lambda x: x * 2)"
PLACES = ("transform_global_to_shared_a", "transform_global_to_shared_b", "transform_regs_to_shared_d", "transform_shared_to_global_d")


def epilogue(draw: Drawing, M: int, N: int, result: str, stack: tuple[int, ...] = ()) -> str:
    way = draw.rng.random()
    if way < 0.45:
        return str(draw.one(EPILOGUES))
    if way < 0.6:
        return f"epilogues.Bias({draw.view(result, (N,))})" if draw.chance(0.7) else f"epilogues.Bias({draw.view(result, (M,))}, along='M')"
    if way < 0.75:
        return f"epilogues.Residual({draw.view(result, (M, N))})" + draw.one(("", " | epilogues.ReLU()"))
    if way < 0.85 and M and N:
        kind = draw.one(("sum", "max", "min", "logsumexp"))
        reduced, along = draw.one((("RowReduce", M), ("ColumnReduce", N)))
        return f"epilogues.{reduced}({draw.view('f4', (*stack, along), True)}, {kind!r})"
    return str(draw.one(ROWS)).format(N=N)


# -- calls -----------------------------------------------------------------------------------------------------------------

def call(function: str, arguments: list[str]) -> str:
    if function == "gk.plan":
        plain = [argument for argument in arguments if "=" not in argument.split("(", 1)[0]]
        out = [argument for argument in arguments if argument.startswith("out=")]
        return f"gk.plan({', '.join(arguments)})({', '.join(plain + out)})"
    return f"{function}({', '.join(arguments)})"


def product(draw: Drawing) -> Case:
    M, N, K = draw.sizes()
    a, b = draw.dtypes()
    given = [draw.view(a, (M, K)), draw.view(b, (K, N))]
    result = result_of(a, b)
    if draw.chance(0.2):
        result = wider(draw, result)
        given.append(draw.view(result, draw.one(((M, N), (M, N), (M, N)))))
    if draw.chance(0.6):
        given.append(f"out={draw.view(wider(draw, result), (M, N), True)}")
    return Case("product", call(draw.one(("gk.matmul", "gk.matmul", "gk.plan")), given))


def with_components(draw: Drawing) -> Case:
    M, N, K = draw.sizes()
    a = draw.one(FLOATS)
    given = [draw.view(a, (M, K)), draw.view(a, (K, N))]
    if draw.chance(0.2):
        given.append(draw.view(a, (M, N)))
    if draw.chance(0.5):
        given.append(f"out={draw.view(wider(draw, a), (M, N), True)}")
    if draw.chance(0.8):
        given.append(f"epilogue={epilogue(draw, M, N, a)}")
    if draw.chance(0.4):
        given.append(f"{draw.one(PLACES)}={TRANSFORMED}")
    return Case("components", call(draw.one(("gk.matmul", "gk.plan")), given))


def with_operator(draw: Drawing) -> Case:
    """Operators that leave shape and dtypes to the call."""
    M, N, K = draw.sizes()
    name, dtypes = draw.one((("MIN_PLUS", ("f4", "f8", "i4", "f2", "i2")), ("MAX_PLUS", ("f4", "i4", "i8")), ("LOG_SUM_EXP", ("f4", "f8")),
                             ("MAX_TIMES", ("f4", "f8")), ("OR_AND", ("?", "i4", "u1")), ("COMPLEX", ("c8", "c16"))))
    a = draw.one(dtypes)
    stack = draw.stack() if draw.chance(0.5) else ()
    given = [draw.view(a, (*draw.part(stack), M, K)), draw.view(a, (*draw.part(stack), K, N))]
    given.append(f"operator=operators.{name}")
    if draw.chance(0.2) and name == "MIN_PLUS" and not stack and a not in ("f2", "i2"):       # an index is as wide as a value
        return Case("select", call("gk.functions.select", given))
    if draw.chance(0.2):
        given.append(f"{draw.one(PLACES[:2])}=transforms.Map(lambda x: x)")
    return Case("operator", call("gk.matmul", given))


def stacked(draw: Drawing) -> Case:
    while True:
        stack = draw.stack()
        M, N, K = draw.sizes()
        if math.prod(stack) * max(M * N, M * K, N * K) <= LARGEST:
            break
    a, b = draw.dtypes()
    one, other = draw.part(stack), draw.part(stack)
    whole = np.broadcast_shapes(one, other)
    given = [draw.view(a, (*one, M, K)), draw.view(b, (*other, K, N))]
    result = result_of(a, b)
    if draw.chance(0.15) and whole:
        given.append(draw.view(result, (*draw.part(whole), M, N)))
    if draw.chance(0.5):
        given.append(f"out={draw.view(wider(draw, result), (*whole, M, N), True)}")
    if draw.chance(0.3) and a in FLOATS and b in FLOATS:
        given.append(f"epilogue={epilogue(draw, M, N, result, whole)}" if draw.chance(0.5) else f"{draw.one(PLACES)}={TRANSFORMED}")
    return Case("stack", call(draw.one(("gk.matmul", "gk.plan")), given))


def structured(draw: Drawing) -> Case:
    """A matrix with structure beside a matrix, a stack or a vector, on either side."""
    M, N, K = draw.sizes()
    dtype = draw.one(("f4", "f4", "f2", "f8", "bf2"))
    rows, columns = (M, K)
    kind = draw.one(("Matrix", "Generated", "Concat", "Diagonal", "Triangular", "Symmetric", "Gather", "quantised", "Hankel"))
    by_keyword = ""
    if kind in ("Diagonal", "Triangular", "Symmetric"):
        rows = columns
        matrix = {"Diagonal": lambda: f"gk.layouts.DiagonalMatrix({draw.view(dtype, (columns,))})",
                  "Triangular": lambda: f"gk.layouts.TriangularMatrix({draw.view(dtype, (rows, columns))}, {draw.one(('lower', 'upper'))!r})",
                  "Symmetric": lambda: f"gk.layouts.SymmetricMatrix({draw.view(dtype, (rows, columns))})"}[kind]()
    elif kind == "Matrix":
        matrix = f"gk.layouts.Matrix({draw.view(dtype, (rows + columns,))}, Hankel({_name(dtype)}), {(rows, columns)})"
    elif kind == "Hankel":
        matrix, by_keyword = draw.view(dtype, (rows + columns,)), f"Hankel({_name(dtype)})"
    elif kind == "Generated":
        dtype = draw.one(("f4", "f8"))
        matrix = f"gk.layouts.GeneratedMatrix(lambda i, j: i - j, {(rows, columns)}, {dtype!r})"
    elif kind == "Gather":
        matrix = f"gk.layouts.Gather({draw.view(dtype, (7, columns))}, np.zeros({rows}, np.int32))"
    elif kind == "Concat":
        axis = draw.one((0, 1))
        shapes = [(draw.size(), columns) if axis == 0 else (rows, draw.size()) for _ in range(draw.one((2, 3)))]
        matrix = f"gk.layouts.Concat({', '.join(draw.view(dtype, shape) for shape in shapes)}, axis={axis})"
        rows, columns = (sum(m for m, _ in shapes), columns) if axis == 0 else (rows, sum(n for _, n in shapes))
    else:
        rows, dtype = 32 * draw.one((1, 2, 4, 16, 64)), "f2"
        matrix = f"quantise(np.ones(({rows}, {columns}), np.float32), group={draw.one((8, 16, 32))})"
    first = kind != "quantised" and draw.chance(0.5)
    inner, outer = (columns, rows) if first else (rows, columns)
    way = draw.rng.random()
    beside = (inner,) if way < 0.5 else (inner, N) if way < 0.85 else (2, inner, N)
    beside = beside if first else (*beside[:-2], *beside[-2:][::-1])
    operands = [matrix, draw.view(dtype, beside)] if first else [draw.view(dtype, beside), matrix]
    if by_keyword:
        size = 1 if len(beside) == 1 else N
        sizes = (outer, size, inner) if first else (size, outer, inner)
        operands += [f"global_{'a' if first else 'b'}_layout={by_keyword}", f"gemm_shape={sizes}"]
    if draw.chance(0.4):
        own = () if len(beside) == 1 else (N,)
        operands.append(f"out={draw.view(dtype, (*beside[:-2], *((outer, *own) if first else (*own, outer))), True)}")
    return Case(f"{kind} beside {len(beside)} dimensions", call("gk.matmul", operands))


def _name(dtype: str) -> str:
    return "'bfloat16'" if dtype == "bf2" else repr(dtype)


def vectors(draw: Drawing) -> Case:
    M, N, K = draw.sizes()
    a, b = draw.dtypes()
    one, other, shape = draw.one((((K,), (K, N), (N,)), ((M, K), (K,), (M,)), ((K,), (K,), ()), ((3, M, K), (K,), (3, M)),
                                  ((K,), (2, K, N), (2, N))))
    given = [draw.view(a, one), draw.view(b, other)]
    result = result_of(a, b)
    if draw.chance(0.3) and shape:
        given.append(draw.view(result, shape))
    if draw.chance(0.5):
        given.append(f"out={draw.view(wider(draw, result), shape, True)}")
    return Case("vector", call(draw.one(("gk.matmul", "gk.plan")), given))


def gemm(draw: Drawing) -> Case:
    M, N, K = draw.sizes()
    a = draw.one((*FLOATS, *FLOATS, "c8", "c16", "i4"))
    letters = draw.one("NTC"), draw.one("NTCntc")
    one = (M, K) if letters[0] == "N" else (K, M)
    other = (K, N) if letters[1] in "Nn" else (N, K)
    stack = (3,) if draw.chance(0.2) else ()
    alpha, beta = ("2", "1") if a == "i4" else (draw.one(("1.0", "0.0", "0.5")), draw.one(("0.0", "1.0", "0.25")))
    return Case("gemmEx", f"blas.gemmEx({letters[0]!r}, {letters[1]!r}, {alpha}, {draw.view(a, (*stack, *one))}, "
                f"{draw.view(a, other)}, {beta}, {draw.view(wider(draw, a), (*stack, M, N), True)})")


def contraction(draw: Drawing) -> Case:
    spec = draw.one(("ij,jk->ik", "ij,kj->ki", "bij,bjk->bik", "ijk,kl->ijl", "ij,j->i", "i,i->", "i,j->ij", "aib,bja->ij", "ij->i", "ij->j",
                     "abc,bd->dac", "ij,jk,kl->il", "bhid,bhjd->bhij", "iij,jk->ik"))
    terms, _, result = spec.partition("->")
    sizes = {label: min(int(draw.size(0.7)), 600) for label in spec if label.isalpha()}
    a = draw.one((*FLOATS, "c8", "i4"))
    shapes = [tuple(sizes[label] for label in term) for term in (*terms.split(","), result)]
    if max(map(math.prod, shapes)) > LARGEST:
        return contraction(draw)
    given = [repr(spec), *(draw.view(a, shape) for shape in shapes[:-1])]
    if draw.chance(0.3):
        given.append(f"out={draw.view(a, shapes[-1], True)}")
    if draw.chance(0.2) and len(shapes) == 3 and a in FLOATS:
        given.append("epilogue=epilogues.ReLU()")
    return Case("einsum", call("gk.einsum", given))


def groups(draw: Drawing) -> Case:
    """Lists of one order each (row- or column-major), as `gk.grouped` asks for."""
    a = draw.one(("f2", "f2", "bf2", "f4"))
    shapes: list[tuple[int, ...]] = []
    while len(shapes) < 4 and (not shapes or draw.chance(0.8)):
        M, N, K = draw.sizes()
        shapes.append((max(2, M), max(2, N), max(2, K)))

    def listed(pick: Any) -> str:
        order = draw.one(((0, 1), (1, 0)))
        views = [f"view({a!r}, {', '.join(map(str, pick(*shape)))}, order={order}, pad={draw.one((0, 0, 1, 4))}, "
                 f"offset={draw.one((0, 0, 1, 8))})" for shape in shapes]
        return f"[{', '.join(views)}]"

    given = [listed(lambda M, N, K: (M, K)), listed(lambda M, N, K: (K, N))]
    if draw.chance(0.4):
        given.append(f"out={listed(lambda M, N, K: (M, N))}")
    return Case("grouped", call("gk.grouped", given))


KINDS = ((product, 0.34), (with_components, 0.16), (stacked, 0.12), (structured, 0.12), (vectors, 0.06), (with_operator, 0.06),
         (gemm, 0.07), (contraction, 0.05), (groups, 0.02))


# -- kernels of their own: attention, MLPs, functions of rows, programs -----------------------------------------------------

MASKS = ("gk.masks.Causal()", "gk.masks.Window(100)", "gk.masks.Causal() & gk.masks.Window(64)")
SCORES = ("gk.masks.ALiBi(view('f4', {heads}))", "gk.masks.SoftCap(30.0)", "lambda s, m, n: s + 0.1 * (m - n)", "lambda s, m, n: gk.epilogues.fast.tanh(s)")


def attention(draw: Drawing) -> Case:
    head, dtype, dense = draw.one((32, 64, 64, 96, 128, 128, 192, 256)), draw.one(("f2", "bf2")), draw.chance(0.85)
    batch, shared, times = draw.one((1, 1, 2, 5)), draw.one((1, 2, 3)), draw.one((1, 1, 4))
    queries, keys = (max(1, min(draw.size(0.4), 4104)) for _ in "qk")
    heads, count = shared * times, 1 if not dense else batch
    start = (count,) if dense else ()
    given = [draw_rows(draw, dtype, (*start, n, rows, head)) for n, rows in ((heads, queries), (shared, keys), (shared, keys))]
    if not dense:
        given.append(f"lengths=([0, {queries // 3}, {queries}], [0, {keys // 2}, {keys}])")
    if draw.chance(0.4):
        given.append(f"mask={draw.one(MASKS)}")
    if draw.chance(0.4):
        given.append(f"score={draw.one(SCORES).format(heads=heads)}")
    given += draw.one(((), (), ("scale=-0.5",), ("return_lse=True",)))
    if draw.chance(0.3):
        given.append(f"out={draw.view(dtype, (*start, heads, queries, head), True)}")
    return Case("attention", call("gk.attention", given))


def draw_rows(draw: Drawing, dtype: str, shape: tuple[int, ...]) -> str:
    """An array whose rows begin at multiples of 16 bytes."""
    return f"view({dtype!r}, {', '.join(map(str, shape))}{draw.one(('', '', ', pad=8'))})"


def mlp(draw: Drawing) -> Case:
    dtype, depth = draw.one(("f2", "bf2")), draw.one((1, 2, 3, 4, 8, 20))
    even = draw.chance(0.3)
    widths = [draw.one((16, 32, 64, 64, 128, 128, 160, 256) if not even else (2, 10, 34, 62, 100, 130, 254)) for _ in range(depth + 1)]
    if draw.chance(0.5):
        widths[1:-1] = [draw.one((32, 64, 128, 224))] * (depth - 1)
    order = draw.one(((0, 1), (1, 0)))
    rows = max(1, draw.size(0.3))
    given = [f"view({dtype!r}, {rows}, {widths[0]})",
             f"[{', '.join(f'view({dtype!r}, {k}, {n}, order={order})' for k, n in pairwise(widths))}]"]
    if draw.chance(0.5):
        kind = draw.one((dtype, "f4"))
        given.append(f"[{', '.join(f'view({kind!r}, {n})' for n in widths[1:])}]")
    if draw.chance(0.3):
        given.append("activation=lambda x: gk.epilogues.fast.tanh(x)")
    if draw.chance(0.2):
        given.append("last=lambda x: max(x, 0)")
    if draw.chance(0.3):
        given.append(f"out=view({dtype!r}, {rows}, {widths[-1]}, pad={draw.one((0, 1, 2, 8))})")
    return Case("mlp", call("gk.mlp", given))


def rows(draw: Drawing) -> Case:
    dtype, count, columns = draw.one(FLOATS), draw.size(0.4), draw.size(0.3)
    x = f"view({dtype!r}, {count}, {columns}, pad={draw.one((0, 0, 0, 1, 2, 8))}, offset={draw.one((0, 0, 0, 1, 4))})"
    if draw.chance(0.1):
        x = f"view({dtype!r}, {count}, {columns}, order=(1, 0))"
    name = draw.one(("gk.softmax", "gk.log_softmax", "gk.layernorm", "gk.rmsnorm"))
    given = [x, *[f"view('f4', {columns})"] * draw.one({"gk.layernorm": (0, 2), "gk.rmsnorm": (0, 1)}.get(name, (0,)))]
    if draw.chance(0.4):
        given.append(f"out=view({draw.one((dtype, 'f4', 'f2'))!r}, {count}, {columns})")
    return Case("rows", call(name, given))


def programmed(draw: Drawing) -> Case:
    """What `tests.drawn_programs` draws, without slips; half of those with a mapping without it."""
    while True:
        case = programs.drawn(int(draw.rng.integers(2**31)), 0, large=draw.chance(0.7))
        if not case.slip:
            break
    given = [repr(printed(case.source))]
    for x in case.source.arrays:
        shape = [case.sizes[dim] for dim in x.dims]
        name = np.dtype(getattr(ml_dtypes, str(x.dtype), x.dtype)).name
        dtype = {"float16": "f2", "bfloat16": "bf2", "float32": "f4"}.get(name, name)
        lies = ""
        if x.pitch == 0 and len(shape) > 1:
            lies = f", order={(*range(len(shape) - 2), len(shape) - 1, len(shape) - 2)}"
        elif x.pitch == -2:
            lies = f", steps={(*[1] * (len(shape) - 1), 2)}"
        elif x.pitch > 1:
            lies = f", pad={-shape[-1] % x.pitch}"
        given.append(f"{x.name}=view({dtype!r}, {', '.join(map(str, shape))}{lies})")
    given += [f"{name}={value!r}" for name, value in case.source.numbers.items()]
    if case.mapping is not None and draw.chance(0.5):
        given.append(f"mapping=gk.{case.mapping!r}")
    return Case("program", call("program", given))


def program(text: str, **given: Any) -> None:
    """Run the program of a source."""
    name = f"<drawn {zlib.crc32(text.encode())}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    held: dict[str, Any] = {"__name__": "drawn"}
    exec(compile(text, name, "exec"), held)
    held["drawn"](**given)


FUSED = ((attention, 0.25), (mlp, 0.2), (rows, 0.15), (programmed, 0.4))


def draw(seed: int, number: int, kinds: Sequence[tuple[Callable[[Drawing], Case], float]] = KINDS) -> Case:
    """The case of a number: the same for the same seed. ``kinds``: what is drawn, and how often."""
    drawing = Drawing(seed, number)
    weights = np.array([weight for _, weight in kinds])
    return kinds[int(drawing.rng.choice(len(kinds), p=weights / weights.sum()))][0](drawing)
