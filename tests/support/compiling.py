"""Kernels of a configuration, compiled where there is no GPU: types, PTX, machine code."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import numpy as np

import gemmkit as gk
from gemmkit.components import freeze
from gemmkit.kernels.collectives.operand import OperandArrays
from gemmkit.kernels.spec import FAMILIES, ProblemShape
from gemmkit.plans.compiled import Nothing
from gemmkit.runtime.compile import ResourceUsage, assemble, cubin_of, disassemble, instruction_counts, to_ptx
from gemmkit.runtime.device import H100


def arguments(conf: gk.Config, whole: bool = True, size: int = 256) -> list[Any]:
    """What the kernel takes, frozen: for aligned square operands whose tiles are all whole, or whose are not."""
    def operand(layout: Any) -> Any:
        array = np.zeros((size, size), layout.dtype, order="CF"[getattr(layout, "axis", 1) == 0])
        return freeze(array)

    c = operand(conf.global_c_layout) if conf.has_c else freeze(Nothing())
    return [freeze(conf.spec(OperandArrays(None, None, None, size, size, size) if whole else None)), operand(conf.global_a_layout), operand(conf.global_b_layout), c,
            operand(conf.global_d_layout), freeze(ProblemShape(size, size, size))]


def entry(conf: gk.Config, **how: Any) -> Any:
    """The kernel's cache entry, compiled if it has to be."""
    given = arguments(conf, **how)
    return cubin_of(FAMILIES[conf.kernel].kernel, given, conf.threads, H100, conf.blocks_per_sm)


class MachineCode(NamedTuple):
    """``counts`` are of whole opcodes with their modifiers."""

    ptx: str
    usage: ResourceUsage
    counts: Counter[str]

    def count(self, opcode: str, *modifiers: str) -> int:
        """Instructions of an opcode that have all these modifiers."""
        return sum(number for name, number in self.counts.items()
                   if name.split(".")[0] == opcode and set(modifiers) <= set(name.split(".")[1:]))


def machine_code(conf: gk.Config, **how: Any) -> MachineCode:
    given = arguments(conf, **how)
    ptx = to_ptx(FAMILIES[conf.kernel].kernel, tuple(x.type for x in given), conf.threads, H100, conf.blocks_per_sm)
    assembled = assemble(ptx)
    return MachineCode(ptx, assembled.usage, instruction_counts(disassemble(assembled.cubin), full=True))
