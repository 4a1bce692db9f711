"""Moves: between registers, and between registers and memory; addresses of the spaces.

``cp.async`` copies at once, so that a wait that is missing is not found here (the emulator finds it).
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx_machine.faults import UnknownInstruction
from tests.ptx_machine.kinds import KINDS
from tests.ptx_machine.memory import RANK, WINDOWS
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import Operation, effect, operation

SPACES = {"global": "global", "shared": "shared", "shared__cta": "shared", "shared__cluster": "shared", "local": "local", "param": "param"}
CACHES = ("nc", "ca", "cg", "cs", "cv", "lu", "wb", "wt", "relaxed", "weak", "volatile", "L1__no_allocate", "L1__evict_last", "L2__128B",
          "L2__256B", "L1__evict_first", "sys", "gpu", "cta", "cluster")


def registers(operand: str) -> list[str]:
    """The registers of a vector, or the only one."""
    return [x.strip() for x in operand.strip("{}").split(",")]


def address(machine: Any, operand: str, instruction: Instruction) -> Any:
    """What gives the addresses that ``[base+offset]`` says."""
    found = re.fullmatch(r"\[\s*([%$\w@]+)\s*(?:\+\s*(-?\w+))?\s*\]", operand)
    if found is None:
        raise UnknownInstruction(f"unknown address {operand}", instruction)
    offset = int(found[2] or "0", 0)
    kind = machine.program.registers.get(found[1])
    base = machine.reader(found[1], KINDS[f"u{kind.bits}"] if kind else KINDS["u64"], instruction)
    return (lambda: base().astype(np.int64) + offset) if offset else base


def access(i: Instruction) -> tuple[str, int]:
    """(the space, the values of a vector) of a load or a store."""
    i.only(*SPACES, *CACHES, "v2", "v4")
    spaces = [SPACES[m] for m in i.modifiers if m in SPACES]
    return spaces[0] if spaces else "generic", 4 if i.has("v4") else 2 if i.has("v2") else 1


def low_bits(value: Any, dtype: np.dtype) -> Any:
    """The first bytes of a number, as memory has them, as another."""
    return np.frombuffer(np.asarray(value).tobytes(), dtype, 1)[0]


@effect("ld")
def load(machine: Any, i: Instruction) -> Any:
    space, count = access(i)
    kind = i.kind
    puts = [machine.writer(x, kind, i) for x in registers(i.operands[0])]
    if space == "param":
        name = i.operands[1].strip("[] ")
        if name not in machine.program.parameters or count > 1 or machine.program.parameters[name].bits < kind.bits:
            raise UnknownInstruction("parameters are read one by one, in their type, or the low bits of it", i)
        return lambda mask: puts[0](low_bits(machine.parameters[name], kind.dtype), mask)
    where = address(machine, i.operands[1], i)

    def act(mask: Any) -> None:
        there, at = machine.place(space, where(), mask, i)
        for put, value in zip(puts, machine.spaces[there].read(at, kind.size, count, i)):
            put(machine.spread(value.view(kind.dtype), mask, kind), mask)

    return act


@effect("st")
def store(machine: Any, i: Instruction) -> Any:
    if i.has("async"):
        from tests.ptx_machine.mbarriers import store_async

        return store_async(machine, i)
    space, count = access(i)
    if space == "param":
        raise UnknownInstruction("calls are not known", i)
    kind = KINDS[f"b{i.kind.bits}"]
    where = address(machine, i.operands[0], i)
    values = [machine.reader(x, kind, i) for x in registers(i.operands[1])]

    def act(mask: Any) -> None:
        there, at = machine.place(space, where(), mask, i)
        given = [np.broadcast_to(value(), (machine.count,)) for value in values]
        machine.spaces[there].write(at, kind.size, given if mask is None else [x[mask] for x in given], i)

    return act


@effect("mov")
def move(machine: Any, i: Instruction) -> Any:
    """Of a register, a literal or an address; into several parts, or of them (the lowest first)."""
    i.only()
    target, source = i.operands
    kind = i.kind
    if target.startswith("{"):
        parts = registers(target)
        part = KINDS[f"b{kind.bits // len(parts)}"]
        read, puts = machine.reader(source, KINDS[f"b{kind.bits}"], i), [machine.writer(x, part, i) for x in parts]

        def take_apart(mask: Any) -> None:
            value = read()
            for n, put in enumerate(puts):
                put((value >> value.dtype.type(n * part.bits)).astype(part.dtype), mask)

        return take_apart
    if source.startswith("{"):
        parts = registers(source)
        part, whole = KINDS[f"b{kind.bits // len(parts)}"], KINDS[f"b{kind.bits}"]
        reads, put = [machine.reader(x, part, i) for x in parts], machine.writer(target, whole, i)

        def put_together(mask: Any) -> None:
            values = [read().astype(whole.dtype) << whole.dtype.type(n * part.bits) for n, read in enumerate(reads)]
            put(np.bitwise_or.reduce(np.broadcast_arrays(*values)), mask)

        return put_together
    read, put = machine.reader(source, kind, i), machine.writer(target, kind, i)
    return lambda mask: put(read(), mask)


@operation("cvta")
def to_generic(i: Instruction) -> Operation:
    """Addresses of a space as generic ones, or back (``cvta.to``)."""
    i.only("to", *WINDOWS)
    window = np.uint64(0 if i.has("global") else WINDOWS[i.one_of(*WINDOWS)])
    return Operation([i.kind], i.kind, (lambda x: x - window) if i.has("to") else (lambda x: x + window))


@operation("mapa")
def of_cluster(i: Instruction) -> Operation:
    """The address in the shared memory of another block of the cluster."""
    i.only("shared__cluster")
    if not i.has("shared__cluster"):
        raise UnknownInstruction("only of shared addresses", i)
    return Operation([i.kind, KINDS["u32"]], i.kind, lambda x, rank: x + (rank + 1).astype(x.dtype) * x.dtype.type(1 << RANK))


@effect("cp")
def copy_async(machine: Any, i: Instruction) -> Any:
    """What is not taken of the source becomes 0: what lies beyond a size (of whole elements of 2 bytes), or all where a
    predicate says to ignore it."""
    if i.modifiers[:2] in (("async", "commit_group"), ("async", "wait_group"), ("async", "wait_all")):
        return lambda mask: None
    i.only("async", "ca", "cg", "shared", "shared__cta", "global", "L2__64B", "L2__128B", "L2__256B")
    size = int(i.operands[2])
    to, of = address(machine, i.operands[0], i), address(machine, i.operands[1], i)
    taken, step = None, 4
    if len(i.operands) > 3:
        is_predicate = machine.program.registers[i.operands[3]].bits == 1
        read = machine.reader(i.operands[3], KINDS["pred" if is_predicate else "u32"], i)
        taken, step = ((lambda: np.where(read(), 0, size)), 4) if is_predicate else (read, 2)

    def act(mask: Any) -> None:
        on = np.ones(machine.count, bool) if mask is None else mask
        for n in range(0, size, step):
            full = on if taken is None else on & (np.broadcast_to(taken(), (machine.count,)) > n)
            values = np.zeros(machine.count, np.dtype(f"u{step}"))
            if full.any():
                _, at = machine.place("global", of(), full, i)
                values[full] = machine.memory.read(at + n, step, 1, i)[0]
            _, at = machine.place("shared", to(), on, i)
            machine.spaces["shared"].write(at + n, step, [values[on]], i)

    return act


@effect("membar", "fence", "prefetch", "griddepcontrol")
def nothing(machine: Any, i: Instruction) -> Any:
    """Threads go in step here: memory is as it was written."""
    return lambda mask: None


@effect("trap")
def trap(machine: Any, i: Instruction) -> Any:
    from tests.ptx_machine.faults import Fault

    def act(mask: Any) -> None:
        raise Fault("trap", i)

    return act
