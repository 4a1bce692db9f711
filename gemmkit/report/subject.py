"""What a report is about: a product's kernel, and a small product by the same mapping that the emulator has run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from gemmkit.ahead import recorded as resolved
from gemmkit.compiled import Compiled
from gemmkit.config import Config
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.mode import Mode, computed_by
from gemmkit.emulator.recording import Event, recorded
from gemmkit.epilogues import Default
from gemmkit.inspection import CompiledKernel, compiled_kernel
from gemmkit.matmul_call import matmul
from gemmkit.matrices import arrays
from gemmkit.planning import Plan
from gemmkit.problem import HOST
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import DeviceInfo, assumed, target

AHEAD = 2                              # k-tiles that a small product has beside those that fill the stages


@dataclass(frozen=True)
class Run:
    """A small product that was emulated: its sizes, its specialisation, and what happened in its launch.

    ``left_out`` says what of the configuration it had to do without, and why. ``asked`` are the sizes of the product that it
    is a part of.
    """

    sizes: tuple[int, int, int]
    spec: Any
    events: list[Event]
    left_out: str = ""
    asked: tuple[int, int, int] | None = None


@dataclass(frozen=True)
class Subject:
    """A kernel for a class of problems, and the device it is for."""

    compiled: Compiled
    device: DeviceInfo

    @property
    def conf(self) -> Config:
        return self.compiled.config

    @property
    def spec(self) -> Any:
        return self.compiled.spec

    @property
    def sizes(self) -> tuple[int, int, int]:
        """M, N and K of what the kernel computes."""
        call = self.compiled.computed
        return call.M, call.N, call.K

    @cached_property
    def kernel(self) -> CompiledKernel | str:
        """The compiled kernel, or why there is none here."""
        try:
            return compiled_kernel(self.compiled, self.device)
        except (RuntimeError, ImportError, OSError) as error:
            return f"{type(error).__name__}: {error}"

    @cached_property
    def run(self) -> Run | str:
        """A small product by the same mapping, or why there is none."""
        try:
            return small_run(self.conf, self.device, self.sizes, self.compiled.computed.products)
        except (ValueError, TypeError, EmulatorError) as error:
            reason = str(error).splitlines()[0]
        plain = dataclasses.replace(self.conf, epilogue=Default(), observe_a=None)
        try:
            made = small_run(plain, self.device, self.sizes, self.compiled.computed.products)
        except (ValueError, TypeError, EmulatorError) as error:
            return str(error).splitlines()[0]
        return dataclasses.replace(made, left_out=f"without the epilogue, which does not go with the small sizes: {reason}")


def small_sizes(conf: Config, device: DeviceInfo, sizes: tuple[int, int, int] | None = None,
                products: int = 1) -> tuple[int, int, int]:
    """What one cluster computes of ``products`` products of these ``sizes`` (None: of a large one), as far as it is new.

    That is a tile of D for each block, two of Hopper's kernel if its blocks have several; and K, up to where the ring has
    gone round: `AHEAD` k-tiles beyond its stages.
    """
    block = conf.block_shape.extents
    rows, columns = (tile * count for tile, count in zip(block, conf.cluster.extents))
    shares = conf.splits if isinstance(conf.splits, int) else 1
    most = rows, columns, block[2] * (conf.stages + AHEAD) * shares
    stays = conf.is_pipeline and shares == 1
    if sizes is None:
        return (rows, 2 * columns, most[2]) if stays else most
    M, N, K = sizes
    clusters = -(-M // rows) * -(-N // columns) * products
    if stays and clusters > max(1, device.sm_count // conf.peers):
        if N > columns:
            return min(M, rows), min(N, 2 * columns), min(K, most[2])
        return min(M, 2 * rows), N, min(K, most[2])
    return min(M, rows), min(N, columns), min(K, most[2])


def small_run(conf: Config, device: DeviceInfo, sizes: tuple[int, int, int] | None = None, products: int = 1) -> Run:
    """Emulate what one cluster does (`small_sizes`); raises ValueError or TypeError where the configuration does not go with
    small sizes."""
    M, N, K = small_sizes(conf, device, sizes, products)
    alone = dataclasses.replace(device, sm_count=conf.peers)            # so that its tiles are one cluster's, in turn

    def zeros(layout: Any, rows: int, columns: int) -> np.ndarray:
        order = "F" if getattr(layout, "axis", 1) == 0 else "C"
        return np.zeros(layout.array_shape(rows, columns), layout.storage, order)       # type: ignore[call-overload]

    a, b = zeros(conf.global_a_layout, M, K), zeros(conf.global_b_layout, K, N)
    c = zeros(conf.global_c_layout, M, N) if conf.has_c else None
    out = zeros(conf.global_d_layout, M, N)
    with computed_by(Mode()), assumed(alone), recorded() as seen:
        plan = Plan(a, b, c, out, conf, dict(gemm_shape=dict(M=M, N=N, K=K)))
        plan(a, b, c, out=out)
    return Run((M, N, K), plan._compiled.spec, seen.launches[0], asked=sizes)


def of_call(a: Any, b: Any, c: Any = None, conf: Config | None = None, out: Any = None,
            keywords: dict[str, Any] | None = None, device: DeviceInfo | None = None) -> Subject:
    """The kernel that `gemmkit.matmul` takes for a call. Arrays of NumPy are planned for ``device`` (None: the GPU that is
    here, or an H100). Nothing is compiled or launched, and no element is read or written.

    Raises what `gemmkit.matmul` raises, and ValueError for a product that needs no kernel.
    """
    keywords = keywords or {}
    if describe(arrays(a, b, (c, out))[0], "a").device != HOST:
        made = Plan(a, b, c, out, conf, keywords)._compiled
    else:
        device = target() if device is None else device
        found = resolved(lambda: matmul(a, b, c, conf, out=out, **keywords), device, zeros=False)
        if not found:
            raise ValueError("the product has no element, and no kernel is launched for it; give sizes of 1 or more")
        made = found[0]
    return Subject(made, made.problem.device)
