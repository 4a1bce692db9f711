"""The kernel families by name: the list to which a new one is added."""

from __future__ import annotations

from collections import UserDict
from importlib import import_module
from typing import Any, cast

from gemmkit.kernels.family import KernelFamily


class Families(UserDict[str, Any]):
    """Families, or where they are: a family's kernel, rules and specialisation are loaded when it is asked for.

    >>> Families(singlestage="gemmkit.kernels.simt.family")["singlestage"].minimum_arch
    (5, 0)
    """

    def __getitem__(self, name: str) -> KernelFamily:
        found = self.data[name]
        if isinstance(found, str):
            found = self.data[name] = import_module(found).FAMILY
        return cast(KernelFamily, found)


FAMILIES = Families(
    singlestage="gemmkit.kernels.simt.family",
    multistage="gemmkit.kernels.sm80.family",
    warp_specialised="gemmkit.kernels.sm90.family",
    quantised="gemmkit.kernels.quantised.family",
)
