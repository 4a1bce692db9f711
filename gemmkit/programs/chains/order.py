"""The order of a chained kernel's round, and with it all synchronisation: one list scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.chains.chain import (
    READ,
    Chain,
    ChainPlaces,
    OperandBlock,
    ProductPart,
    RingPlace,
    depends,
    dots,
    late_values,
    only_adds,
    zero_values,
)
from gemmkit.programs.chains.schedule import ScheduleChoice
from gemmkit.programs.trace import Value

# A product starts as soon as what it takes is there; all else is computed as soon as it needs no wait; else the oldest
# group of products is waited for, and the stages that no product needs any more are released. That is all of `arrange`.
#
# | rounds | before the others | in each of them | after them |
# |---|---|---|---|
# | only add to cells | start | start, wait for all groups but this one, release the stage before | wait, release |
# | plain | the first one, where a cell begins as a block of memory | `arrange` (round) | |
# | ``ahead`` | `arrange` (first) | `arrange` (first + late) | `arrange` (late) |
# | ``across`` | the same, and over the end of a tile `arrange` (first of the next one + late) | | |
#
# Products of a multistage kernel are done where they stand: its rounds are plain, and its printer leaves out waits.
#
# With ``ahead`` products that need another product of their round, and what needs them, are late: they go in the next
# round.

class Full(NamedTuple):
    """The producer fills a stage; a consumer goes on when it is full. ``blocks``: those that the stage then has, from
    ``first`` on of a product in parts."""

    ring: RingPlace
    blocks: tuple[OperandBlock, ...]
    first: int = 0


class ChainStart(NamedTuple):
    """A group of products begins."""

    products: tuple[Value, ...]


class ChainWait(NamedTuple):
    """A consumer goes on when no more than ``pending`` groups run: ``over`` are done, ``flying`` are not."""

    pending: int
    over: tuple[Value, ...]
    flying: tuple[Value, ...]


class ChainRelease(NamedTuple):
    """A stage is empty; with ``before`` that of the round before."""

    ring: RingPlace
    before: bool = False


class Compute(NamedTuple):
    values: tuple[Value, ...]


class Anchor(NamedTuple):
    """What a value of rows is made of stays before the next wait."""

    value: Value


class Turn(NamedTuple):
    """A consumer waits for its turn at the tensor cores."""


class Pass(NamedTuple):
    """The next consumer's turn comes."""


Event = Full | ChainStart | ChainWait | ChainRelease | Compute | Anchor | Turn | Pass


@dataclass
class ChainOrder:
    """``join``: the last products of a tile with what goes before the next one's rounds. ``late``: values of the round
    before, in ``round``; ``zero``: what is zero before the first round."""

    before: list[Event] = field(default_factory=list)
    round: list[Event] = field(default_factory=list)
    after: list[Event] = field(default_factory=list)
    join: list[Event] = field(default_factory=list)
    late: set[Value] = field(default_factory=set)
    zero: set[Value] = field(default_factory=set)
    lags: bool = False


def ordered(chain: Chain, places: ChainPlaces, choice: ScheduleChoice) -> ChainOrder:
    """Raises ConfigError for anchors of rounds that have nowhere to put them."""
    out = _ordered(chain, places, choice)
    if choice.anchored:
        found = [_anchored(chain, part) for part in (out.before, out.round, out.after, out.join)]
        if found == [out.before, out.round, out.after, out.join]:
            raise ConfigError("Mapping(anchored=True): no values of rows are computed while a product runs")
        out.before, out.round, out.after, out.join = found
    return out


def _anchored(chain: Chain, part: list[Event]) -> list[Event]:
    """Before each wait behind what is computed while products run: the value of rows that most of it flows into."""
    outs, events = {c.out for c in chain.carried}, list[Event]()
    for event in part:
        before = events[-1] if events else None
        if isinstance(event, ChainWait) and isinstance(before, Compute):
            values = set(before.values)
            rows = [x for x in before.values if x.dims == (chain.rows,) and (x.op == "rowsum" or x in outs)]
            made_of = {x: sum(x is y or depends(x, {y}, values) for y in values) for x in rows}
            events += [Anchor(max(rows, key=lambda x: made_of[x]))] if rows else []
        events.append(event)
    return events


def _ordered(chain: Chain, places: ChainPlaces, choice: ScheduleChoice) -> ChainOrder:
    out = ChainOrder()
    if only_adds(chain) and not choice.kernel:
        return _adding(chain, places)
    late = late_values(chain) if choice.ahead else set()
    if not late:
        if places.peeled:
            handed = {d.args[0] for d in places.peeled}
            begun = [places.peeled.get(x, x) for x in chain.body if x not in handed]
            out.before = arrange(begun, places, dict(places.peeled), turns=choice.turns)
        stages = {ring.in_turn: n for ring, n in choice.stages.items()}.get(True, 0)
        out.round = arrange(chain.body, places, {}, turns=choice.turns, stages=stages)
        return out
    out.late = late
    first, last = ([x for x in chain.body if (x in late) is is_late] for is_late in (False, True))
    through = {c.inside: c.out for c in chain.carried if c.out in late}
    crossing = {x for x in first if any(x in y.args for y in last)}
    out.zero = zero_values(chain, late)
    begun = [x for x in first if x not in out.zero]
    out.before = arrange(begun, places, {})
    if choice.across:
        out.join = arrange([*begun, *last], places, {}, crossing - out.zero, choice.turns)
    out.round = arrange([*first, *last], places, through, crossing, choice.turns, late=late)
    out.after = arrange(last, places, {})
    return out


def _adding(chain: Chain, places: ChainPlaces) -> ChainOrder:
    products = tuple(dots(chain.body))
    events = arrange(chain.body, places, {}, leave=True)
    groups = sum(isinstance(event, ChainStart) for event in events)
    released = [ChainRelease(ring, True) for ring in places.rings_of(products) if ring.index is not None]
    return ChainOrder(events, [*events, ChainWait(groups, products, ()), *released],
                      [ChainWait(0, products, ()), *released], lags=True)


def arrange(values: list[Value], places: ChainPlaces, through: dict[Value, Value], crossing: Iterable[Value] = (),
            turns: bool = False, leave: bool = False, late: Iterable[Value] = (), stages: int = 0) -> list[Event]:
    """``through``: cells whose values some of ``values`` make, which all but those of the round before (``late``) wait for.
    ``crossing``: what products of the round before still read: it is not made anew while they do. ``leave``: groups still
    run at the end. ``stages``: of blocks that come in turn. A turn has all parts of a product if there is a stage for each.
    Else it has one part less than there are stages: the next part comes when every warpgroup has released its stage, which
    one that waits for its turn does not."""
    events: list[Event] = []
    left, flying = list(values), list[list[Value]]()
    awaited: set[RingPlace] = set()
    readers = {x: [d for d in values if d.op == "dot" and x in d.args] for x in crossing}
    products, starts = dots(values), 0
    in_turn = any(ring.in_turn for ring in places.rings_of(products))

    def done(x: Value) -> bool:
        return x not in left and not any(x in group for group in flying)

    def is_ready(user: Value) -> bool:
        """A reader of what crosses takes it as the round before left it. A part of a product follows the part before."""
        before = user.args[2:] if isinstance(user.data, ProductPart) else ()
        return all((x in before and x not in left) or (x in readers and user in readers[x])
                   or done(x if user in late else through.get(x, x)) for x in user.args)

    def is_read(x: Value, reads: bool) -> bool:
        """Of products that go one after the other what a later one needs is read later."""
        users = [y for y in left if x in y.args]
        return reads and (not flying or not in_turn or any(y in group for group in flying for u in users for y in u.args))

    def computed(reads: bool) -> list[Value]:
        """What needs no wait, with what is made of it: no more left."""
        ready: list[Value] = []
        for x in list(left):
            if x.op != "dot" and (x.op != READ or is_read(x, reads)) and is_ready(x) and all(map(done, readers.get(x, ()))):
                ready.append(x)
                left.remove(x)
        return ready

    def passes() -> bool:
        return any(isinstance(event, Pass) for event in events)

    def wait() -> None:
        over = flying.pop(0)
        if turns and not in_turn and not flying and dots(left) and not passes():
            begun = max(n for n, event in enumerate(events) if isinstance(event, ChainStart))
            events.insert(begun + 1, Pass())           # while nothing of its own runs, another one's products do
        events.append(ChainWait(len(flying), tuple(over), tuple(d for group in flying for d in group)))
        busy = places.rings_of([*left, *(d for group in flying for d in group)])
        events.extend(ChainRelease(ring) for ring in places.rings_of(over)
                      if ring.in_turn or ((ring.index is not None or in_turn) and ring not in busy))

    while left:
        group: list[Value] = []
        for d in dots(left):
            if is_ready(d) and (not group or (not in_turn and places.rings_of(group) == places.rings_of([*group, d]))):
                group.append(d)
        if group:
            part = group[0].data if isinstance(group[0].data, ProductPart) else ProductPart()
            together = part.of if part.of <= stages else stages - 1
            full = [ring for ring in places.rings_of(group)
                    if ring.index is not None and (ring.in_turn or ring not in awaited)]
            awaited.update(full)
            events.extend(Full(ring, places.brought(ring, group), part.first) for ring in full)
            if turns and (part.number % together == 0 if in_turn else not starts):
                events.append(Turn())
            starts += len(group)
            events.append(ChainStart(tuple(group)))
            left = [x for x in left if x not in group]
            is_last = part.number % together == together - 1 or part.number == part.of - 1
            if turns and (is_last if in_turn else starts == len(products) and not passes()):
                events.append(Pass())
            flying.append(group)
            if in_turn and flying[1:]:                 # the part before is over: its stage is filled again
                wait()
            continue
        ready = computed(bool(flying)) or computed(True)           # loads go while a product runs
        if ready:
            events.append(Compute(tuple(ready)))
        else:
            wait()
    while flying and not leave:
        wait()
    return events
