"""A schedule as a Config: which of gemmkit's template kernels does the same, or what of the schedule does not fit it.

The template is `singlestage` (`gemmkit.kernels.simt.kernel`): blocks; sums in registers or fragments; a loop over K with A
and B by shared memory; warps; an epilogue by shared memory.
"""

from __future__ import annotations

from typing import Any

import gemmkit as gk
from gemmkit import layouts, operators
from gemmkit.config import ConfigError
from gemmkit.kernels.rasterisation import Columns
from gemmkit.layouts import Padded
from gemmkit.specs import steps
from gemmkit.specs.forms import FR, SH
from gemmkit.specs.run import matrix_of

_PLAIN = {steps.ROW_MAJOR: layouts.RowMajor, steps.COLUMN_MAJOR: layouts.ColMajor}


def config(schedule: Any, a: Any, b: Any, c: Any, **fields: Any) -> Any:
    """The Config for matrices (arrays, or (dtype, order)); ``fields`` are further ones of it.

    What differs and changes no result is left to the template: the order in which a warp's tiles are dealt, and barriers
    that it has besides. Raises ConfigError with all that does not fit.
    """
    of_a, of_b, of_c = (matrix_of(name, x) for name, x in zip(("a", "b", "c"), (a, b, c)))
    walk = _Walk(list(schedule.steps))
    values: dict[str, Any] = {f"global_{name}_layout": _PLAIN[x.order](x.dtype)
                              for name, x in zip("abd", (of_a, of_b, of_c))}
    block = walk.next(steps.Tile, ".tile(M, N).to(Block)", level=steps.BLOCK)
    sums = walk.next(steps.Accumulate, ".accumulate_in")
    split = walk.next(steps.Split, ".split(K)")
    values["order"] = Columns()
    values["block_shape"] = gk.Tile(M=block.rows, N=block.columns, K=split.k)
    if not split.sync:
        walk.refuse(split, "the template's loop ends with a barrier (.sync)")
    for name, x, dimensions, number in (("a", of_a, "MK", 0), ("b", of_b, "KN", 1)):
        step = walk.next(steps.Move, f".move({name.upper()}, SH)", operand=number, memory=SH)
        layout = _PLAIN[step.order or x.order](x.dtype)
        values[f"shared_{name}_layout"] = Padded(layout, step.pad) if step.pad else layout
        if step.layout is not None or step.swizzle is not None:
            walk.refuse(step, "the template's shared tiles are padded (no .layout or .swizzle)")
        if step.prefetch:
            walk.refuse(step, "the template has one stage (no .prefetch)")
        tiles = _moved(walk, step, step.implementation, step.implementation.steps, dimensions)
        values |= dict(zip((f"mem_{name}_warp", f"mem_{name}_thread"), tiles))
    warp = walk.next(steps.Tile, ".tile(M, N).to(Warp)", level=steps.WARP)
    if isinstance(warp.rows, tuple) or isinstance(warp.columns, tuple):
        walk.refuse(warp, "the template's warps have no pieces apart")
        raise walk.error()
    values["warps_per_block"] = block.rows // warp.rows * (block.columns // warp.columns)
    depth = _product(walk, sums, of_a.dtype, of_c.dtype, values)
    values["compute_warp"] = gk.Tile(M=warp.rows, N=warp.columns, K=depth)
    _epilogue(walk, sums, of_c, values)
    if walk.wrong:
        raise walk.error()
    return gk.get_config(**{**values, **fields})


class _Walk:
    """The steps that are left, and what does not fit so far."""

    def __init__(self, left: list):
        self.left = left
        self.wrong: list[str] = []

    def next(self, kind: Any, what: str, **wanted: Any) -> Any:
        """The next step, which must be of a kind. Raises ConfigError for another."""
        step = self.left[0] if self.left else None
        if isinstance(step, kind) and all(getattr(step, name) == value for name, value in wanted.items()):
            return self.left.pop(0)
        found = f"{step}, at {step.line}" if step is not None else "nothing"
        self.wrong.append(f"where {what} is expected stands {found}")
        raise self.error()

    def refuse(self, step: Any, why: str) -> None:
        self.wrong.append(f"{step}: {why} (at {step.line})")

    def error(self) -> ConfigError:
        return ConfigError("no Config does what this schedule says:\n  " + "\n  ".join(self.wrong))


def _product(walk: _Walk, sums: Any, dtype: Any, accumulator: Any, values: dict[str, Any]) -> int:
    """The operator, and the depth of its steps."""
    if sums.memory == FR:
        depth = walk.next(steps.Split, ".split(16)", k=16)
        for number in (0, 1):
            walk.next(steps.Move, "a move to FR", operand=number, memory=FR)
        walk.next(steps.Tile, ".tile(16, 16)", rows=16, columns=16)
        values["operator"] = operators.WMMAOp(16, 16, 16, dtype=dtype, accumulator=accumulator)
        return int(depth.k)
    thread = walk.next(steps.Tile, ".tile(M, N).to(Thread)", level=steps.THREAD)
    if isinstance(thread.rows, tuple) or isinstance(thread.columns, tuple):
        walk.refuse(thread, "a thread's elements lie in pieces apart; FPUOp says itself how a warp's product is shared out")
    if thread.swizzle is not None:
        walk.refuse(thread, "FPUOp's threads are not renumbered (.swizzle)")
    depth = walk.next(steps.Split, ".split(k)")
    values["operator"] = operators.FPUOp(dtype=dtype, accumulator=accumulator)
    return int(depth.k)


def _epilogue(walk: _Walk, sums: Any, of_c: Any, values: dict[str, Any]) -> None:
    end = sums.end
    first = end.steps[0] if end.steps else None
    if end.micro is not None:
        walk.refuse(sums, f"the epilogue is the micro-kernel {end.micro.__name__}; the template's goes by shared memory "
                          "(write an Epilogue)")
    elif not isinstance(first, steps.Move) or first.memory != SH:
        walk.refuse(sums, "the template's epilogue goes by shared memory: Move.move(SRC, SH, ...)")
    else:
        values |= dict(zip(("mem_cd_warp", "mem_cd_thread"), _moved(walk, first, end, end.steps[1:], "MN")))
        layout = _PLAIN[first.order or of_c.order](of_c.dtype)
        values["shared_c_layout"] = values["shared_d_layout"] = Padded(layout, first.pad) if first.pad else layout


def _moved(walk: _Walk, step: Any, schedule: Any, decomposition: tuple, names: str) -> tuple:
    """(mem_x_warp, mem_x_thread) of a move by tiles of warps, then of threads; nothing where it does not fit."""
    if schedule.micro is not None:
        walk.refuse(step, f"moved by the micro-kernel {schedule.micro.__name__}")
        return ()
    plain = all(isinstance(s, steps.Tile) and type(s.rows) is int and type(s.columns) is int for s in decomposition)
    levels = [step.level for step in decomposition if isinstance(step, steps.Tile)]
    if not plain or len(levels) < 2 or levels[0] != steps.WARP or levels[-1] != steps.THREAD:
        walk.refuse(step, "the template moves plain tiles of warps, then of threads")
        return ()
    return tuple(gk.Tile(**dict(zip(names, (s.rows, s.columns)))) for s in decomposition[-2:])
