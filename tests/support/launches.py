"""What a launch with a table in device memory is given, without a GPU: nothing is bound, copied or launched, but written down."""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest

from bench import stand_ins
from bench.stand_ins import STREAM
from gemmkit.plans.launch import Cache, forget
from gemmkit.programs import calls
from gemmkit.programs import launches as of_programs
from gemmkit.runtime import launch as launchable
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.device import PARAMETER_FORMATS, parameter_struct
from gemmkit.runtime.tensor_maps import Encoder
from tests.support.replaced import forget_replaced

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


class Launched(NamedTuple):
    """All that the driver is told of a launch: which kernel, and how."""

    code: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    attributes: tuple[Any, ...]
    stream: int
    values: tuple[Any, ...]


@contextmanager
def told() -> Iterator[list[Launched]]:
    """Within it there is a GPU of `bench.stand_ins`, whose driver writes launches down. Kernels are told apart by what their
    code depends on, and tensor maps by the tensor and the box that they are of."""
    kernels: dict[int, stand_ins.Kernel] = {}
    of_code: dict[bytes, stand_ins.Kernel] = {}
    seen: list[Launched] = []

    def loaded(cubin: bytes) -> stand_ins.Kernel:
        if cubin not in of_code:
            made: Any = stand_ins.Kernel()
            made.number, made.code = 1 + len(of_code), cubin
            kernels[made.number] = of_code[cubin] = made
        return of_code[cubin]

    def bind(kernel: Any, grid: Any, block: Any, shared: Any, parameters: Any, *more: Any, **how: Any) -> Any:
        kernel.parameters = tuple(parameters)
        return launchable.LoadedKernel.bind(kernel, grid, block, shared, parameters, *more, **how)

    def entry(at_config: Any, function: Any, pointers: Any, extra: None) -> int:
        kernel: Any = kernels[function.value]
        config = at_config._obj
        letters = ["=" + PARAMETER_FORMATS[code][0] for code in kernel.parameters]
        values = [struct.unpack(x, ctypes.string_at(at, struct.calcsize(x))) for x, at in zip(letters, pointers)]
        given = tuple((one.id, tuple(one.dimensions)) for one in (config.attributes[n] for n in range(config.attribute_count)))
        seen.append(Launched(kernel.code, tuple(config.grid), tuple(config.block), config.shared_memory, given, config.stream,
                             tuple(value for (value,) in values)))
        return 0

    def encoded(encoder: Any, address: int) -> bytes:
        return hashlib.sha512(repr((address, encoder.arguments)).encode()).digest() * 2

    with ExitStack() as stack:
        stack.enter_context(stand_ins.gpu(entry))
        for owner, fields in (
            (stand_ins.Kernel, {"bind": bind, "_function": lambda kernel: kernel.number}), (launchable, {"_loaded": loaded}),
            (launchable.Launchable, {"entry": lambda self: SimpleNamespace(cubin=repr(self.code_key).encode())}),
            (Encoder, {"_encode": encoded}), (of_programs, {"stream_memory": lambda *_: 1 << 44}),
        ):  # fmt: skip
            stack.enter_context(mock.patch.multiple(owner, create=True, **fields))
        forget_all()
        yield seen
        forget_all()
    forget_replaced()


def forget_all() -> None:
    """Choose, derive and bind everything anew."""
    forget(), calls.forget_all()
