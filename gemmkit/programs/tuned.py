"""Which mapping a program has where none is said: the one that the tuner has kept for these arrays, else the default.

An entry of the store (`gemmkit.tuning.store`) is found by the text of the default kernel, which has all of a program's
mathematics, and by the kinds of its arrays. So a call without a mapping derives twice where there is an entry; a plan does
it once.
"""

from __future__ import annotations

from collections.abc import Mapping as Names
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from gemmkit.programs.mapping import Mapping
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.planned import device_of, planned
from gemmkit.runtime.arrays import describe, is_array
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning import store
from gemmkit.tuning.problems import Choice, MappingProblem, choose


@dataclass(frozen=True)
class Laid:
    """A mapping as the tuner tries it, and as plain data that a file can keep.

    >>> Laid.of_plain(Laid(Mapping({"n": 128}, stages=3)).plain()).name
    "Mapping({'n': 128}, stages=3)"
    """

    mapping: Mapping

    @property
    def name(self) -> str:
        return repr(self.mapping)

    def plain(self) -> dict[str, Any]:
        """The fields that say something."""
        held = {part.name: getattr(self.mapping, part.name) for part in fields(self.mapping)}
        held = {name: dict(value) if isinstance(value, Names) else value for name, value in held.items()}
        return {name: value for name, value in held.items() if value or value is False}

    @classmethod
    def of_plain(cls, plain: Any) -> Laid:
        """Raises ValueError for what is no mapping."""
        try:
            return cls(Mapping(**plain))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{plain!r} is no mapping of a program: {error}") from None


class ProgramProblem(MappingProblem):
    """A call of a program, or a plan; mappings are `Laid`. ``text``: what runs in place of the derived kernel."""

    read = staticmethod(Laid.of_plain)

    def __init__(self, program: Any, arguments: dict[str, Any], text: str | None = None):
        self.program, self.arguments, self.text = program, arguments, text

    @cached_property
    def device(self) -> DeviceInfo:
        return device_of({name: describe(x, name) for name, x in self.arguments.items() if is_array(x)})

    @cached_property
    def default(self) -> ProgramPlan:
        """By the passes alone. Raises what `gemmkit.programs.planned.planned` raises."""
        return planned(self.program, self.arguments, DEFAULT.mapping, self.text)

    def key(self) -> str:
        return store.digest_of_program(self.default.printed.text, self.default.infos)

    def candidates(self, device: DeviceInfo) -> list[Laid]:
        return [DEFAULT]

    def specialise(self, mapping: Laid, device: DeviceInfo) -> Choice:
        """A `ProgramPlan`. Raises what `gemmkit.programs.planned.planned` raises."""
        return Choice(self.default if mapping is DEFAULT else
                      planned(self.program, self.arguments, mapping.mapping, self.text))

    def plan(self, mapping: Mapping | None) -> ProgramPlan:
        """That of a mapping; None: of the one that the tuner has kept, or the default."""
        found: ProgramPlan = choose(self, self.device, mapping and Laid(mapping)).spec
        return found


DEFAULT = Laid(Mapping())
