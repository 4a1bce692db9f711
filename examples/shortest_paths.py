"""All-pairs shortest paths by products in the min-plus semiring: `python -m examples.shortest_paths`.

A path of at most 2h edges is a path of at most h edges followed by another such: if D holds the shortest
distances over at most h edges, then D ⊗ D, with (D ⊗ D)_ij = min_k (D_ik + D_kj), holds those over at most
2h. Squaring until nothing changes gives all shortest paths after about log2 of the longest one's edges. The
product is gemmkit's own kernel with another operator, `operators.MIN_PLUS`. Its zero is infinity, and that is
what the kernel fills the edges of its tiles with: 77 nodes divide by no tile.

The paths themselves take one product more: `gemmkit.functions.select` tells of D ⊗ L, with L the lengths of the edges
alone, which k each minimum came from. That is the node before j on a shortest path from i to j, and from one
to the next they lead back to i.

The graphs are the real social networks that networkx ships: who appears with whom in *Les Misérables* (77
people), who met whom in a karate club (34), which women of Natchez came to which events (32) and which
families of Florence married (15). (networkx ships no road network.) Where meetings are counted, the length of
an edge is 1 / count: who meets often is near. Scaled by the least common multiple of the counts, all lengths
are integers that float64 adds exactly, so the result must equal networkx's, to the last bit, although the two
add in different orders.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

import gemmkit as gk
from gemmkit import operators

from . import machine

GRAPHS = {  # the largest first
    "les-miserables": "les_miserables_graph",
    "karate-club": "karate_club_graph",
    "southern-women": "davis_southern_women_graph",
    "florentine-families": "florentine_families_graph",
}

EMULATED_GRAPHS = tuple(GRAPHS)[1:]  # the largest takes the emulator longer than all others together


@dataclass(frozen=True)
class Network:
    """`lengths[i, j]` is the length of the edge between nodes i and j, in units of 1 / `scale`.

    It is infinite where there is no edge, and 0 on the diagonal.
    """

    name: str
    nodes: list[str]
    edges: int
    lengths: np.ndarray
    scale: int


def load(name: str) -> Network:
    """One of the graphs that networkx ships.

    Raises:
        ValueError: `name` is none of `GRAPHS`.
    """
    import networkx

    if name not in GRAPHS:
        raise ValueError(f"name: got {name!r}, must be one of {', '.join(GRAPHS)}")
    graph = getattr(networkx, GRAPHS[name])()
    nodes = list(graph)
    counts = {(u, v): int(count) for u, v, count in graph.edges(data="weight", default=1)}
    scale = math.lcm(*counts.values())
    if scale * len(nodes) >= 2**53:
        raise ValueError(f"{name}: path lengths up to {len(nodes)} x {scale} are not exact in float64")
    number = {node: i for i, node in enumerate(nodes)}
    lengths = np.full((len(nodes), len(nodes)), np.inf)
    np.fill_diagonal(lengths, 0.0)
    for (u, v), count in counts.items():
        lengths[number[u], number[v]] = lengths[number[v], number[u]] = scale // count
    return Network(name, [str(node) for node in nodes], len(counts), lengths, scale)


def reference_distances(network: Network) -> np.ndarray:
    """networkx's answer, by Dijkstra's algorithm from every node: nothing in common with squaring."""
    import networkx

    count = len(network.nodes)
    graph = networkx.Graph()
    graph.add_nodes_from(range(count))
    for i, j in zip(*np.nonzero(np.isfinite(network.lengths)), strict=True):
        if i < j:
            graph.add_edge(int(i), int(j), weight=int(network.lengths[i, j]))
    distances = np.full((count, count), np.inf)
    for i, found in networkx.all_pairs_dijkstra_path_length(graph):
        for j, distance in found.items():
            distances[i, j] = distance
    return distances


def reference_square(distances: np.ndarray) -> np.ndarray:
    """One min-plus square by NumPy."""
    square: np.ndarray = np.min(distances[:, :, None] + distances[None, :, :], axis=1)
    return square


def square(distances: np.ndarray, where: machine.Machine) -> np.ndarray:
    """One min-plus square as a gemmkit product."""
    d = where.to_device(distances)
    return where.to_host(gk.matmul(d, d, operator=operators.MIN_PLUS))


def all_pairs(network: Network, where: machine.Machine) -> tuple[np.ndarray, int]:
    """The distances between all pairs of nodes, and how many products they took.

    Raises:
        RuntimeError: the distances still change after the number of products that any graph needs.
    """
    distances = network.lengths
    enough = max(1, math.ceil(math.log2(max(2, len(network.nodes) - 1)))) + 1
    with where.session():
        for products in range(1, enough + 1):
            squared = square(distances, where)
            if np.array_equal(squared, distances):
                return distances, products
            distances = squared
    raise RuntimeError(
        f"{network.name}: distances still change after {enough} products; the products are wrong"
    )


def predecessors(network: Network, distances: np.ndarray, where: machine.Machine) -> np.ndarray:
    """For all pairs the node before the last on a shortest path; -1 where there is none."""
    edges = network.lengths.copy()
    np.fill_diagonal(edges, np.inf)  # the last step must be one
    with where.session():
        _, via = gk.functions.select(where.to_device(distances), where.to_device(edges), operator=operators.MIN_PLUS)
        return where.to_host(via)


def path(before: np.ndarray, i: int, j: int) -> list[int]:
    """The nodes of a shortest path from i to j, by the predecessors; empty where no path leads there.

    Raises:
        RuntimeError: the predecessors go around in circles.
    """
    found = [j]
    while found[-1] != i:
        if before[i, found[-1]] < 0:
            return []
        found.append(int(before[i, found[-1]]))
        if len(found) > len(before):
            raise RuntimeError(f"the predecessors from {j} do not lead back to {i}; the products are wrong")
    return found[::-1]


def are_paths(network: Network, before: np.ndarray, reference: np.ndarray) -> bool:
    """Whether the path of every pair is one along edges, and as long as the reference says."""
    count = len(network.nodes)
    for i in range(count):
        for j in range(count):
            nodes = path(before, i, j)
            length = sum(network.lengths[u, v] for u, v in pairwise(nodes)) if nodes else np.inf
            if length != reference[i, j]:
                return False
    return True


def main(emulate: bool | None = None, graphs: Sequence[str] | None = None) -> bool:
    """Compute the distances, print what came out, and return whether they equal networkx's.

    Without `graphs`, all of them on a GPU, and all but the largest in the emulator.
    """
    where = machine.find(emulate)
    graphs = graphs or (EMULATED_GRAPHS if where.emulated else tuple(GRAPHS))
    print(f"Shortest paths in social networks, {where}")
    equal = True
    for name in graphs:
        network = load(name)
        distances, products = all_pairs(network, where)
        reference = reference_distances(network)
        before = predecessors(network, distances, where)
        same = bool(np.array_equal(distances, reference)) and are_paths(network, before, reference)
        equal &= same
        finite = np.where(np.isfinite(distances), distances, -1.0)
        i, j = np.unravel_index(np.argmax(finite), finite.shape)
        print(
            f"  {name}: {len(network.nodes)} nodes, {network.edges} edges, {products} products; "
            f"{'equal to' if same else 'DIFFERS FROM'} networkx's answer"
        )
        length = finite[i, j] / network.scale
        print(f"    farthest apart: {network.nodes[i]} and {network.nodes[j]}, at {length:.3g}")
        print(f"    by way of {' - '.join(network.nodes[n] for n in path(before, int(i), int(j)))}")
    return equal


def command(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.shortest_paths", description="Shortest paths.")
    parser.add_argument(
        "graphs",
        nargs="*",
        metavar="graph",
        help=f"of {', '.join(GRAPHS)} (default: all; in the emulator all but the first)",
    )
    parser.add_argument("--emulate", action="store_true", default=None, help="use the emulator, GPU or not")
    options = parser.parse_args(arguments)
    for name in options.graphs:
        if name not in GRAPHS:
            parser.error(f"graph {name!r} is none of {', '.join(GRAPHS)}")
    return 0 if main(options.emulate, options.graphs or None) else 1


if __name__ == "__main__":
    raise SystemExit(command())
