"""A template kernel in the emulator: arrays become checked views, components stay the Python objects that they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import numpy as np

from gemmkit.component_arrays import arrays_of
from gemmkit.components import Component, at_path, field_values, with_fields
from gemmkit.emulator import machine
from gemmkit.emulator.captures import Captures
from gemmkit.emulator.errors import EmulatorError
from gemmkit.emulator.fault_page import Launched
from gemmkit.emulator.user_code import arguments, kernel_code
from gemmkit.lang import dialect
from gemmkit.lang.functions import DeviceFunction
from gemmkit.lang.host import View
from gemmkit.lang.kinds import ViewKind
from gemmkit.lang.members import Members
from gemmkit.ptx.map_table import MapTable
from gemmkit.ptx.tma import emulated_map
from gemmkit.runtime.arrays import alignment, describe, is_array, on_host, shares_memory, unit_axis, whole
from gemmkit.runtime.device import H100


class Arena:
    """The arrays of one launch: the same memory under the same checks, however often it is passed."""

    def __init__(self) -> None:
        self._memories: dict[tuple, Any] = {}
        self._captures = Captures(self._captured)
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

    def view(self, array: Any, name: str, unit: int | None, align: int, **how: Any) -> View:
        array = on_host(array)
        return View(array, self.memory(array, name, **how), unit, align)

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


def _seen(array: Any, layout: Any, info: Any) -> Any:
    """An operand as the kernel takes it: of a stack all matrices, each as its layout sees it."""
    array = on_host(array)
    own = layout.dimensions_of(describe(array))
    first = layout.host_view(array if own is None else array[(0,) * max(0, array.ndim - own)])
    if info is None or not info.steps:
        return first
    stack = whole(info)
    steps = tuple(stride * info.dtype.itemsize for stride in stack.strides)
    return np.lib.stride_tricks.as_strided(first, stack.shape, steps, writeable=array.flags.writeable)


def run(compiled: Any, a: Any, b: Any, c: Any, out: Any, seed: int | None = None) -> None:
    """Run a compiled problem's kernel on NumPy arrays; faults raise the exceptions of `gemmkit.emulator.errors`. A ``seed``
    shuffles the order of threads and blocks."""
    dialect.check(compiled.spec)
    conf, arena = compiled.problem.config, Arena()
    a, b, c, out = compiled.problem.vectors.host(a, b, c, out)
    given = describe(out, "out")
    others = [held.info for held in arrays_of(compiled.spec)] + ([] if c is None else [describe(c, "c")])
    reads_out = any(shares_memory(info, given) for info in others)
    call, names = compiled.computed, dict(a="a", b="b", c="c", out="out")
    infos = call.a, call.b, call.c, compiled.out
    if compiled.problem.is_transposed:             # a fault is told of the caller's arrays
        a, b, c, out = (x if x is None else on_host(x).T for x in (b, a, c, out))
        infos, names = (*infos[:3], describe(out, "out")), dict(names, a="b", b="a")
    a, b, c, out = (array if array is None else _seen(array, getattr(conf, f"global_{name}_layout"), info)
                    for name, array, info in zip("abcd", (a, b, c, out), infos))
    kinds = [operand.kind for operand in compiled.operands]
    views_order = (("out", out, kinds[3], dict(written=reads_out)), ("a", a, kinds[0], dict(readonly=True)),
                   ("b", b, kinds[1], dict(readonly=True)), ("c", c, kinds[2], dict(readonly=True)))
    made = {name: arena.view(array, names[name], kind.unit, kind.alignment, **how) if isinstance(kind, ViewKind) else None
            for name, array, kind, how in views_order}
    views = [made[name] for name in ("a", "b", "c", "out")]
    spec: Any = arena.component(compiled.spec_on_host)
    maps = [None if m is None else _map_of(m, views, spec) for m in compiled.maps]
    # Integers wrap and floats overflow, as on the device.
    with np.errstate(all="ignore"), _told(Launched(compiled.spec, {names[name]: view for name, view in made.items()})):
        if compiled.blocks:
            _launch(conf.family.kernel, (spec, *views, compiled.shape, *maps), arena, grid=(compiled.blocks, 1, 1),
                    block=(conf.threads, 1, 1), cluster=(conf.peers, 1, 1), shared_memory=compiled.spec.shared_bytes,
                    schedule_seed=seed, dependent=compiled.launchable.dependent,
                    registers=conf.family.registers(compiled.spec))
        for behind in compiled.behind:             # kernels of their own: what the first has written they see
            _launch(behind.launchable.kernel, behind.emulated(spec, views[3]), arena, grid=(behind.blocks, 1, 1),
                    block=(behind.threads, 1, 1), shared_memory=behind.shared_bytes, schedule_seed=seed)


def _launch(kernel: Any, given: Sequence[Any], arena: Arena, **how: Any) -> None:
    """Run a kernel with the device's arithmetic (`gemmkit.emulator.user_code`)."""
    machine.launch(kernel_code(kernel), arguments(given, arena.originals), **how,
                   max_shared_memory=H100.shared_memory_per_block)


@contextmanager
def _told(launched: Launched) -> Iterator[None]:
    """A fault within it knows what the launch worked on."""
    try:
        yield
    except EmulatorError as error:
        error.launched = launched
        raise


def _map_of(made: Any, views: list[Any], spec: Any) -> Any:
    """An operand's tensor map in the emulator, or a tuple of those of its arrays."""
    found = tuple(emulated_map(views[one.which] if isinstance(one.which, int) else at_path(spec, one.which), one.spec,
                               one.axis) for one in made.maps)
    return found if len(found) > 1 else found[0]


def run_group(compiled: Any, products: list[tuple], places: np.ndarray, seed: int | None = None) -> None:
    """Run the kernel of a group on NumPy arrays: of each product (a, b, c, out)."""
    conf, arena = compiled.config, Arena()
    dialect.check(compiled.spec)
    views: list[Any] = []
    for at, name in ((3, "out"), (0, "a"), (1, "b"), (2, "c")):      # outputs first: they say what has been written
        kind = compiled.operands[at].kind
        if not isinstance(kind, ViewKind):
            views.append(None)
            continue
        how = dict(written=products[0][2] is not None) if name == "out" else dict(readonly=True)
        members = [arena.view(of[at], f"{name}[{n}]", kind.unit, kind.alignment, **how) for n, of in enumerate(products)]
        views.append(Members(on_host(products[0][at]), members[0].memory, kind.unit, kind.alignment, members))
    spec = arena.component(compiled.spec_on_host(places))
    shape = arena.component(with_fields(compiled.shape, {"sizes": compiled.tables.sizes}))
    out, a, b, c = views
    with np.errstate(all="ignore"):
        _launch(conf.family.kernel, (spec, a, b, c, out, shape), arena, grid=(compiled.blocks, 1, 1),
                block=(conf.threads, 1, 1), shared_memory=compiled.spec.shared_bytes, schedule_seed=seed)


def run_rows(made: Any, x: Any, out: Any, seed: int | None = None) -> None:
    """Run a kernel of rows on NumPy arrays."""
    launch, arena = made.launchable, Arena()
    dialect.check(made.spec)
    views = {}
    for name, array, frozen in (("out", out, made.out), ("x", x, made.x)):
        kind, array = frozen.kind, on_host(array)
        as_matrix = np.lib.stride_tricks.as_strided(
            array, made.shape, [stride * array.dtype.itemsize for stride in frozen.arrays[0].strides],
            writeable=array.flags.writeable)
        how = dict(readonly=True) if name == "x" and not made.in_place else dict(written=made.in_place)
        views[name] = arena.view(as_matrix, name, kind.unit, kind.alignment, **how)
    with np.errstate(all="ignore"):
        _launch(launch.kernel, (arena.component(made.spec), views["x"], views["out"], *made.shape), arena,
                grid=(launch.blocks, 1, 1), block=(launch.threads, 1, 1), shared_memory=launch.shared_bytes,
                schedule_seed=seed, dependent=launch.dependent)


def run_attention(made: Any, arrays: dict[str, Any], seed: int | None = None) -> None:
    """Run an attention kernel on NumPy arrays: q, k, v, out, and lse or None."""
    launch, arena = made.launchable, Arena()
    dialect.check(made.spec)
    views: dict[str, Any] = {}
    for name, info in made.infos.items():              # the results first: they say what has been written
        if info is None:
            continue
        array = on_host(arrays[name])
        seen = np.lib.stride_tricks.as_strided(array, info.shape, [stride * array.dtype.itemsize for stride in info.strides],
                                               writeable=name in ("out", "lse"))
        how = dict(written=False) if name in ("out", "lse") else dict(readonly=True)
        views[name] = arena.view(seen, name, unit_axis(info), alignment(info), **how)
    order = arena.view(made.order, "order", 1, 4, readonly=True)
    maps: list[Any] = [emulated_map(views[name], spec, 3) for name, spec in made.maps]
    maps += [None] * (len(made.spec.map_specs) - len(maps))
    values = (arena.component(made.spec), made.sizes, order, *(name and views[name] for name in made.views), *maps)
    with np.errstate(all="ignore"):
        _launch(launch.kernel, values, arena, grid=(launch.blocks, 1, 1), block=(launch.threads, 1, 1),
                shared_memory=launch.shared_bytes, schedule_seed=seed, dependent=launch.dependent,
                registers=made.spec.warpgroups.warp_registers)


def run_mlp(made: Any, arrays: dict[str, Any], seed: int | None = None) -> None:
    """Run the kernel of an MLP on NumPy arrays: x, weights, biases or None, and out."""
    launch, arena, layers = made.launchable, Arena(), made.layers
    dialect.check(made.spec)

    def seen(array: Any, info: Any) -> np.ndarray:
        array = on_host(array)
        return np.lib.stride_tricks.as_strided(array, info.shape, [stride * array.dtype.itemsize for stride in info.strides],
                                               writeable=array.flags.writeable)

    def several(name: str, infos: tuple, unit: int) -> tuple[list[np.ndarray], list[View]]:
        arrays_of = [seen(array, info) for array, info in zip(() if arrays[name] is None else arrays[name], infos)]
        return arrays_of, [arena.view(array, f"{name}[{n}]", unit, alignment(info, unit), readonly=True)
                           for n, (array, info) in enumerate(zip(arrays_of, infos))]

    given = made.call.out                              # first: it says what has been written
    out = arena.view(seen(arrays["out"], given), "out", unit_axis(given), alignment(given), written=False)
    x = arena.view(seen(arrays["x"], layers.x), "x", 1, alignment(layers.x, 1), readonly=True)
    axis = 0 if made.spec.k_major else 1
    (w, weights), (b, biases) = several("weights", layers.weights, axis), several("biases", layers.biases, 1)
    shapes = arena.view(made.shapes, "shapes", 1, 4, readonly=True)
    spec = arena.component(made.spec)
    values: tuple
    if made.by_tma:
        table = MapTable([emulated_map(held, one.spec, one.axis) for held, one in zip(weights + biases, made.table)])
        maps: list[Any] = [emulated_map(held, one.spec, one.axis) for held, one in zip((x, out), made.maps)]
        direct = None if made.spec.store.uses_tma else out
        values = (spec, made.sizes, table, shapes, direct, *maps, *[None] * (2 - len(maps)))
    else:
        members = [Members(w[0], weights[0].memory, axis, 2 * made.spec.run, weights),
                   Members(b[0], biases[0].memory, 1, int(made.spec.bias_dtype.itemsize), biases) if biases else None]
        values = (spec, made.sizes, arena.view(made.places, "places", 1, 8, readonly=True), shapes, out, x, *members)
    with np.errstate(all="ignore"):
        _launch(launch.kernel, values, arena, grid=(launch.blocks, 1, 1), block=(launch.threads, 1, 1),
                cluster=(launch.cluster, 1, 1), shared_memory=launch.shared_bytes, schedule_seed=seed,
                dependent=launch.dependent, registers=made.spec.warpgroups.warp_registers)
