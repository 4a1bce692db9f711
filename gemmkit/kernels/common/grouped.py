"""The scheduler of groups: it hands out the tiles of products of different sizes in one launch.

The host makes three tables in device memory: of each product its first tile and sizes (``sizes``), and where its matrices
lie (``places``); of each tile its product (``products``), so that a block finds its own with one load, and no search.
Products with the longest K come first, so that the last blocks to end are short ones.
"""

from __future__ import annotations

from typing import Any

from gemmkit.component_products import with_number
from gemmkit.components import Array, Component
from gemmkit.kernels.common.many_products import ManyProducts
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.members import FIRST, K, M, N, entry_of, member_of, number_of


@dataclass(frozen=True)
class Member(Component):
    """The matrices of one operand (0 to 3 are A, B, C, D)."""

    operand: int
    sizes: Array
    places: Array

    def matrix(self, data: Any, batch: int) -> Any:
        """The view of a product's matrix."""
        return member_of(data, self.sizes, self.places, batch, self.operand)


@dataclass(frozen=True)
class Group(Component):
    """The matrices of A, B, C and D that belong to each product."""

    a: Member
    b: Member
    c: Member
    d: Member


@dataclass(frozen=True)
class GroupShape(Component):
    """The sizes of all products; kernels and users' code get those of one (``shape`` with other numbers in it)."""

    shape: Any                         # a `gemmkit.kernels.spec.StackShape`
    sizes: Array

    def of_product(self, batch: int) -> Any:
        numbered = with_number(with_number(self.shape, "batch", batch), "M", number_of(self.sizes, batch, M))
        return with_number(with_number(numbered, "N", number_of(self.sizes, batch, N)), "K", number_of(self.sizes, batch, K))


@dataclass(frozen=True)
class Grouped(ManyProducts):
    """The tiles of all products of a group, each product's as ``one`` hands them out."""

    stack: Group
    sizes: Array
    products: Array

    def product(self, tile: int) -> tuple:
        batch = entry_of(self.products, tile)
        return batch, tile - number_of(self.sizes, batch, FIRST)
