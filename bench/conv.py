"""Convolutions and their gradients beside cuDNN: `python -m bench.conv`.

| work | what | beside |
|---|---|---|
| forward | `gemmkit.conv` | ``torch.nn.functional.conv2d`` (or 3d), by cuDNN |
| fused | the same, and a bias, a residual and ReLU | cuDNN with a bias, then PyTorch's addition and ReLU |
| input | the gradient of x | ``torch.ops.aten.convolution_backward``, by cuDNN |
| weight | the gradient of w | the same |

Tensors are float16 with channels last, as cuDNN is fastest (``torch.backends.cudnn.benchmark`` is on). All are captured in
CUDA graphs, timed in turns, and compared with PyTorch's result in float32 before. The shapes are those of ResNet-50 (He et
al., 2016) and of a 3-D U-Net (Cicek et al., 2016). With ``--device cpu`` small ones run in the emulator: the times are no
measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import gemmkit as gk
from bench.backends import Torch
from bench.harness import Processor, Row, Work, compare, input_sets
from bench.turns import command
from gemmkit.epilogues import Bias, ReLU

TOLERANCE = 2e-3                       # of the norm
WORKS = "forward", "fused", "input", "weight"


class ConvCase(NamedTuple):
    """``images`` of ``extent`` along each of ``dimensions`` by ``channels``, and ``filters`` with ``taps`` along each."""

    work: str
    images: int
    extent: int
    channels: int
    filters: int
    taps: int = 3
    stride: int = 1
    dimensions: int = 2

    @property
    def padding(self) -> int:
        return self.taps // 2

    @property
    def result_extent(self) -> int:
        return (self.extent + 2 * self.padding - self.taps) // self.stride + 1

    @property
    def how(self) -> dict[str, Any]:
        return dict(stride=self.stride, padding=self.padding)

    @property
    def product(self) -> tuple[int, int, int]:
        """Rows, columns and K of the product that the forward convolution is."""
        return (self.images * self.result_extent ** self.dimensions, self.filters,
                self.channels * self.taps ** self.dimensions)

    def tensors(self, device: str) -> tuple[Any, ...]:
        """x, w, a gradient, a bias and a residual, in PyTorch's order of dimensions with channels last in memory."""
        last = torch.channels_last if self.dimensions == 2 else torch.channels_last_3d

        def drawn(first: int, second: int, extent: int) -> Any:
            made = torch.randn(first, second, *(extent,) * self.dimensions, device=device).half()
            return made.contiguous(memory_format=last)

        scale = (self.channels * self.taps ** self.dimensions) ** -0.5
        return (drawn(self.images, self.channels, self.extent), drawn(self.filters, self.channels, self.taps) * scale,
                drawn(self.images, self.filters, self.result_extent), torch.randn(self.filters, device=device).half(),
                drawn(self.images, self.filters, self.result_extent))


SHAPES = tuple((images, *of) for images in (32, 256) for of in (
    (56, 64, 64), (28, 128, 128), (14, 256, 256), (7, 512, 512),                           # ResNet-50's 3 x 3
    (56, 64, 256, 1), (14, 1024, 256, 1), (56, 128, 128, 3, 2), (56, 256, 512, 1, 2)))     # 1 x 1, and with a stride
SHAPES_3D = ((4, 64, 32, 32, 3, 1, 3), (4, 32, 64, 64, 3, 1, 3), (4, 16, 128, 128, 3, 1, 3))
SMALL = ((2, 5, 8, 16), (1, 6, 8, 8, 3, 2), (1, 4, 8, 8, 3, 1, 3))


def cases(match: str = "") -> list[ConvCase]:
    found = [ConvCase(work, *shape) for work in WORKS for shape in (*SHAPES, *SHAPES_3D)
             if work == "forward" or shape[0] <= 32]
    return [case for case in found if match in str(case)]


def ours(case: ConvCase, given: tuple[Any, ...]) -> tuple[Callable[[], Any], Any]:
    """Our call, and the array that it writes."""
    x, w, gradient, bias, residual = given
    how = dict(case.how, layout="NCHW" if case.dimensions == 2 else "NCDHW")
    out = torch.empty_like({"input": x, "weight": w}.get(case.work, gradient))
    if case.work == "input":
        return lambda: gk.functions.conv_input_gradient(tuple(x.shape), w, gradient, out=out, **how), out
    if case.work == "weight":
        return lambda: gk.functions.conv_weight_gradient(x, tuple(w.shape), gradient, out=out, **how), out
    if case.work == "fused":
        epilogue = Bias(bias) | ReLU()
        return lambda: gk.conv(x, w, residual, epilogue=epilogue, out=out, **how), out
    return lambda: gk.conv(x, w, out=out, **how), out


def peer(case: ConvCase, given: tuple[Any, ...]) -> Callable[[], Any]:
    """PyTorch's."""
    x, w, gradient, bias, residual = given
    function = torch.nn.functional.conv2d if case.dimensions == 2 else torch.nn.functional.conv3d
    if case.work == "forward":
        return lambda: function(x, w, **case.how)
    if case.work == "fused":
        return lambda: function(x, w, bias, **case.how).add_(residual).relu_()
    numbers = [[n] * case.dimensions for n in (case.stride, case.padding, 1)]
    mask = [case.work == "input", case.work == "weight", False]
    backward = torch.ops.aten.convolution_backward
    return lambda: backward(gradient, x, w, None, *numbers, False, [0] * case.dimensions, 1, mask)[mask.index(True)]


def error_of(case: ConvCase, given: tuple[Any, ...], out: Any) -> float:
    """How far the result is from PyTorch's in float32, of its norm."""
    wanted = peer(case, tuple(x.float() for x in given))()
    return float((out.float() - wanted).norm() / wanted.norm())


def row(case: ConvCase, device: str, pairs: int = 15) -> Row:
    """Raises `bench.harness.WrongResult` where the result is another than PyTorch's in float32."""
    torch.manual_seed(0)
    further = dict(group="conv", **{name: value for name, value in case._asdict().items() if name != "work"})
    first, version = case.tensors(device), torch.__version__.partition("+")[0]
    if device == "cuda":
        lib = Torch()
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = False
        clock, name, sets = lib, f"cuDNN (torch {version})", input_sets(sum(x.numel() * 2 for x in first), lib.l2_bytes())
    else:
        clock, name, sets = Processor(), f"torch {version} on a CPU", 1                # type: ignore[assignment]
    given = [first, *(case.tensors(device) for _ in range(min(8, sets) - 1))]
    made = [ours(case, one) for one in given]

    def poison() -> None:
        for _, out in made:
            out.fill_(float("nan"))

    found = compare(Work(case.work, "float16", *case.product, "nt"), [call for call, _ in made],
                    [peer(case, one) for one in given], peer_name=name, clock=clock, poison=poison,
                    error=lambda n: error_of(case, given[n], made[n][1]), tolerance=TOLERANCE, pairs=pairs,
                    target_us=2000.0 if device == "cuda" else 1.0, graph=device == "cuda", further=further)
    print(f"{case}: {found['ours_us']:.1f} us, {found['tflops']:.0f} TF, {found['ratio']:.3f} of {found['peer']}",
          flush=True)
    return found


def measured(options: Any) -> Iterator[Row]:
    if options.device == "cpu":
        yield from (row(ConvCase(work, *size), "cpu", 2) for size in SMALL for work in WORKS)
    else:
        yield from (row(case, "cuda") for case in cases(options.match))


def main(arguments: Sequence[str] | None = None) -> int:
    return command("conv", __doc__, measured, arguments, on_cpu=True, add=lambda parser: parser.add_argument(
        "--match", default="", help="only rows whose name contains this"))


if __name__ == "__main__":
    raise SystemExit(main())
