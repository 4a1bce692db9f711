"""Bad values for arguments of every kind. A value is code as text, so that each case can be pasted."""

from __future__ import annotations

import numpy as np

# What no argument of any kind should be, or should be only by accident.
ANYTHING = (
    "None", "'text'", "''", "[]", "[1, 2]", "()", "(1, 2, 3)", "set()", "{}", "{'M': 1}", "object()", "int", "object", "True",
    "False", "float('nan')", "float('inf')", "10**30", "-1", "0", "-(2**63)", "1.5", "1j", "b'bytes'", "Ellipsis", "range(3)",
    "np.float32(2)", "np.int64(-3)", "np.float16('nan')", "np.bool_(True)", "np.str_('x')", "np.dtype('f4')", "np", "gk",
    "np.zeros(3)", "np.zeros(())", "np.array(['a'])", "lambda: 0", "lambda x: x", "np.exp", "NotImplemented", "slice(1)",
    "gk.Tile(M=1)", "layouts.RowMajor", "layouts.RowMajor('float32')", "epilogues.ReLU()", "operators.FPUOp", "Raising()",
    "type('A', (), {})()", "iter([1])", "ValueError('x')", "memoryview(b'abcd')", "2**31", "2**63", "np.uint8(200)")

ARRAYS = (                                                    # {x} is the array as it was
    "{x}.tolist()", "{x}[0]", "{x}[None]", "{x}[None, None]", "{x}[0, 0]", "np.asarray({x}[0, 0])", "{x}[:0]", "{x}[:, :0]",
    "{x}[1:]", "{x}[:, 1:]", "{x}.T", "{x}.ravel()", "{x}.astype(object)", "{x}.astype(str)", "{x}.astype('M8[s]')",
    "{x}.astype('m8[s]')", "{x}.astype(bool)", "{x}.astype('>f4')", "{x}.astype(np.longdouble)", "{x}.astype(np.clongdouble)",
    "{x}.astype('c8')", "{x}.astype('i1')", "abs({x}).astype('u8')", "{x}.astype('f2')", "{x}.astype('f8')",
    "np.zeros({x}.shape, [('p', 'f4'), ('q', 'i8')])", "np.zeros({x}.shape, 'V4')", "np.zeros({x}.shape, 'S4')",
    "np.zeros({x}.shape, ml_dtypes.float8_e4m3)", "np.zeros({x}.shape, ml_dtypes.int4)", "np.ma.masked_array({x}, {x} > 0)",
    "np.matrix({x})", "readonly({x})", "np.broadcast_to({x}[:1], {x}.shape)", "{x}[::-1]", "{x}[:, ::-1]", "misaligned({x})",
    "apart({x})", "Interface({x}, shape=5)", "Interface({x}, version='3')", "Interface({x}, version=1)", "Interface({x}, typestr='foo')",
    "Interface({x}, typestr=5)", "Interface({x}, data=None)", "Interface({x}, data=(0,))", "Interface({x}, data=('a', False))",
    "Interface({x}, strides=5)", "Interface({x}, strides=('a', 'b'))", "Interface({x}, strides=(1,))", "Interface({x}, strides=(3, 1))",
    "Interface({x}, shape=(-1, 3))", "Interface({x}, shape=(5.5, 7))", "Interface({x}, shape='ab')", "Interface({x}, mask=1)",
    "Interface({x}, stream='x')", "Interface({x}, stream=0)", "Interface({x}, typestr='|V2')", "Interface({x}, typestr='>f4')",
    "Interface({x}, shape=DROP)", "Interface({x}, typestr=DROP)", "Interface({x}, data=DROP)", "Interface({x}, version=DROP)",
    "Interface({x})", "Interface(None)", "Interface(5)", "Interface(KeyError('x'))", "DLPack(KeyError('x'), (2, 0))",
    "DLPack(AttributeError('x'), (2, 0))", "DLPack(5, (2, 0))", "DLPack(5, (1, 0))", "DLPack(5, 'x')", "DLPack(5, (99, 0))",
    "DLPack(BufferError('x'), (2, 0))", "type({x})", "memoryview({x})")

FUNCTIONS = (                                                 # {n}: how many arguments it should take
    "lambda: 0", "lambda *x: x[0]", "lambda **x: 0", "lambda x, *, y: x", "lambda a, b, c, d, e, f, g: a", "np.exp", "np.add",
    "np.linalg.norm", "max", "print", "math.hypot", "functools.partial(max, 0)", "operator.neg", "str", "float", "math.exp", "abs",
    "Raising()", "Callable()", "Callable().method", "type('A', (), {})", "layouts.RowMajor", "np.vectorize(abs)", "functools.lru_cache(abs)",
    "len", "iter", "lambda {args}: None", "lambda {args}: 'text'", "lambda {args}: (1, 2, 3)", "lambda {args}: []", "lambda {args}: {{}}",
    "lambda {args}: object()", "lambda {args}: np.zeros(3)", "lambda {args}: np.zeros(())", "lambda {args}: float", "lambda {args}: b'x'",
    "lambda {args}: 1j", "lambda {args}: Ellipsis", "lambda {args}: (1, 'x')", "lambda {args}: ((1, 2), 3)", "lambda {args}: ()",
    "lambda {args}: print", "lambda {args}: np.str_('x')", "lambda {args}: np.datetime64('2020')", "lambda {args}: range(2)")

DTYPES = ("'float9'", "'U3'", "object", "'O'", "'M8[s]'", "'V4'", "np.longdouble", "np.clongdouble", "'S1'", "5", "None", "'>f4'",
          "[('p', 'f4'), ('q', 'i8')]", "[('p', 'O')]", "float", "np.ndarray", "lambda: 0", "[]", "{}", "''", "'f4,f4'", "bool",
          "ml_dtypes.int4", "ml_dtypes.float8_e3m4", "np.zeros(2)", "type", "dict", "'(2,3)f4'")
COUNTS = ("0", "-1", "2.0", "'3'", "None", "True", "10**30", "float('nan')", "float('inf')", "np.float64(2)", "7", "1", "2**31", "3", "[]",
          "(1,)", "1j", "np.int64(0)", "1000000")
WORDS = ("'nope'", "''", "None", "0", "b'N'", "['N']", "'n'", "'NN'", "True", "object()", "('N',)", "{'N'}", "np.str_('zz')")
TILES = ("gk.Tile(M=3)", "gk.Tile(M=3, N=5)", "gk.Tile(M=3, N=5, K=7)", "gk.Tile(M=1, N=1, K=1)", "gk.Tile(K=4, M=4, N=4)",
         "gk.Tile(M=2**20, N=64, K=32)", "gk.Tile(a=2)", "dict(M=16, N=16, K=16)", "(16, 16, 16)", "gk.Tile", "16",
         "gk.Tile(M=4096, N=4096, K=4096)", "gk.tiling.translate(gk.Tile(M=16, N=16, K=16), M=3)", "None", "'16x16x16'")
SHAPES = ("dict(M=1)", "dict(M=5, N=3)", "dict(M=5, N=3, K=7, L=1)", "dict(M=-5, N=3, K=7)", "dict(M=5.0, N=3, K=7)", "(5, 3, 7)",
          "dict(M='5', N=3, K=7)", "dict(m=5, n=3, k=7)", "gk.Tile(M=5, N=3)", "[5, 3, 7]", "5", "'MNK'", "{1: 2}", "dict(M=None, N=3, K=7)",
          "dict(M=6, N=3, K=7)", "dict(M=5, N=3, K=2**40)", "dict(M=True, N=3, K=7)", "dict(M=float('nan'), N=3, K=7)", "{}", "set('MNK')")
COMPONENTS = ("layouts.RowMajor", "layouts.RowMajor('float16')", "layouts.ColMajor('float32')", "layouts.Diagonal('float32')",
              "layouts.Zero('float32')", "layouts.Layout('float32')", "layouts.Planar('complex64')", "epilogues.ReLU", "epilogues.ReLU()",
              "epilogues.Bias(np.ones(9, np.float32))", "epilogues.Bias(np.ones((3, 1), np.float32))", "epilogues.Epilogue()",
              "transforms.Identity", "transforms.Transform()", "transforms.Map(lambda x: x)", "operators.FPUOp", "operators.MMAOp()",
              "operators.FPUOp(dtype='float64')", "operators.Operator()", "operators.COMPLEX", "operators.MIN_PLUS", "operators.WGMMAOp()",
              "lambda x: x", "Grouped", "Grouped(4)", "Condition()", "Condition", "gk.Component()", "Thawed()", "NoCall()", "Stateful()",
              "layouts.Padded(layouts.RowMajor('float32'), 4)", "layouts.Matricised('float32', (2,), (3,))")

# Methods of user's components that do not do what their contract says; {name}(self, {args}).
METHODS = ("return None", "return 'text'", "return (1, 2, 3)", "return []", "return np.zeros(3)", "return object()", "return 1j",
           "return 1.5", "return {{}}", "return self", "return ((1, 2), (3, 4))", "return (1.5, 2.5)", "return ('a', 'b')", "return print",
           "return (None, 0)", "raise KeyError('mine')", "return self.missing", "return undefined", "return 1 // 0")

POOLS = {"array": ARRAYS, "function": FUNCTIONS, "dtype": DTYPES, "count": COUNTS, "word": WORDS, "tile": TILES, "shape": SHAPES,
         "component": COMPONENTS, "any": ()}


def broken(kind: str, good: str, rng: np.random.Generator) -> str:
    """Code of a bad value in place of the good one: of its kind's own pool in three cases of four."""
    pool = POOLS[kind.partition(":")[0]] if good != "None" or not kind.startswith("array") else ()
    chosen = str(rng.choice(pool if pool and rng.random() < 0.75 else ANYTHING))
    if kind.startswith("array"):
        return chosen.replace("{x}", f"({good})")
    if kind.startswith("function"):
        arguments = ", ".join("xyzuvw"[:int(kind.partition(":")[2] or 1)])
        return chosen.replace("{args}", arguments).replace("{{", "{").replace("}}", "}")
    return chosen
