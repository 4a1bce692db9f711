"""Products in semirings: the shipped ones and a user's, with infinities, at odd sizes, transposed, with C; and which k won."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.layouts import RowMajor
from gemmkit.operators import LOG_SUM_EXP, MAX_PLUS, MAX_TIMES, MIN_PLUS, OR_AND, FPUOp, Semiring
from gemmkit.runtime.device import H100
from tests.support.checks import assert_close
from tests.support.compiling import machine_code
from tests.support.machines import on_machines, poison

SIZES = [(17, 13, 11), (1, 1, 1), (5, 33, 2)]
LARGER = [(101, 67, 33), (128, 64, 96), (1, 257, 31)]
SELECTIVE = {"min-plus": (MIN_PLUS, np.add, np.min), "max-plus": (MAX_PLUS, np.add, np.max)}


def infinity(dtype: Any, sign: int = 1) -> Any:
    """What stands for infinity in a dtype."""
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        return dtype.type(sign * math.inf)
    return np.iinfo(dtype).max if sign > 0 else np.iinfo(dtype).min


def small(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any, absent: Any) -> np.ndarray:
    """Whole numbers, a quarter of them absent: sums are exact."""
    x = rng.integers(-50, 50, shape).astype(dtype)
    x[rng.random(shape) < 0.25] = absent
    return x


def products(a: np.ndarray, b: np.ndarray, absent: Any) -> np.ndarray:
    """All a_ik + b_kj, absent where one of the two is."""
    with np.errstate(all="ignore"):
        sums = a[:, :, None] + b[None, :, :]
    sums[np.broadcast_to((a == absent)[:, :, None], sums.shape) | (b == absent)[None, :, :]] = absent
    return sums


def empty_or(reduce: Any, x: np.ndarray, absent: Any) -> np.ndarray:
    """A reduction over k, also of none."""
    return np.asarray(reduce(x, axis=1, initial=absent))


@pytest.mark.kin(4)
@pytest.mark.sample(8)
@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8", "i2"])
@pytest.mark.parametrize("name", SELECTIVE)
def test_tropical(machine: Any, name: str, dtype: str, rng: np.random.Generator) -> None:
    operator, _, reduce = SELECTIVE[name]
    absent = infinity(dtype, 1 if operator is MIN_PLUS else -1)
    for M, N, K in SIZES[:2] if machine.emulated else SIZES + LARGER:
        a, b = small(rng, (M, K), dtype, absent), small(rng, (K, N), dtype, absent)
        a[0] = absent                                            # a row that nothing leads from
        out = machine.array(poison((M, N), dtype))
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), out=out, operator=operator)
        expected = empty_or(reduce, products(a, b, absent), absent)
        assert np.array_equal(machine.numpy(out), expected) and (machine.numpy(out)[0] == absent).all()


@pytest.mark.sample(3)
@on_machines
@pytest.mark.parametrize("transa", "NT")
@pytest.mark.parametrize("transb", "NT")
def test_transposed_and_with_c(machine: Any, transa: str, transb: str, rng: np.random.Generator) -> None:
    """D = min(C, min_k (A + B)): C goes into the sum by the semiring's own addition."""
    M, N, K = (9, 21, 7) if machine.emulated else (75, 130, 41)
    a, b, c = (small(rng, shape, "f4", np.inf) for shape in ((M, K), (K, N), (M, N)))
    given = (machine.array(a if transa == "N" else np.asfortranarray(a)), machine.array(b if transb == "N" else np.asfortranarray(b)))
    out = machine.array(poison((M, N), "f4"))
    with machine.session():
        gk.matmul(*given, machine.array(c), out=out, operator=MIN_PLUS)
    assert np.array_equal(machine.numpy(out), np.minimum(c, products(a, b, np.inf).min(axis=1)))


@on_machines
def test_an_empty_sum_is_zero(machine: Any) -> None:
    a, b = np.empty((3, 0), np.float32), np.empty((0, 5), np.float32)
    for operator, expected in ((MIN_PLUS, np.inf), (MAX_PLUS, -np.inf), (MAX_TIMES, 0), (LOG_SUM_EXP, -np.inf)):
        out = machine.array(poison((3, 5), "f4"))
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), out=out, operator=operator)
        assert (machine.numpy(out) == expected).all()


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_probabilities(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    """The most probable path by products, and sums of probabilities by logarithms."""
    for M, N, K in SIZES[:1] if machine.emulated else SIZES + LARGER:
        a, b = rng.random((M, K)).astype(dtype), rng.random((K, N)).astype(dtype)
        a[0] = 0                                                 # impossible: -infinity as a logarithm
        with machine.session():
            best = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=MAX_TIMES))
            with np.errstate(divide="ignore"):
                logs = [machine.array(np.log(x)) for x in (a, b)]
            total = machine.numpy(gk.matmul(*logs, operator=LOG_SUM_EXP))
        assert_close(best, (a[:, :, None].astype("f8") * b[None].astype("f8")).max(axis=1), 1e-6)
        with np.errstate(divide="ignore"):
            assert_close(total, np.log(a.astype("f8") @ b.astype("f8")), 1e-5 if dtype == "f4" else 1e-13)


@on_machines
def test_log_sum_exp_of_infinities(machine: Any) -> None:
    """Infinite and huge summands, where e^x alone would overflow."""
    a = np.array([[np.inf, 0], [-np.inf, 1000], [1000, 1000], [-np.inf, -np.inf]], np.float64)
    with machine.session():
        out = machine.numpy(gk.matmul(machine.array(a), machine.array(np.zeros((2, 1))), operator=LOG_SUM_EXP))
    assert np.allclose(out[1:3, 0], [1000, 1000 + math.log(2)], rtol=1e-15)
    assert out[0, 0] == np.inf and out[3, 0] == -np.inf


@pytest.mark.sample(2)
@on_machines
@pytest.mark.parametrize("dtype", ["?", "u1", "u4", "u8"])
def test_or_and(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    """Booleans, and every bit of an integer by itself."""
    for M, N, K in SIZES[:1] if machine.emulated else SIZES + LARGER:
        if dtype == "?":
            a, b = rng.random((M, K)) < 0.3, rng.random((K, N)) < 0.3
        else:
            a, b = (rng.integers(0, np.iinfo(dtype).max, s, dtype) & rng.integers(0, np.iinfo(dtype).max, s, dtype)
                    for s in ((M, K), (K, N)))
        with machine.session():
            out = machine.numpy(gk.matmul(machine.array(a), machine.array(b), operator=OR_AND))
        assert out.dtype == np.dtype(dtype)
        assert np.array_equal(out, np.bitwise_or.reduce(a[:, :, None] & b[None], axis=1))


@pytest.mark.kin(4)
@on_machines
def test_a_users_semiring_with_a_shape_and_a_configuration(machine: Any, rng: np.random.Generator) -> None:
    """Of all paths, the one whose narrowest edge is the widest; as a recipe, and with a shape of its own."""
    a, b = (rng.integers(-90, 5, s).astype("f4") for s in ((19, 23), (23, 18)))
    expected = np.minimum(a[:, :, None], b[None]).max(axis=1)
    widest = Semiring(max, min, -math.inf)
    shaped = Semiring(max, min, -math.inf, M=8, N=16, K=2)
    conf = gk.get_config(operator=widest, global_a_layout=RowMajor("f4"), gemm_shape=dict(M=19, N=18, K=23))
    with machine.session():
        for how in (dict(operator=widest), dict(operator=shaped), dict(conf=conf)):
            assert np.array_equal(machine.numpy(gk.matmul(machine.array(a), machine.array(b), **how)), expected)


@on_machines
@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "i4", "f2", "f4", "f8"])
def test_the_widest_path_of_all_numbers_of_a_type(machine: Any, dtype: str, rng: np.random.Generator) -> None:
    """Also where all are negative, and of sizes that no tile divides: what is beyond an edge is less than any of them."""
    limits: Any = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else np.finfo(dtype)
    for high in (0, int(limits.max) if np.dtype(dtype).kind in "iu" else 9):
        low = int(limits.min) + 1 if np.dtype(dtype).kind in "iu" else -9
        a, b = (rng.integers(min(low, high), max(low, high), size, endpoint=True).astype(dtype) for size in ((7, 5), (5, 9)))
        out = machine.array(poison((7, 9), dtype))
        with machine.session():
            gk.matmul(machine.array(a), machine.array(b), operator=Semiring(max, min, -math.inf), out=out)
        assert np.array_equal(machine.numpy(out), np.minimum(a[:, :, None], b[None]).max(axis=1))


# -- which k ------------------------------------------------------------------------------------------------------------

@pytest.mark.kin(4)
@pytest.mark.sample(16)
@on_machines
@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "i8"])
@pytest.mark.parametrize("name", SELECTIVE)
def test_select(machine: Any, name: str, dtype: str, rng: np.random.Generator) -> None:
    operator, _, reduce = SELECTIVE[name]
    absent, first = infinity(dtype, 1 if operator is MIN_PLUS else -1), np.argmin if operator is MIN_PLUS else np.argmax
    for M, N, K in SIZES[:2] if machine.emulated else SIZES + LARGER:
        a, b = small(rng, (M, K), dtype, absent), small(rng, (K, N), dtype, absent)
        a[0, : (K + 1) // 2] = absent
        out, index = machine.array(poison((M, N), dtype)), machine.array(poison((M, N), f"i{a.dtype.itemsize}"))
        with machine.session():
            gk.functions.select(machine.array(a), machine.array(b), operator=operator, out=out, index=index)
        every = products(a, b, absent)
        values = reduce(every, axis=1)
        assert np.array_equal(machine.numpy(out), values)
        assert np.array_equal(machine.numpy(index), np.where(values == absent, -1, first(every, axis=1)))


def test_select_refuses_what_it_cannot() -> None:
    a = np.ones((4, 4), np.float32)
    with gk.emulate():
        with pytest.raises(ValueError, match="whose add returns one of its arguments"):
            gk.functions.select(a, a, operator=LOG_SUM_EXP)
        with pytest.raises(TypeError, match="a has dtype float16 and b float16; both must be float32"):
            gk.functions.select(a.astype("f2"), a.astype("f2"))
        with pytest.raises(ValueError, match=r"index has shape \(4, 4\) and dtype int64; \(4, 4\) and int32 are needed"):
            gk.functions.select(a, a, index=np.zeros((4, 4), np.int64))
        with pytest.raises(ValueError, match="matrices of 2 dimensions"):
            gk.functions.select(a[0], a)
        with pytest.raises(TypeError, match="select.. got unknown keywords epilogue; it takes operator, out, index and stream, and no tr"):
            gk.functions.select(a, a, epilogue=None)


# -- bad input ----------------------------------------------------------------------------------------------------------

def test_a_zero_that_add_does_not_absorb() -> None:
    with pytest.raises(ValueError, match=r"Semiring\(minimum, <lambda>, zero=0\.0\): add\(zero, x\) is 0\.0 for x=0\.25"):
        Semiring(min, lambda x, y: x + y, 0.0)
    with pytest.raises(ValueError, match=r"add\(x, mul\(zero, 0\.5\)\) is 0\.5 for x=0\.25 and must be x"):
        Semiring(max, lambda x, y: y, 0.0)
    with pytest.raises(ValueError, match=r"add\(zero, x\) is 0\.0 for x=-0\.25 and must be x.*-math.inf.*give sample="):
        Semiring(max, min, 0.0)
    with pytest.raises(ValueError, match=r"add\(zero, x\) is 0 for x=-1 and must be x"):
        Semiring(max, lambda x, y: x * y, 0)
    negative = Semiring(min, max, 0.0, sample=(-1.0, -2.0))      # of numbers below zero it is one
    a = -np.arange(12, dtype=np.float32).reshape(3, 4)
    with gk.emulate():
        assert np.array_equal(gk.matmul(a, a.T, operator=negative), np.maximum(a[:, :, None], a.T[None]).min(axis=1))


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"Semiring\(add=3\): a Python function of two numbers is needed"):
        Semiring(3, min, 0.0)                                    # type: ignore[arg-type]


@pytest.mark.parametrize("given", [dict(M=0, N=16), dict(M=16, N=0), dict(M=np.zeros(3), N=16), dict(M=False)], ids=str)
def test_what_is_no_extent(given: dict[str, Any]) -> None:
    """0 would stand for a shape that is still to be chosen."""
    with pytest.raises(ValueError, match=r"Semiring\([MN]=.*: a whole number from 1 on is needed, or None"):
        Semiring(max, min, -math.inf, **given)


def test_arrays_of_other_dtypes_than_a_shaped_one() -> None:
    a = np.ones((4, 4), np.float64)
    with gk.emulate(), pytest.raises(gk.ConfigError, match="float32"):
        gk.matmul(a, a, operator=Semiring(max, min, -math.inf, M=16, N=16))


# -- machine code -------------------------------------------------------------------------------------------------------

LARGE = dict(M=4096, N=4096, K=4096)


def compiled(operator: Any, dtype: str) -> Any:
    conf = gk.get_config(operator=operator, global_a_layout=RowMajor(dtype), gemm_shape=LARGE, device=H100)
    code = machine_code(conf)
    assert (code.usage.spill_stores, code.usage.spill_loads, code.usage.stack_bytes) == (0, 0, 0)
    assert code.count("CALL") == code.count("LDL") == code.count("STL") == 0
    return conf, code


@pytest.mark.thorough
@pytest.mark.sample(6)
@pytest.mark.compile
@pytest.mark.parametrize("name,dtype,opcodes", [
    ("min-plus", "f4", {"FADD": 1, "FMNMX": 1}), ("min-plus", "i4", {"VIMNMX": 1}), ("max-times", "f4", {"FMUL": 1, "FMNMX": 1}),
    ("log-sum-exp", "f4", {}), ("min-plus", "i2", {}), ("or-and", "u4", {"LOP3": 1})])
def test_compiled(name: str, dtype: str, opcodes: dict[str, int]) -> None:
    """One instruction an operation, and nothing spills."""
    operators = {"min-plus": MIN_PLUS, "max-times": MAX_TIMES, "log-sum-exp": LOG_SUM_EXP, "or-and": OR_AND}
    conf, code = compiled(operators[name], dtype)
    operator = conf.operator
    products = operator.M * operator.N * operator.K // 32        # of one step along K of one thread
    for opcode, each in opcodes.items():
        found = code.count(opcode)
        assert found >= each * products and found % products < products // 2, (opcode, found, products)
    assert code.count("DADD") == code.count("DFMA") == 0         # nothing has widened


@pytest.mark.kin(4)
@pytest.mark.compile
def test_select_compiled() -> None:
    """A pair costs a compare and a select more, and stays in registers."""
    from gemmkit.functions import semiring as selection
    from gemmkit.plans import ahead as inspection

    semiring = Semiring(min, lambda x, y: x + y, math.inf, M=32, N=32, dtype="f4")
    conf = gk.get_config(operator=selection.Selecting.of(semiring), global_a_layout=RowMajor("f4"),
                         global_d_layout=RowMajor("f4"), transform_global_to_shared_a=selection.WithIndex(),
                         epilogue=selection.IndexSplit(np.zeros((4096, 4096), np.int32)), gemm_shape=LARGE, device=H100)
    kernel = inspection.compile_config(conf, device=H100)
    assert kernel.usage.spill_stores == kernel.usage.stack_bytes == 0
    found = [kernel.instructions[opcode] for opcode in ("FADD", "FMNMX", "FSETP", "SEL")]
    assert all(32 <= count < 64 for count in found), found


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4"])
def test_arrays_of_registers_hold_what_numbers_one_by_one_give(dtype: str, rng: np.random.Generator) -> None:
    """The emulator computes a semiring of gemmkit's functions by arrays, one of a user's number by number."""
    a, b = (rng.integers(-3, 3, shape).astype(dtype) for shape in ((17, 13), (13, 19)))
    if dtype != "i4":
        for x in (a, b):
            x[rng.random(x.shape) < 0.1] = rng.choice([np.nan, np.inf, -np.inf, -0.0])
    of_users = Semiring(lambda x, y: max(x, y), lambda x, y: x + y, -math.inf)
    with gk.emulate():
        by_arrays, one_by_one = (gk.matmul(a, b, operator=operator) for operator in (MAX_PLUS, of_users))
    assert by_arrays.tobytes() == one_by_one.tobytes()
    assert np.isnan(by_arrays).any() == np.isnan(a).any() or dtype == "i4"


@pytest.mark.parametrize("sample", [np.zeros(()), 3, "ab", int], ids=["array", "number", "word", "type"])
def test_a_sample_is_a_tuple_of_numbers(sample: Any) -> None:
    with pytest.raises(TypeError, match=r"Semiring\(sample=.*: a tuple of numbers is needed"):
        Semiring(max, min, -math.inf, sample=sample)


@dataclass(frozen=True)
class ChiSquare(FPUOp):
    """0 / 0 beyond the edge."""

    def multiply(self, x: Any, y: Any) -> Any:
        return (x - y) ** 2 / (x + y)


@dataclass(frozen=True)
class Shifted(FPUOp):
    def multiply(self, x: Any, y: Any) -> Any:
        return x * y + 1


@dataclass(frozen=True)
class LargestProduct(FPUOp):
    start = -math.inf

    def combine(self, c: Any, product: Any) -> Any:
        return max(c, product)


@pytest.mark.parametrize("kind, words", [(ChiSquare, "makes nan of two"), (Shifted, "makes 1.0 of two"),
                                         (LargestProduct, "is 0.0 and must be start")])
def test_an_operator_whose_edge_would_change_sums(kind: type[FPUOp], words: str) -> None:
    """K is padded to whole tiles, so the result was wrong without a word."""
    with pytest.raises(ValueError, match=words):
        kind()
