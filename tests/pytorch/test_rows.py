"""Norms, softmaxes and gated units of `gemmkit.torch` beside PyTorch in float64: results, gradients, transforms; what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from gemmkit.functions import gradients  # noqa: E402
from gemmkit.lang.errors import ConfigError  # noqa: E402
from gemmkit.torch import gated, glu, layernorm, log_softmax, rmsnorm, softmax  # noqa: E402
from gemmkit.torch import rows as torch_rows  # noqa: E402
from gemmkit.torch.rows import UNITS  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

F = torch.nn.functional
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
BOUNDS = {BF16: 1.2e-2, F16: 2e-3, F32: 2e-6, F64: 1e-12}


def drawn(*shape: int, device: str = "cpu", dtype: Any = BF16, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype).to(device)


def near(found: Any, wanted: Any, dtype: Any, times: float = 1.0) -> None:
    """Of each row's largest, by the unit of a dtype."""
    assert found.shape == wanted.shape and found.isfinite().all()
    found, wanted = found.detach().double(), wanted.detach().double()
    if wanted.numel():
        size = wanted.abs().amax(-1, keepdim=True) if wanted.dim() > 1 else wanted.abs().max()
        assert ((found - wanted).abs() <= times * BOUNDS[dtype] * size + 1e-30).all()


#: By name: ours of (x, gamma, beta), and the same by PyTorch of float64.
WORKS: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "layernorm": (layernorm, lambda x, g, b: F.layer_norm(x, x.shape[-1:], g, b, 1e-5), 2),
    "layernorm without beta": (layernorm, lambda x, g: F.layer_norm(x, x.shape[-1:], g, None, 1e-5), 1),
    "plain layernorm": (layernorm, lambda x: F.layer_norm(x, x.shape[-1:], None, None, 1e-5), 0),
    "rmsnorm": (rmsnorm, lambda x, g: F.rms_norm(x, x.shape[-1:], g, 1e-6), 1),
    "plain rmsnorm": (rmsnorm, lambda x: F.rms_norm(x, x.shape[-1:], None, 1e-6), 0),
    "softmax": (lambda x: softmax(x, scale=0.5), lambda x: F.softmax(0.5 * x, -1), 0),
    "log_softmax": (lambda x: log_softmax(x, scale=-2.0), lambda x: F.log_softmax(-2.0 * x, -1), 0),
}


def check(work: str, x: Any, dtype: Any) -> None:
    ours, theirs, count = WORKS[work]
    given = [x.requires_grad_(), *(drawn(x.shape[-1], device=x.device, dtype=dtype, seed=n + 1).requires_grad_() for n in range(count))]
    exact = [y.detach().double().requires_grad_() for y in given]
    found, wanted = ours(*given), theirs(*exact)
    assert found.dtype == x.dtype
    near(found, wanted, x.dtype)
    grad = drawn(*wanted.shape, device=x.device, dtype=found.dtype, seed=9)
    for one, other, of in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, exact, grad.double()), given):
        assert one.dtype == of.dtype and one.shape == of.shape
        near(one, other, x.dtype, 3.0)
    with torch.no_grad():
        assert torch.equal(ours(*given), found)


@pytest.mark.sample(7, at=3)
@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16, F32, F64])
@pytest.mark.parametrize("work", WORKS)
def test_results_and_gradients(work: str, dtype: Any, device: str) -> None:
    """Of odd lengths, of views, of rows that do not lie at one distance, of one row, and far from zero."""
    room = drawn(3, 4, 2, 41, device=device, dtype=dtype)
    views = [room[0, :, 0], room[..., 3:36].transpose(0, 1), room[0, 0, 0], room[:, 1, 1, ::2] + 3]
    if device == "cuda":
        views += [drawn(70, n, device=device, dtype=dtype) for n in (8, 1000, 4096, 33000)]
    for x in views:
        check(work, x.detach(), dtype)


@on_devices
def test_rows_that_an_eps_decides(device: str) -> None:
    x = drawn(6, 24, device=device, dtype=F32) * torch.logspace(-6, 3, 6, device=device)[:, None]
    for work in ("rmsnorm", "layernorm"):
        check(work, x.detach(), F32)


@on_devices
@pytest.mark.parametrize("work", ["layernorm", "rmsnorm", "plain layernorm"])
def test_gradients_of_norms_of_many_rows(work: str, device: str) -> None:
    """Several rows a block; a block and a warp a row; rows that are held, and rows that are streamed."""
    sizes = [(37, 40), (9, 520)] if device == "cpu" else [(5000, 8), (3000, 1024), (1500, 4096), (700, 8192), (300, 12000), (150, 20000), (150, 33001)]
    for m, n in sizes:
        check(work, (drawn(m, n, device=device) + 2).detach(), BF16)


@pytest.mark.parametrize(("held", "registers"), [(1024, 0), (16, 64)])
def test_sums_in_shared_memory(held: int, registers: int, in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows that a block holds, and of streamed ones."""
    monkeypatch.setattr(gradients, "HELD", held)
    monkeypatch.setattr(gradients, "IN_REGISTERS", registers)
    for work in ("layernorm", "rmsnorm"):
        for columns in (24, 33):
            check(work, drawn(11, columns, dtype=F32), F32)


def test_gradients_that_are_wanted(in_the_emulator: None) -> None:
    """Of some of x, gamma and beta; the others get none, and it is computed once."""
    for wanted in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)):
        given = [y.requires_grad_(bool(want)) for y, want in zip((drawn(5, 24, dtype=F32), *(drawn(24, dtype=F32, seed=n) for n in (1, 2))), wanted)]
        exact = [y.detach().double().requires_grad_(y.requires_grad) for y in given]
        grad = drawn(5, 24, dtype=F32, seed=9)
        layernorm(*given).backward(grad)
        WORKS["layernorm"][1](*exact).backward(grad.double())
        for one, other in zip(given, exact):
            assert (one.grad is None) is (other.grad is None)
            if one.grad is not None:
                near(one.grad, other.grad, F32, 3.0)


@pytest.mark.parametrize("rows", [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[0]])
def test_a_norm_may_be_written_to(rows: Callable[[Any], Any], in_the_emulator: None) -> None:
    """As PyTorch's may, whose backward pass does not read it; a softmax's does."""
    x = drawn(3, 2, 24, dtype=F32).requires_grad_()
    for function, own, _ in (WORKS["plain layernorm"], WORKS["plain rmsnorm"]):
        found = [torch.autograd.grad(one(rows(x)).mul_(2).pow(3).sum(), x)[0] for one in (function, own)]
        near(found[0], found[1], F32, 3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        softmax(x).mul_(2).sum().backward()


def test_rows_that_are_too_long_for_sums(in_the_emulator: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes them."""
    def refused(*_: Any) -> Any:
        raise ConfigError("sums of 33 columns take 1 byte too many")

    monkeypatch.setattr(torch_rows, "norm_gradients_of", refused)
    for dtype in (F32, BF16):
        check("layernorm", drawn(5, 33, dtype=dtype), dtype)


@on_devices
def test_parameters_of_another_dtype(device: str) -> None:
    """As under autocast: rows of 16 bits, a result and parameters of float32."""
    for ours, count in ((layernorm, 2), (rmsnorm, 1)):
        x = drawn(7, 40, device=device).requires_grad_()
        given = [drawn(40, device=device, dtype=F32, seed=n + 1).requires_grad_() for n in range(count)]
        exact = [y.detach().double().requires_grad_() for y in (x, *given)]
        theirs = WORKS[ours.__name__][1]
        found, wanted = ours(x, *given, dtype=F32), theirs(*exact)
        assert found.dtype == F32
        near(found, wanted, F32)
        grad = drawn(7, 40, device=device, dtype=F32, seed=5)
        of_x, *others = torch.autograd.grad(found, (x, *given), grad)
        exact_of_x, *exact_others = torch.autograd.grad(wanted, exact, grad.double())
        near(of_x, exact_of_x, BF16)
        for one, other in zip(others, exact_others):
            assert one.dtype == F32
            near(one, other, F32)


def test_rows_of_nothing(in_the_emulator: None) -> None:
    for shape in ((0, 8), (3, 0), (0,)):
        x, gamma = torch.empty(shape, requires_grad=True), torch.ones(shape[-1:], requires_grad=True)
        found = rmsnorm(x, gamma)
        assert found.shape == shape
        found.sum().backward()
        assert x.grad.shape == shape and not gamma.grad.any()
        softmax(x).sum().backward()
        gated(x, x).sum().backward()


# -- gated units ----------------------------------------------------------------------------------------------------------

@pytest.mark.sample(3)
@on_devices
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("activation", UNITS)
def test_glu(activation: str, dtype: Any, device: str) -> None:
    """By weights of either order, and by the halves of one; the gradient of each, and a result without one."""
    both = drawn(32, 24, device=device, dtype=dtype)
    pairs = [(both[:16].mT, both[16:].mT)]
    if device == "cuda":
        pairs.append((drawn(24, 16, device=device, dtype=dtype), drawn(24, 16, device=device, dtype=dtype, seed=3)))
    for w, v in pairs:
        x = (drawn(2, 3, 24, device=device, dtype=dtype, seed=4) / 2).requires_grad_()
        given = [x, *(y.detach().clone(memory_format=torch.preserve_format).requires_grad_() for y in (w, v))]
        exact = [y.detach().double().requires_grad_() for y in given]
        found = glu(*given, activation)
        wanted = UNITS[activation].of_tensors(exact[0] @ exact[1]) * (exact[0] @ exact[2])
        near(found, wanted, dtype, 4.0)
        grad = drawn(*wanted.shape, device=device, dtype=dtype, seed=8)
        for one, other in zip(torch.autograd.grad(found, given, grad), torch.autograd.grad(wanted, exact, grad.double())):
            near(one.flatten(), other.flatten(), dtype, 4.0)
        with torch.no_grad():
            near(glu(x, w, v, activation), wanted, dtype, 4.0)


@pytest.mark.sample(2)
@on_devices
@pytest.mark.parametrize("activation", UNITS)
def test_gradients_of_a_gate(activation: str, device: str) -> None:
    """Where the activation saturates, too."""
    gate = torch.linspace(-30, 30, 61, device=device)[None].repeat(3, 1).requires_grad_()
    up = drawn(3, 61, device=device, dtype=F32).requires_grad_()
    exact = [y.detach().double().requires_grad_() for y in (gate, up)]
    found, wanted = gated(gate, up, activation), UNITS[activation].of_tensors(exact[0]) * exact[1]
    grad = drawn(3, 61, device=device, dtype=F32, seed=1)
    near(found, wanted, F32)
    for one, other in zip(torch.autograd.grad(found, (gate, up), grad), torch.autograd.grad(wanted, exact, grad.double())):
        near(one, other, F32)


# -- what looks at operators ----------------------------------------------------------------------------------------------

def loss(x: Any, gamma: Any, beta: Any) -> Any:
    y = layernorm(x, gamma, beta) * rmsnorm(x, gamma)
    return (softmax(y) * log_softmax(y)).sum() + glu(y, w_of(y), w_of(y) * 2).square().sum()


def w_of(y: Any) -> Any:
    return torch.linspace(-1, 1, 16 * 8, device=y.device, dtype=y.dtype).view(8, 16).mT


@on_devices
def test_compiled(device: str) -> None:
    """Whole, with its gradients; and eager calls give the same."""
    found = []
    for call in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        given = [drawn(*shape, device=device, dtype=F32).requires_grad_() for shape in ((4, 16), (16,), (16,))]
        value = call(*given)
        found.append([value, *torch.autograd.grad(value, given)])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_transforms_of_functions(in_the_emulator: None) -> None:
    given = [drawn(*shape, dtype=F32) for shape in ((3, 4, 16), (16,), (16,))]
    of_one = torch.func.grad(loss, argnums=(0, 1, 2))
    wanted = [of_one(x, *given[1:]) for x in given[0]]
    for n, found in enumerate(torch.func.vmap(of_one, in_dims=(0, None, None))(*given)):
        torch.testing.assert_close(found, torch.stack([w[n] for w in wanted]), rtol=1e-5, atol=1e-5)
    gammas = drawn(3, 16, dtype=F32)
    found = torch.func.vmap(rmsnorm, in_dims=(0, 0))(given[0], gammas)
    torch.testing.assert_close(found, torch.stack([rmsnorm(x, g) for x, g in zip(given[0], gammas)]))


def test_operators_pass_pytorchs_own_checks(in_the_emulator: None) -> None:
    """Schemas, fake kernels and autograd of each operator."""
    x, gamma = drawn(3, 16, dtype=F32).requires_grad_(), drawn(16, dtype=F32).requires_grad_()
    w = drawn(16, 8, dtype=F32).requires_grad_()
    tests = "test_schema", "test_faketensor", "test_autograd_registration"
    for name, args, more in (("norm", (x, gamma, gamma), dict(eps=1e-5, centred=True)), ("softmax", (x,), dict(scale=1.0, log=False)),
                             ("gated", (x, x), dict(activation="silu")), ("glu", (x, w, w), dict(activation="silu"))):
        torch.library.opcheck(getattr(torch.ops.gemmkit, name).default, args, more, test_utils=tests)


def test_autocast(in_the_emulator: None) -> None:
    """On the CPU PyTorch's norms keep their dtype; products are cast."""
    x, w = drawn(3, 16, dtype=F32), drawn(16, 8, dtype=F32)
    with torch.autocast("cpu", dtype=BF16):
        assert glu(x, w, w).dtype == BF16
        assert softmax(x).dtype == F.softmax(x, -1).dtype == F32
        assert layernorm(x.bfloat16()).dtype == F.layer_norm(x.bfloat16(), (16,)).dtype


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [BF16, F16])
def test_autocast_on_a_gpu(kind: Any) -> None:
    x, gamma = drawn(3, 16, device="cuda", dtype=kind), drawn(16, device="cuda", dtype=F32)
    with torch.autocast("cuda", dtype=kind):
        for ours, theirs in ((softmax(x), F.softmax(x, -1)), (log_softmax(x), F.log_softmax(x, -1)),
                             (layernorm(x, gamma, gamma), F.layer_norm(x, (16,), gamma, gamma)),
                             (rmsnorm(x, gamma), F.rms_norm(x, (16,), gamma, 1e-6))):
            assert ours.dtype == theirs.dtype
            near(ours, theirs.double(), F32, 4.0)


@pytest.mark.gpu
def test_in_a_graph() -> None:
    """Forward and backward, captured once and run of other numbers."""
    x = drawn(64, 512, device="cuda").requires_grad_()
    gamma, w = drawn(512, device="cuda").requires_grad_(), drawn(512, 128, device="cuda").requires_grad_()

    def run() -> Any:
        y = glu(rmsnorm(x, gamma), w, w)
        return torch.autograd.grad(y.float().square().mean(), (x, gamma, w))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    with torch.no_grad():
        x.copy_(drawn(64, 512, device="cuda", seed=77))
    graph.replay()
    for one, other in zip(captured, run()):
        assert torch.equal(one, other)


# -- what is refused ------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("call", "error", "words"), [
    (lambda x: glu(x, x.mT, x.mT, "swish"), ValueError, "activation='swish': one of 'silu'"),
    (lambda x: glu(x, x.mT, x), ValueError, r"w has shape \(8, 2\) and v has shape \(2, 8\)"),
    (lambda x: glu(x, x, x), ValueError, r"x has shape \(2, 8\); \(\.\.\., 2\) is needed"),
    (lambda x: glu(x, x.mT.double(), x.mT.double()), TypeError, "operands must have one dtype"),
    (lambda x: gated(x, x[:1]), ValueError, "both must be the same"),
    (lambda x: gated(x, x.double()), TypeError, "operands must have one dtype"),
    (lambda x: layernorm(x, None, x[0]), ValueError, "beta is given alone"),
    (lambda x: rmsnorm(x, x[0, :3]), ValueError, r"gamma has shape \(3,\)"),
    (lambda x: rmsnorm([1.0]), TypeError, "takes tensors"),
    (lambda x: softmax(x.int()), TypeError, "int32"),
    (lambda x: rmsnorm(x, eps=math.nan), ValueError, "eps"),
])
def test_refused(call: Callable[[Any], Any], error: type, words: str, in_the_emulator: None) -> None:
    with pytest.raises(error, match=words):
        call(drawn(2, 8, dtype=F32))
