"""The kernel families by name: the list to which a new one is added."""

from __future__ import annotations

from collections.abc import Callable

from gemmkit.kernels.family import KernelFamily
from gemmkit.kernels.quantised import family as quantised
from gemmkit.kernels.simt import family as simt
from gemmkit.kernels.sm80 import family as sm80
from gemmkit.kernels.sm90 import family as sm90

FAMILIES: dict[str, KernelFamily] = {family.name: family for family in (simt.FAMILY, sm80.FAMILY, sm90.FAMILY,
                                                                        quantised.FAMILY)}

#: Their device code.
KERNELS: dict[str, Callable[..., None]] = {name: family.kernel for name, family in FAMILIES.items()}

__all__ = ["FAMILIES", "KERNELS"]
