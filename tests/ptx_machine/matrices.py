"""Matrix instructions of warps, by the fragment maps and the arithmetic of gemmkit's own atoms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gemmkit.ptx.mma import INPUT_NAME, SUM_NAME, collect, distribute
from gemmkit.ptx.mma import SPECS as MMA
from gemmkit.ptx.wmma import SPECS as WMMA
from tests.ptx_machine.faults import Fault, UnknownInstruction
from tests.ptx_machine.kinds import KINDS, kind_of
from tests.ptx_machine.parser import Instruction
from tests.ptx_machine.registry import effect
from tests.ptx_machine.transfers import address
from tests.ptx_machine.transfers import registers as names

DTYPES = {name: dtype for dtype, name in (*INPUT_NAME.items(), *SUM_NAME.items())}
B32 = KINDS["b32"]


def register_of(dtype: Any) -> Any:
    """The bits of a register of a fragment: 64 of float64, else 32."""
    return KINDS["b64"] if dtype is not None and dtype.itemsize == 8 else B32


def fragments(machine: Any, operand: str, dtype: np.dtype, i: Instruction) -> Callable[[], np.ndarray]:
    """The values that lanes hold in registers: (warps, 32, values)."""
    kind = register_of(dtype)
    reads = [machine.reader(name, kind, i) for name in names(operand)]

    def given() -> np.ndarray:
        words = np.stack([np.broadcast_to(read(), (machine.count,)) for read in reads], 1)
        return np.ascontiguousarray(words).view(dtype).reshape(machine.warps, 32, -1)

    return given


def put_fragments(machine: Any, operand: str, i: Instruction,
                  dtype: Any = None) -> Callable[[list[int], list[list[tuple]], Any], None]:
    """Give the lanes of warps their fragments."""
    kind = register_of(dtype)
    puts = [machine.writer(name, kind, i) for name in names(operand)]

    def put(warps: list[int], made: list[list[tuple]], mask: Any) -> None:
        words = np.zeros((machine.warps, 32, len(puts)), kind.dtype)
        for warp, lanes in zip(warps, made):
            words[warp] = np.ascontiguousarray(np.array(lanes)).view(kind.dtype).reshape(32, -1)
        flat = words.reshape(machine.count, -1)
        for n, write in enumerate(puts):
            write(np.ascontiguousarray(flat[:, n]), mask)

    return put


def running(machine: Any, mask: Any) -> list[int]:
    """Warps that run, wholly."""
    return list(range(machine.warps)) if mask is None else [int(w) for w in np.flatnonzero(mask.reshape(-1, 32).any(1))]


def multiply(machine: Any, i: Instruction, spec: Any, dtypes: tuple[np.dtype, np.dtype, np.dtype]) -> Any:
    reads = [fragments(machine, x, dtype, i) for x, dtype in zip(i.operands[1:], dtypes)]
    put = put_fragments(machine, i.operands[0], i, dtypes[2])

    def act(mask: Any) -> None:
        warps, (a, b, c) = running(machine, mask), [read() for read in reads]
        put(warps, [spec.compute([(a[w][n], b[w][n], c[w][n]) for n in range(32)]) for w in warps], mask)

    return act


MMA_BY_TEXT = {tuple(spec.text.split(" ")[0].split(".")[1:]): spec for spec in MMA.values()}


@effect("mma", collective=True)
def mma(machine: Any, i: Instruction) -> Any:
    spec = MMA_BY_TEXT.get(tuple(i.modifiers))
    if spec is None:
        raise UnknownInstruction("unknown shape or types", i)
    return multiply(machine, i, spec, (spec.a_dtype, spec.b_dtype, spec.accumulator))


def shape_of(text: str) -> tuple[int, ...]:
    m, rest = text[1:].split("n")
    n, k = rest.split("k")
    return int(m), int(n), int(k)


@effect("wmma", collective=True)
def wmma(machine: Any, i: Instruction) -> Any:
    what = i.modifiers[0]
    if what == "mma":
        _, _, _, _, _, shape, *kinds = i.modifiers
        kind, accumulator = ("f16", kinds[-1]) if len(kinds) == 2 else (kinds[1], kinds[-1])
        spec = WMMA.get((shape_of(shape), DTYPES[kind], DTYPES[accumulator]))
        if spec is None:
            raise UnknownInstruction("unknown shape or types", i)
        return multiply(machine, i, spec, (spec.input, spec.input, spec.accumulator))
    _, operand, _, _, layout, shape, space, kind = i.modifiers
    operand = {"d": "c"}.get(operand, operand)
    known = {spec.dtype(operand): spec for key, spec in WMMA.items() if key[0] == shape_of(shape)}
    if (space != "shared" and (what, space) != ("store", "global")) or DTYPES.get(kind) not in known:
        raise UnknownInstruction("unknown shape, space or type", i)
    return _move(machine, i, known[DTYPES[kind]], operand, layout, space)


def _move(machine: Any, i: Instruction, spec: Any, operand: str, layout: str, space: str) -> Any:
    """A matrix between memory and fragments, line by line."""
    is_store = i.modifiers[0] == "store"
    where = address(machine, i.operands[0 if is_store else 1], i)
    stride = machine.reader(i.operands[2], KINDS["u32"], i)
    dtype, (rows, columns) = spec.dtype(operand), spec.extents(operand)
    lines, length = (rows, columns) if layout == "row" else (columns, rows)
    size = dtype.itemsize
    given = fragments(machine, i.operands[1], dtype, i) if is_store else None
    put = None if is_store else put_fragments(machine, i.operands[0], i)
    memory = machine.spaces[space]

    def act(mask: Any) -> None:
        warps = running(machine, mask)
        _, at = machine.place(space, where(), mask, i) if space == "shared" else (space, _running(machine, where(), mask))
        at, apart = at.reshape(-1, 32), np.broadcast_to(stride(), (machine.count,)).reshape(-1, 32)[warps].astype(np.int64)
        if (at != at[:, :1]).any() or (apart != apart[:, :1]).any():
            raise Fault("lanes of a warp give different addresses or strides", i)
        if (at % 16).any() or (apart * size % 16).any():
            raise Fault("the address and the stride must be multiples of 16 bytes", i)
        places = at[:, 0, None, None] + (np.arange(lines)[:, None] * apart[:, :1, None] + np.arange(length)) * size
        if given is not None:
            held = given()
            for n, w in enumerate(warps):
                matrix = spec.collect("c", [held[w][lane] for lane in range(32)])
                values = np.ascontiguousarray(matrix if layout == "row" else matrix.T).reshape(-1)
                there = places[n].reshape(-1)
                memory.write(there if space == "shared" else machine.memory.places(there, i), size, [values.view(kind_of(f"b{8 * size}").dtype)], i)
            return
        made = []
        for n in range(len(warps)):
            values = memory.read(places[n].reshape(-1), size, 1, i)[0].view(dtype).reshape(lines, length)
            made.append(spec.deal(operand, np.ascontiguousarray(values if layout == "row" else values.T)))
        assert put is not None
        put(warps, made, mask)

    return act


def _running(machine: Any, values: Any, mask: Any) -> np.ndarray:
    """Of the running threads, as addresses."""
    found = np.broadcast_to(values, (machine.count,)).astype(np.int64)
    return found if mask is None else found[mask]


@effect("ldmatrix", collective=True)
def load_matrices(machine: Any, i: Instruction) -> Any:
    i.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared")
    count = int(i.one_of("x1", "x2", "x4")[1])
    where, put = address(machine, i.operands[1], i), put_fragments(machine, i.operands[0], i)

    def act(mask: Any) -> None:
        rows = _rows(machine, where(), mask, count)
        _, at = machine.place("shared", where(), rows, i)
        words = np.stack(machine.spaces["shared"].read(at, 4, 4, i), 1)
        lines = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 8 * count, 8)
        put(running(machine, mask), [distribute(list(x), count, i.has("trans")) for x in lines], mask)

    return act


@effect("stmatrix", collective=True)
def store_matrices(machine: Any, i: Instruction) -> Any:
    i.only("sync", "aligned", "m8n8", "x1", "x2", "x4", "trans", "shared")
    count = int(i.one_of("x1", "x2", "x4")[1])
    where, given = address(machine, i.operands[0], i), fragments(machine, i.operands[1], np.dtype("u2"), i)

    def act(mask: Any) -> None:
        held = given()
        lines = [row for w in running(machine, mask) for row in collect([tuple(x) for x in held[w]], i.has("trans")) if row is not None]
        _, at = machine.place("shared", where(), _rows(machine, where(), mask, count), i)
        words = np.ascontiguousarray(np.stack(lines).astype(np.uint16)).view(np.uint32)
        machine.spaces["shared"].write(at, 4, list(words.T), i)

    return act


def _rows(machine: Any, addresses: np.ndarray, mask: Any, count: int) -> np.ndarray:
    """The lanes whose addresses count: eight a matrix."""
    lanes = np.arange(machine.count) % 32 < 8 * count
    return lanes if mask is None else lanes & mask
