"""Where values of a chained program are: blocks of operands in rings, sums and what is made of them in registers.

| value | place |
|---|---|
| blocks that rounds take | a ring of stages, of which one product takes its blocks at once |
| blocks that all rounds of a tile take | a ring that is filled once a tile |
| a product | a warpgroup's accumulators |
| the left operand of a product that was computed | the registers that it was computed in (the hand-over) |
| a row's value | a register in each of the four threads that share the row |
| a cell that begins as a block of an array | its ring in a first round of its own, then the hand-over |
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np

from gemmkit.programs.chains.chain import Chain, dots, loaded
from gemmkit.programs.trace import Value
from gemmkit.programs.values import Index, Parameter, refused, shown

RECTIFIED = "rectified"                # a hand-over's data where it takes max(x, 0) as it packs
TAKEN = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


@dataclass(eq=False)
class OperandBlock:
    """What a product takes from memory: ``dims`` as they are in the array, ``key`` its indices."""

    name: str
    parameter: Parameter
    key: tuple[Index, ...]
    dims: tuple[Any, Any]
    ring: RingPlace

    @property
    def stack(self) -> Index | None:
        return next((index for index in self.key if index.stack), None)


@dataclass(eq=False)
class RingPlace:
    """``index``: the loop's, whose round fills a stage; None: a tile does."""

    index: Index | None
    blocks: list[OperandBlock] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "_".join(block.name for block in self.blocks)


@dataclass
class ChainPlaces:
    """``blocks``: of a product and of one of its operands; ``peeled``: of a product the one of the first round."""

    blocks: dict[tuple[Value, int], OperandBlock] = field(default_factory=dict)
    rings: list[RingPlace] = field(default_factory=list)
    peeled: dict[Value, Value] = field(default_factory=dict)

    def lone(self) -> list[RingPlace]:
        return [ring for ring in self.rings if ring.index is None]

    def is_first_alone(self, ring: RingPlace) -> bool:
        """Whether only a tile's first round takes its blocks."""
        readers = {d for (d, _), block in self.blocks.items() if block.ring is ring}
        return readers <= set(self.peeled.values())

    def rings_of(self, products: Any) -> list[RingPlace]:
        return list(dict.fromkeys(self.blocks[d, k].ring for d in products for k in (0, 1) if (d, k) in self.blocks))


def placed(chain: Chain) -> ChainPlaces:
    """Raises ValueError and TypeError, with the user's line, for what has no place."""
    places = ChainPlaces()
    known: dict[Any, OperandBlock] = {}
    handed_over(chain)
    sink_rectified(chain)
    for dot in dots(chain.body):
        near = [block.ring for which in (0, 1) if (block := _operand(dot, which, chain, places, known)) is not None]
        if len(near) == 2 and near[0] is not near[1] and near[0].index is near[1].index:
            for block in near[1].blocks:               # one product takes both at once: they share stages
                block.ring = near[0]
            near[0].blocks += near[1].blocks
            places.rings.remove(near[1])
    if not dots(chain.body):
        raise refused(ValueError, "rounds without a product; a function of rows takes whole rows instead, x[m]", chain.line)
    _peel(chain, places, known)
    for x in chain.values:
        wrong = next((y for y in x.args if y.op == "load" and len(y.dims) == 2), None)
        if wrong is not None and x.op in ("rowmax", "rowsum", "handover"):
            raise refused(ValueError, f"{x.op} of a block of {wrong.data[0].name} as it is: in tiles of whole rows "
                                      f"products and "
                                      "what they are computed with are reduced and handed over", x.line)
    late = next((x for x in chain.end if x.op == "dot"), None)
    if late is not None:
        raise refused(ValueError, "a product after the loop; a kernel multiplies inside its rounds (only .reference(...) "
                                  "runs others)", late.line)
    return places


def _operand(dot: Value, which: int, chain: Chain, places: ChainPlaces,
             known: dict[Any, OperandBlock]) -> OperandBlock | None:
    x = dot.args[which]
    load = loaded(x)
    if load is None:
        if which == 1 or x.op == "transpose":
            raise refused(ValueError, f"the {'right' if which else 'left'} operand of a product is computed; only the left "
                                      "operand may be, and without a transpose (only .reference(...) runs others)", dot.line)
        return None
    parameter, key = load.data
    if np.dtype(parameter.dtype) not in TAKEN:
        raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; products in programs need float16 or "
                                 "bfloat16 (gemmkit.matmul takes other dtypes)",
                      dot.line)
    stacks = [index for index in key if index.stack]
    if len(load.dims) != 2 or len(stacks) > 1:
        raise refused(ValueError, f"{parameter.name}[{shown(key)}] is an operand of a product: a matrix, or one of a "
                                  "stack, is needed", dot.line)
    found = known.get((parameter.name, key))
    if found is None:
        index = chain.index if chain.index in key else None
        ring = RingPlace(index)
        name = parameter.name
        while any(block.name == name for block in known.values()):
            name += "_2"
        found = known[parameter.name, key] = OperandBlock(name, parameter, key, load.dims, ring)
        ring.blocks.append(found)
        places.rings.append(ring)
    places.blocks[dot, which] = found
    return found


def handed_over(chain: Chain) -> None:
    """What a product takes as A from registers is packed just before it; what is rounded for no other reason is not."""
    for dot in dots(chain.body):
        a, b = dot.args[0], loaded(dot.args[1])
        if loaded(a) is None and b is not None:
            source = a.args[0] if a.op == "cast" else a
            new = Value("handover", (source,), a.dims, None, f"{a.name or source.name or 'value'}_as_a", dot.line)
            at = chain.body.index(source) + 1 if source in chain.body else chain.body.index(dot)
            chain.body.insert(at, new)
            dot.args = (new, *dot.args[1:])
    for x in [x for x in chain.body if x.op == "cast"]:
        chain.body.remove(x)
        source = x.args[0]
        source.name = source.name or x.name
        for y in chain.body:
            y.args = tuple(source if z is x else z for z in y.args)
        for c in chain.carried:
            c.out = source if c.out is x else c.out


def sink_rectified(chain: Chain) -> None:
    """A cell that becomes max(x, 0) in each round, and is only handed over: rounds carry x, the instruction that packs takes
    the maximum with it, and it is taken once more behind the loop. Half of the arithmetic of an MLP's round was that."""
    for c in chain.carried:
        largest = c.out
        zeros = [y for y in largest.args if y.op == "const" and y.data == 0.0]
        readers = [x for x in chain.body if c.inside in x.args]
        if (largest.op != "max" or len(zeros) != 1 or len(largest.dims) != 2 or c.init.op != "load"
                or any(x.op != "handover" for x in readers) or any(largest in x.args for x in chain.body)):
            continue
        (x,) = (y for y in largest.args if y not in zeros)
        chain.body.remove(largest)
        c.out, x.name = x, x.name or largest.name
        for reader in readers:
            reader.data = RECTIFIED
        after = Value("max", (c.after, zeros[0]), largest.dims, None, largest.name, largest.line)
        for y in chain.end:
            y.args = tuple(after if z is c.after else z for z in y.args)
        chain.stores = [replace(store, value=after) if store.value is c.after else store for store in chain.stores]
        chain.end.insert(0, after)


def _peel(chain: Chain, places: ChainPlaces, known: dict[Any, OperandBlock]) -> None:
    """A cell that is a block of memory at first: the product that takes it has another first round."""
    first = {c.inside: c.init for c in chain.carried if c.init.op == "load"}
    taken: set[Value] = set()
    for dot in dots(chain.body):
        a = dot.args[0]
        init = first.get(a.args[0]) if a.op == "handover" else None
        if init is not None:
            taken.add(a.args[0])
            clone = places.peeled[dot] = Value("dot", (init, *dot.args[1:]), dot.dims, None, dot.name, dot.line)
            places.blocks[clone, 1] = places.blocks[dot, 1]
            _operand(clone, 0, chain, places, known)
            ring = places.blocks[clone, 0].ring
            places.rings.remove(ring)
            places.rings.insert(0, ring)
    for c in chain.carried:
        other = [x for x in chain.body if c.inside in x.args and x.op != "handover"]
        if c.init.op == "load" and (c.inside not in taken or other):
            raise refused(ValueError, f"{c.inside.name} begins as a block of {c.init.data[0].name}; a kernel can use such a "
                                      "cell only as the left operand of a product", (other or [c.init])[0].line)
        if c.init.op not in ("load", "const"):
            raise refused(ValueError, f"a cell that begins with {c.init.op}; a kernel's cells begin with a number, or as a "
                                      "block of an array", c.init.line)
