"""Every function takes tensors on the CPU in the emulator: it computes what it computes of NumPy's arrays, in tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
from gemmkit import programs as gp  # noqa: E402
from gemmkit.epilogues import Bias, Elementwise, ReLU, RowReduce  # noqa: E402
from gemmkit.runtime.arrays import on_host  # noqa: E402
from tests.support.machines import poison  # noqa: E402

pytestmark = pytest.mark.sample(2)

F32, F16, BF16 = np.dtype("f4"), np.dtype("f2"), np.dtype(ml_dtypes.bfloat16)
Made = Callable[[Any], Any]


def of(*shape: int, dtype: Any = F32) -> Any:
    return (np.random.default_rng(sum(shape)).integers(-8, 9, shape) / 4).astype(dtype)


def tensor(x: Any) -> Any:
    """A tensor on the CPU of NumPy's memory, whatever its dtype."""
    if x.dtype == BF16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


@gk.program
def doubled(a: Any, b: Any, d: Any) -> None:
    for m, n in gp.parallel(a.rows, b.columns):
        sums = gp.zeros(m, n)
        for k in gp.sequential(a.columns):
            sums += a[m, k] @ b[k, n]
        d[m, n] = sums * 2.0


def program(t: Made) -> Any:
    d = t(poison((5, 8), F16))
    doubled(t(of(5, 64, dtype=F16)), t(of(64, 8, dtype=F16)), d)
    return d


def planned(t: Made) -> Any:
    run, out = gk.plan(t(of(5, 7)), t(of(7, 3))), t(poison((5, 3), F32))
    assert run(t(of(5, 7)), t(of(7, 3)), out=out) is out
    return out, run(t(of(5, 7)), t(of(7, 3)))


def into(t: Made) -> Any:
    out, largest = t(poison((5, 3), F32)), t(poison((5,), F32))
    assert gk.matmul(t(of(5, 7)), t(of(7, 3)), out=out, epilogue=RowReduce(largest, "max")) is out
    return out, largest


def attended(t: Made) -> Any:
    q, k, v = (t(of(1, 2, n, 64, dtype=BF16)) for n in (5, 9, 9))
    return gk.attention(q, k, v, mask=gk.masks.Causal(), return_lse=True)


def gemm(t: Made) -> Any:
    return gk.blas.gemmEx("N", "T", 2.0, t(of(2, 5, 7)), t(of(3, 7)), 0.5, t(of(2, 5, 3)))


def captured(t: Made) -> Any:
    by = t(of(3))
    return gk.matmul(t(of(5, 7)), t(of(7, 3)), epilogue=Elementwise(lambda x, m, n: x * by[n]))


CALLS: dict[str, Callable[[Made], Any]] = {
    "matmul": lambda t: gk.matmul(t(of(5, 7)), t(of(7, 3)), t(of(5, 3)), epilogue=Bias(t(of(3))) | ReLU()),
    "bfloat16": lambda t: gk.matmul(t(of(5, 7, dtype=BF16)), t(of(7, 3, dtype=BF16))),
    "views": lambda t: gk.matmul(t(of(7, 11)).T[1::2], t(of(3, 15, dtype=F32))[:, 1::2].T),
    "a stack": lambda t: gk.matmul(t(of(2, 5, 7, dtype=BF16)), t(of(7, 3, dtype=BF16))),
    "vectors": lambda t: gk.matmul(t(of(7)), t(of(2, 7, 3))),
    "into out": into,
    "plan": planned,
    "captured": captured,
    "diagonal": lambda t: gk.matmul(gk.layouts.DiagonalMatrix(t(of(5))), t(of(5, 3))),
    "rows by index": lambda t: gk.matmul(gk.layouts.Gather(t(of(5, 7)), t(np.array([4, 0, 4], np.int32))), t(of(7, 3))),
    "concat": lambda t: gk.matmul(gk.layouts.Concat(t(of(5, 3)), t(of(5, 4)), axis=1), t(of(7, 3))),
    "gemmEx": gemm,
    "einsum": lambda t: gk.einsum("bij,jk,kl->bil", t(of(2, 3, 4)), t(of(4, 5)), t(of(5, 2))),
    "sum": lambda t: gk.einsum("ij->i", t(of(3, 4))),
    "grouped": lambda t: tuple(gk.grouped([t(of(2, 3)), t(of(1, 4))], [t(of(3, 2)), t(of(4, 3))])),
    "select": lambda t: gk.functions.select(t(of(5, 7)), t(of(7, 3))),
    "softmax": lambda t: gk.softmax(t(of(3, 40, dtype=BF16))),
    "softmax in place": lambda t: (lambda x: gk.softmax(x, out=x))(t(of(3, 40))),
    "log_softmax": lambda t: gk.log_softmax(t(of(3, 40, dtype=F16))),
    "layernorm": lambda t: gk.layernorm(t(of(3, 40)), t(of(40)), t(of(40))),
    "rmsnorm": lambda t: gk.rmsnorm(t(of(3, 40)), t(of(40))),
    "glu": lambda t: gk.glu(t(of(5, 16, dtype=F16)), t(of(16, 8, dtype=F16)), t(of(16, 8, dtype=F16)), lambda x: max(x, 0)),
    "lstm_cell": lambda t: gk.functions.lstm_cell(t(of(2, 3)), t(of(2, 4)), t(of(2, 4)), t(of(3, 16)), t(of(4, 16))),
    "mlp": lambda t: gk.mlp(t(of(3, 16, dtype=F16)), [t(of(16, 32, dtype=F16)), t(of(32, 16, dtype=F16))], [t(of(32)), t(of(16))]),
    "attention": attended,
    "program": program,
    "dual": lambda t: gk.matmul(gk.functions.Dual.of(t(of(2, 3)), t(of(2, 3, 1))), t(of(3, 2))).parts,
}


def listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


@pytest.mark.parametrize("name", CALLS)
def test_tensors_on_the_cpu(name: str) -> None:
    with gk.emulate():
        found, expected = CALLS[name](tensor), CALLS[name](lambda x: x)
    for x, y in zip(listed(found), listed(expected), strict=True):
        assert type(x) is torch.Tensor and x.device.type == "cpu"
        assert on_host(x).dtype == y.dtype and np.array_equal(on_host(x), y, equal_nan=False)
    with pytest.raises(TypeError, match=r"tensor on cpu; move it to the GPU with \.cuda\(\), or compute in the emulator|"
                                        r"is a host array; emulate its kernel: with gemmkit\.emulate\(\)"):
        CALLS[name](tensor)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_products_behind_copies(dtype: Any, cheap_copies: Any) -> None:
    """Of operands whose rows TMA does not take."""
    a, b = of(3, 33, 65, dtype=dtype), of(65, 17, dtype=dtype)
    x, y = tensor(a), tensor(b)
    with gk.emulate():
        plan = gk.plan(x, y)
        assert plan._compiled.copies
        for found in (plan(x, y), gk.matmul(x, y)):
            assert np.array_equal(on_host(found), gk.matmul(a, b))


def test_a_plan_of_the_emulators_is_refused_outside_it() -> None:
    a, b = tensor(of(5, 7)), tensor(of(7, 3))
    with gk.emulate():
        run = gk.plan(a, b)
    with pytest.raises(TypeError, match=r"with gemmkit\.emulate\(\)"):
        run(a, b)


def test_parameters_and_what_has_no_memory() -> None:
    weight = torch.nn.Parameter(tensor(of(7, 3)))
    with gk.emulate():
        with torch.no_grad():
            assert np.array_equal(on_host(gk.matmul(tensor(of(5, 7)), weight)), gk.matmul(of(5, 7), of(7, 3)))
        gk.matmul(tensor(of(5, 7)), weight, epilogue=ReLU()).sum().backward()
        assert weight.grad.shape == (7, 3)
        with pytest.raises(ValueError, match=r"x is a tensor on meta; move it to the GPU"):
            gk.softmax(torch.empty(3, 4, device="meta"))
        with pytest.raises(ValueError, match=r"without memory; use gemmkit.torch.matmul"):
            torch.func.vmap(gk.softmax)(torch.ones(2, 3, 4))
