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

    ``left_out`` says what of the configuration it had to do without, and why.
    """

    sizes: tuple[int, int, int]
    spec: Any
    events: list[Event]
    left_out: str = ""


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
            return small_run(self.conf, self.device)
        except (ValueError, TypeError, EmulatorError) as error:
            reason = str(error).splitlines()[0]
        plain = dataclasses.replace(self.conf, epilogue=Default(), observe_a=None)
        try:
            made = small_run(plain, self.device)
        except (ValueError, TypeError, EmulatorError) as error:
            return str(error).splitlines()[0]
        return dataclasses.replace(made, left_out=f"without the epilogue, which does not go with the small sizes: {reason}")


def small_sizes(conf: Config) -> tuple[int, int, int]:
    """One tile of D a block of a cluster (two of Hopper's kernel, whose blocks stay), and K to go around the ring."""
    block = conf.block_shape.extents
    rows, columns = conf.cluster.extents
    shares = conf.splits if isinstance(conf.splits, int) else 1
    tiles = 2 if conf.is_pipeline and shares == 1 else 1
    return block[0] * rows, block[1] * columns * tiles, block[2] * (conf.stages + AHEAD) * shares


def small_run(conf: Config, device: DeviceInfo) -> Run:
    """Emulate a small product; raises ValueError or TypeError where the configuration does not go with small sizes."""
    M, N, K = small_sizes(conf)
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
    return Run((M, N, K), plan._compiled.spec, seen.launches[0])


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
