"""The pipeline as a timeline: which role waits for which barrier, from the events of an emulated launch.

The emulator has an order and no time. `Timeline` gives each event the least time that the barriers allow: a thread that
waits goes on when the last of those has come that its barrier counts, and lengths are assumed: a k-tile's products take
`TILE`, a copy from global memory is on its way for `LATENCY`, a tile's end takes `FINISH`, and what starts a copy
`ISSUE`. So the figure shows what waits for what, and how deep the ring is; not how long anything takes on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gemmkit.emulator.errors import figure, hue, legend, rect, table, text
from gemmkit.emulator.recording import Event
from gemmkit.tools.subject import Run

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
