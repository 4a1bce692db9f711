"""Chained programs whose rounds end at a length of the tile's own (`gemmkit.programs.lengths`).

A tile's rounds go to min(length, the axis): producer and consumers read it at the tile's beginning, and blocks behind it
are not loaded. The last block is loaded as a whole, and holds what the array has there; so `guard` puts the identity of what
is folded in place of it, in a tile's ragged block alone. A product's right operand is not guarded: its rows behind a length
meet zeros, and must be finite, as padding is.

| length | rounds | results |
|---|---|---|
| more than the axis | all | as without a length |
| 70, blocks of 64 | 2, of which the last shows 6 places | |
| 0 or less | 1, which shows none | what the cells begin with: `begun` |

Every tile has a round, since rounds run on across tile ends. Most programs are not changed by one that shows nothing: an
attention's weights are zeros. Where trials find that a cell is changed, as by exp(-inf - -inf), it begins anew behind the
loop: ``out = apply(make_out, out, n_length)`` with ``0.0 if n_length < 1 else out``.
"""

from __future__ import annotations

from dataclasses import replace

from gemmkit.programs.chains.chain import Chain, dots, loaded
from gemmkit.programs.chains.trials import changed_by_nothing
from gemmkit.programs.lines import refused
from gemmkit.programs.trace import Value

LENGTH = "length"


def check_bounded(chain: Chain) -> None:
    """Raises ValueError, with the user's line, for rounds that cannot end within a block."""
    index = chain.index
    if chain.length is None:
        return
    for dot in dots(chain.body):
        a = loaded(dot.args[0])
        if a is not None and dot.args[0].dims[1] is index:
            raise refused(ValueError, f"a product sums over {index}, and takes both operands as they are: behind a length "
                                      f"blocks of {a.data[0].name} hold what the array has there. Kernels are derived of "
                                      "lengths of what rounds compute from; of others there is the reference", dot.line)
    block = next((c for c in chain.carried if c.init.op == "load"), None)
    if block is not None:
        raise refused(ValueError, f"{block.inside.name} begins as a block of {block.init.data[0].name}, and rounds have a "
                                  "length: kernels are derived of cells that begin with a number, which they have where "
                                  "the length is 0", chain.line)


def begun(chain: Chain, signs: dict[str, float]) -> None:
    """Where a length is 0, or a share has no rounds, cells are what they begin with: of those that a round without places
    changes behind the loop."""
    if not chain.has_length:
        return
    changed = set(changed_by_nothing(chain, signs))
    needed = {y for x in chain.end for y in x.args} | {store.value for store in chain.stores}
    is_none = Value("lt", (Value(LENGTH, line=chain.line), Value("const", data=1.0, line="")), line=chain.line)
    for c in chain.carried:
        if c.inside not in changed or c.after not in needed:
            continue
        new = Value("where", (is_none, c.init, c.after), c.after.dims, None, c.after.name, c.after.line)
        for x in chain.end:
            x.args = tuple(new if y is c.after else y for y in x.args)
        chain.stores = [replace(store, value=new) if store.value is c.after else store for store in chain.stores]
        chain.end.insert(0, new)
