"""The tile plan drawn: D's grid of blocks, a block's warps with their fragments, and what a thread holds of a fragment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from typing import Any

from gemmkit.drawing import figure, hue, legend, rect, text
from gemmkit.ptx.fragments import FragmentMap
from gemmkit.report.subject import Subject
from gemmkit.tiling import parallelise

SIDE = 300  # pixels of a figure's longer side
MOST_BLOCKS = 4096  # of D's grid: more are told by their number alone
MOST_WAVES = 6  # that the legend names
WINDOW = 32, 32  # rows and columns of a fragment that are drawn


def plan_drawn(subject: Subject) -> str:
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
        f"<div class=row>{grid(subject)}{block(subject)}</div><h3>What a thread holds of a fragment</h3>{missing}<div "
        f"class=row>{drawn}</div>"
    )


def _is_held(spec: Any, name: str) -> bool:
    """Whether threads hold fragments of an operand: the tensor cores of wgmma read A and B from shared memory themselves."""
    if name == "D" or not hasattr(spec.operator, "register_instruction"):
        return True
    return name == "A" and type(spec.mainloop).__name__ == "RegisterMainloop"


# -- the grid -------------------------------------------------------------------------------------------------------------


def grid(subject: Subject) -> str:
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
        order = {spec.scheduler.order.block(n, rows, columns): n for n in range(rows * columns)}
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
            f". A wave is what {subject.device.sm_count} multiprocessors compute at one time, in the order "
            f"{spec.scheduler.order!r}; hover tells a tile's number.{more}"
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


def block(subject: Subject) -> str:
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
        text(left, top + size.M * scale + 14, f"D {size.M} x {size.N}: {len(tiles)} {worker}s, by number", kind="soft")
    )
    stages = f", {spec.stages} stages" if hasattr(spec, "stages") else ""
    producers = f" (and {spec.producer_warps} warps that fetch)" if of_groups else ""
    return figure(
        left + size.N * scale + 4,
        top + size.M * scale + 20,
        parts,
        f"A block's tiles: {size.M} x {size.N} of D, {size.K} deep{stages}; {spec.warps} warps multiply{producers}. "
        "Lines are fragments; hover tells who computes what.",
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
        f"is {across}; its number is the thread{' (of several, the first)' if shared else ''}. Hover lights all that the "
        f"thread holds.{part}"
    )
    keys = legend([(f"lane {n}", hue(n, 32)) for n in lanes])
    return f"<div>{keys}{figure(max(columns * wide, 110), 18 + rows * high, parts, caption)}</div>"


def _upright(x: float, y: float, said: str) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" class="soft" text-anchor="middle" transform="rotate(-90 {x:g} '
        f'{y:g})">{escape(said)}</text>'
    )
