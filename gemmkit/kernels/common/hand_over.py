"""The hand-over: the sums of one product become A of the next one in the registers that they are in.

A kernel that chains products (attention's two, the layers of an MLP) joins the sums of one, converts them, packs neighbours
into registers, and gives the next product so many at a time as fragments of A. That is right where every lane holds the
elements that the instruction wants of it, in the instruction's order; elsewhere the kernel computes another product, and
says nothing. The operators' fragment maps (`gemmkit.ptx.fragments`) have both sides, so that a kernel's spec compares them
on the host, before anything is compiled.
"""

from __future__ import annotations

from functools import cached_property, lru_cache

from gemmkit.components import Component
from gemmkit.lang.component_class import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.operators.base import Operator
from gemmkit.ptx.fragments import FragmentMap

REGISTER = 4                           # bytes; an element of 8 has two of them
PARTS = {1: ("",), 2: (" (its lower half)", " (its upper half)"), 4: tuple(f" (its byte {n})" for n in range(4))}


@dataclass(frozen=True)
class HandOver(Component):
    """The sums of ``product``, ``columns`` wide, as A of ``following``.

    The sums are a lane's accumulators, joined: instructions stand side by side along N, as many as ``columns`` has, and what
    a lane holds of one comes before what it holds of the next. Each ``values`` of them, converted to ``following``'s dtype
    and packed, the first into the lower part of a register, are a fragment of A: in device code
    ``split(sums, hand_over.values)``. Fragment n has columns ``n * k`` to ``(n + 1) * k`` of the sums.

    Raises ConfigError where a lane does not hold what it has to, naming operators, lane, register and elements.

    >>> from gemmkit.operators import MMAOp, WGMMAOp
    >>> layers = HandOver(WGMMAOp(128), WGMMAOp(64), columns=128)
    >>> layers.fragments, layers.values, layers.k
    (8, 8, 16)
    >>> HandOver(MMAOp(), MMAOp(), columns=64).fragments           # eight instructions of 8 columns
    4
    >>> HandOver(MMAOp(), MMAOp(dtype="float32"), columns=64)      # doctest: +ELLIPSIS
    Traceback (most recent call last):
    gemmkit.lang.errors.ConfigError: the sums of MMAOp() as A of MMAOp(dtype='float32'): lane 0 has element (0, 1) of ...
    """

    product: Operator
    following: Operator
    columns: int

    def __post_init__(self) -> None:
        super().__post_init__()
        reason = _unmapped(self) or _uneven(self) or _other_element(self)
        if reason is not None:
            raise ConfigError(f"the sums of {self.product!r} as A of {self.following!r}: {reason}")

    @cached_property
    def values(self) -> int:
        """A lane's elements of a fragment of A."""
        return _map_a(self).values

    @cached_property
    def k(self) -> int:
        """Columns of the sums that a fragment has."""
        return _map_a(self).columns

    @cached_property
    def fragments(self) -> int:
        return self.columns // self.k


def _map_a(given: HandOver) -> FragmentMap:
    found = given.following.map_a
    assert found is not None
    return found


def _unmapped(given: HandOver) -> str | None:
    """Why nothing can be said of a lane's registers."""
    c, a = given.product.map_c, given.following.map_a
    if c is None:
        return f"which element a lane's accumulator is, {type(given.product).__name__} does not say (map_c is None)"
    if a is None:
        return f"which element of A a lane's register is, {type(given.following).__name__} does not say (map_a is None)"
    for operator in (given.product, given.following):
        if operator.sums != 1:
            return f"an element of {type(operator).__name__} has {operator.sums} parts; numbers of one are needed"
    return None


def _uneven(given: HandOver) -> str | None:
    """Why the two do not have the same rows and whole numbers of instructions."""
    c, a = given.product.map_c, given.following.map_a
    assert c is not None and a is not None
    if (c.threads, c.rows) != (a.threads, a.rows):
        return f"{c.threads} threads hold {c.rows} rows of sums, and {a.threads} threads hold {a.rows} rows of A"
    for what, width in (("an instruction's sums", c.columns), ("a fragment of A", a.columns)):
        if given.columns < 1 or given.columns % width:
            return f"columns={given.columns}: a multiple of {width} is needed, which {what} has"
    sums, taken = given.columns // c.columns * c.values, given.columns // a.columns * a.values
    if sums != taken:
        return f"a lane has {sums} sums of {given.columns} columns, and A takes {taken} of it"
    return None


def _other_element(given: HandOver) -> str | None:
    """Which element stands where another one should."""
    c, a = given.product.map_c, given.following.map_a
    assert c is not None and a is not None
    found = _first_difference(c, a, given.columns)
    if found is None:
        return None
    lane, value, has, wanted = found
    n, place = divmod(value, a.values)
    per = max(1, REGISTER // int(given.following.fragment_a.dtype.itemsize))
    return (f"lane {lane} has element {has} of the sums in register {place // per}{PARTS[per][place % per]} of A's fragment "
            f"{n}, where element {wanted} is wanted")


Element = tuple[int, int]


@lru_cache(maxsize=256)
def _first_difference(c: FragmentMap, a: FragmentMap, columns: int) -> tuple[int, int, Element, Element] | None:
    """(lane, value, the element that it is, the one that it should be) where the two differ.

    A map is a sum of what the lane and what the value contribute, so that two maps which agree for all values of lane 0, and
    for value 0 of all lanes, agree everywhere.
    """
    c, a = c.beside(columns // c.columns), a.beside(columns // a.columns)
    for lane, value in (*((0, value) for value in range(a.values)), *((lane, 0) for lane in range(a.threads))):
        held, wanted = ((x.row(lane, value), x.column(lane, value)) for x in (c, a))
        if held != wanted:
            return lane, value, held, wanted
    return None
