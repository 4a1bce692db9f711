"""Products by DMMA that add to what an earlier one has not given yet: a fault of the assembler, found in machine code.

ptxas (13.0; 13.5 writes the same) leaves out a wait in some loops: the last DMMA of a round and the first of the next one add to the
same registers, and nothing between them waits for the first of the two. Results are then wrong by 1e-3 to 2e-1 when several
warps run side by side, and right when one is alone, so no emulator and hardly a small test on a GPU sees it.

    assert unwaited_products(assemble(ptx).cubin) == []

An instruction names in its control bits a scoreboard that it holds until its results are there, and those that must be free before
it starts. This walks through every loop twice, so that waits over the back edge count, and once through all of the kernel, from one
loop to the next, and says which DMMA reads
accumulators that nobody has waited for since: for the scoreboard of the product that gives them, or for that of a later one
(all of its holders, or all but the last few: ``DEPBAR.LE SB5, 0x2``), since a warp's products end in the order in which they begin (ptxas counts on that, and it is right). Only near ones count: a sub-core takes products one after the other, 16
cycles or more each, and ptxas lets those that are five or more apart go without a wait, inside a round too; they are right.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from gemmkit.runtime.compile import candidates

NEAR = 4                               # products after one that may not rely on its being done
_LABEL = re.compile(r"\s*(\.L_\w+):")
_CODE = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]{16} \*/")
_SECOND_WORD = re.compile(r"/\* 0x([0-9a-f]{16}) \*/")
_BRANCH = re.compile(r"\bBRA\b.*`\((\.L_\w+)\)")
_PRODUCT = re.compile(r"\bDMMA\.\S+ R(\d+), \S+ \S+ R(\d+)")
_COUNTED = re.compile(r"DEPBAR\.LE SB(\d), 0x([0-9a-f]+)")


class Instruction(NamedTuple):
    """``holds`` is the scoreboard it holds until it is done, ``waits`` are those that it waits for. ``leaves``: a scoreboard, and
    how many of its holders may still be on their way behind this one (DEPBAR.LE), or none."""

    text: str
    holds: int
    waits: frozenset[int]
    leaves: tuple[int, int] | None = None


class Unwaited(NamedTuple):
    """A product that reads accumulators too early, and how many products after the one that gives them."""

    text: str
    products_since: int


def listing(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions and labels of what ``nvdisasm -hex`` prints."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    lines = text.splitlines()
    for n, line in enumerate(lines):
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _CODE.match(line):
            word = _SECOND_WORD.search(lines[n + 1])
            assert word is not None, "the second half of an instruction stands in the next line"
            control = int(word[1], 16) >> 41                    # stall 4, yield 1, two scoreboards of 3, waits 6, reuse 4
            waits = {s for s in range(6) if control >> 11 >> s & 1}
            counted = _COUNTED.search(found[1])
            leaves = (int(counted[1]), int(counted[2], 16)) if counted else None
            code.append(Instruction(found[1], control >> 5 & 7, frozenset(waits), leaves))
    return code, labels


def loops(code: list[Instruction], labels: dict[str, int]) -> Iterator[list[Instruction]]:
    """The instructions from a label to a branch back to it."""
    for n, instruction in enumerate(code):
        branch = _BRANCH.search(instruction.text)
        if branch and labels.get(branch[1], n + 1) <= n:
            yield code[labels[branch[1]]:n + 1]


def early(code: list[Instruction]) -> list[Unwaited]:
    """The products of straight code that read accumulators too early."""
    giver: dict[int, int] = {}                           # accumulators: the number of the last product that gives them
    held: dict[int, list[int]] = {}                      # scoreboards: their holders, each with the last product by then
    found, products, done = [], 0, -1                    # products up to `done` are
    for instruction in code:
        waits = [(scoreboard, 0) for scoreboard in instruction.waits] + ([instruction.leaves] if instruction.leaves else [])
        for scoreboard, left in waits:
            ended = held.get(scoreboard, [])
            done = max(done, *ended[:len(ended) - left], -1)
        if product := _PRODUCT.search(instruction.text):
            given, taken = (int(register) for register in product.groups())
            last = giver.get(taken, -1)
            if last > done and products - last <= NEAR:
                found.append(Unwaited(instruction.text, products - last))
            giver[given] = products
            held.setdefault(instruction.holds, []).append(products)
            products += 1
        elif instruction.holds < 6:
            held.setdefault(instruction.holds, []).append(-1)    # of another kind: it counts, and gives no sums
    return found


def in_text(text: str) -> list[Unwaited]:
    """Of what ``nvdisasm -hex`` prints."""
    code, labels = listing(text)
    twice = (product for body in loops(code, labels) for product in early([*body, *body]))
    return list(dict.fromkeys((*twice, *early(code))))


def hex_listing(cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        done = subprocess.run([candidates("nvdisasm")[0], "-c", "-hex", str(file)], capture_output=True, text=True, check=True)
    return done.stdout


def unwaited_products(cubin: bytes) -> list[Unwaited]:
    """Products of a kernel's loops that ptxas lets start too early; empty where all is well.

    Raises AssertionError for a listing without instructions.
    """
    text = hex_listing(cubin)
    assert listing(text)[0], "nvdisasm listed no instruction"
    return in_text(text)


__all__ = ["Unwaited", "hex_listing", "in_text", "listing", "unwaited_products"]
