"""The order of a loop's events, and with it all synchronisation: fills, waits, groups of products, releases.

The products of a round take their blocks from one stage and start together: they are one group of wgmma. Rounds do nothing
but add, so that no thread needs the sums before the loop is over, and a group is waited for one round later, while the next
one runs. Then its stage has been read, and is released.

| part | a consumer's events | the producer's |
|---|---|---|
| before | await the stage, start (and read what threads add up); sums that begin with zero begin here | fill |
| round | await the next stage, start, wait for all groups but this one, release the stage before | fill |
| after | wait for the last group, release its stage | |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gemmkit.programs.places import ColumnSum, Multiply, Rounds, RowSum

LEAST_STAGES = 2                       # a stage is released when the next one is in use


class Fill(NamedTuple):
    """The producer has the blocks of a round brought."""


class Await(NamedTuple):
    """A consumer goes on when the stage is full."""


class Start(NamedTuple):
    """A group of products begins. ``fresh``: those whose sums are not read, but begin with zero."""

    products: tuple[Multiply, ...]
    fresh: tuple[Multiply, ...] = ()


class Read(NamedTuple):
    """Threads add up rows and columns of what is staged, while the products of the round run."""

    row_sums: tuple[RowSum, ...]
    column_sums: tuple[ColumnSum, ...]


class Wait(NamedTuple):
    """A consumer goes on when no more than ``pending`` groups run; the sums named are then theirs again."""

    pending: int


class Release(NamedTuple):
    """The stage of the round before is empty."""


Event = Fill | Await | Start | Read | Wait | Release


@dataclass(frozen=True)
class Ordered:
    """What happens before the other rounds, in each of them, and after them."""

    rounds: Rounds
    before: tuple[Event, ...]
    round: tuple[Event, ...]
    after: tuple[Event, ...]


def ordered(rounds: Rounds) -> Ordered:
    started: set[int] = set()
    fresh = []
    for product in rounds.products:
        init = product.carried.init
        if id(product.carried) not in started and init.op == "const" and init.data == 0:
            fresh.append(product)
        started.add(id(product.carried))
    products = tuple(rounds.products)
    read = (Read(tuple(rounds.row_sums), tuple(rounds.column_sums)),) if rounds.is_read_by_threads else ()
    before = Fill(), Await(), Start(products, tuple(fresh)), *read
    return Ordered(rounds, before, (Fill(), Await(), Start(products), *read, Wait(1), Release()), (Wait(0), Release()))
