"""All passes of a chained program: from its trace to its text."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from gemmkit.programs.chains.algebra import guard, keep_parts, rewrite, settle
from gemmkit.programs.chains.allocate import ChainProblem, Choice, May
from gemmkit.programs.chains.chain import Chain, chain_of
from gemmkit.programs.chains.lazy import begin_lazily, references
from gemmkit.programs.chains.lengths import begun, check_bounded
from gemmkit.programs.chains.order import ordered
from gemmkit.programs.chains.places import ChainPlaces, placed
from gemmkit.programs.chains.ranges import ranges_of
from gemmkit.programs.chains.reads import read_early
from gemmkit.programs.chains.shares import Shares, shares_of
from gemmkit.programs.chains.text import ChainPrinter
from gemmkit.programs.chains.tile_order import section_of
from gemmkit.programs.chains.trials import commutes
from gemmkit.programs.kernels import Kernel
from gemmkit.programs.mapping import SWITCHES, Mapping
from gemmkit.programs.multistage.chains import MultistageChainPrinter
from gemmkit.programs.multistage.text import Copies
from gemmkit.programs.printed import OutKind, Printed
from gemmkit.programs.trace import Loop, Value
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.problems import choose


class Derived:
    """What the passes make of a program: the parts that a launch and its checks need."""

    def __init__(self, chain: Chain, places: ChainPlaces, choice: Choice, text: Printed, read: dict[str, Value],
                 shares: Shares | None):
        self.chain, self.places, self.choice, self.text, self.read = chain, places, choice, text, read
        self.shares = shares

    def section(self, processors: int) -> int:
        """How many of the stack are taken side by side (`gemmkit.programs.chains.tile_order`)."""
        if self.chain.stack is None or not self.choice.longest_first:
            return 1
        blocks = {block.parameter.name: block.parameter for ring in self.places.rings if ring.index is not None
                  for block in ring.blocks}
        nbytes = sum(2 * math.prod(parameter.shape[-2:]) for parameter in blocks.values())
        count, rows = self.chain.stack.extent.size, self.chain.rows.extent.size
        tiles, clusters = -(-rows // (self.choice.rows * self.choice.cluster.m)), self.choice.cluster.at_once(processors)
        return section_of(count, tiles, nbytes, max(1, min(clusters, count * tiles))) if count * tiles else 1


def derived(name: str, loop: Loop, mapping: Mapping, numbers: dict[str, float], outs: Any, arrays: list[str],
            device: DeviceInfo, kernel: Kernel, copies: dict[str, Copies]) -> Derived:
    """``numbers``: the run-time scalars, whose signs the text depends on. ``outs``: how a store leaves (`OutKind`), by the
    store and the descriptions of what is stored to beside the program's arrays. ``copies``: how threads copy operands, where
    they do."""
    chain = chain_of(loop)
    check_bounded(chain)
    lazy = references(chain, numbers, mapping.lazy)
    shares = shares_of(chain, mapping, numbers, device.sm_count, kernel)
    cells = {} if shares is None else shares.cells
    kinds: dict[str, OutKind] = {store.parameter.name: outs(chain, store, cells) for store in chain.stores}
    may_commute = commutes(chain, numbers)
    ranges = ranges_of(chain, numbers, may_commute)
    may = May(may_commute, ranges.grow)
    rewrite(chain, numbers)
    begin_lazily(chain, lazy, mapping.lazy)
    settle(chain)
    guard(chain, numbers)
    begun(chain, numbers)
    keep_parts(chain)
    places = placed(chain)
    by_tma = {key: np.dtype(kind.dtype) for key, kind in kinds.items() if kind.kind == "TmaOut"}
    choice: Choice = choose(ChainProblem(chain, places, mapping, may, by_tma, kernel), device).spec
    kinds = {key: replace(kind, kind="OctetOut") if key in by_tma and key not in choice.outs else kind
             for key, kind in kinds.items()}
    read_early(chain, choice, kernel)
    order = ordered(chain, places, choice)
    shown = ", ".join(f"{key} {size}" for key, size in choice.blocks.items())
    how = ", ".join(word.replace("_", " ") for word in SWITCHES if getattr(choice, word))
    split = f"; rounds in {chain.splits} shares" if chain.splits > 1 else ""
    together = "" if choice.cluster.is_single else f"; clusters of {choice.cluster.m}"
    title = f"{name}: blocks of {shown}; {choice.warpgroups} warpgroups{'; ' if how else ''}{how}{split}{together}."
    made = chain, places, choice, order, ranges, kinds, list(numbers), [*arrays, *cells]
    printer = ChainPrinter(*made) if kernel.uses_tma else MultistageChainPrinter(*made, copies=copies)
    text, read = printer.printed(title)
    return Derived(chain, places, choice, text, read, shares)
