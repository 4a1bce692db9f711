"""PTX's types: how wide they are, and which NumPy dtype has their arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from tests.ptx_machine.faults import UnknownInstruction


@dataclass(frozen=True)
class Kind:
    """A type of values. A packed one (``f16x2``) has ``lanes`` of ``dtype`` in one register."""

    name: str
    bits: int
    dtype: np.dtype
    lanes: int = 1

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return self.bits // 8

    @property
    def unsigned(self) -> np.dtype:
        """The dtype of its bits, as registers hold them."""
        return UNSIGNED[self.bits]

    @property
    def is_float(self) -> bool:
        return self.name[0] == "f" or self.name.startswith("bf")

    @property
    def is_signed(self) -> bool:
        return self.name[0] == "s"


UNSIGNED = {1: np.dtype(bool), **{8 * size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}}
BF16 = np.dtype(ml_dtypes.bfloat16)
KINDS = {"pred": Kind("pred", 1, np.dtype(bool)),
         **{f"{letter}{bits}": Kind(f"{letter}{bits}", bits, np.dtype(f"{'i' if letter == 's' else 'u'}{bits // 8}"))
            for letter in "sub" for bits in (8, 16, 32, 64)},
         **{f"f{bits}": Kind(f"f{bits}", bits, np.dtype(f"f{bits // 8}")) for bits in (16, 32, 64)},
         "bf16": Kind("bf16", 16, BF16), "f16x2": Kind("f16x2", 32, np.dtype("f2"), 2), "bf16x2": Kind("bf16x2", 32, BF16, 2)}


def kind_of(name: str, instruction: object = None) -> Kind:
    if name not in KINDS:
        raise UnknownInstruction(f"unknown type .{name}", instruction)
    return KINDS[name]


__all__ = ["BF16", "KINDS", "UNSIGNED", "Kind", "kind_of"]
