"""The kernel families by name: the list to which a new one is added."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from importlib import import_module

from gemmkit.kernels.family import KernelFamily

__all__ = ["FAMILIES"]


class Families(MutableMapping[str, KernelFamily]):
    """Families, or where they are: a family's kernel, rules and specialisation are loaded when it is asked for.

    >>> Families(singlestage="gemmkit.kernels.simt.family")["singlestage"].minimum_arch
    (5, 0)
    """

    def __init__(self, **families: KernelFamily | str):
        self._families = families

    def __getitem__(self, name: str) -> KernelFamily:
        found = self._families[name]
        if isinstance(found, str):
            found = self._families[name] = import_module(found).FAMILY
        return found

    def __setitem__(self, name: str, family: KernelFamily) -> None:
        self._families[name] = family

    def __delitem__(self, name: str) -> None:
        del self._families[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._families)

    def __len__(self) -> int:
        return len(self._families)

    def __contains__(self, name: object) -> bool:
        return name in self._families


FAMILIES = Families(
    singlestage="gemmkit.kernels.simt.family",
    multistage="gemmkit.kernels.sm80.family",
    warp_specialised="gemmkit.kernels.sm90.family",
    quantised="gemmkit.kernels.quantised.family",
)
