"""Valid calls of the public surface: what is broken, and what NumPy says of the result."""

from __future__ import annotations

from typing import NamedTuple


class Argument(NamedTuple):
    """``also``: other words by which a message may name it."""

    name: str
    kind: str
    good: str
    by_keyword: bool = False
    also: tuple[str, ...] = ()


class Call(NamedTuple):
    """``function(arguments)``, then ``after`` of its ``result``. ``expected`` is NumPy's result, of the arguments' names."""

    function: str
    arguments: tuple[Argument, ...]
    after: str = "result"
    expected: str | None = None
    prepare: str = ""
    weight: int = 1


def call(function: str, *arguments: str, after: str = "result", expected: str | None = None, prepare: str = "",
         weight: int = 1) -> Call:
    """Arguments as ``name kind good`` (positional) or ``name= kind good``; ``name|other`` may be named either way."""
    made = []
    for text in arguments:
        name, kind, good = text.split(" ", 2)
        by_keyword = name.endswith("=")
        name, *also = name.rstrip("=").split("|")
        made.append(Argument(name, kind, good, by_keyword, tuple(also)))
    return Call(function, tuple(made), after, expected, prepare, weight)


A, B, C, OUT = "a array of(1, 5, 7)", "b array of(2, 7, 3)", "c array of(3, 5, 3)", "out= array np.full((5, 3), np.nan, 'f4')"
FPU = "operators.FPUOp(M=16, N=16)"
CONF = f"gk.get_config(operator={FPU}, global_a_layout=layouts.RowMajor('float32'))"
WITH_C = f"gk.get_config(operator={FPU}, global_a_layout=layouts.RowMajor('float32'), global_c_layout=layouts.RowMajor('float32'))"
TRANSFORMS = ("transform_global_to_shared_a", "transform_shared_to_regs_b", "transform_regs_to_shared_d",
              "transform_shared_to_global_d")
EPILOGUE = "epilogue= component epilogues.Bias(np.ones(3, 'f4'))"
MULTIPLY = "with_product(result)"


def products() -> list[Call]:
    return [
        call("gk.matmul", A, B, expected="a @ b", weight=6),
        call("gk.matmul", A, B, C, "conf any None", OUT, "stream= any None", expected="a @ b + c", weight=6),
        call("gk.matmul", A, B, "c array None", f"conf component {CONF}", OUT, expected="a @ b", weight=3),
        call("gk.matmul", A, B, f"operator= component {FPU}", EPILOGUE, "condition= component Condition()",
             "gemm_shape= shape dict(M=5, N=3, K=7)", expected="a @ b + np.float32(1)", weight=4),
        *(call("gk.matmul", A, B, f"{name}= component transforms.Map(lambda x: x)", expected="a @ b")
          for name in TRANSFORMS),
        call("gk.matmul", A, B, OUT, *(f"global_{x}_layout= component layouts.RowMajor('float32')" for x in "abd"), weight=2),
        call("gk.matmul", "a array of(1, 2, 5, 7)", "b array of(2, 7, 3)", "out= array np.zeros((2, 5, 3), 'f4')", expected="a @ b"),
        call("gk.matmul", "a array of(1, 5, 7, dtype='c8')", "b array of(2, 7, 3, dtype='c8')", expected="a @ b"),
        call("gk.matmul", "a array of(1, 5, 7, dtype='f2')", "b array of(2, 7, 3, dtype='f2')", expected="a @ b"),
        call("gk.matmul", "a any gk.layouts.DiagonalMatrix(of(1, 7))", B, "c array of(3, 7, 3)", weight=2),
        call("gk.matmul", "a any gk.layouts.GeneratedMatrix(lambda i, j: i - j, (5, 7), 'float32')", B, "gemm_shape= shape None"),
        call("gk.plan", A, B, C, "conf any None", OUT, f"operator= component {FPU}", EPILOGUE, weight=3),
        call("gk.plan(of(1, 5, 7), of(2, 7, 3))", A, B, "c any None", OUT, "stream= any None", expected="a @ b", weight=4),
        call("gk.plan(of(1, 5, 7), of(2, 7, 3), of(3, 5, 3))", A, B, C, OUT, expected="a @ b + c", weight=3),
        call("blas.gemmEx", "transa word 'N'", "transb word 'N'", "alpha count 1.0", A, B, "beta count 0.5", C,
             f"operator= component {FPU}", "conf= any None", "stream= any None", weight=6),
        call("blas.gemmEx", "transa word 'T'", "transb word 'C'", "alpha count 1.0", "a array of(1, 7, 5, dtype='c8')",
             "b array of(2, 3, 7, dtype='c8')", "beta count 1j", "c array of(3, 5, 3, dtype='c8')"),
        call("blas.gemmEx", "transa word 'N'", "transb word 'T'", "alpha count 2.0", "a array of(1, 2, 5, 7)", "b array of(2, 3, 7)",
             "beta count 0.0", "c array of(3, 2, 5, 3)", f"operator= component {FPU}", weight=3),
        call("blas.syrk", "uplo word 'L'", "trans word 'T'", "alpha count 1.0", "a array of(1, 7, 5)", "beta count 0.5",
             "c array of(3, 5, 5)", f"operator= component {FPU}", "conf= any None", "stream= any None", weight=3),
        call("blas.herk", "uplo word 'U'", "trans word 'N'", "alpha count 1.0", "a array of(1, 5, 7, dtype='c8')", "beta count 0.0",
             "c array of(3, 5, 5, dtype='c8')", weight=2),
        call("blas.symm", "side word 'R'", "uplo word 'L'", "alpha count 1.0", "a array of(1, 3, 3)", "b array of(2, 5, 3)",
             "beta count 0.0", C, "hermitian= any False", weight=2),
        call("blas.trmm", "side word 'L'", "uplo word 'U'", "transa word 'T'", "diag word 'U'", "alpha count 1.0", "a array of(1, 5, 5)",
             "b array of(2, 5, 3)", C, weight=2),
        call("gk.matmul", A, B, "out= any gk.layouts.Discard()", "epilogue= component epilogues.RowReduce(np.zeros(5, 'f4'), 'sum')", weight=2),
        call("gk.matmul", A, "b array of(1, 5, 7).T", "out= any gk.layouts.SymmetricMatrix(np.zeros((5, 5), 'f4'), 'both')", EPILOGUE, weight=2),
        call("blas.gemm", "transa word 'N'", "transb word 'T'", A, "b array of(2, 3, 7)", "out|c array None", "alpha count 1.0",
             "beta count 0.0", weight=3),
        call("gk.einsum", "spec|einsum word 'ij,jk->ik'", "operand|operands array of(1, 5, 7)", "operand|operands array of(2, 7, 3)", OUT,
             f"operator= component {FPU}", "epilogue= component epilogues.ReLU()", "stream= any None", weight=4),
        call("gk.einsum", "spec|einsum word 'ij,jk,kl->il'", "operand|operands array of(1, 5, 4)", "operand|operands array of(2, 4, 3)",
             "operand|operands array of(2, 3, 2)", "optimize= word 'auto'", weight=2),
        call("gk.functions.select", A, B, "operator= component operators.MIN_PLUS", "out= array np.zeros((5, 3), 'f4')",
             "index= array np.zeros((5, 3), 'i4')", "stream= any None", weight=2),
    ]


def configurations() -> list[Call]:
    fields = ("global_b_layout= component layouts.RowMajor('float32')", "global_c_layout= component layouts.Zero('float32')",
              "global_d_layout= component layouts.RowMajor('float32')", "block_shape= tile gk.Tile(M=32, N=32, K=16)",
              "compute_warp= tile gk.Tile(M=16, N=16, K=16)", "warps_per_block= count 4", "splits= count 1",
              "mem_a_warp= tile gk.Tile(M=8, K=16)", "mem_a_thread= tile gk.Tile(M=1, K=4)", "mem_b_thread= tile gk.Tile(K=1, N=4)",
              "mem_cd_thread= tile gk.Tile(M=1, N=4)", "shared_a_layout= component layouts.RowMajor('float32')",
              "shared_d_layout= component layouts.RowMajor('float32')", "order= component Grouped(8)", "kernel= word 'singlestage'",
              "blocks_per_sm= count 1", "stages= count 1", "schedule= word 'cooperative'", "cluster= tile gk.Tile(M=1, N=1)",
              "producer_warps= count 0", "epilogue= component epilogues.ReLU()", "condition= component Condition()",
              "gemm_shape= shape dict(M=512, N=512, K=64)", "device= word None",
              "transform_shared_to_regs_a= component transforms.Identity()")
    base = (f"operator= component {FPU}", "global_a_layout= component layouts.RowMajor('float32')")
    hopper = ("operator= component operators.WGMMAOp(64)", "global_a_layout= component layouts.RowMajor('float16')",
              "kernel= word 'warp_specialised'", "stages= count 3", "schedule= word 'cooperative'",
              "block_shape= tile gk.Tile(M=128, N=64, K=64)", "cluster= tile gk.Tile(M=1, N=1)", "splits= count 1",
              "producer_warps= count 4", "warps_per_block= count 8", "epilogue= component epilogues.ReLU()", "device= any H100")
    pieces = [fields[n:n + 5] for n in range(0, len(fields), 5)]
    return [*(call("gk.get_config", *base, *piece, weight=3) for piece in pieces), call("gk.get_config", *hopper, weight=3),
            call("ahead.compile_config", f"conf any {CONF}", "device= any H100", "gemm_shape= shape dict(M=1, N=2)",
                 "operands= any {'x': 1}", weight=2),
            call("ahead.occupancy", "registers count 64", "threads count 128", "shared_bytes count 1000", "device any H100")]


def components() -> list[Call]:
    apply = "gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, {}=result)"
    as_layout = apply.format("global_a_layout")
    as_transform, as_epilogue = apply.format("transform_regs_to_shared_d"), apply.format("epilogue")
    as_operator = "gk.matmul(of(1, 5, 7), of(2, 7, 3), operator=result)"
    sizes = ("M= count 16", "N= count 16", "K= count 1", "MB= count 4", "NB= count 8")
    return [
        call("layouts.RowMajor", "dtype dtype 'float32'", after=as_layout, weight=2),
        call("layouts.ColMajor", "dtype dtype 'float32'", after=as_layout),
        call("layouts.Zero", "dtype dtype 'float32'"),
        call("layouts.Padded", "layout component layouts.RowMajor('float32')", "padding count 4"),
        call("layouts.Swizzled", "layout component layouts.RowMajor('float16')", "width count 128"),
        call("layouts.Sliding", "layout component layouts.RowMajor('float16')", "width count 64", "panels= count 3", "step= count 1"),
        call("layouts.Interleaved", "dtype dtype 'complex64'", "order word 'row'"),
        call("layouts.Planar", "dtype dtype 'complex64'", "order word 'row'"),
        call("layouts.Planes", "plane component layouts.RowMajor('float32')", "dtype dtype 'complex64'"),
        call("layouts.Diagonal", "dtype dtype 'float32'", "nothing count 0", "operand word 'a'", "skips any True"),
        call("layouts.Triangular", "layout component layouts.RowMajor('float32')", "half word 'lower'", "unit any False"),
        call("layouts.Symmetric", "layout component layouts.RowMajor('float32')", "half word 'lower'", "hermitian any False"),
        call("layouts.Generated", "dtype dtype 'float32'", "f|lambda function:3 lambda i, j, s: s * (i - j)", "first|f|lambda count 0.5",
             after="gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, global_a_layout=result, gemm_shape=dict(M=5, N=3, K=7))", weight=2),
        call("layouts.Matricised", "dtype dtype 'float32'", "rows any (5,)", "columns any (7,)"),
        call("transforms.Map", "f|lambda function:1 lambda x: x + 1", after=as_transform, weight=6),
        call("transforms.Map", "f|lambda function:3 lambda x, i, j: x + i", after=apply.format("transform_global_to_shared_a"), weight=2),
        call("transforms.ComposedTransform", "first component transforms.Identity()", "second component transforms.Map(lambda x: x)",
             after=as_transform),
        call("transforms.Staged", "first component transforms.Identity()", "second component transforms.Identity()", "dtype dtype 'float16'",
             after=as_transform),
        call("epilogues.Elementwise", "f|lambda function:1 lambda x: x + 1", after=as_epilogue, weight=4),
        call("epilogues.Bias", "bias array np.ones(3, 'f4')", "along word 'N'", after=as_epilogue, weight=3),
        call("epilogues.Scale", "by any 2.0", "along word 'N'", after=as_epilogue),
        call("epilogues.Clamp", "low count 0.0", "high count 1.0", after=as_epilogue),
        call("epilogues.GELU", "form word 'erf'", after=as_epilogue),
        call("epilogues.Residual", "array array of(3, 5, 3)", "layout any None", after=as_epilogue, weight=2),
        call("epilogues.Store", "array array of(3, 5, 3)", "layout any None", after=as_epilogue, weight=2),
        call("epilogues.Where", "mask|lambda function:2 lambda m, n: m > n", "value count 0.0", after=as_epilogue, weight=2),
        call("epilogues.CausalMask", "value count 0.0", "offset count 0", after=as_epilogue),
        call("epilogues.LinearCombination", "alpha count 1.0", "beta count 1.0", "c array of(3, 5, 3)",
             "layout component layouts.RowMajor('float32')", after=as_epilogue, weight=2),
        call("epilogues.ComposedEpilogue", "first component epilogues.ReLU()", "second component epilogues.Clamp(0.0, 1.0)", after=as_epilogue),
        call("operators.FPUOp", *sizes, "dtype= dtype 'float32'", "accumulator= dtype 'float32'", "b_dtype= dtype 'float32'",
             after=as_operator, weight=3),
        call("operators.MMAOp", "M= count 16", "N= count 8", "K= count 16", "dtype= dtype 'float16'", "accumulator= dtype 'float32'", weight=2),
        call("operators.WMMAOp", "M= count 16", "dtype= dtype 'float16'", "accumulator= dtype 'float32'", "a_order= word 'col'"),
        call("operators.WGMMAOp", "N= count 256", "dtype= dtype 'float16'", "accumulator= dtype 'float32'", "promote= count 0",
             "a_major= word 'K'"),
        call("operators.Semiring", "add function:2 min", "mul function:2 lambda x, y: x + y", "zero count float('inf')", *sizes, weight=2),
        call("operators.Algebra", f"base component {FPU}", "table any (((1, 0), (0, 1)), ((0, 1), (-1, 0)))", "names any ('real', 'imag')",
             "conjugate any (1, -1)", weight=2),
        call("operators.dual", "p|tangents count 2"),
        call("Grouped", "group count 8"),
    ]


def objects() -> list[Call]:
    product = "gk.matmul(result, of(1, 7, 2), conf=SMALL)"
    return [
        call("gk.layouts.Matrix", "array array of(1, 7, 7)", "layout component layouts.RowMajor('float32')", "shape any (7, 7)", after=product, weight=2),
        call("gk.layouts.DiagonalMatrix", "diagonal array of(1, 7)", after=product, weight=2),
        call("gk.layouts.TriangularMatrix", "array array of(1, 7, 7)", "half word 'lower'", "unit any False", after=product, weight=2),
        call("gk.layouts.SymmetricMatrix", "array array of(1, 7, 7)", "half word 'lower'", after=product),
        call("gk.layouts.GeneratedMatrix", "f|lambda function:3 lambda i, j, s: s * i", "shape any (5, 7)", "dtype dtype 'float32'", "argument|first count 0.5",
             after=product, weight=3),
        call("gk.functions.Dual", "parts array of(1, 5, 7, 2)", weight=2),
        call("gk.functions.Dual.of", "value array of(1, 5)", "tangents array of(2, 5, 2)", weight=2),
        call("gk.functions.Dual.constant", "value array of(1, 5)", "count count 1"),
        call("gk.functions.Dual.seed", "value array of(1, 3)"),
        call("gk.functions.Dual(of(1, 5, 2)).map", "f function:1 np.exp", "derivative function:2 lambda x, y: y"),
        call("gk.functions.Dual.product", "a any gk.functions.Dual(of(1, 3, 4, 2))", "b any gk.functions.Dual(of(2, 4, 2, 2))", "c any None", weight=2),
        call("operator.add", "a|dual any gk.functions.Dual(of(1, 5, 2))", "b|dual any gk.functions.Dual(of(1, 5, 2))"),
        call("gk.Tile", "M= count 16", "N= count 8", weight=2),
        call("gk.tiling.parallelise", "tile tile gk.Tile(M=8, N=4)", "tiling tile gk.Tile(M=4, N=1)", "index count 3", "count count 4", "order word 'row'",
             weight=2),
        call("gk.tiling.subdivide", "tile tile gk.Tile(M=8, N=4)", "tiling tile gk.Tile(M=4, N=1)", "index count 3", "count count 4"),
        call("gk.tiling.translate", "tile tile gk.Tile(M=8, N=4)", "M= count 3", "N= count 4"),
        call("gk.tiling.translate_offset", "tile tile gk.Tile(M=8, N=4)", "distance|translate count 3", "distance|translate count 4"),
        call("gk.tiling.linearise", "coord|coordinates any (1, 2)", "shape any (4, 5)", "order word 'row'"),
        call("emulated", "seed count 1", after="result"),
    ]


def commands() -> list[tuple[str, ...]]:
    """Arguments of ``python -m gemmkit`` that are refused before anything is compiled."""
    return [("explain", option, value) for option in ("--m", "--k", "--a-dtype", "--b-dtype", "--d-dtype", "--accumulator", "--layout",
                                                       "--operator", "--block", "--warp", "--blocks-per-sm", "--nope")
            for value in ("-1", "x", "0", "1e9", "3x3x3", "float9", "99999999999999999999x1x1", "O", "M8[s]")
            ] + [("cache", "lose"), ("info", "x"), ("nope",), (), ("cache", "info", "more"), ("demo", "nope")]


def methods() -> list[tuple[str, str, str, str, str]]:
    """Contracts of user's components: base, method, arguments, how one is made, how it is used."""
    use = "gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, {}=result)"
    multiply = "gk.matmul(of(1, 5, 7), of(2, 7, 3), operator=result)"
    layout = "gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=SMALL, {}=result, gemm_shape=dict(M=5, N=3, K=7), out=np.zeros((5, 3), 'f4'))"
    return [
        ("layouts.Layout", "element", "data, i, j, shape", "('float32')", layout.format("global_a_layout")),
        ("layouts.Layout", "store_element", "data, i, j, value, shape", "('float32')", layout.format("global_d_layout")),
        ("layouts.RowMajor", "k_range", "begin, end, shape", "('float32')", use.format("global_a_layout")),
        ("layouts.RowMajor", "load", "data, tile, shape", "('float32')", use.format("global_a_layout")),
        ("layouts.RowMajor", "extents", "array", "('float32')", use.format("global_a_layout")),
        ("layouts.RowMajor", "as_operand", "name, transformed", "('float32')", use.format("global_a_layout")),
        ("transforms.Transform", "__call__", "x", "()", use.format("transform_regs_to_shared_d")),
        ("transforms.Transform", "__call__", "x, i, j", "()", use.format("transform_global_to_shared_b")),
        ("epilogues.Epilogue", "__call__", "x, m, n", "()", use.format("epilogue")),
        ("epilogues.Epilogue", "finish", "values, tile, shape", "()", use.format("epilogue")),
        ("operators.FPUOp", "multiply", "a, b", "(M=16, N=16)", multiply),
        ("operators.FPUOp", "combine", "c, product", "(M=16, N=16)", multiply),
        ("Condition", "__call__", "m, n, k", "()", use.format("condition")),
        ("Order", "block", "linear, rows, columns", "()", "gk.matmul(of(1, 5, 7), of(2, 7, 3), conf=gk.get_config(order=result, operator="
         "SMALL.operator, global_a_layout=SMALL.global_a_layout, block_shape=SMALL.block_shape, compute_warp=SMALL.compute_warp))"),
    ]


CALLS = [*products(), *configurations(), *components(), *objects()]
