"""`choose`: the mapping of a kernel, chosen in one place for every family, and the spec that was made of it.

A family says what is asked for as a `MappingProblem`: which mappings may be taken, those that cost least first, and what
becomes of one. `choose` takes the first of these that a kernel can carry out:

1. the mapping that the caller gives, or the tuner tries;
2. the one that `gemmkit.tune` has kept for the problem (`gemmkit.tuning.store`);
3. the family's candidates, in the order of their cost. Shipped winners stand before what a model says.

| family | candidates |
|---|---|
| products, groups (`gemmkit.tuning.choose`) | swap-AB, the winners, the tables by their models, the dtypes' operator |
| wgmma's tiles for an operator (`gemmkit.tuning.sm90`) | its table's mappings by their cycles |
| rows (`RowsProblem`) | as few lanes, or warps, a row as can hold it, then a cluster, then rows that are streamed |
| gradients of norms (`gemmkit.functions.gradients`) | rows that are copied ahead, then rows that are not |
| int8 products of residues (`gemmkit.plans.ozaki`) | of large ones two tiles by what they cost, then the tables' |
| programs (`gemmkit.programs.calls`) | the default: tiles by waves, or a chain's blocks by what fits |

A choice is made once for a class of problems: `gemmkit.plans.launch` keeps launches by what they rest on, programs keep
plans.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.lang.errors import ConfigError

if TYPE_CHECKING:
    from gemmkit.runtime.device import DeviceInfo


class Choice(NamedTuple):
    """A mapping as the ``spec`` that was made of it: what a kernel is specialised by, or all of a plan. ``by``: what chose
    it, "tuned" or a family's word. With ``swap_ab`` it is of D^T = B^T A^T."""

    spec: Any
    by: str = "model"
    swap_ab: bool = False


class MappingProblem(ABC):
    """What a mapping is chosen for."""

    #: ``key()`` is what a tuned mapping is kept under, and ``read`` makes one of plain data; None where nothing is tuned.
    key: Callable[[], str] | None = None
    read: Any = None

    @abstractmethod
    def candidates(self, device: DeviceInfo) -> Iterable[Any]:
        """Mappings, those that cost least first. They are asked for one by one, until one is taken."""

    @abstractmethod
    def specialise(self, mapping: Any, device: DeviceInfo) -> Choice:
        """What becomes of a mapping. Raises ConfigError where no kernel can carry it out, or it does not fit the device."""

    def settled(self, choice: Choice, device: DeviceInfo) -> Choice:
        """What is taken in place of a choice."""
        return choice

    def refusal(self, refused: list[ConfigError], last: Any) -> ConfigError:
        """Why none of the candidates, down to the ``last``, is taken, by the reasons of all."""
        return refused[-1]


def choose(problem: MappingProblem, device: DeviceInfo, mapping: Any = None) -> Choice:
    """The choice for a problem: ``mapping`` where one is given, else the tuned one, else the candidate that costs least.

    Raises ConfigError where no kernel can carry out any, or none fits the device. For a tuned mapping that cannot be taken
    any more there is a warning.
    """
    if mapping is not None:
        return problem.specialise(mapping, device)
    if problem.key is not None:
        from gemmkit.tuning import store  # loads what digests of products need, and rows have none

        tuned = store.find(device, problem.key, problem.read)
        if tuned is not None:
            try:
                choice = problem.specialise(tuned, device)._replace(by="tuned")
            except ConfigError as error:
                store.refused(device, tuned, error)
            else:
                return problem.settled(choice, device)
    refused: list[ConfigError] = []
    try:
        for one in problem.candidates(device):
            try:
                choice = problem.specialise(one, device)
            except ConfigError as error:
                refused.append(error)
            else:
                return problem.settled(choice, device)
        raise problem.refusal(refused, one)
    finally:
        refused.clear()                                # what they were raised for would live as long as they


# --------------------------------------------------------------------------------------------------
# Which threads a row has: of functions of rows, and of programs of rows.

WORDS = 16                             # bytes that a thread loads at a time
WARP, MOST_WARPS = 32, 32
CLUSTER, CLUSTER_WARPS = 8, 16         # blocks of a cluster that has a row, and warps of each (sm_90)
MOST_AT_ONCE = 48                      # of all rows: elements, and two values of each row (16 x 4 spilled 124 bytes)
MOST_PIECES = 4                        # of these that a thread holds: with more, blocks of 1,024 threads spill
MOST_OF_LANES = 2                      # of a part of a warp: sums of 128 products take 34 us with two pieces, 42 with one
ROWS_PER_BLOCK = 4                     # where a warp has a row
SECTOR = 32                            # bytes of global memory that are read or stored at once
TURNED_WARPS = 8                       # of a block that streams rows of a transpose
RESIDENT = 1024                        # threads of a multiprocessor: while some fold their rows, others wait for theirs


class RowsProblem(MappingProblem):
    """Rows of so many ``columns`` of ``itemsize`` bytes, computed in ``dtype``: the threads of a row, how they get at it,
    and how many elements they load at a time. Mappings are how many threads have a row, and whether they hold it: a part of
    a warp, else as few warps as can, else rows are streamed. A thread has fewer pieces of rows that are ``held_at_once``.
    Where elements of ``turned`` bytes lie along columns (0: nowhere), a block has as many rows as fill a sector of them.

    A cluster has a row that no block holds, if so few ``rows`` (None: many) leave multiprocessors without one, or if the
    row is longer than what the cluster holds: the L2 then keeps fewer rows at a time, each for longer. Between these, a
    block that reads its row twice from the L2 is faster than one that waits for others (docs/design/rows.md).

    >>> import numpy as np
    >>> from gemmkit.runtime.device import H100
    >>> team, source, vector = choose(RowsProblem(768, 2, np.dtype(np.float32)), H100).spec
    >>> team.warps, source.pieces, source.whole, vector
    (1, 3, 3, 8)
    """

    def __init__(self, columns: int, itemsize: int, dtype: np.dtype, held_at_once: int = 1, turned: int = 0,
                 rows: int | None = None):
        self.rows = rows
        self.side = min(SECTOR // turned, WARP // 2) if turned else 0
        self.dtype, self.vector = dtype, math.gcd(columns, WORDS // itemsize) or 1
        while self.vector > 1 and (self.vector + 2) * held_at_once > MOST_AT_ONCE:
            self.vector //= 2
        self.pieces = -(-columns // self.vector)
        self.most = min(MOST_PIECES, MOST_PIECES * WORDS // 2 // (self.vector * held_at_once))      # of a thread

    def candidates(self, device: DeviceInfo) -> Iterator[tuple[int, bool]]:
        if self.side:
            share = WARP // self.side
            yield from ((warps * share, True) for warps in (1, 2, 4, 8, 16, MOST_WARPS))
            yield TURNED_WARPS * share, False
            return
        yield from ((lanes, True) for lanes in (1, 2, 4, 8, 16))
        warps = [2**n * WARP for n in range(MOST_WARPS.bit_length())]
        yield from ((threads, True) for threads in warps)
        most, of_block, of_cluster = max(1, self.most), MOST_WARPS * WARP, CLUSTER * CLUSTER_WARPS * WARP
        are_few = self.rows is not None and self.rows * of_cluster <= device.sm_count * RESIDENT
        if device.arch >= (9, 0) and self.pieces > most * (of_block if are_few else of_cluster):
            yield from ((of_cluster, is_held) for is_held in (True, False))
        yield from ((threads, False) for threads in warps)

    def specialise(self, mapping: tuple[int, bool], device: DeviceInfo) -> Choice:
        # Products need none of these.
        from gemmkit.kernels.rows import BlockTeam, ClusterTeam, RegisterRow, RowTeam, StreamedRow, TurnedTeam, WarpTeam

        threads, is_held = mapping
        held, most = -(-self.pieces // threads), self.most if threads >= WARP or self.side else min(self.most, MOST_OF_LANES)
        if is_held and not 0 < held <= most:
            raise ConfigError(f"{threads} threads hold {most * threads} pieces of a row, and not {self.pieces}")
        if held > max(1, self.most) and not self.side and threads < MOST_WARPS * WARP:
            raise ConfigError(f"{self.pieces} pieces of a row are streamed by more than {threads} threads")
        lanes = min(threads, WARP)
        team: RowTeam = (TurnedTeam(threads * self.side // WARP, self.dtype, self.side) if self.side else
                         WarpTeam(1, self.dtype, ROWS_PER_BLOCK * WARP // lanes, lanes) if threads <= WARP else
                         ClusterTeam(CLUSTER_WARPS, self.dtype, CLUSTER) if threads > MOST_WARPS * WARP else
                         BlockTeam(threads // WARP, self.dtype))
        source = RegisterRow(held, self.pieces // threads) if is_held else StreamedRow()
        return Choice((team, source, self.vector))
