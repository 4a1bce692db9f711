"""What a launch with a table in device memory is given, without a GPU: nothing is bound, copied or launched, but written down."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bench.stand_ins import STREAM
from gemmkit.plans.launch import Cache
from gemmkit.runtime import launch as launchable
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.device import parameter_struct

TABLE = 0x7000_0000


def preparing(launched: Callable[[int, tuple[Any, ...], list[Any]], None]) -> Callable[..., Any]:
    """Stands for `BoundLaunch.prepare`: tells of each launch the stream, what its call brought, and all of its values."""
    def prepare(values: list[Any], slots: list[int], expand: Any) -> Any:
        def start(stream: int, brought: tuple[Any, ...]) -> None:
            put = list(values)
            for slot, value in zip(slots, expand(brought), strict=True):
                put[slot] = value
            launched(stream, brought, put)

        return start

    return prepare


class Seen:
    """Launches, the calls that they are of, and the tables that they were given."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, list[Any]]] = []
        self.calls: list[Any] = []
        self.tables: list[Any] = []
        self.bound = 0

    def table(self, ordinal: int, stream: int, key: Any, data: np.ndarray) -> int:
        assert (ordinal, stream) == (0, STREAM) and data.flags.c_contiguous
        hash(key)
        self.kept(key, data)
        return TABLE

    def kept(self, key: Any, data: np.ndarray) -> None:
        """Write the table down, and check that its key is one by which it may be kept."""
        raise NotImplementedError

    def watch(self, patch: pytest.MonkeyPatch, plans: ModuleType) -> None:
        """See the launches of a module of plans, which knows of none yet."""
        launch = plans._launch

        def launched(stream: int, call: Any, *how: Any) -> Any:
            self.calls.append(call)
            return launch(stream, call, *how)

        def bind(made: Any) -> Any:
            self.bound += 1
            packing, _ = parameter_struct(tuple(made.formats))

            def started(stream: int, brought: tuple[Any, ...], put: list[Any]) -> None:
                self.launches.append((stream, list(packing.unpack(packing.pack(*put)))))      # numbers as the kernel has them

            return SimpleNamespace(prepare=preparing(started))

        patch.setattr(plans, "_launch", launched)
        patch.setattr("gemmkit.plans.launch._launches", Cache())
        patch.setattr(workspace, "table", self.table)
        patch.setattr(launchable.Launchable, "bind", bind)
