"""Default mappings of algebras on Hopper's tensor cores, and when these are the ones to take."""

from __future__ import annotations

import dataclasses
from typing import Any

from gemmkit.config import Problem
from gemmkit.kernels.rasterisation import Grouped
from gemmkit.kernels.sm90.fragments import RegisterMainloop
from gemmkit.kernels.sm90.routes.tma import Tma
from gemmkit.lang.records import part_dtypes
from gemmkit.layouts import ArrayLayout
from gemmkit.operators.algebra import Algebra, units
from gemmkit.operators.wgmma import WGMMAOp
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.hopper_fields import assumed_spec
from gemmkit.tuning.mappings import applies
from gemmkit.tuning.model import Mapping, choose_mapping

PROBLEM = {field.name for field in dataclasses.fields(Problem)}
LIKELY = Mapping(64, 32, "cooperative", 4, (1, 1), 0, 0, 0)

REGISTERS = 128                        # of a consumer's sums: beside them a producer that works keeps what it needs
STAGE = 48 * 1024                      # bytes: four stages fit
DEEP = 64 * 1024                       # three: enough where A comes from registers, and 3 % of dual numbers' time
MOST_PARTS = 8
HELD = 64 * 72 * 2                     # parts of 16 bits that two warps can hold
PEAK = 2048                            # real multiply-accumulates of a multiprocessor in a cycle
SHARED = 128.0                         # bytes that go in or out of a multiprocessor's shared memory in a cycle


def take(values: dict[str, Any], a: ArrayLayout, b: ArrayLayout, sizes: tuple[int, int, int] | None, device: DeviceInfo,
         products: int = 1) -> None:
    """Give an algebra that leaves its base open Hopper's tensor cores, in place, if they are the ones to take."""
    algebra = values["operator"]
    if not isinstance(algebra, Algebra) or algebra.base is not None or not algebra.is_signed:
        return
    of_a, of_b = part_dtypes(a.dtype), part_dtypes(b.dtype)
    if len(of_a) == len(of_b) == algebra.parts <= MOST_PARTS and applies(of_a[0], of_b[0], values, device):
        listed = mappings(algebra, dict(values, global_a_layout=a, global_b_layout=b))
        mapping = choose_mapping(sizes, device, mappings=listed, products=products)
        values["operator"] = algebra.with_base(WGMMAOp(mapping.N, dtype=of_a[0]))
        for name, value in mapping.fields.items():                # what the user gives of a mapping stays
            values.setdefault(name, value)


def mappings(algebra: Algebra, values: dict[str, Any]) -> tuple[Mapping, ...]:
    """From the largest tile, as wide as the sums of all parts fit a thread's registers, to the smallest."""
    spec = _likely_spec(algebra, values)
    works = any(type(x.route) is not Tma for x in (spec.a, spec.b))
    by_registers = isinstance(spec.mainloop, RegisterMainloop)
    widest = max(8, REGISTERS * 2 // algebra.parts // 16 * 16)
    if works:                                                    # what warps divide among them
        widest = 2 ** (widest.bit_length() - 1)
    widths = [n for n in (widest, 64, 32, 16) if n <= widest]
    tiles = [(128, widest, 8), *((64, n, 4) for n in dict.fromkeys(widths))]
    return tuple(_mapping(algebra, M, N, warps, works, by_registers) for M, N, warps in tiles)


def _likely_spec(algebra: Algebra, values: dict[str, Any]) -> Any:
    """The kernel for this problem on a likely mapping: it says how operands travel."""
    part = part_dtypes(values["global_a_layout"].dtype)[0]
    base = WGMMAOp(LIKELY.N, dtype=part) if algebra.base is None else dataclasses.replace(units(algebra), N=LIKELY.N)
    problem = {name: value for name, value in values.items() if name in PROBLEM}
    return assumed_spec(dict(problem, operator=algebra.with_base(base)), LIKELY)


def _mapping(algebra: Algebra, M: int, N: int, warps: int, works: bool, by_registers: bool) -> Mapping:
    """The deepest stage of which four fit; where warps de-interleave it, one of which two of them can hold an operand,
    or four where they have B alone to de-interleave."""
    line = algebra.parts * (M + N) * 2                           # bytes of an element of K
    most = HELD // (algebra.parts * max(M, N)) if works and not by_registers else 64
    depth = next((k for k in (64, 32, 16) if line * k <= (DEEP if by_registers else STAGE) and k <= most), 16)
    # Through shared memory go numbers once (planes), twice (to registers) or three times (de-interleaved), then what
    # every wgmma reads of B, and of A.
    moved = 2 * algebra.parts * (M * (2 if by_registers else 3 if works else 1) + N * (3 if works else 1))
    read = 2 * algebra.products * M // 64 * (N + (0 if by_registers else 64))
    step = 64 * max(algebra.products * M * N / PEAK, (moved + read) / SHARED)
    return Mapping(M, N, "cooperative", warps, (1, 1), step, 5000, 0, order=Grouped(16), depth=2 * depth)


__all__ = ["mappings", "take"]
