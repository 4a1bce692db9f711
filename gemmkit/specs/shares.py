"""Who has what of a matrix that all workers have together (Fireiron, section 3.1: distributed arrays).

A block's sums in registers are allocated by each thread: how many is inferred by walking the decomposition (`owned`). Init,
product and epilogue decompose them one by one, and must share them out alike; Fireiron leaves that to its users, here it is
checked (`check`).
"""

from __future__ import annotations

from typing import Any

from gemmkit.shapes import Shape, ShapeError, Step, local, shape
from gemmkit.specs import nodes, steps
from gemmkit.specs.forms import Form


def tiler(step: steps.Tile, size: Any, extent: int | None) -> tuple[Any, int]:
    """(the tile along a dimension, its extent): of a number, or of pieces of a width, a step apart."""
    if not isinstance(size, tuple):
        return size, size
    width, apart = size
    if extent is None or extent % apart:
        raise step.refuse(f"pieces {apart} apart do not divide {'what is known at run time' if extent is None else extent}")
    return shape((width, extent // apart), (1, apart)), width * (extent // apart)


def owned(at: steps.Step, decomposition: tuple, extents: tuple, level: str, home: str) -> tuple:
    """The extents of the part that one worker of ``home`` has, by a decomposition that begins at ``level``: of tiles in turn
    above the workers it has its part of each."""
    times = [1] * len(extents)
    for step in decomposition:
        if level == home or not isinstance(step, steps.Tile):
            break
        tile = tuple(tiler(step, size, extent)[1] for size, extent in zip((step.rows, step.columns), extents))
        if step.level is None:
            times = [n * (extent // size) for n, extent, size in zip(times, extents, tile)]
        extents, level = tile, step.level or level
    if level != home:
        raise at.refuse(f"how many elements each {home} has is not said: the decomposition of what is moved ends at "
                        f"{level}; add .tile(...).to({home})")
    return tuple(n * extent for n, extent in zip(times, extents))


def permuted(step: steps.Tile, count: int) -> list[int]:
    """The numbers that ``count`` workers have behind a swizzle. Raises ScheduleError where it is no permutation."""
    numbers = [int((step.swizzle or nodes.same)(n)) for n in range(count)]
    if sorted(numbers) != list(range(count)):
        twice = next((n for n in numbers if numbers.count(n) > 1), max(numbers))
        raise step.refuse(f".swizzle is no permutation of {count} workers: number {twice} is "
                          f"{'of several' if numbers.count(twice) > 1 else 'of none of them'}")
    return numbers


def shares(decomposition: tuple, extents: tuple, level: str, home: str) -> dict[tuple, list]:
    """{worker: the coordinates of its elements, in the order of its registers}."""
    part: Shape = local(*extents)
    at: dict[tuple, Any] = {(): Step((0, 0))}
    for step in decomposition:
        if level == home:
            break
        if not isinstance(step, steps.Tile) or step.level is None:
            continue
        sizes = [tiler(step, size, extent)[0] for size, extent in zip((step.rows, step.columns), part.extents)]
        outer, part = part.tile(*sizes)
        m, n = outer.extents
        place = nodes.column_first if step.order == steps.COLUMN_MAJOR else nodes.row_first
        numbers = permuted(step, m * n)
        at = {(*who, worker): Step(outer(*place(number, m, n)) or (0, 0)) + origin
              for who, origin in at.items() for worker, number in enumerate(numbers)}
        level = step.level
    elements = [part(i, j) for i in range(part.extents[0]) for j in range(part.extents[1])]
    return {who: [origin + element for element in elements] for who, origin in at.items()}


def check(step: steps.Accumulate, product: tuple, extents: tuple, level: str) -> None:
    """Raise ScheduleError where a worker's registers are other elements in the epilogue than in the product."""
    home, end = steps.HOME[step.memory], step.end
    if home not in (level, *(s.level for s in product if isinstance(s, steps.Tile))):
        return                                                # a product that is not whole is refused where it ends
    if end.steps and isinstance(end.steps[0], steps.Move):
        end = end.steps[0].implementation
    try:
        mine = shares(product, extents, level, home)
        held = owned(step, step.begin.steps, extents, level, home)
        theirs = None if end.micro is not None else shares(end.steps, extents, level, home)
    except ShapeError as error:
        raise step.refuse(str(error)) from None
    count = len(next(iter(mine.values())))
    if count != held[0] * held[1]:
        raise step.refuse(f"Init allocates {held[0]} x {held[1]} elements a {home}, and the product has {count} each")
    for who in mine if theirs is not None else ():
        other = theirs.get(who, [])                           # type: ignore[union-attr]
        if mine[who] != other:
            n = next((n for n, (x, y) in enumerate(zip(mine[who], other)) if x != y), len(other))
            there = f"C{tuple(other[n])}" if n < len(other) else "nothing"
            raise step.refuse(f"element {n} of {home} {who[-1]}'s registers is C{tuple(mine[who][n])} in the product and "
                              f"{there} in the epilogue; decompose both alike")


def form_in_registers(form: Form, memory: str, role: Any) -> Form:
    """A form of whole registers, with coordinates of their own."""
    return Form((local(*form.extents),), memory, form.dtype, role=role)
