"""Kernels run as PTX: any, by their parameters, and those of plans in place of the emulator."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from gemmkit.components import Component, field_values, held_values
from gemmkit.emulator import ExecutionTarget, computed_by
from gemmkit.functions.rows import RowsLaunch
from gemmkit.kernels.spec import FAMILIES
from gemmkit.lang.memory import ViewType
from gemmkit.plans.compiled import OPERANDS, Compiled
from gemmkit.programs.plan import ProgramPlan
from gemmkit.runtime.arrays import ArrayInfo, is_array
from gemmkit.runtime.compile import to_ptx
from gemmkit.runtime.device import PARAMETER_FORMATS
from gemmkit.runtime.launch import spaces_of
from tests.ptx_machine.machine import Machine
from tests.ptx_machine.memory import Array, GlobalMemory
from tests.ptx_machine.parser import parse
from tests.support.machines import Emulator


def run_ptx(ptx: str, threads: int, blocks: int, parameters: Sequence[Any], memory: Sequence[Any], shared_bytes: int = 0,
            cluster: int = 1) -> Machine:
    """Run the kernel of a PTX text: ``blocks`` blocks of ``threads`` threads with ``shared_bytes`` of dynamic shared memory.

    ``parameters`` are in the kernel's order: an array stands for its address, a NumPy scalar for its bits, an int for itself.
    ``memory`` has the arrays that the kernel may use, each as an `Array` or as an ndarray that may be read and written; what the
    kernel writes is in them afterwards. Returns the machine (``steps``: instructions run). Raises `Fault` for what a kernel may not
    do, `UnknownInstruction` for what the interpreter does not have.

    >>> x = np.arange(32, dtype=np.uint32)
    >>> _ = run_ptx('''
    ... .visible .entry twice(.param .u64 twice_param_0)
    ... {
    ...     .reg .b32 %r<4>;
    ...     .reg .b64 %rd<4>;
    ...     ld.param.u64 %rd1, [twice_param_0];
    ...     mov.u32 %r1, %tid.x;
    ...     mul.wide.u32 %rd2, %r1, 4;
    ...     add.s64 %rd3, %rd1, %rd2;
    ...     ld.global.u32 %r2, [%rd3];
    ...     shl.b32 %r3, %r2, 1;
    ...     st.global.u32 [%rd3], %r3;
    ...     ret;
    ... }''', 32, 1, [x], [x])
    >>> x[:5].tolist()
    [0, 2, 4, 6, 8]
    """
    arrays = [x if isinstance(x, Array) else Array(x, f"array {n}", is_output=True) for n, x in enumerate(memory)]
    machine = Machine(parse(ptx), threads, blocks, GlobalMemory(arrays), shared_bytes, cluster)
    machine.run([_bits(p) for p in parameters])
    machine.memory.copy_back()
    return machine


def _bits(parameter: Any) -> int:
    if isinstance(parameter, np.ndarray):
        return int(parameter.__array_interface__["data"][0])
    return int.from_bytes(parameter.tobytes(), "little") if isinstance(parameter, np.generic) else int(parameter)


# -- kernels of plans -----------------------------------------------------------------------------------------------------

_ptx: dict[tuple, str] = {}


def ptx_of(compiled: Any) -> str:
    """The PTX of a plan's kernel (`gemmkit.plans.plan.Compiled`), for its GPU; the same kernel is compiled once."""
    conf, device = compiled.problem.config, compiled.problem.device
    key = conf.kernel, tuple(x.type for x in compiled.arguments), conf.threads, conf.blocks_per_sm, device.arch_name
    if key not in _ptx:
        _ptx[key] = to_ptx(FAMILIES[conf.kernel].kernel, key[1], conf.threads, device, conf.blocks_per_sm)
    return _ptx[key]


def parameters_of(compiled: Any, arrays: Sequence[Any], workspaces: Mapping[str, np.ndarray] = MappingProxyType({})) -> list[int]:
    """A launch's parameters as bits, with the addresses of a, b, c and out, and of workspaces by their roles."""
    values = list(compiled.values)
    for space in compiled.spaces:
        if space.role in workspaces:
            values[space.slot] = _bits(workspaces[space.role])
    for slot, which, _, encoder in compiled.puts:
        if encoder is None:
            values[slot] = _bits(np.asarray(arrays[("a", "b", "c", "out").index(OPERANDS[which])]))
    return _packed(compiled.launchable, values)


def _packed(launchable: Any, values: Sequence[Any]) -> list[int]:
    return [int.from_bytes(struct.pack("=" + PARAMETER_FORMATS[code][0], value), "little") for code, value in zip(launchable.formats, values)]


def run_compiled(compiled: Any, a: Any, b: Any, c: Any, out: Any) -> None:
    """What `gemmkit.emulator.launch.run` does, with the kernel's PTX: the same arrays and arguments."""
    conf = compiled.problem.config
    memory = []
    for name, array, operand in zip(("a", "b", "c", "out"), (a, b, c, out), compiled.operands):
        if array is None or not isinstance(operand.type, ViewType):
            continue
        seen = getattr(conf, f"global_{name[0] if name != 'out' else 'd'}_layout").host_view(np.asarray(array))
        seen_out = seen
        memory.append(Array(seen, name, is_output=name == "out", is_written=name != "out", reads_words=operand.type.alignment < 4))
    memory += arrays_of(compiled.spec)
    known = {_bits(x.array) for x in memory}
    memory += [Array(np.asarray(_At(info)), "a captured array") for info in compiled.arguments[0].arrays
               if info.pointer not in known and info.library != "workspace"]
    workspaces = {space.role: np.full(space.nbytes, 0xFF, np.uint8) for space in compiled.spaces}
    if compiled.blocks:
        run_ptx(ptx_of(compiled), conf.threads, compiled.blocks, parameters_of(compiled, (a, b, c, out), workspaces),
                memory + [Array(x, role, is_output=True, is_written=False) for role, x in workspaces.items()],
                compiled.spec.shared_bytes, conf.peers)
    for behind in compiled.behind:
        launch = behind.launchable
        values = list(launch.values)
        for space in spaces_of(values, [info for argument in launch.arguments for info in argument.arrays]):
            values[space.slot] = _bits(workspaces[space.role])
        ptx = to_ptx(launch.kernel, tuple(x.type for x in launch.arguments), launch.threads, compiled.problem.device)
        held, rescales = arrays_of(behind.epilogue), "out" in behind.sources()
        if rescales:                                   # D in place
            values[sum(len(argument.leaves) for argument in launch.arguments[:behind.sources().index("out")])] = _bits(out)
            held += [Array(seen_out, "out", is_output=True)]
        else:
            held += arrays_of(behind.parts[1])
        run_ptx(ptx, launch.threads, launch.blocks, _packed(launch, values), held + [Array(x, role) for role, x in workspaces.items()],
                launch.shared_bytes)


def run_rows(made: Any, x: Any, out: Any) -> None:
    """What the emulator does for a function of rows, with the kernel's PTX."""
    launch = made.launchable
    key = launch.kernel, tuple(argument.type for argument in launch.arguments), launch.threads, launch.target.arch_name
    if key not in _ptx:
        _ptx[key] = to_ptx(launch.kernel, key[1], launch.threads, launch.target)
    memory = [Array(np.asarray(array), name, is_output=name == "out" or made.in_place, is_written=name == "x" or made.in_place)
              for name, array in (("x", x), ("out", out))[made.in_place:]]
    run_ptx(_ptx[key], launch.threads, launch.blocks, _packed(launch, launch.values), memory + arrays_of(made.spec),
            launch.shared_bytes)


def run_row_program(plan: Any, arrays: Sequence[Any]) -> None:
    """What a program's plan does in the emulator, with the kernel's PTX; of functions of rows."""
    launch = plan.launchable
    key = launch.kernel, tuple(argument.type for argument in launch.arguments), launch.threads, launch.target.arch_name
    if key not in _ptx:
        _ptx[key] = to_ptx(launch.kernel, key[1], launch.threads, launch.target, launch.blocks_per_sm)
    memory = [Array(np.asarray(x.value), x.name, is_output=x.is_filled, is_written=not x.is_filled or x.name in plan.printed.updated)
              for x in arrays]
    memory += [Array(np.asarray(x), name) for held in plan.printed.callees.components for name, x, _ in held_values(held)]
    at = {plan.infos[x.name].pointer: _bits(np.asarray(x.value)) for x in arrays if x.name in plan.spare}
    values = [at.get(value, value) if isinstance(value, int) else value for value in launch.values]
    run_ptx(_ptx[key], launch.threads, launch.blocks, _packed(launch, values), memory, launch.shared_bytes)


def arrays_of(component: Component) -> list[Array]:
    """A component's run-time arrays, and those of components in it."""
    found = []
    for name, value in field_values(component).items():
        if isinstance(value, Component):
            found += arrays_of(value)
        elif is_array(value) and not isinstance(value, ArrayInfo):
            is_output = name in getattr(component, "outputs", ())
            found.append(Array(np.asarray(value), f"{type(component).__qualname__}.{name}", is_output, not is_output))
    return found


class _At:
    """An array that is known by its description alone: what a transform's function captured."""

    def __init__(self, info: ArrayInfo):
        strides = tuple(s * info.dtype.itemsize for s in info.strides)
        self.__array_interface__ = dict(version=3, data=(info.pointer, True), shape=info.shape, strides=strides, typestr=info.dtype.str)


class Interpreted(ExecutionTarget):
    """Products of host arrays are computed by their kernels' PTX."""

    def run(self, made: Any, arrays: Any) -> None:
        if isinstance(made, Compiled):
            run_compiled(made, *arrays)
        elif isinstance(made, RowsLaunch):
            run_rows(made, *arrays)
        elif isinstance(made, ProgramPlan):
            run_row_program(made, arrays)
        else:
            super().run(made, arrays)


class Ptx(Emulator):
    """A machine of tests (`tests.support.machines`): NumPy arrays, multiplied by compiled kernels that are interpreted."""

    emulated = False                    # the compiled code's types count, not Python's

    def __repr__(self) -> str:
        return "ptx"

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:                                # type: ignore[override]
        with computed_by(Interpreted()):
            yield


__all__ = ["Ptx", "run_compiled", "run_ptx"]
