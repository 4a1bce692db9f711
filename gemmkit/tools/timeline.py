"""The pipeline as a timeline: which role waits for which barrier, from the events of an emulated launch.

The emulator has an order and no time. `Timeline` gives each event the least time that the barriers allow: a thread that
waits goes on when the last of those has come that its barrier counts, and lengths are assumed: a k-tile's products take
`TILE`, a copy from global memory is on its way for `LATENCY`, a tile's end takes `FINISH`, and what starts a copy
`ISSUE`. So the figure shows what waits for what, and how deep the ring is; not how long anything takes on a GPU.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np

from gemmkit.emulator import ExecutionTarget, computed_by
from gemmkit.emulator.errors import EmulatorError, figure, hue, legend, rect, table, text
from gemmkit.emulator.launch import Event, recorded
from gemmkit.epilogues import Default
from gemmkit.functions.einsum import as_launched, einsum
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import Config
from gemmkit.lang.errors import ConfigError
from gemmkit.layouts import ArrayLayout
from gemmkit.layouts.matrices import arrays
from gemmkit.plans.ahead import CompiledKernel, compiled_kernel
from gemmkit.plans.ahead import recorded as resolved
from gemmkit.plans.compiled import OPERANDS, Compiled
from gemmkit.plans.ozaki import OzakiProduct, why_plain
from gemmkit.plans.plan import Plan
from gemmkit.plans.problem import HOST
from gemmkit.runtime.arrays import describe
from gemmkit.runtime.device import DeviceInfo, assumed, target
from gemmkit.tuning.candidates import Candidate, modelled

# --------------------------------------------------------------------------------------------------
# What a report is about: a product's kernel, and a small product by the same mapping that the emulator has run.

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


def is_on_device(a: object, b: object, *others: object) -> bool:
    return describe(arrays(a, b, others)[0], "a").device != HOST


def of_call(a: Any, b: Any, c: object = None, conf: Any = None, out: object = None,
            keywords: dict[str, Any] | None = None, device: DeviceInfo | None = None) -> ExplainedKernel:
    """The kernel that `gemmkit.matmul` takes for a call; or `gemmkit.einsum`, if that is ``a``, for the spec ``b`` and the
    operands ``c`` and ``conf``. Arrays of NumPy are planned for ``device`` (None: the GPU that is here, or an H100). Nothing
    is compiled or launched, and no element is read or written.

    Raises what `gemmkit.matmul` raises, and ValueError for a product that needs no kernel.
    """
    keywords = keywords or {}
    if a is einsum:
        with nullcontext() if is_on_device(c, conf, out) else computed_by(ExecutionTarget()), assumed(device or target()):
            (a, b, out, keywords), copies = as_launched(b, c, conf, out=out, **keywords)
        moved = _copied({"AB"[n]: copy for n, copy in copies.items()})
        said = f"einsum: {moved} copied into another order first" if moved else "einsum"
        found = of_call(a, b, None, None, out, keywords, device)
        return dataclasses.replace(found, part_of=f"{said}: {found.part_of}" if found.part_of else said)
    if is_on_device(a, b, c, out):
        made = Plan(a, b, c, out, conf, keywords)._compiled
    else:
        device = target() if device is None else device
        made_of = resolved(lambda: matmul(a, b, c, conf, out=out, **keywords), device, zeros=False)
        if not made_of:
            raise ValueError("the product has no element, and no kernel is launched for it; give sizes of 1 or more")
        made = made_of[-1]                             # copies of operands come first
    if isinstance(made, OzakiProduct):
        return ExplainedKernel(made.products, made.problem.device, made.description)
    if made.problem.is_auto:
        why = why_plain(made.problem) if made.problem.moduli else "of other dtypes there is nothing to choose"
        return ExplainedKernel(made, made.problem.device, f"precision='auto': the {made.problem.a.dtype} product; {why}")
    moved = _copied({OPERANDS[n].upper(): copy for n, copy in made.copies.items()})
    said = f"a product: {moved} copied first into rows that begin at multiples of 16 bytes, for TMA" if moved else ""
    return ExplainedKernel(made, made.problem.device, said)


def _copied(copies: dict[str, Any]) -> str:
    """Which operands are copied, and how large these copies are."""
    return " and ".join(f"{name} ({copy.nbytes / 2**20:,.1f} MiB)" for name, copy in copies.items())


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
    "swap_ab": ("the transpose D^T = B^T A^T is computed: A has few rows, or B has to be rewritten or dequantised",
                "gemmkit/tuning/choose.py"),
    "batch_invariant": ("mapping='batch_invariant': all of K in one share, by the instruction of batches of every size",
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


# --------------------------------------------------------------------------------------------------

TILE, LATENCY, FINISH, ISSUE = 1.0, 2.0, 1.0, 0.12
MOST = 6  # roles that are drawn
UNIT = 34  # pixels of a k-tile's products
LONGEST = 3200  # pixels of a figure


class Bar(NamedTuple):
    """What a ``role`` does from ``start`` to ``end``: "wait", "issue", "copy", "multiply", "finish". ``stage`` is -1 where
    it is none's; ``what`` says more."""

    role: str
    kind: str
    start: float
    end: float
    stage: int = -1
    what: str = ""


@dataclass
class Timeline:
    """The bars of one block of a run."""

    run: Run
    block: int = 0
    bars: list[Bar] = field(default_factory=list)

    def __post_init__(self) -> None:
        spec = self.run.spec
        self._is_hopper = hasattr(spec, "producer_warps")
        self._clock: dict[int, float] = defaultdict(float)  # of a thread
        self._ends: dict[Any, float] = defaultdict(float)  # of a barrier's phase, or of an opening
        self._landed: dict[tuple[int, int], list[float]] = defaultdict(list)  # when a thread's copies into a stage are there
        self._last: dict[int, tuple[str, int]] = {}  # what a thread did last
        self._multiplied: dict[int, int] = {}  # the stage that a thread is at
        self._finished: set[int] = set()  # threads that have begun to finish their tile
        self._started: dict[Any, int] = {}  # of a phase that TMA completes: how many bytes
        self._bar_of: dict[Any, Bar] = {}
        for event in self.run.events:
            if event.block == self.block:
                self._take(event)
        self.bars += self._bar_of.values()
        self.bars.sort(key=lambda bar: (bar.start, bar.end))

    @property
    def end(self) -> float:
        return max((bar.end for bar in self.bars), default=0.0)

    @property
    def roles(self) -> list[str]:
        """In the order from producers to consumers; copies on their way stand between."""
        found = dict.fromkeys(bar.role for bar in self.bars)
        return sorted(
            found,
            key=lambda name: ((name.startswith("consumer") or name.startswith("warp ")) + 0.5 * ("copies" in name), name),
        )

    def role(self, thread: int) -> str:
        spec = self.run.spec
        if not self._is_hopper:
            return f"warp {thread // 32}"
        group = thread // 128
        if group < spec.producers:
            return "producer" if spec.producers == 1 else f"producer {group}"
        return f"consumer {group - spec.producers}"

    def is_drawn(self, thread: int) -> bool:
        """Of each role one thread is drawn; all are followed."""
        return thread % (128 if self._is_hopper else 32) == 0

    def barrier(self, place: Any) -> tuple[str, int]:
        """The name of an mbarrier, and its stage."""
        pipeline = self.run.spec.pipeline
        at, stages = (place[1] - pipeline.offset) // 8, pipeline.stages
        if 0 <= at < pipeline.nbytes // 8:
            return ("full", "empty", "raw")[at // stages], at % stages
        return f"mbarrier at byte {place[1]}", -1

    # -- events -----------------------------------------------------------------------------------------------------------

    def _take(self, event: Event) -> None:
        taken = getattr(self, f"_on_{event.kind}", None)
        if taken is not None:
            taken(event, event.thread)

    def _draw(self, thread: int, kind: str, length: float, stage: int = -1, what: str = "", once: bool = False) -> None:
        """Advance a thread, with a bar; with ``once`` what it does on end is one."""
        same = once and self._last.get(thread) == (kind, stage)
        self._last[thread] = kind, stage
        if same:
            return
        start = self._clock[thread]
        self._clock[thread] = start + length
        if self.is_drawn(thread) and length:
            self.bars.append(Bar(self.role(thread), kind, start, start + length, stage, what))

    def _until(self, thread: int, time: float, name: str, stage: int = -1) -> None:
        if time > self._clock[thread] + 1e-9:
            self._draw(thread, "wait", time - self._clock[thread], stage, name)
        self._last.pop(thread, None)
        if self.run.spec.stages == 1:
            self._multiplied.pop(thread, None)

    def _on_waited(self, event: Event, thread: int) -> None:
        name, stage = self.barrier(event.place)
        said = (
            f"waits for {name}[{stage}], phase {event.phase}" if stage >= 0 else f"waits for the {name}, phase {event.phase}"
        )
        self._until(thread, self._ends[event.place, event.phase], said, stage)

    def _on_arrive(self, event: Event, thread: int) -> None:
        key = event.place, event.phase
        self._ends[key] = max(self._ends[key], self._clock[thread])

    def _on_tma(self, event: Event, thread: int) -> None:
        """Bytes that TMA brings for a barrier: the thread that is running started them."""
        name, stage = self.barrier(event.place)
        self._draw(thread, "issue", ISSUE, stage, f"starts TMA copies into stage {stage}", once=True)
        start = self._clock[thread] - ISSUE
        key = event.place, event.phase
        self._ends[key] = max(self._ends[key], start + ISSUE + LATENCY)
        self._started[key] = self._started.get(key, 0) + event.size
        bar = Bar(
            "TMA copies",
            "copy",
            start + ISSUE,
            start + ISSUE + LATENCY,
            stage,
            f"{self._started[key]:,} bytes on their way into stage {stage}; they complete {name}[{stage}], phase "
            f"{event.phase}",
        )
        self._bar_of[key] = self._bar_of.get(key, bar)._replace(what=bar.what, end=bar.end)

    def _on_operand(self, event: Event, thread: int) -> None:
        stage = int(min(event.place.ravel())) // self.run.spec.stage_bytes
        self._multiply(thread, stage)

    def _on_awaited(self, event: Event, thread: int) -> None:
        leader = thread - thread % 128
        self._clock[thread] = max(self._clock[thread], self._clock[leader])

    def _on_copy(self, event: Event, thread: int) -> None:
        stage = self._stage(event)
        if stage < 0:
            return
        known = self._last.get(thread)
        self._draw(thread, "issue", ISSUE, stage, f"starts its cp.async copies into stage {stage}", once=True)
        if known != ("issue", stage):
            self._landed[thread, stage].append(self._clock[thread] + LATENCY)
            if thread == 0:
                self.bars.append(
                    Bar(
                        "cp.async copies",
                        "copy",
                        self._clock[thread],
                        self._clock[thread] + LATENCY,
                        stage,
                        f"warp 0's bytes on their way into stage {stage}",
                    )
                )

    def _on_landed(self, event: Event, thread: int) -> None:
        stage = self._stage(event)
        if stage >= 0 and self._landed[thread, stage]:
            self._until(thread, self._landed[thread, stage].pop(0), f"waits for its copies into stage {stage}", stage)

    def _on_read(self, event: Event, thread: int) -> None:
        stage = self._stage(event)
        if stage >= 0:
            self._multiply(thread, stage)
        else:
            self._finish(thread)

    def _on_write(self, event: Event, thread: int) -> None:
        stage = self._stage(event)
        if stage >= 0:
            self._draw(thread, "issue", ISSUE, stage, f"writes its part of stage {stage}", once=True)
        elif "initialise" not in event.way:
            self._finish(thread)

    def _on_store(self, event: Event, thread: int) -> None:
        self._finish(thread)

    _on_stored = _on_store

    def _multiply(self, thread: int, stage: int) -> None:
        self._finished.discard(thread)
        if self._multiplied.get(thread) != stage:
            self._multiplied[thread] = stage
            self._draw(thread, "multiply", TILE, stage, f"multiplies stage {stage}")

    def _finish(self, thread: int) -> None:
        """The end of a tile, once for each."""
        if thread not in self._finished:
            self._finished.add(thread)
            self._draw(thread, "finish", FINISH, -1, "finishes its tile: epilogue, D to shared memory and on")

    def _on_met(self, event: Event, thread: int) -> None:
        key = id(event.place[1])
        self._ends[key] = max(self._ends[key], self._clock[thread])

    def _on_left(self, event: Event, thread: int) -> None:
        self._until(thread, self._ends[id(event.place[1])], f"waits for named barrier {event.place[0]}")

    def _stage(self, event: Event) -> int:
        """The stage of A's or B's tiles that an access is to; -1: none's."""
        spec = self.run.spec
        if "run" not in event.way:
            return -1
        stage, at = divmod(int(event.place), spec.stage_bytes)
        inside = any(0 <= at - getattr(spec, name).offset < getattr(spec, name).nbytes for name in "ab")
        return stage if stage < spec.stages and inside else -1


# -- the figure -----------------------------------------------------------------------------------------------------------


def drawn(run: Run) -> str:
    """The figure, and how long each role waits for what."""
    found = Timeline(run)
    stages = run.spec.stages
    roles = [name for name in found.roles if not name.startswith("warp ") or int(name[5:]) < MOST - 2]
    left, line, top = 118, 30, 8
    unit = min(UNIT, LONGEST / max(found.end, 1))
    lanes = {name: _lanes([bar for bar in found.bars if bar.role == name]) for name in roles}
    parts, y = [], float(top)
    for name in roles:
        deep = max(lanes[name].values(), default=0) + 1
        high = line if deep == 1 else 15 * deep
        parts += [
            rect(left, y, found.end * unit, high, kind="frame", fill="var(--panel)"),
            text(left - 8, y + high / 2 + 4, name, "end"),
        ]
        each = high / deep
        for bar, lane in lanes[name].items():
            parts.append(
                _bar(
                    bar,
                    left + bar.start * unit,
                    y + lane * each,
                    max((bar.end - bar.start) * unit, 1.5),
                    each - (deep > 1),
                    stages,
                )
            )
        y += high + 7
    for n in range(0, int(found.end) + 1, max(1, int(found.end) // 16)):
        parts.append(text(left + n * unit, y + 10, str(n), "middle", "soft"))
    waits: dict[tuple[str, str], float] = defaultdict(float)
    for bar in found.bars:
        if bar.kind == "wait":
            waits[
                bar.role,
                bar.what.partition("[")[0].partition(", phase")[0].partition(" into stage")[0].replace("waits for ", ""),
            ] += bar.end - bar.start
    hidden = {bar.role for bar in found.bars} - set(roles)
    more = f" {len(hidden)} more warps do alike." if hidden else ""
    caption = (
        f"{_of_what(run)}; the axis counts k-tiles' products. The waits are those "
        f"of the run. Lengths are assumed: a copy takes {LATENCY:g} k-tiles, the end of a tile {FINISH:g}.{more}"
    )
    keys = [(f"stage {n}", hue(n, stages)) for n in range(stages)]
    hatch = (
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<path d="M0 0V6" stroke="var(--soft)" stroke-width="1.5"/></pattern></defs>'
    )
    shown = table(
        ("role", "waits for", "k-tiles"),
        [(role, what, round(time, 2)) for (role, what), time in waits.items() if role in roles],
    )
    said = (
        "<p class=soft>Bars: a stage's colour full height: multiplied; dark: a copy is started; striped: waits; "
        "grey: the tile's end. Hover over a bar for its barrier and phase.</p>"
    )
    return legend(keys) + figure(left + found.end * unit + 10, y + 18, [hatch, *parts], caption, wide=True) + said + shown


def _of_what(run: Run) -> str:
    """What part of the product that was asked about a figure shows."""
    depth, shown = run.spec.block.size.K, " x ".join(map(str, run.sizes))
    if run.asked is None:
        return f"A block of {shown}, emulated"
    steps, drawn = (-(-size[2] // depth) for size in (run.asked, run.sizes))
    which = f"all of its {steps} k-tiles"
    if steps > drawn:
        which = f"the first {drawn} of its {steps} k-tiles, which the others repeat"
    return f"A block's part of the product, {shown}, emulated: {which}"


def _bar(bar: Bar, x: float, y: float, wide: float, high: float, stages: int) -> str:
    tip = f"{bar.role} {bar.what}\nfrom {bar.start:.2f} to {bar.end:.2f} k-tiles"
    colour = hue(bar.stage, stages) if bar.stage >= 0 else None
    if bar.kind == "wait":
        return rect(x, y, wide, high, tip, kind="wait", fill="url(#hatch)")
    if bar.kind == "finish" or colour is None:
        return rect(x, y, wide, high, tip, kind="edge", fill="var(--soft)")
    drawn = rect(x, y, wide, high, tip, f"s{bar.stage}", colour, "k edge" if bar.kind == "issue" else "h edge")
    return drawn + (text(x + wide / 2, y + high / 2 + 4, str(bar.stage), "middle") if wide >= 14 else "")


def _lanes(bars: list[Bar]) -> dict[Bar, int]:
    """Bars that overlap, one below the other: of copies on their way several are."""
    ends: list[float] = []
    found: dict[Bar, int] = {}
    for bar in bars:
        lane = next((n for n, end in enumerate(ends) if end <= bar.start + 1e-9), len(ends))
        ends[lane : lane + 1] = [bar.end]
        found[bar] = lane
    return found
