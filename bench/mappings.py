"""Mappings of the warp-specialised kernel by short names, for tuning: ``128x256c-2x1-g8``.

    <M>x<N>      the tile of a block (of both consumers' tiles in turn, where they play ping-pong)
    c or p       cooperative or ping-pong
    -<m>x<n>     the cluster: blocks along M and along N
    -g<rows>     grouped rasterisation; -h is the Hilbert curve
    -s<stages>   optional: stages; by default as many as fit
    -w<warps>    optional: warps that multiply; by default 8 (4 where M is 64 and the schedule cooperative)
    -p<warps>    optional: warps that produce; by default 4
    -k<blocks>   optional: blocks of a cluster that share K
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import Any

from gemmkit import Tile
from gemmkit.kernels.collectives.scheduler import Grouped, Hilbert, Order

NAME = re.compile(r"(\d+)x(\d+)([cp])-(\d+)x(\d+)-(?:g(\d+)|h)(?:-s(\d+))?(?:-w(\d+))?(?:-p(\d+))?(?:-k(\d+))?")
LINE = 128  # bytes of K in a stage

TILES = ("128x256c", "256x128c", "128x192p", "128x128p", "64x256p")
CLUSTERS = ("1x1", "2x1", "1x2")
ORDERS = ("g8", "g16", "h")
DEFAULT = tuple("-".join(parts) for parts in itertools.product(TILES, CLUSTERS, ORDERS))


@dataclass(frozen=True)
class Mapping:
    """One mapping; `parse` makes it of its name."""

    M: int
    N: int
    schedule: str
    cluster: tuple[int, int]
    order: Order
    stages: int | None
    warps: int
    producer_warps: int
    splits: int = 1

    def fields(self, itemsize: int) -> dict[str, Any]:
        """The fields of `gemmkit.get_config`, for operands of ``itemsize`` bytes."""
        chosen: dict[str, Any] = {
            "block_shape": Tile(M=self.M, N=self.N, K=LINE // itemsize),
            "schedule": self.schedule,
            "warps_per_block": self.warps,
            "producer_warps": self.producer_warps,
            "splits": self.splits,
            "cluster": Tile(M=self.cluster[0], N=self.cluster[1]),
            "order": self.order,
        }
        return chosen if self.stages is None else {**chosen, "stages": self.stages}


def parse(name: str) -> Mapping:
    """The mapping of a name.

    Raises:
        ValueError: it is not one.

    >>> parse("128x256c-2x1-g8").warps
    8
    """
    found = NAME.fullmatch(name)
    if found is None:
        raise ValueError(f"mapping {name!r}: a name such as 128x256c-2x1-g8 or 128x192p-1x2-h-s4 is needed")
    m, n, schedule, rows, columns, group, stages, warps, producers, splits = found.groups()
    usual = 4 if schedule == "c" and int(m) == 64 else 12 if schedule == "c" and int(m) == 192 else 8
    return Mapping(
        int(m),
        int(n),
        "pingpong" if schedule == "p" else "cooperative",
        (int(rows), int(columns)),
        Hilbert() if group is None else Grouped(int(group)),
        None if stages is None else int(stages),
        usual if warps is None else int(warps),
        4 if producers is None else int(producers),
        1 if splits is None else int(splits),
    )


def describe(config: Any) -> str:
    """The name of a configuration's mapping; the kernel's name for another kernel.

    `parse` reads it, unless the order is one that has no name here.
    """
    if not config.is_pipeline:
        return str(config.kernel)
    block, cluster, order = config.block_shape.size, config.cluster.size, config.order
    way = f"g{order.group}" if isinstance(order, Grouped) else "h" if isinstance(order, Hilbert) else repr(order)
    return (
        f"{block.M}x{block.N}{config.schedule[0]}-{cluster.M}x{cluster.N}-{way}-s{config.stages}"
        f"-w{config.warps_per_block}" + (f"-p{config.producer_warps}" if config.producer_warps != 4 else "")
        + (f"-k{config.splits}" if config.splits != 1 else "")
    )
