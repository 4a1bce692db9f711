"""``a | b | c``: epilogues one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gemmkit.epilogues.base import Epilogue
from gemmkit.lang.returned import number, numbers


@dataclass(frozen=True)
class Composed(Epilogue):
    """``first``, then ``second``: what ``first | second`` makes. Either may be composed itself.

    Values stay in registers between the two, in the type that ``first`` gives. Raises TypeError for an epilogue that
    stores D in its own way: it can be alone only.

    >>> from gemmkit.epilogues import Clamp, Scale
    >>> (Scale(2.0) | Clamp(0.0, 5.0))(4.0, 0, 0)
    5.0
    """

    first: Epilogue
    second: Epilogue

    def __post_init__(self) -> None:
        for name, part in (("first", self.first), ("second", self.second)):
            if not isinstance(part, Epilogue):
                raise TypeError(f"{name}={part!r} in a composition of epilogues: an Epilogue is needed; wrap a function in "
                                "epilogues.Elementwise")
            if part.stores_itself:
                raise TypeError(f"{name}={part!r} stores D in its own way (it overrides tile or store) and cannot be "
                                "composed; override finish instead")

    def __call__(self, x: Any, m: int, n: int) -> Any:
        return self.second(number(self.first, "__call__", self.first(x, m, n), x), m, n)

    def finish(self, values: tuple, tile: Any, shape: Any) -> tuple:
        return self.second.finish(numbers(self.first, "finish", self.first.finish(values, tile, shape), values), tile, shape)

    @property
    def reads_tiles(self) -> bool:
        return self.first.reads_tiles or self.second.reads_tiles

    @property
    def writes(self) -> bool:
        return self.first.writes or self.second.writes

    def check(self, M: int, N: int) -> None:
        """What the parts check."""
        for part in (self.first, self.second):
            check = getattr(part, "check", None)
            if check is not None:
                check(M, N)

    def __repr__(self) -> str:
        return f"{self.first!r} | {self.second!r}"


def parts(epilogue: Any) -> Iterator[Any]:
    """The epilogues that one is composed of, in their order."""
    if isinstance(epilogue, Composed):
        yield from parts(epilogue.first)
        yield from parts(epilogue.second)
    else:
        yield epilogue


__all__ = ["Composed", "parts"]
