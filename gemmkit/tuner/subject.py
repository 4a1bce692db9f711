"""What a search asks of what is tuned (`gemmkit.tuner.subjects`, `gemmkit.programs.subject`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gemmkit.runtime.array_info import ArrayInfo
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.launchable import Launchable
from gemmkit.tuner.found import Tuned
from gemmkit.tuner.jobs import Job, Memory


class Output(NamedTuple):
    """An array that a launch writes, and how far a candidate's may lie from the default's (`verifying.difference`)."""

    name: str
    info: ArrayInfo
    allowed: float


class Subject:
    """What is tuned. ``default`` is what the tables' mapping launches (`Compiled`, `CompiledGroup` or `ProgramPlan`)."""

    default: Any
    answer: type[Tuned] = Tuned                            # what a search returns

    @property
    def device(self) -> DeviceInfo:
        raise NotImplementedError

    @property
    def ordinal(self) -> int:
        """The device's number."""
        raise NotImplementedError

    @property
    def what(self) -> str:
        """In words."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        raise NotImplementedError

    def candidates(self) -> Iterable[Any]:
        """In the order in which they should be tried."""
        raise NotImplementedError

    def tried(self, candidate: Any) -> Any:
        """What a candidate launches. Raises ConfigError, ValueError or TypeError where it is not legal."""
        raise NotImplementedError

    def is_known(self, tried: Any) -> bool:
        """Whether it launches what the default does, or one that has been asked about before."""
        raise NotImplementedError

    @staticmethod
    def config_of(compiled: Any) -> Any:
        """The configuration of what is launched, or its mapping."""
        raise NotImplementedError

    def memory(self) -> Memory:
        raise NotImplementedError

    @staticmethod
    def kernels(compiled: Any) -> list[Launchable]:
        """Those that are launched, in the order in which they run."""
        return [compiled.launchable]

    def job(self, compiled: Any, memory: Memory, cubins: Sequence[bytes]) -> Job:
        """``cubins``: of its `kernels`, in their order."""
        raise NotImplementedError

    def outputs(self) -> list[Output]:
        raise NotImplementedError

    def key(self) -> str:
        """What the winner is kept under."""
        raise NotImplementedError
