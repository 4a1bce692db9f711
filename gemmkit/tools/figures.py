"""The tile plan drawn: D's grid of blocks, a block's warps with their fragments, and what a thread holds of a fragment."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

from gemmkit.emulator.errors import figure, hue, legend, rect, table, text
from gemmkit.emulator.launch import Event
from gemmkit.emulator.memory import BANKS, WORD
from gemmkit.operators import MMAOp, Operator, WGMMAOp, WMMAOp
from gemmkit.ptx.mma import FragmentMap
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tiling import parallelise
from gemmkit.tools.timeline import ExplainedKernel, Run, choice_of, microseconds_text

SIDE = 300  # pixels of a figure's longer side
MOST_BLOCKS = 4096  # of D's grid: more are told by their number alone
MOST_WAVES = 6  # that the legend names
WINDOW = 32, 32  # rows and columns of a fragment that are drawn


def plan_drawn(subject: ExplainedKernel) -> str:
    """Three figures, from the grid to a lane."""
    operator = subject.spec.operator
    maps = [
        (name, found)
        for name, found in (("D", operator.map_c), ("A", operator.map_a), ("B", operator.map_b))
        if found is not None and _is_held(subject.spec, name)
    ]
    drawn = "".join(fragment(name, found) for name, found in maps)
    missing = (
        ""
        if operator.map_c is not None
        else (
            f"<p>{escape(type(operator).__name__)} does not say which elements a lane "
            "holds (PTX leaves fragments of wmma unspecified).</p>"
        )
    )
    return (
        f"<div class=row>{grid(subject)}{block(subject)}</div><h3>The threads' elements of a fragment</h3>{missing}<div "
        f"class=row>{drawn}</div>"
    )


def _is_held(spec: Any, name: str) -> bool:
    """Whether threads hold fragments of an operand: the tensor cores of wgmma read A and B from shared memory themselves."""
    if name == "D" or not hasattr(spec.operator, "register_instruction"):
        return True
    return name == "A" and type(spec.mainloop).__name__ == "RegisterMainloop"


# -- the grid -------------------------------------------------------------------------------------------------------------


def grid(subject: ExplainedKernel) -> str:
    """D as blocks, coloured by the order in which they are computed, those of a first wave set off."""
    spec, (M, N, _) = subject.spec, subject.sizes
    size, cluster = spec.block.size, spec.cluster
    rows, columns = math.ceil(M / (size.M * cluster.m)), math.ceil(N / (size.N * cluster.n))
    scale = SIDE / max(M, N)
    keys = ""
    parts = [rect(30, 16, max(N * scale, 4), max(M * scale, 4), kind="frame", fill="var(--panel)")]
    caption = f"D in {rows * cluster.m} x {columns * cluster.n} blocks of {size.M} x {size.N}" + (
        f", in clusters of {cluster.m} x {cluster.n}" if cluster.size > 1 else ""
    )
    if rows * columns <= MOST_BLOCKS:
        order = {spec.scheduler.order.block(n, rows, columns): n for n in range(spec.scheduler.order.count(rows, columns))}
        at_once = max(1, subject.device.sm_count // max(cluster.size, 1))
        for (m, n), number in order.items():
            x, y = 30 + n * size.N * cluster.n * scale, 16 + m * size.M * cluster.m * scale
            wide = min(size.N * cluster.n, N - n * size.N * cluster.n) * scale
            high = min(size.M * cluster.m, M - m * size.M * cluster.m) * scale
            place = (
                f"rows {m * size.M * cluster.m} to {min(M, (m + 1) * size.M * cluster.m) - 1}, columns "
                f"{n * size.N * cluster.n} to {min(N, (n + 1) * size.N * cluster.n) - 1}"
            )
            wave = number // at_once
            parts.append(
                rect(
                    x,
                    y,
                    max(wide, 1),
                    max(high, 1),
                    f"tile {number} in order (wave {wave + 1} at one a multiprocessor)\n{place}",
                    f"w{wave}",
                    hue(wave, max(4, math.ceil(len(order) / at_once))),
                )
            )
            if min(wide, high) >= 22:
                parts.append(text(x + wide / 2, y + high / 2 + 4, str(number), "middle"))
        waves = math.ceil(len(order) / at_once)
        keys = legend([(_wave(n, at_once, len(order)), hue(n, max(4, waves))) for n in range(min(waves, MOST_WAVES))])
        more = f" The first {MOST_WAVES} of {waves} waves are named." if waves > MOST_WAVES else ""
        caption += (
            f". {subject.device.sm_count} multiprocessors compute a wave at one time, in the order "
            f"{spec.scheduler.order!r}; hover over a tile for its number.{more}"
        )
    else:
        caption += f"; more than {MOST_BLOCKS:,} are not drawn one by one. Order: {spec.scheduler.order!r}."
        parts.append(
            rect(30, 16, max(size.N * cluster.n * scale, 2), max(size.M * cluster.m * scale, 2), "the first tile", None, 210)
        )
    parts += [text(30, 11, f"N = {N}", kind="soft"), _upright(22, 16 + M * scale / 2, f"M = {M}")]
    return f"<div>{keys}{figure(44 + max(N * scale, 4), 24 + max(M * scale, 4), parts, caption)}</div>"


def _wave(n: int, at_once: int, count: int) -> str:
    first, last = n * at_once, min(count, (n + 1) * at_once) - 1
    return f"wave {n + 1}: tile{f's {first} to {last}' if last > first else f' {first}'}"


# -- the block ------------------------------------------------------------------------------------------------------------


def warp_tiles(spec: Any) -> Iterator[tuple[int, int, int, int, int]]:
    """(warp, first row, first column, rows, columns) of each warp's part of a block's tile of D.

    A warpgroup of Hopper's has 64 rows of each fragment, of which a warp has 16: those are told apart in `fragment`.
    """
    tile = spec.compute_warp.MN
    if hasattr(spec, "consumers"):  # warpgroups share the rows, or have tiles of their own
        for group in range(spec.consumers):
            yield group, group * spec.first_rows, 0, tile.size.M, spec.block.size.N
        return
    for warp in range(spec.warps):
        place = parallelise(spec.block.MN, tile, warp, spec.warps)[0].index
        yield warp, place[0], place[1], tile.size.M, tile.size.N


def block(subject: ExplainedKernel) -> str:
    """A block's tile of D with its warps, A's tile to the left and B's above."""
    spec = subject.spec
    size = spec.block.size
    scale = SIDE / max(size.M + size.K, size.N + size.K)
    k, gap = max(size.K * scale, 18), 8
    left, top = 48 + k + gap, 26 + k + gap
    of_groups = hasattr(spec, "consumers")
    worker = "warpgroup" if of_groups else "warp"
    parts = [
        text(0, top + size.M * scale + 14, f"A {size.M} x {size.K}", kind="soft"),
        text(left, 16, f"B {size.K} x {size.N}", kind="soft"),
    ]
    tiles = list(warp_tiles(spec))
    op = spec.operation.size
    seen: set[tuple[str, int]] = set()
    for number, m, n, rows, columns in tiles:
        colour = hue(number, len(tiles))
        if of_groups:
            first = 32 * spec.producer_warps + 128 * number
            who = f"consumer {number} (warps {first // 32} to {first // 32 + 3}, threads {first} to {first + 127})"
        else:
            who = f"warp {number} (threads {32 * number} to {32 * number + 31})"
        tip = (
            f"{who}\nrows {m} to {m + rows - 1}, columns {n} to {n + columns - 1} of the block's tile\n"
            f"{rows // op.M} x {columns // op.N} fragments of {op.M} x {op.N}, {size.K // op.K} steps of {op.K} along K"
        )
        if of_groups and spec.is_pingpong:
            tip += "\nping-pong: each consumer has whole tiles of its own, in turn"
        if not (of_groups and spec.is_pingpong and number):
            for i in range(rows // op.M):
                for j in range(columns // op.N):
                    parts.append(
                        rect(
                            left + (n + j * op.N) * scale,
                            top + (m + i * op.M) * scale,
                            op.N * scale,
                            op.M * scale,
                            tip,
                            f"{worker}{number}",
                            colour,
                        )
                    )
            if min(rows, columns) * scale >= 16:
                parts.append(
                    text(
                        left + (n + columns / 2) * scale,
                        top + (m + rows / 2) * scale + 4,
                        "both" if of_groups and spec.is_pingpong else f"{number}",
                        "middle",
                    )
                )
        for name, at, x, y, wide, high in (
            ("A", m, 48, top + m * scale, k, rows * scale),
            ("B", n, left + n * scale, 26, columns * scale, k),
        ):
            if (name, at) not in seen:
                seen.add((name, at))
                first_of = m if name == "A" else n
                users = [other for other, *place in tiles if place[name == "B"] == first_of]
                tip = (
                    f"{name}'s tile: {'rows' if name == 'A' else 'columns'} {first_of} to "
                    f"{first_of + (rows if name == 'A' else columns) - 1}"
                    f"\nread by {worker}{'s' if len(users) > 1 else ''} {', '.join(map(str, users))}"
                )
                parts.append(rect(x, y, wide, high, tip, None, 40 if name == "A" else 160))
    parts.append(
        text(left, top + size.M * scale + 14, f"D {size.M} x {size.N}: {worker}s by number ({len(tiles)})", kind="soft")
    )
    stages = f", {spec.stages} stages" if hasattr(spec, "stages") else ""
    producers = f" (and {spec.producer_warps} warps that fetch)" if of_groups else ""
    return figure(
        left + size.N * scale + 4,
        top + size.M * scale + 20,
        parts,
        f"A block's tiles: {size.M} x {size.N} of D, {size.K} deep{stages}; {spec.warps} warps multiply{producers}. "
        "Lines separate fragments; hover over a part for the warp that computes it.",
    )


# -- the fragment ---------------------------------------------------------------------------------------------------------


def fragment(name: str, found: FragmentMap) -> str:
    """Which thread holds each element: neighbours along a row that one thread holds are one rectangle."""
    rows, columns = min(found.rows, WINDOW[0]), min(found.columns, WINDOW[1])
    held: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for thread in range(found.threads):
        for value in range(found.values):
            place = found.row(thread, value), found.column(thread, value)
            if place[0] < rows and place[1] < columns:
                held.setdefault(place, []).append((thread, value))
    wide, high = min(20, 640 / columns), min(13, 420 / rows)
    parts = [text(0, 11, f"{name}: {found.rows} x {found.columns}", kind="soft")]
    runs: set[int] = set()  # how many columns a rectangle is
    for m in range(rows):
        n = 0
        while n < columns:
            of = held.get((m, n), [])
            end = n + 1
            while end < columns and [t for t, _ in held.get((m, end), [])] == [t for t, _ in of]:
                end += 1
            runs.add(end - n)
            owners = ", ".join(str(t) for t, _ in of) or "none"
            values = ", ".join(str(v) for at in range(n, end) for _, v in held.get((m, at), [])[:1])
            lane = of[0][0] if of else 0
            tip = (
                f"row {m}, column{'s' if end > n + 1 else ''} {n}{f' to {end - 1}' if end > n + 1 else ''}: "
                f"thread{'s' if len(of) > 1 else ''} {owners}, value{'s' if end > n + 1 else ''} {values} of {found.values}"
            )
            parts.append(rect(n * wide, 16 + m * high, (end - n) * wide, high, tip, f"t{lane}", hue(lane % 32, 32)))
            if high >= 11 and (end - n) * wide >= 18 and len(of) == 1:
                parts.append(text((n + end) / 2 * wide, 16 + m * high + high - 3, f"{lane}", "middle", size=9))
            n = end
    shared = any(len(of) > 1 for of in held.values())
    part = (
        ""
        if (rows, columns) == (found.rows, found.columns)
        else f" Shown are its first {rows} row{'s' * (rows > 1)} and {columns} column{'s' * (columns > 1)}."
    )
    across = f"{runs.pop()} neighbouring columns" if len(runs) == 1 and max(runs) > 1 else "one column" if runs == {1} else (
        "neighbouring columns of one thread")
    threads = min(found.threads, 1 + max(t for of in held.values() for t, _ in of))
    lanes = sorted({*range(0, min(32, threads), 4)})
    caption = (
        f"{found.threads} threads hold {found.values} values each of {name}'s {found.rows} x {found.columns}. A rectangle "
        f"is {across}; its number is the thread{' (of several, the first)' if shared else ''}. Hover over one to "
        f"light all that its thread holds.{part}"
    )
    keys = legend([(f"lane {n}", hue(n, 32)) for n in lanes])
    return f"<div>{keys}{figure(max(columns * wide, 110), 18 + rows * high, parts, caption)}</div>"


def _upright(x: float, y: float, said: str) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="soft" text-anchor="middle" transform="rotate(-90 {x:g} '
        f'{y:g})">{escape(said)}</text>'
    )


# --------------------------------------------------------------------------------------------------
# Conflicts of shared memory's banks, counted from the addresses of a recorded launch of `multistage` or
# `warp_specialised`.
#
# Shared memory has 32 banks of 4 bytes and serves 128 bytes of a warp at a time: accesses of 4 bytes all lanes together,
# of 8 bytes half a warp, of 16 bytes (and each matrix of ``ldmatrix``) eight lanes. Lanes that read one word share it.
# What falls on a bank twice takes another pass. The tensor cores' reads (wgmma) are counted by core matrices: 8 lines of
# 16 bytes each.

WARP, SERVED = 32, 128


class Lane(NamedTuple):
    """What a lane addresses."""

    lane: int
    address: int
    nbytes: int


class AccessRow(NamedTuple):
    """An operand's accesses of one ``kind`` (read, write, copy: a warp's; wgmma: a core matrix): how many, and how many
    passes too many they take: ``extra`` in the kernel's shared layout, ``without`` in the plain layout."""

    operand: str
    kind: str
    accesses: int
    extra: int
    without: int


def extra_passes(lanes: Iterable[Lane]) -> int:
    """How many passes more than needed one access of a warp takes.

    >>> extra_passes(Lane(n, 16 * n, 16) for n in range(32)), extra_passes(Lane(n, 128 * n, 4) for n in range(32))
    (0, 31)
    """
    given = list(lanes)
    together = WARP if max(one.nbytes for one in given) <= WORD else SERVED // max(one.nbytes for one in given)
    passes = 0
    for first in range(0, WARP, together):
        words: dict[int, set[int]] = defaultdict(set)
        for lane, at, width in given:
            if first <= lane < first + together:
                for word in range(at // WORD, -(-(at + width) // WORD)):
                    words[word % BANKS].add(word)
        passes += max((len(rows) for rows in words.values()), default=1) - 1
    return passes


def count(events: list[Event], spec: Any) -> list[AccessRow]:
    """The accesses of A's and B's stages, in the order A, B. (TMA writes whole lines, and is left out.)"""
    groups: dict[Any, list[Lane]] = defaultdict(list)
    numbers: dict[Any, int] = defaultdict(int)
    for number, event in enumerate(events):
        name = _operand(event, spec)
        if name and event.kind == "operand":
            for n, matrix in enumerate(core_matrices(event.place)):
                lanes = [Lane(lane, int(address), event.size) for lane, address in enumerate(matrix)]
                groups[event.block, 0, "wgmma", number, name, n] = lanes
        elif name:
            key = event.block, event.thread // WARP, event.kind, event.site, name
            numbers[key, event.thread] += 1
            groups[(*key, numbers[key, event.thread])].append(Lane(event.thread % WARP, int(event.place), event.size))
    tables = {name: _without(getattr(spec, name)) for name in "ab"}
    found: dict[tuple[str, str], list[int]] = {}
    for (_, _, kind, _, name, _), lanes in groups.items():
        row = found.setdefault((name, kind), [0, 0, 0])
        row[0] += 1
        row[1] += extra_passes(lanes)
        row[2] += extra_passes(Lane(one.lane, _moved(one.address, getattr(spec, name), tables[name], spec), one.nbytes)
                               for one in lanes)
    return [AccessRow(name.upper(), kind, *numbers) for (name, kind), numbers in sorted(found.items())]


def core_matrices(addresses: np.ndarray) -> np.ndarray:
    """The addresses of an operand of wgmma (`Descriptor.addresses`), by core matrices: [n, line]."""
    if addresses.shape[1] == 2:                        # K-major: [line, chunk]
        return addresses.reshape(-1, 8, 2).transpose(0, 2, 1).reshape(-1, 8)
    return addresses.reshape(-1, 8)                    # MN-major: [chunk, k]


def _operand(event: Event, spec: Any) -> str:
    """Whose stage an event is in: "a", "b", or "" where it is neither's."""
    if event.kind not in ("read", "copy", "write", "operand") or "run" not in event.way:
        return ""
    address = int(np.min(event.place))
    if "warp_specialised" in event.way and address >= spec.stages * spec.stage_bytes:      # D's, behind the ring
        return ""
    at = address % spec.stage_bytes
    return next((name for name in "ab" if 0 <= at - getattr(spec, name).offset < getattr(spec, name).nbytes), "")


def _without(operand: Any) -> dict[int, int]:
    """From where an element lies in a tile to where it would lie in the plain layout, in elements."""
    layout, plain, size = operand.shared, getattr(operand.shared, "layout", operand.shared), operand.tile.size
    rows, columns = (part.ravel() for part in np.indices(operand.tile.extents))
    places = layout.position((rows, columns), layout.leading(size)), plain.position((rows, columns), plain.leading(size))
    return dict(zip(*(np.asarray(place).tolist() for place in places)))


def _moved(address: int, operand: Any, table: dict[int, int], spec: Any) -> int:
    stage, at = divmod(address, spec.stage_bytes)
    element, rest = divmod(at - operand.offset, operand.shared.dtype.itemsize)
    return int(stage * spec.stage_bytes + operand.offset + table[element] * operand.shared.dtype.itemsize + rest)


# --------------------------------------------------------------------------------------------------
# Shared-memory layouts drawn: a tile's elements coloured by the bank they lie in, in the kernel's layout and in a plain
# one.

LINES, WORDS = 16, 32  # of a tile's contiguous axis: how many lines, and words of each


def drawn_accesses(run: Run) -> str:
    """The tiles of A and B with and without their layout, and conflicts counted from the run."""
    rows = count(run.events, run.spec)
    parts = "".join(
        f"<h3>{name.upper()}'s tile</h3><div class=row>{_pair(getattr(run.spec, name), run.spec)}</div>" for name in "ab"
    )
    said = (
        "A square is a word of 4 bytes, and its colour is the bank that it lies in. Lanes that read a column of squares of "
        "one colour wait for each other. Hover over a square to light all words of its bank."
    )
    return counted(rows) + f"<p class=soft>{said}</p>" + parts


def counted(rows: list[AccessRow]) -> str:
    kinds = {
        "read": "reads of a warp",
        "write": "writes of a warp",
        "copy": "cp.async of a warp",
        "wgmma": "core matrices (wgmma)",
    }
    return table(
        ("operand", "access", "how many", "conflicts (extra passes)", "without swizzle or padding"),
        [(row.operand, kinds[row.kind], row.accesses, row.extra, row.without) for row in rows],
    )


def _pair(operand: Any, spec: Any) -> str:
    layout = operand.shared
    plain = getattr(layout, "layout", layout)
    found = _window(operand, layout)
    if plain == layout or plain is layout:
        return found
    return found + _window(operand, plain)


def _window(operand: Any, layout: Any) -> str:
    """Lines along the axis that is contiguous, in words of 4 bytes: the hue of a word is its bank."""
    size, item = operand.tile.size, int(operand.shared.dtype.itemsize)
    axis = 1 if (getattr(layout, "axis", None) or getattr(layout, "vector_axis", 1) or 0) == 1 else 0
    extents = operand.tile.extents
    lines, along = extents[1 - axis], extents[axis]
    each = max(1, WORD // item)  # elements of a word
    words = min(WORDS, -(-along // each))
    place = banks_of(layout, size, item)
    wide, high = 13, 13
    names = ("row", "column") if axis == 1 else ("column", "row")
    parts = [text(0, 11, f"{layout!r}", kind="soft")]
    for line in range(min(lines, LINES)):
        for word in range(words):
            element = word * each
            address, bank = place((line, element) if axis == 1 else (element, line))
            tip = (
                f"{names[0]} {line}, {names[1]}{'s' if each > 1 else ''} "
                f"{element}{f' to {element + each - 1}' if each > 1 else ''}\n"
                f"byte {address} of the tile, bank {bank}"
            )
            parts.append(rect(word * wide, 17 + line * high, wide, high, tip, f"b{bank}", hue(bank, BANKS)))
    shown = min(lines, LINES), words * each
    said = f"{names[0]}s downwards, {names[1]}s to the right: {shown[0]} of {lines}, {shown[1]} of {along}"
    return figure(words * wide, 20 + shown[0] * high, parts, said)


def banks_of(layout: Any, size: Any, item: int) -> Any:
    """(row, column) of a tile -> (its byte, its bank)."""
    leading = layout.leading(size)

    def place(element: tuple[int, int]) -> tuple[int, int]:
        at = int(np.asarray(layout.position((np.int64(element[0]), np.int64(element[1])), leading))) * item
        return at, at // WORD % BANKS

    return place


# --------------------------------------------------------------------------------------------------
# A roofline: what bounds a product by its operations and bytes, and where its modelled time stands.
#
# Rates are NVIDIA's, of a multiprocessor and a cycle at the boost clock, dense ("NVIDIA H100 Tensor Core GPU
# Architecture", tables 1 to 3; "NVIDIA A100 Tensor Core GPU Architecture", tables 1 and 4; H200: its data sheet). The
# figure is Williams, Waterman and Patterson's ("Roofline", CACM 52(4), 2009).

#: Operations (a multiplication and an addition are two) of a multiprocessor a cycle: tensor cores, by the operands' dtype.
TENSOR = {
    (9, 0): {
        "float16": 4096,
        "bfloat16": 4096,
        "float32": 2048,
        "float64": 256,
        "int8": 8192,
        "uint8": 8192,
        "float8_e4m3fn": 8192,
        "float8_e5m2": 8192,
    },
    (8, 0): {"float16": 2048, "bfloat16": 2048, "float32": 1024, "float64": 128, "int8": 4096, "uint8": 4096},
}
#: The same of the ordinary units.
ORDINARY = {
    (9, 0): {"float16": 512, "bfloat16": 512, "float32": 256, "float64": 128, "int32": 128},
    (8, 0): {"float16": 512, "bfloat16": 256, "float32": 128, "float64": 64, "int32": 128},
}
CLOCK = {(9, 0): 1.83e9, (8, 0): 1.41e9}
#: Bytes a second of global memory, by what a GPU's name holds.
MEMORY = {"H200": 4.8e12, "H100 PCIe": 2.0e12, "H100": 3.35e12, "A100": 1.94e12}


#: What complex numbers are multiplied in: four products and four additions of it.
REAL = {"complex64": "float32", "complex128": "float64"}


@dataclass(frozen=True)
class Roof:
    """Operations a second of the units that an operator uses, and bytes a second of global memory."""

    operations: float
    memory: float
    units: str

    @property
    def ridge(self) -> float:
        """The intensity, operations a byte, from which on the units are the bound."""
        return self.operations / self.memory

    def at(self, intensity: float) -> float:
        """Operations a second that can be had at most."""
        return min(self.operations, self.memory * intensity)


def roof_of(operator: Operator, device: DeviceInfo) -> Roof | str:
    """The roof of an operator on a device, or what is not known of it.

    >>> from gemmkit.runtime.device import H100
    >>> roof = roof_of(MMAOp(), H100)
    >>> round(roof.operations / 1e12), round(roof.ridge), roof.units
    (989, 295, 'tensor cores, float16')
    """
    base = getattr(operator, "operator", operator)
    is_tensor = isinstance(base, (MMAOp, WMMAOp, WGMMAOp)) or hasattr(operator, "instruction")
    dtype = str(base.dtype if is_tensor and hasattr(base, "dtype") else operator.fragment_c.dtype)
    rates = (TENSOR if is_tensor else ORDINARY).get(device.arch)
    memory = next((value for name, value in MEMORY.items() if name in device.name), None)
    if rates is None or memory is None:
        return f"rates of {device.name} are not in gemmkit/tools/figures.py"
    dtype = REAL.get(dtype, dtype)
    if dtype not in rates:
        return f"the rate of {type(operator).__name__} on {dtype} is not known: NVIDIA's tables have none"
    units = "tensor cores" if is_tensor else "ordinary units"
    return Roof(rates[dtype] * device.sm_count * CLOCK[device.arch], memory, f"{units}, {dtype}")


def work_of(subject: ExplainedKernel) -> tuple[float, float, float]:
    """Operations; bytes where each operand is read (or written) once; bytes that blocks fetch from the L2."""
    M, N, K = subject.sizes
    call, size = subject.compiled.computed, subject.spec.block.size
    many, a, b = call.products, call.a.dtype.itemsize, call.b.dtype.itemsize
    d = subject.conf.global_d_layout.storage.itemsize
    once = (M * K * a + K * N * b + M * N * d * (2 if subject.conf.has_c else 1)) * many
    blocks = math.ceil(M / size.M) * math.ceil(N / size.N)
    cluster = subject.spec.cluster
    fetched = (blocks * K * (size.M * a / cluster.n + size.N * b / cluster.m) + M * N * d) * many
    each = 8.0 if str(call.a.dtype) in REAL and str(call.b.dtype) in REAL else 2.0
    return each * M * N * K * many, float(once), float(fetched)


@dataclass(frozen=True)
class Standing:
    """Where a product stands: its roof, operations, operations a byte, and modelled operations a second (None: no model)."""

    roof: Roof
    operations: float
    intensity: float
    modelled: float | None

    @property
    def bound(self) -> str:
        return "the " + self.roof.units if self.intensity >= self.roof.ridge else "global memory"

    @property
    def most(self) -> float:
        """Operations a second that can be had at most."""
        return self.roof.at(self.intensity)

    @property
    def share(self) -> str | None:
        return None if self.modelled is None else f"{100 * self.modelled / self.most:.0f} % of the roof"


def standing(subject: ExplainedKernel) -> Standing | str:
    """Where a product stands, or what is not known of its roof."""
    roof = roof_of(subject.spec.operator, subject.device)
    if isinstance(roof, str):
        return roof
    operations, once, _ = work_of(subject)
    microseconds = choice_of(subject.compiled).microseconds
    return Standing(roof, operations, operations / once, None if microseconds is None else operations / microseconds * 1e6)


def drawn_roofline(subject: ExplainedKernel) -> str:
    """The figure, and its numbers."""
    found = standing(subject)
    if isinstance(found, str):
        return f"<p>No roofline: {found}.</p>"
    operations, once, fetched = work_of(subject)
    roof, intensity, modelled = found.roof, found.intensity, found.modelled
    rows: list[tuple[str, object]] = [
        ("operations (2 M N K, of complex numbers 8)", f"{operations:.4g}"),
        ("bytes, each operand once", f"{once / 1e6:,.4g} MB"),
        ("operations a byte", f"{intensity:,.4g}"),
        ("the ridge is at", f"{roof.ridge:,.4g} operations a byte"),
        ("bound by", found.bound),
        ("at most", f"{found.most / 1e12:.4g} TFLOP/s: {operations / found.most * 1e6:.4g} us"),
        ("bytes that blocks fetch from the L2", f"{fetched / 1e6:,.5g} MB ({operations / fetched:.3g} operations a byte)"),
    ]
    if modelled is not None:
        time = microseconds_text(operations / modelled * 1e6)
        rows.append(("modelled", f"{modelled / 1e12:.4g} TFLOP/s: {time}, {found.share}"))
    return f"<div class=row>{_figure(roof, intensity, modelled)}{table((), rows)}</div>"


def _figure(roof: Roof, intensity: float, modelled: float | None) -> str:
    wide, high, left, top = 420.0, 240.0, 56.0, 14.0
    low_x, high_x = min(-1.0, math.log10(intensity) - 0.3), max(math.log10(roof.ridge), math.log10(intensity)) + 0.8
    high_y = math.log10(roof.operations) + 0.25
    low_y = min(high_y - 3.2, math.log10(modelled or roof.at(intensity)) - 0.3)

    def x(value: float) -> float:
        return left + wide * (math.log10(value) - low_x) / (high_x - low_x)

    def y(value: float) -> float:
        return top + high * (high_y - math.log10(value)) / (high_y - low_y)

    def parts() -> Iterator[str]:
        for power in range(math.ceil(low_x), math.floor(high_x) + 1):
            at = x(10.0**power)
            yield f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top}" y2="{top + high}" stroke="var(--line)"/>'
            yield text(at, top + high + 15, f"{10.0**power:g}", "middle", "soft")
        for power in range(math.ceil(low_y), math.floor(high_y) + 1):
            at = y(10.0**power)
            yield f'<line x1="{left}" x2="{left + wide}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>'
            yield text(left - 6, at + 4, f"{10.0 ** (power - 12):g}", "end", "soft")
        start = max(10.0**low_x, 10.0**low_y / roof.memory)
        yield (
            f'<path d="M{x(start):.1f} {y(roof.memory * start):.1f} L{x(roof.ridge):.1f} {y(roof.operations):.1f} '
            f"L{left + wide} "
            f'{y(roof.operations):.1f}" fill="none" stroke="var(--accent)" stroke-width="2.5"/>'
        )
        yield text(x(roof.ridge) - 8, y(roof.operations) + 4, f"{roof.operations / 1e12:.4g} TFLOP/s, {roof.units}", "end")
        slope = math.degrees(math.atan((y(roof.memory) - y(10 * roof.memory)) / (x(10.0) - x(1.0))))
        middle = math.sqrt(start * roof.ridge)
        at_x, at_y = x(middle) - 7, y(roof.memory * middle) - 7
        yield (
            f'<text x="{at_x:.1f}" y="{at_y:.1f}" text-anchor="middle" transform="rotate({-slope:.1f} {at_x:.1f} '
            f'{at_y:.1f})">'
            f"{roof.memory / 1e12:g} TB/s</text>"
        )
        most = roof.at(intensity)
        yield (
            f'<line x1="{x(intensity):.1f}" x2="{x(intensity):.1f}" y1="{y(most):.1f}" y2="{top + high}" '
            f'stroke="var(--hot)" '
            'stroke-dasharray="4 3"/>'
        )
        yield _point(x(intensity), y(most), f"at most {most / 1e12:.4g} TFLOP/s at {intensity:.4g} operations a byte", False)
        if modelled is not None:
            yield _point(x(intensity), y(modelled), f"modelled: {modelled / 1e12:.4g} TFLOP/s", True)
        yield text(left + wide / 2, top + high + 32, "operations a byte of global memory", "middle", "soft")
        yield (
            f'<text x="12" y="{top + high / 2}" class="soft" text-anchor="middle" transform="rotate(-90 12 '
            f'{top + high / 2})">'
            "TFLOP/s</text>"
        )

    return figure(
        left + wide + 12,
        top + high + 38,
        parts(),
        "Both axes are logarithmic. The open circle is the bound of this product, "
        "the full one the time that the tables model.",
    )


def _point(x: float, y: float, tip: str, full: bool) -> str:
    fill = "var(--hot)" if full else "var(--paper)"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5.5" fill="{fill}" stroke="var(--hot)" stroke-width="2" data-t="{tip}"/>'
