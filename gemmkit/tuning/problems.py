"""`choose`: the mapping of a kernel, chosen in one place for every family, and the spec that was made of it.

A family says what is asked for as a `MappingProblem`: which mappings may be taken, those that cost least first, and what
becomes of one. `choose` takes the first of these that a kernel can carry out:

1. the mapping that the caller gives, or the tuner tries;
2. the one that `gemmkit.tune` has kept for the problem (`gemmkit.tuning.store`);
3. the family's candidates, in the order of their cost. Shipped winners stand before what a model says.

| family | candidates |
|---|---|
| products, groups (`gemmkit.tuning.choose`) | swap-AB, the winners, the tables by their models, the dtypes' operator |
| wgmma's tiles for an operator (`gemmkit.tuning.sm90`) | its table's mappings by their cycles |
| attention (`gemmkit.functions.attention`) | the head size's rows of a table |
| MLPs (`gemmkit.functions.mlp`) | two tiles of x where enough stages of weights fit beside them, then one |
| rows (`gemmkit.functions.rows`) | as few warps a row as can hold it, then rows that are streamed |
| programs (`gemmkit.programs.tuned`) | the default: tiles by waves, or a chain's blocks by what fits |

A choice is made once for a class of problems: `gemmkit.plans.launch` keeps launches by what they rest on, programs keep
plans.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from gemmkit.lang.errors import ConfigError

if TYPE_CHECKING:
    from gemmkit.runtime.device import DeviceInfo


class Choice(NamedTuple):
    """A mapping as the ``spec`` that was made of it: what a kernel is specialised by, or all of a plan. ``by``: what chose
    it, "tuned" or a family's word. With ``swap_ab`` it is of D^T = B^T A^T."""

    spec: Any
    by: str = "model"
    swap_ab: bool = False


class MappingProblem(ABC):
    """What a mapping is chosen for."""

    #: ``key()`` is what a tuned mapping is kept under, and ``read`` makes one of plain data; None where nothing is tuned.
    key: Callable[[], str] | None = None
    read: Any = None

    @abstractmethod
    def candidates(self, device: DeviceInfo) -> Iterable[Any]:
        """Mappings, those that cost least first. They are asked for one by one, until one is taken."""

    @abstractmethod
    def specialise(self, mapping: Any, device: DeviceInfo) -> Choice:
        """What becomes of a mapping. Raises ConfigError where no kernel can carry it out, or it does not fit the device."""

    def settled(self, choice: Choice, device: DeviceInfo) -> Choice:
        """What is taken in place of a choice."""
        return choice

    def refusal(self, refused: list[ConfigError], last: Any) -> ConfigError:
        """Why none of the candidates, down to the ``last``, is taken, by the reasons of all."""
        return refused[-1]


def choose(problem: MappingProblem, device: DeviceInfo, mapping: Any = None) -> Choice:
    """The choice for a problem: ``mapping`` where one is given, else the tuned one, else the candidate that costs least.

    Raises ConfigError where no kernel can carry out any, or none fits the device. For a tuned mapping that cannot be taken
    any more there is a warning.
    """
    if mapping is not None:
        return problem.specialise(mapping, device)
    if problem.key is not None:
        from gemmkit.tuning import store  # loads what digests of products need, and rows have none

        tuned = store.find(device, problem.key, problem.read)
        if tuned is not None:
            try:
                choice = problem.specialise(tuned, device)._replace(by="tuned")
            except ConfigError as error:
                store.refused(device, tuned, error)
            else:
                return problem.settled(choice, device)
    refused: list[ConfigError] = []
    try:
        for one in problem.candidates(device):
            try:
                choice = problem.specialise(one, device)
            except ConfigError as error:
                refused.append(error)
            else:
                return problem.settled(choice, device)
        raise problem.refusal(refused, one)
    finally:
        refused.clear()                                # what they were raised for would live as long as they
