"""What a report is about: a product's kernel, and a small product by the same mapping that the emulator has run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np

from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.mode import ExecutionTarget, computed_by
from gemmkit.emulator.recording import Event, recorded
from gemmkit.epilogues import Default
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import Config
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import ArrayLayout
from gemmkit.layouts.matrices import arrays
from gemmkit.plans.ahead import CompiledKernel, compiled_kernel
from gemmkit.plans.ahead import recorded as resolved
from gemmkit.plans.compiled import Compiled
from gemmkit.plans.ozaki import OzakiProduct
from gemmkit.plans.plan import Plan
from gemmkit.plans.problem import HOST
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import DeviceInfo, assumed, target
from gemmkit.tuning.candidates import Candidate, modelled

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
class ExplainedKernel:
    """A kernel for a class of problems, and the device it is for."""

    compiled: Compiled
    device: DeviceInfo
    part_of: str = ""                    # what its launch is a part of, where that is more than a product

    @property
    def conf(self) -> Config:
        return self.compiled.config

    @property
    def spec(self) -> Any:
        return self.compiled.spec

    @property
    def of_product(self) -> Any:
        """What hands out the tiles of one product, also of a stack."""
        return getattr(self.spec.scheduler, "one", self.spec.scheduler)

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

    def zeros(layout: ArrayLayout, rows: int, columns: int) -> np.ndarray:
        order: Literal["F", "C"] = "F" if getattr(layout, "axis", 1) == 0 else "C"
        return np.zeros(layout.array_shape(rows, columns), layout.storage, order)

    a, b = zeros(conf.global_a_layout, M, K), zeros(conf.global_b_layout, K, N)
    c = zeros(conf.global_c_layout, M, N) if conf.has_c else None
    out = zeros(conf.global_d_layout, M, N)
    with computed_by(ExecutionTarget()), assumed(alone), recorded() as seen:
        plan = Plan(a, b, c, out, conf, dict(gemm_shape=dict(M=M, N=N, K=K)))
        plan(a, b, c, out=out)
    return Run((M, N, K), plan._compiled.spec, seen.launches[0], asked=sizes)


def of_call(a: Any, b: Any, c: Any = None, conf: Config | None = None, out: Any = None,
            keywords: dict[str, Any] | None = None, device: DeviceInfo | None = None) -> ExplainedKernel:
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
    if isinstance(made, OzakiProduct):
        return ExplainedKernel(made.products, made.problem.device, made.description)
    return ExplainedKernel(made, made.problem.device)


# --------------------------------------------------------------------------------------------------
# Why a product takes the mapping that it takes: what chose it, what the tables' model says of it, and of others.

SHOWN = 8                              # mappings beside the one that was chosen
#: By `gemmkit.plans.problem.Call.chosen_by`: the reason, and the file that owns it.
REASONS = {
    "conf": ("the configuration was given (conf=)", "gemmkit/kernels/config.py"),
    "operator": ("the operator was given; get_config completes its tiles", "gemmkit/tuning/choose.py"),
    "tuned": ("gemmkit.tune measured it on such a GPU, and its result is on disk", "gemmkit/tuning/store.py"),
    "candidate": ("a mapping that is being tried", "gemmkit/tuning/candidates.py"),
    "winners": ("the table that ships has a measured mapping for these sizes, faster than the model's by 7 % or more",
                "gemmkit/tuning/candidates.py"),
    "boxes": ("A and B are contiguous along different indices of K, and are copied as boxes",
              "gemmkit/tuning/sm80.py"),
    "quantised": ("B has 2- or 4-bit words with group scales, which are dequantised in registers",
                  "gemmkit/tuning/candidates.py"),
    "multistage": ("the least modelled time among the mappings of mma.sync and of the ordinary units with a ring of stages",
                   "gemmkit/tuning/sm80.py"),
    "gathered": ("TMA cannot take the rows of A or B, and another kernel hides their copies better",
                 "gemmkit/tuning/candidates.py"),
    "hopper": ("16-bit floats on Hopper: the least modelled time among the mappings of its tensor cores (wgmma, TMA)",
               "gemmkit/tuning/sm90.py"),
    "swap_ab": ("the transpose D^T = B^T A^T is computed: A has few rows, or B would have to be rewritten",
                "gemmkit/tuning/choose.py"),
    "units": ("the operator that gives NumPy's result type for these dtypes, in the tiles for these sizes",
              "gemmkit/tuning/operators.py"),
}


@dataclass(frozen=True)
class ChoiceReport:
    """What chose a mapping (``by``, a key of `REASONS`), its own ``candidate`` with the modelled time, None where the tables
    do not model it, and the ``others`` with the least modelled times."""

    by: str
    candidate: Candidate | None
    others: tuple[Candidate, ...]

    @property
    def reason(self) -> str:
        return REASONS[self.by][0]

    @property
    def owner(self) -> str:
        """The file that decides."""
        return REASONS[self.by][1]

    @property
    def microseconds(self) -> float | None:
        """The modelled time of a launch."""
        return None if self.candidate is None else self.candidate.nanoseconds / 1000


def microseconds_text(time: float) -> str:
    """A time as it is shown.

    >>> microseconds_text(171.6234), microseconds_text(10450.2)
    ('171.6 us', '10,450 us')
    """
    return f"{time:,.0f} us" if time >= 1000 else f"{time:.4g} us"


def choice_of(compiled: Compiled) -> ChoiceReport:
    """The choice of a product's mapping.

    >>> import numpy as np, gemmkit
    >>> from gemmkit.plans.ahead import recorded
    >>> from gemmkit.runtime.device import H100
    >>> a = np.zeros((4096, 4096), np.float16)
    >>> choice = choice_of(recorded(lambda: gemmkit.matmul(a, a), H100, zeros=False)[0])
    >>> choice.by, choice.candidate.name, 100 < choice.microseconds < 300
    ('hopper', 'warp_specialised 128x256x64, cooperative, 8 warps, groups of 8', True)
    """
    conf, call = compiled.problem.config, compiled.computed
    sizes = call.M, call.N, call.K
    mine: Candidate | None = None
    found: list[Candidate] = []
    for given in dict.fromkeys((None, conf.operator)):
        try:
            families = modelled(conf.global_a_layout, conf.global_b_layout, given, sizes, call.device, call.products,
                                (call.a, call.b))
        except (ConfigError, TypeError, ValueError):           # no table knows such operands
            continue
        listed = sorted((one for family in families for one in family), key=_time)
        own = next((one for one in listed if is_of(one, conf)), None)
        if own is not None or not found:
            mine, found = own, listed
        if own is not None:
            break
    others: dict[tuple[Any, ...], Candidate] = {}
    # Of each tile the best: the rest are orders and depths of it. Families have models of their own, which do not compare.
    for one in found:
        if mine is None or (one.kernel == mine.kernel and tile_of(one) != tile_of(mine)):
            others.setdefault(tile_of(one), one)
    return ChoiceReport(compiled.problem.chosen_by, mine, tuple(others.values())[:SHOWN])


def _time(candidate: Candidate) -> float:
    return candidate.nanoseconds


def tile_of(candidate: Candidate) -> tuple[Any, ...]:
    return candidate.kernel, candidate.block[:2], candidate.schedule, candidate.splits


def is_of(candidate: Candidate, conf: Config) -> bool:
    """Whether a configuration has all that a candidate says."""
    return all(getattr(conf, name) == value for name, value in candidate.fields().items())
