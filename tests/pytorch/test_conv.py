"""`gemmkit.torch.conv` beside PyTorch's convolutions: results, gradients of both orders, transforms of ``torch``, a bench's rows."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import gemmkit as gk  # noqa: E402
import gemmkit.torch  # noqa: E402
from bench import conv as bench  # noqa: E402
from tests.support.machines import on_devices  # noqa: E402

F = torch.nn.functional


def drawn(device: str, *shape: int, dtype: Any = torch.float64, last: bool = False) -> Any:
    """Small whole numbers: results are exact."""
    made = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).to(device)
    if last:
        made = made.contiguous(memory_format=torch.channels_last)
    return made.requires_grad_()


@on_devices
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups, stride, padding, dilation", [(1, 1, 1, 1), (2, 2, 1, 1), (1, 2, 2, 2)])
def test_results_and_gradients(device: str, groups: int, stride: int, padding: int, dilation: int, last: bool) -> None:
    x, w = drawn(device, 2, 4, 5, 6, last=last), drawn(device, 4, 4 // groups, 3, 3, last=last)
    b = drawn(device, 4)
    y = gk.torch.conv(x, w, b, stride=stride, padding=padding, dilation=dilation, groups=groups)
    wanted = F.conv2d(x, w, b, stride, padding, dilation, groups)
    assert torch.equal(y, wanted)
    assert device != "cpu" or y.stride() == wanted.stride()         # cuDNN's choice of an order depends on the dtype
    g = drawn(device, *y.shape).detach()
    for found, of_torch in zip(torch.autograd.grad(y, (x, w, b), g), torch.autograd.grad(wanted, (x, w, b), g)):
        assert torch.equal(found, of_torch)


@on_devices
@pytest.mark.parametrize("dimensions", [1, 3])
def test_dimensions(device: str, dimensions: int) -> None:
    x, w = drawn(device, 1, 3, *(4,) * dimensions), drawn(device, 2, 3, *(2,) * dimensions)
    function = {1: F.conv1d, 3: F.conv3d}[dimensions]
    assert torch.equal(gk.torch.conv(x, w, padding=1), function(x, w, padding=1))


@on_devices
def test_gradcheck(device: str) -> None:
    x, w, b = drawn(device, 1, 1, 2, 3), drawn(device, 1, 1, 2, 2), drawn(device, 1)
    assert torch.autograd.gradcheck(lambda *args: gk.torch.conv(*args, stride=(1, 2), padding=1), (x, w, b), fast_mode=True)


@on_devices
def test_gradients_have_gradients(device: str) -> None:
    found = []
    for conv in (gk.torch.conv, F.conv2d):
        x, w = drawn(device, 1, 2, 4, 4), drawn(device, 2, 2, 3, 3)
        of_x, of_w = torch.autograd.grad((conv(x, w, padding=1) ** 2).sum(), (x, w), create_graph=True)
        found.append(torch.autograd.grad((of_x ** 2).sum() + (of_w ** 2).sum(), (x, w)))
    assert all(torch.allclose(ours, of_torch, rtol=1e-12) for ours, of_torch in zip(*found))


@on_devices
def test_compile_vmap_and_autocast(device: str) -> None:
    x, w, b = (y.detach() for y in (drawn(device, 2, 3, 5, 5), drawn(device, 4, 3, 3, 3), drawn(device, 4)))
    compiled = torch.compile(lambda *args: gk.torch.conv(*args, padding=1), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w, b), F.conv2d(x, w, b, padding=1))
    batch = drawn(device, 2, 1, 3, 5, 5).detach()
    assert torch.equal(torch.func.vmap(lambda y: gk.torch.conv(y, w))(batch), F.conv2d(batch[:, 0], w)[:, None])
    with torch.autocast(device, torch.bfloat16):
        assert gk.torch.conv(x.float(), w.float()).dtype == torch.bfloat16
    how = [1, 1], [1, 1, 1, 1], [1, 1], 1, "NCHW"
    torch.library.opcheck(torch.ops.gemmkit.conv.default, (x, w, b, *how))
    torch.library.opcheck(torch.ops.gemmkit.conv_input.default, (w, drawn(device, 2, 4, 5, 5).detach(), [2, 3, 5, 5], *how))
    torch.library.opcheck(torch.ops.gemmkit.conv_weight.default, (x, drawn(device, 2, 4, 5, 5).detach(), [4, 3, 3, 3], *how))


def test_bad_calls() -> None:
    x, w = torch.zeros(1, 4, 5, 5), torch.zeros(4, 4, 3, 3)
    with pytest.raises(TypeError, match="tensors are needed"):
        gk.torch.conv(x.numpy(), w)
    with pytest.raises(TypeError, match="w has dtype torch.float64"):
        gk.torch.conv(x, w.double())
    with pytest.raises(ValueError, match="bias has shape"):
        gk.torch.conv(x, w, torch.zeros(3))
    with pytest.raises(ValueError, match="groups=3"):
        gk.torch.conv(x, w, groups=3)
    with gk.emulate(), pytest.raises(ValueError, match="x requires a gradient"):
        gk.conv(x.requires_grad_(), w, layout="NCHW")


def test_rows_of_the_bench() -> None:
    """`bench.conv` without a GPU: small cases in the emulator are rows, and a wrong result is none."""
    case = bench.ConvCase("fused", *bench.SMALL[0])
    with gk.emulate():
        assert bench.row(case, "cpu")["error"] < bench.TOLERANCE
        given = case.tensors("cpu")
        assert bench.error_of(case, given, torch.zeros_like(given[2])) > bench.TOLERANCE
    assert len(bench.cases()) == len(set(bench.cases())) and case.product == (50, 16, 72)
