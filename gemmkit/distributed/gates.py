"""Products that a rank launches before all of their operands are there: the configuration, with `Gated` as the order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from gemmkit.distributed.calls import planned
from gemmkit.distributed.ranks import Ranks
from gemmkit.distributed.shards import even_lengths
from gemmkit.kernels.gated import Gated, arrivals
from gemmkit.planning import Plan
from gemmkit.runtime.arrays import describe

_SOON = 2**31 - 1                      # milliseconds: the longest that a kernel waits

Table = Callable[[Plan], np.ndarray]


def by_shards(lengths: tuple[int, ...], rank: int) -> Table:
    """Own rows first, then those of the ranks behind; a tile waits for the shards that it reads."""
    return lambda made: arrivals(made.config.order, lengths, rank, *made.tiles)


def by_chunks(rows: int, chunks: int, ranks: int) -> Table:
    """The rows in chunks, one after the other; a tile waits for its chunks from all ranks."""
    def table(made: Plan) -> np.ndarray:
        found = arrivals(made.config.order, even_lengths(rows, chunks), 0, *made.tiles)
        found[:, 2:] *= ranks
        return found

    return table


class Gate(NamedTuple):
    """A configuration, and the table of its tiles on the device."""

    conf: Any
    table: Any
    orders: dict[int, Gated]           # by the flags' address: a component that comes again is not read anew


class Gates:
    """The gated configurations of one agreed call, by what is this rank's own matter: the arrays' kinds."""

    def __init__(self, ranks: Ranks, table: Table):
        self.rank = ranks.rank
        self.patience = min(int(ranks.timeout.total_seconds() * 1000), _SOON)
        self._table = table
        self._known: dict[Any, Gate | None] = {}

    def of(self, a: Any, b: Any, c: Any, out: Any, conf: Any, components: dict[str, Any]) -> Gate | None:
        """None where the product cannot be gated: its transpose is computed, or it has no tiles or no K.

        Raises what `gemmkit.plan` raises.
        """
        key = tuple(None if x is None else (describe(x, name)[1:4], x.data_ptr() & 15)
                    for x, name in ((a, "a"), (b, "b"), (c, "c"), (out, "out")))
        if key not in self._known:
            self._known[key] = self._made(planned(a, b, c, out, conf, components), a)
        return self._known[key]

    def _made(self, made: Plan, a: Any) -> Gate | None:
        if made.swap_ab or 0 in made.shape:
            return None
        table = torch.from_numpy(self._table(made)).to(a.device)
        return Gate(made.config, table, {})

    def order(self, gate: Gate, flags: Any) -> Gated:
        found = gate.orders.get(flags.data_ptr())
        if found is None:
            found = gate.orders[flags.data_ptr()] = Gated(gate.table, flags, self.rank, self.patience)
        return found

    def check(self, gate: Gate | None, a: Any, b: Any, c: Any, out: Any, components: dict[str, Any]) -> None:
        """Compile the gated kernel; ``a`` may be a `gemmkit.Concat`."""
        if gate is not None:
            flags = torch.zeros(1, dtype=torch.uint32, device=b.device)
            order = Gated(gate.table, flags, 0, self.patience)
            planned(a, b, c, out, gate.conf, {**beside(gate.conf, components), "order": order})


def beside(conf: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The components to give beside a configuration that was made with them, which has the operator; all without one."""
    return components if conf is None else {name: value for name, value in components.items() if name != "operator"}


def gated(gates: Gates, gate: Gate, inbox: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a gated product, beside its configuration."""
    return {**beside(gate.conf, components), "order": gates.order(gate, inbox.arrived)}
