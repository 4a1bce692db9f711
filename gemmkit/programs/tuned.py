"""Which mapping a program has where none is said: the one that the tuner has kept for these arrays, else the default.

An entry of the store (`gemmkit.tuning.store`) is found by the text of the default kernel, which has all of a program's
mathematics, and by the kinds of its arrays. So a call without a mapping derives twice where there is an entry; a plan does
it once.
"""

from __future__ import annotations

from collections.abc import Mapping as Names
from dataclasses import dataclass, fields
from typing import Any

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.planned import planned
from gemmkit.tuning import store


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


def key_of(plan: ProgramPlan) -> str:
    """What the mapping of a program is kept under; ``plan`` is the default one."""
    return store.digest_of_program(plan.printed.text, plan.infos)


def best_planned(program: Any, arguments: dict[str, Any], mapping: Mapping | None, text: str | None) -> ProgramPlan:
    """The plan of a call. Raises what `gemmkit.programs.plan.planned` raises; for an entry that no kernel takes there is a
    warning, and the default."""
    if mapping is not None:
        return planned(program, arguments, mapping, text)
    default = planned(program, arguments, Mapping(), text)
    found = store.find(default.device, lambda: key_of(default), Laid.of_plain)
    if found is None:
        return default
    try:
        return planned(program, arguments, found.mapping, text)
    except ConfigError as error:
        store.refused(default.device, found, error)
        return default
