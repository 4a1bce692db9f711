"""Schedules (`gemmkit.specs`) on a GPU: rows of `bench.experiments`.

* decompositions: the first three of docs/specs.md against cuBLAS; 4 and 5 are the listings.
* listings: both of Fireiron's paper, as printed and with A and B a step ahead (`gemmkit.specs.products`), against the Config
  of the template kernel with the same tiles, and against cuBLAS. The wmma listing's Config is what its ``.config()`` gives.
  The Maxwell listing has none; the nearest has its tile, warps and thread's tile, and the template's copies and stores.
* staged: one schedule of tensor cores, whose tiles in shared memory are plain, padded or swizzled, and brought a step ahead
  or not, and Hopper's by TMA and wgmma, as a schedule and as a spec, against cuBLAS: the table of docs/design/specs.md.
* fused_specs: Graphene's fused kernels as specs, against PyTorch, cuBLASLt and cuDNN.
* small: M = N = 16 to 512, K = 64 to 4096, float16 to float32: the fastest of some schedules and of `gemmkit.matmul` as it
  chooses by itself, against cuBLAS. Which it was is the row's ``config``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gemmkit
from bench.experiments.attention import Attention
from bench.experiments.composed import Composed
from bench.experiments.experiment import Experiment, Lib
from bench.experiments.mlp import Mlp
from bench.experiments.rows import RowWise
from bench.harness import Call
from examples import fused_specs
from gemmkit import layouts, operators
from gemmkit.specs import products as first
from gemmkit.specs.products import cuda_wmma_sample, maxwell_optimized, multiply_adds, tensor_cores, wgmma_ring
from gemmkit.specs.schedule import (
    FR,
    GL,
    RF,
    SH,
    XOR,
    A,
    B,
    Block,
    ColMajor,
    Init,
    K,
    Kernel,
    M,
    MatMul,
    Move,
    N,
    Thread,
    Warp,
)

SIZES = (1024, 4096)
SMALL, DEPTHS = (16, 32, 64, 128, 256, 512), (64, 128, 256, 512, 1024, 2048, 4096)
TRIALS, LAUNCHES = 3, 32               # of each candidate of a small product
F16 = (("float16", "row"), ("float16", "col"), ("float32", "row"))


@dataclass(frozen=True)
class Scheduled(Experiment):
    """A product with float32 sums and result; ``layout`` has the orders of A and B, and D is column-major where both are."""

    order: str = "nt"
    versus: str = "cuBLAS"

    def __str__(self) -> str:
        return f"{super().__str__()}, against {self.versus}"

    @property
    def layout(self) -> str:  # type: ignore[override]
        return self.order

    @property
    def tolerance(self) -> float:
        return 5e-5

    def operands(self, lib: Lib, i: int) -> SimpleNamespace:
        def ordered(rows: int, columns: int, order: str, make: Callable[[int, int], Any]) -> Any:
            return make(rows, columns) if order == "n" else make(columns, rows).T

        def normal(seed: int) -> Callable[[int, int], Any]:
            return lambda rows, columns: lib.normal(rows, columns, self.kind, seed)

        last = "t" if self.order == "tt" else "n"
        outs = [ordered(self.m, self.n, last, lambda rows, columns: lib.empty(rows, columns, "f32")) for _ in range(2)]
        return SimpleNamespace(a=ordered(self.m, self.k, self.order[0], normal(2 * i)), out=outs[0],
                               b=ordered(self.k, self.n, self.order[1], normal(2 * i + 1)), peer_out=outs[1])

    def peers(self, lib: Lib, x: Any) -> Call:
        if self.order == "tt":                                # the transpose, of the same memory: all row-major
            return lambda: lib.matmul(x.b.T, x.a.T, x.peer_out.T)
        return lambda: lib.wide_matmul(x.a, x.b, x.peer_out)


# -- listings and decompositions -----------------------------------------------------------------------------------------

@functools.cache
def wmma_config() -> gemmkit.Config:
    """What the listing's ``.config()`` says."""
    return cuda_wmma_sample.config(*F16)


@functools.cache
def maxwell_config() -> gemmkit.Config:
    """The listing's tile, warps and thread's tile: of a warp's 64 x 32 each thread has four pieces of 4 x 4, as there."""
    layout = layouts.ColMajor("float32")
    return gemmkit.get_config(global_a_layout=layout, global_b_layout=layout, global_d_layout=layout,
                              operator=operators.FPUOp(64, 32, 1, 8, 4), block_shape=gemmkit.Tile(M=128, N=128, K=8),
                              warps_per_block=8, compute_warp=gemmkit.Tile(M=64, N=32, K=1), kernel="singlestage")


def in_shared_memory(place: str = "", warp: tuple[int, int] = (64, 32)) -> Any:
    """128 x 128 in steps of 64, sums straight to global memory. ``place`` says what follows the moves to shared memory."""
    def moved(step: Any) -> Any:
        step = step.pad(8) if ".pad" in place else step.swizzle(XOR) if ".swizzle" in place else step
        step = step.prefetch if ".prefetch" in place else step
        return step.through(RF) if ".through" in place else step

    warps = 128 // warp[0] * (128 // warp[1])
    a = Move.tile(128 // warps, 64).to(Warp).tile(4, 64).unroll.tile(1, 8).to(Thread).done
    b = Move.tile(64, 128 // warps).to(Warp).tile(64, 4).unroll.tile(8, 1).to(Thread).layout(ColMajor).done
    steps = (MatMul(M, N, K)(GL, GL, GL)(Kernel).tile(128, 128).to(Block)
        .accumulate_in(FR, Init.tile(*warp).to(Warp).tile(16, 16).unroll.done,
                       Move.tile(*warp).to(Warp).tile(16, 16).unroll.done)
        .split(64))
    steps = steps if ".prefetch" in place else steps.sync
    steps = moved(steps.move(A, SH, a))
    steps = moved((steps if ".prefetch" in place else steps.no_sync).move(B, SH, b))
    return (steps.tile(*warp).to(Warp).split(16).unroll
        .move(A, FR, Move.tile(16, 16).unroll.done)
        .move(B, FR, Move.tile(16, 16).unroll.done)
        .tile(16, 16).done)


def _staged(place: str) -> tuple[Any, None]:
    return in_shared_memory(place), None


STAGED = ("", ".pad(8)", ".swizzle(XOR)", ".pad(8).prefetch", ".swizzle(XOR).prefetch", ".swizzle(XOR).prefetch.through(RF)")
LARGE_WARPS = ".swizzle(XOR).prefetch, warps of 64 x 64"
RING, ALONE = "wgmma_ring: TMA, wgmma, clusters of two", "wgmma_ring without clusters"
SPEC = "a spec: TMA, mbarriers, wgmma"


def as_a_spec(a: Any, b: Any, out: Any) -> None:
    fused_specs.product()(a, b, out)


# By name: the schedule, and the Config with its tiles.
SCHEDULES: dict[str, Callable[[], tuple[Any, Callable[[], gemmkit.Config] | None]]] = {
    "1. scalar": lambda: (first.scalar, None),
    "2. registers": lambda: (first.registers, None),
    "3. shared": lambda: (first.shared_tile, None),
    "maxwell_optimized": lambda: (maxwell_optimized, maxwell_config),
    "maxwell, a step ahead": lambda: (multiply_adds((128, 128), 8, ahead=True, occupancy=2), maxwell_config),
    "cuda_wmma_sample": lambda: (cuda_wmma_sample, wmma_config),
    "wmma, a step ahead": lambda: (tensor_cores((128, 128), 64, (64, 32), ahead=True, occupancy=2), wmma_config),
    **{place or "plain": functools.partial(_staged, place) for place in STAGED},
    LARGE_WARPS: lambda: (in_shared_memory(LARGE_WARPS, (64, 64)), None),
    RING: lambda: (wgmma_ring(), None),
    ALONE: lambda: (wgmma_ring(cluster=1), None),
    SPEC: lambda: (as_a_spec, None),
}


@dataclass(frozen=True)
class Listing(Scheduled):
    """``work`` names the schedule; ``versus`` is "cuBLAS" or "the template"."""

    @property
    def mapping(self) -> str:  # type: ignore[override]
        return "schedule"

    @property
    def peers_kernel(self) -> str | None:  # type: ignore[override]
        return f"the template of {self.work}" if self.versus == "the template" else None

    def ours(self, lib: Lib, x: Any) -> Call:
        return functools.partial(SCHEDULES[self.work]()[0], x.a, x.b, out=x.out)

    def peers(self, lib: Lib, x: Any) -> Call:
        if self.versus == "cuBLAS":
            return super().peers(lib, x)
        configuration = SCHEDULES[self.work]()[1]
        assert configuration is not None
        return lambda: gemmkit.matmul(x.a, x.b, None, configuration(), out=x.peer_out)

    def templates(self) -> list[Any]:
        """What the peer launches, where that is the template."""
        from bench.prepare import HostArrays, recorded

        host = HostArrays()
        return recorded(self.peers(host, self.operands(host, 0))) if self.versus == "the template" else []

    def build_peer(self) -> None:
        for made in self.templates():
            made.launchable.entry()

    def title(self, lib: Lib) -> str:
        return "gemmkit's template, same tiles" if self.versus == "the template" else super().title(lib)


def named() -> Iterator[Listing]:
    """The first three decompositions."""
    for name in ("1. scalar", "2. registers", "3. shared"):
        yield Listing("decompositions", name, "f32", 1024, 1024, 1024, order="nn")


def listings() -> Iterator[Listing]:
    """Both listings, as printed and a step ahead."""
    for name, kind, order in (("maxwell_optimized", "f32", "tt"), ("maxwell, a step ahead", "f32", "tt"),
                              ("cuda_wmma_sample", "f16", "nt"), ("wmma, a step ahead", "f16", "nt")):
        for size in SIZES:
            yield Listing("listings", name, kind, size, size, size, 1.0, 1.1, order=order, versus="the template")
            yield Listing("listings", name, kind, size, size, size, order=order)


def staged() -> Iterator[Listing]:
    for name in ("cuda_wmma_sample", *(place or "plain" for place in STAGED), LARGE_WARPS, ALONE, RING, SPEC):
        for size in SIZES:
            yield Listing("staged", name, "f16", size, size, size, order="nt")


# -- fused kernels of specs (`examples.fused_specs`), at the sizes of Graphene's Figs. 11 to 14 ---------------------------

@dataclass(frozen=True)
class FusedMlp(Mlp):
    mapping = "specs"

    def ours(self, lib: Lib, x: Any) -> Call:
        kernel, weights = fused_specs.mlp(self.layers), x.weights.reshape(-1, self.n)
        return lambda: kernel(x.a, weights, x.biases, x.out)


@dataclass(frozen=True)
class FusedLstm(Composed):
    mapping = "specs"

    def ours(self, lib: Lib, x: Any) -> Call:
        rows, columns, stages = (128, 256, 4) if self.m * self.n >= 132 * 128 * 256 else (64, 128, 8)
        tiles = -(-self.m // rows) * -(-self.n // columns)
        kernel, bias = fused_specs.lstm(rows, columns, stages, blocks=min(132, tiles)), x.bias.reshape(1, -1)
        return lambda: kernel(x.a, x.b, x.h, x.u, bias, x.out)


@dataclass(frozen=True)
class FusedNorm(RowWise):
    mapping = "specs"

    def ours(self, lib: Lib, x: Any) -> Call:
        kernel = fused_specs.layernorm(self.n)
        return lambda: kernel(x.x, x.gamma, x.beta, x.out)


@dataclass(frozen=True)
class FusedAttention(Attention):
    mapping = "specs"

    def ours(self, lib: Lib, x: Any) -> Call:
        kernel = fused_specs.attention(self.n)
        q, k, v, out = (y.reshape(-1, self.n, self.k) for y in (x.q, x.k, x.v, x.out))
        return lambda: kernel(q, k, v, out)


def fused() -> Iterator[Experiment]:
    for layers in (2, 8, 20):
        yield FusedMlp("fused_specs", f"{layers} layers", "f16", 16384, 128, 128)
    for size in (1024, 4096):
        yield FusedLstm("fused_specs", "lstm, addmm", "f16", size, size, size)
        yield FusedNorm("fused_specs", "layernorm", "f16", 16384, size, 1)
        yield FusedNorm("fused_specs", "layernorm", "f16", 16384, size, 1, is_compiled=True)
    yield FusedAttention("fused_specs", "plain", "f16", 32 * 16 * 384, 384, 64, None, None, 32, 16)


# -- small matrices ----------------------------------------------------------------------------------------------------

# Block, k, warp of a schedule that a small product may take: the paper's 16 x 16 x 64 and larger ones.
CANDIDATES = (
    ((16, 16), 64, (16, 16)), ((16, 16), 256, (16, 16)), ((16, 16), 512, (16, 16)), ((32, 16), 128, (16, 16)),
    ((32, 32), 64, (16, 16)), ((32, 32), 128, (16, 16)), ((64, 32), 64, (16, 32)),
    ((64, 64), 64, (32, 32)), ((64, 64), 64, (16, 32)),
)  # fmt: skip


def candidates(m: int, n: int, k: int) -> dict[str, Any]:
    """By name: the schedules whose tiles divide the product (cp.async knows no edges)."""
    found = {}
    for block, depth, warp in CANDIDATES:
        if m % block[0] == n % block[1] == k % depth == 0:
            found[f"schedule {block[0]}x{block[1]}x{depth}, warp {warp[0]}x{warp[1]}"] = _schedule(block, depth, warp)
    return found


@functools.cache
def _schedule(block: tuple[int, int], depth: int, warp: tuple[int, int]) -> Any:
    return tensor_cores(block, depth, warp, ahead=True)


_fastest: dict[Any, tuple[str, dict[str, float]]] = {}


@dataclass(frozen=True)
class Small(Scheduled):
    """The fastest candidate, found when the first operands are there: ``mapping`` is its name."""

    @property
    def mapping(self) -> str:  # type: ignore[override]
        return _fastest[self][0] if self in _fastest else "fastest"

    def calls(self, x: Any) -> dict[str, Call]:
        """By name: `gemmkit.matmul`, and the schedules."""
        schedules = candidates(self.m, self.n, self.k)
        return {"gemmkit.matmul": lambda: gemmkit.matmul(x.a, x.b, out=x.out),
                **{name: functools.partial(schedule, x.a, x.b, out=x.out) for name, schedule in schedules.items()}}

    def ours(self, lib: Lib, x: Any) -> Call:
        calls = self.calls(x)
        if not hasattr(lib, "capture"):                       # host arrays: all of them are compiled ahead
            return lambda: [call() for call in calls.values()]
        if self not in _fastest:
            times = {name: _time(lib, call) for name, call in calls.items()}
            _fastest[self] = min(times, key=times.__getitem__), times
        return calls[_fastest[self][0]]


def _time(lib: Lib, call: Call) -> float:
    """Microseconds of a launch in a graph."""
    call()
    graph = lib.capture([call] * LAUNCHES)
    return min(float(lib.elapsed_us(graph)) for _ in range(TRIALS)) / LAUNCHES


def small() -> Iterator[Small]:
    """Table "small matrices"."""
    for size in SMALL:
        for k in DEPTHS:
            yield Small("small", "small", "f16", size, size, k)
