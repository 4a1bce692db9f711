"""A template kernel in the emulator, and a recording of what its threads do.

Arrays become checked views; components stay the Python objects that they are.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType, FrameType, FunctionType, ModuleType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from gemmkit.components import Component, arrays_of, field_values, with_fields
from gemmkit.emulator import machine
from gemmkit.emulator.agents import running
from gemmkit.emulator.barriers import Mbarrier, TensorCores
from gemmkit.emulator.copies import EmulatedTensorMap, Stores
from gemmkit.emulator.errors import EmulatorError, Launched
from gemmkit.emulator.machine import Kinds, chosen
from gemmkit.emulator.memory import Memory
from gemmkit.emulator.user_code import arguments, kernel_code
from gemmkit.lang import source
from gemmkit.lang.errors import ComponentError
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.host import TEMPLATE_PATHS, Site, View, here
from gemmkit.lang.memory import Members
from gemmkit.lang.references import contents, globals_of, is_fixed, names_of
from gemmkit.runtime.array_info import as_strided
from gemmkit.runtime.arrays import ArrayInfo, alignment, describe, is_array, on_host, unit_axis

# --------------------------------------------------------------------------------------------------
# What threads, TMA and tensor cores did in a launch, in the order in which the emulator ran them.
#
# The order is one in which the launch may run: what waits stands behind what it waits for. The emulator has no time, and
# events have none.

MOST = 2_000_000                       # events of a launch; the rest is left out (`EventRecording.is_cut`)
_FINISHED = "_finish"                  # the function of `copies` that writes a copy a second time, at its end


class Event(NamedTuple):
    """Something that a thread did, or had done.

    ``block`` and ``thread`` are numbers in the grid and in the block; of a warpgroup's instruction, its first thread.

    | kind | place | size | phase |
    |---|---|---|---|
    | read, write | address in shared memory | bytes | |
    | copy, landed | the same, of a cp.async: started, and awaited | bytes | |
    | load, store | address in global memory; ``memory`` is its name | bytes | |
    | operand | addresses that the tensor cores read (an array) | bytes of each | |
    | instruction | its name, once a warp | | |
    | awaited | | | the last group of wgmmas that is done |
    | arrive, waited | mbarrier: (block, address) | | number of the phase |
    | tma | mbarrier that gets the bytes | bytes | number of the phase |
    | met, left | a named barrier: (number, which of its openings) | | |
    | stored | address that TMA stores from | bytes | |
    | store wait | | | |

    ``way`` has the kernel's functions that led there, the innermost first; ``site`` is the line.
    """

    kind: str
    block: int
    thread: int
    place: Any = 0
    size: int = 0
    phase: int = 0
    way: tuple[str, ...] = ()
    site: Site | None = None
    memory: str = ""


class EventRecording:
    """``launches`` has the events of each launch, and ``is_cut`` says whether one had more than `MOST`."""

    def __init__(self) -> None:
        self.launches: list[list[Event]] = []
        self.is_cut = False

    def begin(self) -> Kinds:
        """The classes of the next launch."""
        events: list[Event] = []
        self.launches.append(events)

        def note(event: Event) -> None:
            if len(events) < MOST:
                events.append(event)
            else:
                self.is_cut = True

        return _kinds(note)


@contextmanager
def recorded() -> Iterator[EventRecording]:
    """Launches within it are recorded, about half as fast as they are else.

    >>> import numpy as np, gemmkit
    >>> a = np.eye(16, dtype=np.float32)
    >>> with gemmkit.emulate(), recorded() as seen:
    ...     d = gemmkit.matmul(a, a)
    >>> {event.kind for event in seen.launches[0]} >= {"read", "write", "met", "left"}
    True
    """
    recording = EventRecording()
    token = chosen.set(recording.begin)
    try:
        yield recording
    finally:
        chosen.reset(token)


def _kinds(note: Any) -> Kinds:
    """The machine's classes, with methods that note what is done before they do it."""

    def event(kind: str, thread: Any, place: Any = 0, size: int = 0, phase: int = 0) -> None:
        note(Event(kind, thread.block.number, thread.index, place, size, phase))

    def access(shared: str, far: str, thread: Any, memory: Memory, address: int, nbytes: int) -> None:
        frame = sys._getframe(2)
        at, way = int(address), _way(frame)
        if memory is not thread.block.shared:
            note(Event(far, thread.block.number, thread.index, at, nbytes, 0, way, here(2), memory.name))
            return
        caller = frame.f_code.co_name if frame.f_code.co_filename.endswith("copies.py") else ""
        kind = shared if not caller else "landed" if caller == _FINISHED else "copy"
        note(Event(kind, thread.block.number, thread.index, at, nbytes, 0, way, here(2), memory.name))

    class RecordedThread(machine.Thread):
        __slots__ = ("_met",)

        def read(self, memory: Memory, address: int, nbytes: int, alignment: int | None = None) -> Any:
            access("read", "load", self, memory, address, nbytes)
            return super().read(memory, address, nbytes, alignment)

        def write(self, memory: Memory, address: int, data: Any, alignment: int | None = None) -> None:
            access("write", "store", self, memory, address, data.nbytes if hasattr(data, "nbytes") else len(data))
            super().write(memory, address, data, alignment)

        def shared_read(self, offset: int, nbytes: int, alignment: int | None = None) -> Any:
            access("read", "load", self, self.block.shared, offset, nbytes)
            return super().read(self.block.shared, offset, nbytes, alignment)

        def shared_write(self, offset: int, data: Any, alignment: int | None = None) -> None:
            access("write", "store", self, self.block.shared, offset, len(data))
            super().write(self.block.shared, offset, data, alignment)

        def collective(self, key: str, *given: Any, **named: Any) -> Any:
            if self.lane == 0:
                event("instruction", self, key)
            return super().collective(key, *given, **named)

        def barrier(self, barrier_id: int = 0, count: int | None = None) -> None:
            super().barrier(barrier_id, count)
            event("left", self, self._met)

        def _barrier(self, barrier_id: int, count: int | None) -> Any:
            barrier = super()._barrier(barrier_id, count)
            self._met = barrier_id, barrier            # which keeps the object, so that no other has its identity
            event("met", self, self._met)
            return barrier

    class Barrier(Mbarrier):
        __slots__ = ()

        @property
        def place(self) -> tuple[int, int]:
            return self.block.number, self.address

        def arrive(self, thread: Any) -> None:
            event("arrive", thread, self.place, 0, self.phase)
            super().arrive(thread)

        def complete(self, unit: Any, nbytes: int) -> None:
            event("tma", machine.current(), self.place, nbytes, self.phase)
            super().complete(unit, nbytes)

        def wait(self, thread: Any, parity: int) -> None:
            super().wait(thread, parity)
            event("waited", thread, self.place, 0, self.phase - 1)

    class Cores(TensorCores):
        __slots__ = ()

        def gather(self, thread: Any, addresses: Any) -> Any:
            note(Event("operand", thread.block.number, thread.index, addresses, 16, 0, _way(sys._getframe(1))))
            return super().gather(thread, addresses)

        def wait(self, thread: Any, pending: int) -> int:
            group = super().wait(thread, pending)
            event("awaited", thread, 0, 0, group)
            return group

    class BulkStores(Stores):
        def store(self, thread: Any, tensor_map: Any, coordinates: Any, offset: int, adds: bool = False) -> None:
            event("stored", thread, int(offset), tensor_map.spec.box_bytes)
            super().store(thread, tensor_map, coordinates, offset, adds)

        def wait(self, thread: Any, pending: int, done: bool) -> None:
            super().wait(thread, pending, done)
            event("store wait", thread, 0, 0, pending)

    return Kinds(RecordedThread, Barrier, Cores, BulkStores)


def _way(frame: FrameType | None) -> tuple[str, ...]:
    names: list[str] = []
    while frame is not None:
        if TEMPLATE_PATHS[0] in frame.f_code.co_filename:
            names.append(frame.f_code.co_name)
        frame = frame.f_back
    return tuple(names)


# --------------------------------------------------------------------------------------------------
# Functions and methods in the emulator, with checked views in place of the arrays that they refer to.
#
# Python would hand out the NumPy array itself, which wraps negative indices around and takes any write. The function
# among a component's fields is made anew, with views in its cells and among its globals: what it captured is an argument
# of the kernel (:mod:`gemmkit.lang.functions`). An array that a helper or a method refers to is none, on the device it
# is refused; so it is here, when it is used. What refers to no array stays the object that it is.

class Captures:
    """Makes functions anew: ``view(array, name)`` stands for an array that one captured."""

    def __init__(self, view: Callable[[Any, str], Any]) -> None:
        self._view = view
        self._made: dict[Any, Any] = {}

    def function(self, value: Any, in_field: bool = True) -> Any:
        """The function with views in place of arrays (of one that is not ``in_field``: with what refuses to be used); itself
        where it and its helpers refer to none."""
        function = value.function if isinstance(value, DeviceFunction) else value
        key = function, in_field
        if key in self._made:
            return self._made[key]
        if is_fixed(function) and not (in_field and any(is_array(contents(of)) for of in function.__closure__ or ())):
            return value                                       # gemmkit's own capture arrays in `lstm_cell` alone
        self._made[key] = value                                # what it calls may call it again
        cells = [self._cell(cell, name, function, in_field)
                 for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ())]
        scope, changed = function.__globals__, {}
        for name in globals_of(function.__code__):
            if name in scope:
                found = self._stand_in(scope[name], name, function, in_field)
                if found is not scope[name]:
                    changed[name] = found
        if not changed and all(x is y for x, y in zip(cells, function.__closure__ or ())):
            return value
        made = FunctionType(function.__code__, {**scope, **changed}, function.__name__, function.__defaults__, tuple(cells))
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        made.__kwdefaults__ = function.__kwdefaults__
        self._made[key] = made
        return made

    def methods(self, component: Any) -> Any:
        """The component with methods that refer to arrays made anew, in a class of its own; itself where none does."""
        kind: Any = type(component)
        changed: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for base in reversed(kind.__mro__):                    # gemmkit's classes refer to no arrays, and are most
            own = {**own, **vars(base)} if base is not object and not is_fixed(base) else own
        for name, method in own.items():
            if inspect.getattr_static(kind, name) is not method:        # a class of gemmkit's comes before
                continue
            function = method.__func__ if isinstance(method, staticmethod) else method
            if isinstance(function, (FunctionType, DeviceFunction)) and not (name.startswith("__") and name != "__call__"):
                made = self.function(function, in_field=False)
                if made is not function:
                    changed[name] = staticmethod(made) if isinstance(method, staticmethod) else made
        if not changed:
            return component
        names = {"__qualname__": kind.__qualname__, "__module__": kind.__module__, "__repr__": kind.__repr__}
        out = copy.copy(component)
        metaclass: Any = type(kind)
        object.__setattr__(out, "__class__", metaclass(kind.__name__, (kind,), {**changed, **names}))
        return out

    def _cell(self, cell: CellType, name: str, function: FunctionType, in_field: bool) -> CellType:
        try:
            value = cell.cell_contents
        except ValueError:                                     # not bound yet
            return cell
        found = self._stand_in(value, name, function, in_field)
        return cell if found is value else CellType(found)

    def _stand_in(self, value: Any, name: str, function: FunctionType, in_field: bool) -> Any:
        """What a function is to find where it refers to ``value``."""
        if is_array(value):
            return self._view(value, f"{name}, captured by {function.__name__}") if in_field else _Refused(name, function)
        if isinstance(value, (FunctionType, DeviceFunction)):
            return self.function(value, in_field=False)
        if isinstance(value, Component):
            return _Refused(name, function) if any(arrays_of(value)) else value
        if isinstance(value, ModuleType) and not is_fixed(value):
            held = {own: vars(value)[own] for own in names_of(function.__code__) if own in vars(value)}
            found = {own: self._stand_in(x, f"{name}.{own}", function, False) for own, x in held.items()
                     if not isinstance(x, ModuleType)}
            changed = {own: x for own, x in found.items() if x is not held[own]}
            return _Module(value, changed) if changed else value
        return value


class _Module(ModuleType):
    """A module some of whose names are bound otherwise."""

    def __init__(self, module: ModuleType, changed: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        vars(self).update({**vars(module), **changed})


class _Refused:
    """Stands for an array that device code cannot use; any use of it is an error."""

    def __init__(self, name: str, function: FunctionType) -> None:
        code = function.__code__
        self.__dict__["_why"] = (
            f"{name} is an array, and {function.__qualname__} (file {code.co_filename!r}, line {code.co_firstlineno}) is a "
            "helper or a method: what these refer to is a constant of the kernel, while an array can change in place; hand "
            "it over as an argument, from a gk.Array field or from the function that a component has as a field")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise ComponentError(self.__dict__["_why"])

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()


_OF_TWO = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"
for _name in ("getitem", "setitem", "len", "iter", "contains", "call", "array", "bool", "float", "int", "index", "neg",
              "abs", *_OF_TWO, *(f"r{name}" for name in _OF_TWO)):
    setattr(_Refused, f"__{_name}__", _Refused._refuse)


class Arena:
    """The arrays of one launch: the same memory under the same checks, however often it is passed."""

    def __init__(self) -> None:
        self._memories: dict[tuple, Any] = {}
        self._captures = Captures(self._captured)
        self.launched: Launched | None = None
        self.originals: dict[int, Any] = {}                    # of what was made anew, by the id of what stands for it

    def memory(self, array: np.ndarray, name: str, readonly: bool = False, written: bool = True) -> Any:
        """An array's memory. Of one array there may be two, of which one can be written and the other cannot: they share
        their bytes, and what is known of them."""
        kind = array.__array_interface__["data"][0], array.shape, array.strides, array.dtype
        found = self._memories.get((kind, readonly))
        if found is None:
            other = self._memories.get((kind, not readonly))
            if other is None:
                found = machine.Memory.for_array(array, name, readonly=readonly, written=written)
            else:
                found = machine.Memory(name, other.base, other.data, readonly=readonly, valid=other.valid,
                                       written=other.written)
            self._memories[kind, readonly] = found
        return found

    def note_constants(self) -> None:
        """Tell which memories nothing writes in the launch that follows: read-only ones that have no byte of another one. (A
        stream beside the launch may write anywhere.)"""
        memories = self._memories.values()
        written = [(memory.base, memory.base + memory.size) for memory in memories if not memory.readonly]
        alone = running.get() is None
        for memory in memories:
            low, high = memory.base, memory.base + memory.size
            memory.constant = alone and memory.readonly and all(end <= low or first >= high for first, end in written)

    def view(self, array: Any, name: str, unit: int | None, align: int, **how: Any) -> View:
        array = on_host(array)
        return View(array, self.memory(array, name, **how), unit, align)

    def view_of(self, info: ArrayInfo, array: Any, name: str, unit: int | bool | None = True, align: int | None = None,
                **how: Any) -> View:
        """An array as ``info`` describes it: its shape and strides there may be others. ``unit``: True for its own."""
        array = on_host(array)
        seen = as_strided(array, info.shape, [stride * array.dtype.itemsize for stride in info.strides],
                          array.flags.writeable)
        unit = unit_axis(info) if unit is True else unit
        return self.view(seen, name, unit, alignment(info, unit) if align is None else align, **how)

    def members(self, views: list[View], array: Any, align: int) -> Members | None:
        """Views of one type, which promises ``align``, as one argument; ``array`` is the first one's. None without any."""
        return Members(on_host(array), views[0].memory, views[0].unit, align, views) if views else None

    def map(self, made: Any, view: View) -> Any:
        """A tensor map (`gemmkit.kernels.sm90.family.TensorMapSlot`) of a view."""
        return EmulatedTensorMap.of(view, made.spec, made.axis)

    def tell(self, spec: Any, arrays: dict[str, Any]) -> None:
        """What a fault knows of the launch."""
        self.launched = Launched(spec, arrays)

    def component(self, component: Component) -> Component:
        """The component with its runtime arrays as views: those in fields, in nested components, and those that its
        functions captured."""
        changed: dict[str, Any] = {}
        for field, value in field_values(component).items():
            if is_array(value):
                is_output = field in getattr(component, "outputs", ())
                changed[field] = self._array(value, f"{type(component).__qualname__}.{field}", readonly=not is_output,
                                             written=not is_output)
            elif isinstance(value, Component):
                inner = self.component(value)
                if inner is not value:
                    changed[field] = inner
            elif isinstance(value, (FunctionType, DeviceFunction)):
                function = self._captures.function(value)
                if function is not value:
                    changed[field] = function
                    self.originals[id(function)] = value
        made = self._captures.methods(with_fields(component, changed))
        if made is not component:
            self.originals[id(made)] = component
        return made

    def _captured(self, array: Any, name: str) -> View:
        return self._array(array, name, readonly=True)

    def _array(self, array: Any, name: str, **how: Any) -> View:
        info = describe(array, name)
        return self.view(array, name, unit_axis(info), alignment(info), **how)


def run(made: Any, arrays: Any, seed: int | None = None) -> None:
    """Run what a family of kernels describes on NumPy arrays; faults raise the exceptions of `gemmkit.emulator.errors`. A
    ``seed`` shuffles the order of threads and blocks.

    ``made`` has a ``spec``, and ``emulated(arrays, arena)``: the kernels (`gemmkit.runtime.launch.Launchable`) in their
    order, each with its arguments as the emulator takes them.
    """
    arena = Arena()
    source.check(made.spec)
    try:
        for kernel, given in made.emulated(arrays, arena):
            arena.note_constants()
            with np.errstate(all="ignore"):                   # integers wrap and floats overflow, as on the device
                machine.launch(kernel_code(kernel.kernel), arguments(given, arena.originals), grid=(kernel.blocks, 1, 1),
                               block=(kernel.threads, 1, 1), cluster=(kernel.cluster, 1, 1),
                               shared_memory=kernel.shared_bytes, max_shared_memory=kernel.target.shared_memory_per_block,
                               schedule_seed=seed, dependent=kernel.dependent, registers=kernel.registers)
    except EmulatorError as error:
        error.launched = arena.launched
        raise
