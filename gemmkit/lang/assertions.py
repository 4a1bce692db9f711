"""Assertions in device code: checked in the emulator, and nothing when compiled, as under ``python -O``.

A GPU cannot say which assertion failed. Compiled as Python has them they would end a thread early, its results missing.
"""

from __future__ import annotations

from typing import Any

from gemmkit.lang.numba_hooks import FunctionPass, register_pass
from gemmkit.lang.numba_hooks import numba_ir as ir


class Assertions(FunctionPass):
    """Takes the ways that end in an assertion's error for never taken."""

    _name = "gemmkit_assertions"

    def __init__(self) -> None:
        FunctionPass.__init__(self)

    def run_pass(self, state: Any) -> bool:
        blocks = state.func_ir.blocks
        failing = {label for label, block in blocks.items() if any(map(_is_error, block.body))}
        changed = False
        for block in blocks.values():
            last = block.body[-1]
            if isinstance(last, ir.Branch) and failing & {last.truebr, last.falsebr}:
                block.body[-1] = ir.Jump(last.falsebr if last.truebr in failing else last.truebr, last.loc)
                changed = True
        if changed:
            forget_unreached(blocks)
        return changed


register_pass(mutates_CFG=True, analysis_only=False)(Assertions)


def _is_error(statement: Any) -> bool:
    return (isinstance(statement, ir.Assign) and isinstance(statement.value, ir.Global)
            and statement.value.value is AssertionError)


def forget_unreached(blocks: dict[int, Any]) -> None:
    """Drop the blocks to which no way leads from the first."""
    reached, left = set(), [min(blocks)]
    while left:
        label = left.pop()
        if label not in reached:
            reached.add(label)
            left += blocks[label].body[-1].get_targets()
    for label in set(blocks) - reached:
        del blocks[label]
