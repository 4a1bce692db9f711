"""All passes: from a program with arrays and a mapping to its plan, or to an error before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from gemmkit.lang.errors import ConfigError
from gemmkit.programs.algebra import simplified
from gemmkit.programs.allocate import STEP, allocated, out_bytes, said
from gemmkit.programs.chains.chain import Chain, is_chained
from gemmkit.programs.chains.plan import derived
from gemmkit.programs.chains.shares import Shares
from gemmkit.programs.chains.text import names_of_ranges
from gemmkit.programs.expressions import Function, function_of
from gemmkit.programs.kernels import Kernel, kernel_of
from gemmkit.programs.launches import given_by
from gemmkit.programs.lines import refused
from gemmkit.programs.mapping import Mapping
from gemmkit.programs.modules import ROWS_NEEDED, module_of
from gemmkit.programs.multistage.text import OWN_NAMES as NAMES_OF_MULTISTAGE
from gemmkit.programs.multistage.text import Copies, MultistagePrinter
from gemmkit.programs.order import ordered
from gemmkit.programs.own_names import OWN_NAMES, OWN_STARTS
from gemmkit.programs.places import Places, places_of
from gemmkit.programs.plan import ProgramPlan, shared
from gemmkit.programs.printed import Out, OutKind
from gemmkit.programs.rows.elements import PART
from gemmkit.programs.rows.form import has_rows_alone, row_program_of, walked
from gemmkit.programs.rows.plan import derived as derived_rows
from gemmkit.programs.rows.text import OWN_NAMES as NAMES_OF_ROWS
from gemmkit.programs.text import Printer
from gemmkit.programs.text import printed as text_of
from gemmkit.programs.tile_grid import laid_out
from gemmkit.programs.trace import Loop, Store, Value
from gemmkit.programs.values import Index
from gemmkit.runtime.array_info import ArrayInfo, shares_memory, unit_axis
from gemmkit.runtime.arrays import describe, is_array
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tuning.problems import Choice, MappingProblem, choose


def planned(program: Any, arguments: dict[str, Any], mapping: Mapping, text: str | None) -> ProgramPlan:
    """All passes. Raises ValueError, TypeError and ConfigError before anything is compiled."""
    loop, name = program.traced(arguments), program.function.__name__
    if loop.twice:
        raise refused(ValueError, "rows and columns of a product are the same block of a round: such programs have a "
                                  "reference, and no kernel yet", loop.twice)
    infos = {key: describe(x, key) for key, x in arguments.items() if is_array(x)}
    device = device_of(infos)
    if has_rows_alone(loop):
        return _of_rows(name, loop, infos, arguments, mapping, text, device)
    kernel = kernel_of(mapping, device)
    kernel.refuse(mapping)
    if is_chained(loop):
        try:
            return _chained(name, loop, infos, arguments, mapping, text, device, kernel)
        except _NoMerge as error:
            if mapping.splits:
                raise error.reason from None
            return planned(program, arguments, replace(mapping, splits=1), text)
    places = places_of(loop, arguments)
    _check_names(infos, places, arguments, kernel)
    _check_arrays(infos, places, kernel)
    mapping, memory, outs = choose(GridProblem(loop, places, infos, mapping, kernel), device).spec
    shown = ", ".join(f"{key} {size}" for key, size in memory.blocks.items())
    together = "" if memory.cluster.is_single else f"; clusters of {memory.cluster.m} x {memory.cluster.n}"
    title = f"{name}: blocks of {shown}; {mapping.warpgroups} warpgroups; {memory.rings[0].stages} stages{together}."
    given = places, [ordered(rounds) for rounds in places.loops], memory, outs, mapping.warpgroups
    operands = {tile.parameter.name for rounds in places.loops for tile in rounds.tiles}
    printed = text_of(Printer(*given) if kernel.uses_tma else MultistagePrinter(*given, copies={
        key: _copies(kernel, infos[key]) for key in operands}), title)
    indices = *_tile_indices(places), *(rounds.index for rounds in places.loops)
    extents = {index.name: index.extent.size for index in indices}
    if text is not None:
        module_of(name, text)                          # raises for what is no kernel's text
    return ProgramPlan(name, said(memory, mapping), printed, printed.text if text is None else text, infos, extents,
                       given_by(arguments), device)


@dataclass(frozen=True)
class GridProblem(MappingProblem):
    """A program whose tiles have rows and columns: its mapping, how it lies in memory, and how results leave. Where the
    mapping does not say how wide tiles are, they are as wide as waves of them take the least time; where these do not fit
    in shared memory, they are narrower, or have half of A's rows."""

    loop: Loop
    places: Places
    infos: dict[str, ArrayInfo]
    mapping: Mapping
    kernel: Kernel

    def candidates(self, device: DeviceInfo) -> Iterator[Mapping]:
        m, n = (index.name for index in self.places.indices)
        for given in (self.mapping, replace(self.mapping, warpgroups=1)):
            made = laid_out(self.places, given, self.kernel, device.sm_count)
            yield made
            while n not in given.blocks and made.blocks[n] > STEP:
                made = replace(made, blocks={**made.blocks, n: made.blocks[n] - STEP})
                yield made
            if given.warpgroups or m in given.blocks or made.warpgroups == 1:
                return

    def specialise(self, mapping: Mapping, device: DeviceInfo) -> Choice:
        places, stores, outs = self.places, self.places.stores, list[Out]()
        stale = {carried.init for held in self.loop.body if isinstance(held, Loop) for carried in held.carried}
        for store, root in zip(stores, simplified([store.value for store in stores])):
            made = _element(store, root, places, mapping.warpgroups)
            if stale & set(made.uses):
                raise refused(ValueError, "sums are read here, and a later loop adds to them: store them when all is "
                                          "added", store.line)
            info = self.infos[store.parameter.name]
            for array in made.arrays:
                _check_read(array, self.infos[array], store.line)
            kind = {None: self.kernel.whole_rows if _leaves_by_tma(info) else "DirectOut", places.indices[0]: "ColumnsOut",
                    places.indices[1]: "RowsOut"}[store.only]
            outs.append(Out(store, info.dtype, kind, kind == "DirectOut" and _in_pairs(info),
                            None if root.op == "after" else made, made.sums[0]))
        nbytes = {out.name: out_bytes(places, mapping, out.dtype, self.kernel) for out in outs if out.kind == "TmaOut"}
        return Choice((mapping, allocated(places, mapping, nbytes, device, self.kernel), outs))


def _element(store: Store, root: Value, places: Places, warpgroups: int) -> Function:
    """What becomes of the sums of a tile, or of its rows or columns alone."""
    name, (m, n) = f"element_of_{store.parameter.name}", places.indices
    if store.only is n:
        return function_of(name, root, (m,), places.rows, places.stack)
    if store.only is m:
        return function_of(name, root, (n,), places.columns, places.stack, place="column",
                           step=128 * warpgroups)
    return function_of(name, root, (m, n), places.cells, places.stack, rows=places.rows, columns=places.columns)


def _chained(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
             text: str | None, device: DeviceInfo, kernel: Kernel) -> ProgramPlan:
    """Of a program whose tiles are whole rows (`gemmkit.programs.chains`)."""
    call = given_by(arguments)
    numbers = call.numbers

    def leaves(chain: Chain, store: Store, cells: dict[str, ArrayInfo]) -> OutKind:
        info, is_rows = {**infos, **cells}[store.parameter.name], chain.stores_rows(store)
        columns = 1 if is_rows else info.shape[-1]
        whole = not is_rows and columns % kernel.line == 0 and _leaves_by_tma(info)
        kind = "RowsOut" if is_rows else kernel.whole_rows if whole else "DirectOut"
        return OutKind(kind, info.dtype, not is_rows and _in_pairs(info), columns)

    copies = {} if kernel.uses_tma else {key: _copies(kernel, info) for key, info in infos.items() if info.shape}
    made = derived(name, loop, mapping, numbers, leaves, list(infos), device, kernel, copies)
    chain, printed = made.chain, made.text
    indices = *chain.indices, chain.index
    _check_own_names([*infos, *numbers, *(c.inside.name for c in chain.carried), *(index.name for index in indices)],
                     [index.name for index in indices], kernel)
    names = *infos, *numbers, *(index.name for index in indices)
    clash = next((key for key in names if key in names_of_ranges(chain)), None)
    if clash is not None:
        raise _taken(clash) if made.shares is None else _NoMerge(_taken(clash))
    operands = {block.parameter.name: chain.line for ring in made.places.rings for block in ring.blocks}
    shares = made.shares
    stores: list[Store] = chain.stores if shares is None else shares.merging.body
    _check_launch(infos, operands, chain.indices, [chain.index], {chain.index.name: chain.line}, stores, kernel)
    for array, x in made.read.items():
        _check_read(array, infos[array], x.line)
    if text is not None:
        module_of(name, text)
    extents = {**{index.name: index.extent.size for index in indices}, "section": made.section(device.sm_count)}
    merge = None if shares is None else _merging(name, shares, infos, arguments, device)
    cells = {} if shares is None else shares.cells
    return ProgramPlan(name, made.choice.said(mapping), printed, printed.text if text is None else text, {**infos, **cells},
                       extents, call, device, tuple(cells), merge)


class _NoMerge(Exception):
    """Rounds cannot be split, by this ``reason``: where nothing is said of splits, they are not."""

    def __init__(self, reason: Exception):
        super().__init__(str(reason))
        self.reason = reason


def _merging(name: str, shares: Shares, infos: dict[str, ArrayInfo], arguments: dict[str, Any],
             device: DeviceInfo) -> ProgramPlan:
    """Of the kernel that merges what shares of rounds have made, a function of rows."""
    clash = next((key for key in (*shares.cells, *shares.parts) if key in infos), None)
    if clash is not None:
        raise _NoMerge(_taken(clash))
    used = {store.parameter.name for store in shares.merging.body}
    used |= {x.data[0].name for x in walked([store.value for store in shares.merging.body]) if x.op == "load"}
    held = {key: info for key, info in {**infos, **shares.parts}.items() if key in used}
    try:
        plan = _of_rows(f"{name}_merged", shares.merging, held, arguments, Mapping(), None, device)
    except (ValueError, TypeError) as error:
        raise _NoMerge(ConfigError(f"Mapping(splits=...): the kernel that merges shares is a function of rows, and: "
                                   f"{error}")) from None
    return replace(plan, spare=tuple(key for key in shares.parts if key in used))


def _of_rows(name: str, loop: Loop, infos: dict[str, ArrayInfo], arguments: dict[str, Any], mapping: Mapping,
             text: str | None, device: DeviceInfo) -> ProgramPlan:
    """Of a program without products (`gemmkit.programs.rows`)."""
    call, program = given_by(arguments), row_program_of(loop)
    own = [index.name for index in program.indices]
    _check_indices([*infos, *call.numbers, *own], own)
    for key in (*infos, *call.numbers, *(index.name for index in program.indices)):
        if key in NAMES_OF_ROWS or key.startswith(PART):
            raise _taken(key)
    _check_launch(infos, {}, program.indices, [], {}, program.stores)
    printed = derived_rows(name, program, mapping, infos, list(call.numbers), device)
    if text is not None:
        module_of(name, text, ROWS_NEEDED)
    extents = {**{index.name: index.extent.size for index in program.indices}, "columns": program.columns}
    return ProgramPlan(name, mapping, printed, printed.text if text is None else text, infos, extents, call, device)


def device_of(infos: dict[str, ArrayInfo]) -> DeviceInfo:
    places = {info.device for info in infos.values()}
    if len(places) != 1:
        raise ValueError(f"{', '.join(infos)} are in different places; put them on one GPU")
    return target(places.pop())


def _tile_indices(places: Places) -> tuple[Index, ...]:
    """Rows, columns, and the stack if there is one."""
    return places.indices if places.stack is None else (*places.indices, places.stack)


def _copies(kernel: Kernel, info: ArrayInfo) -> Copies:
    vector = kernel.vector(info)
    return Copies(vector, info.shape[-1] % vector != 0)


def _check_names(infos: dict[str, ArrayInfo], places: Places, arguments: dict[str, Any], kernel: Kernel) -> None:
    """Raises ValueError for names that the text has for its own."""
    numbers = given_by(arguments).numbers
    indices = [index.name for index in (*_tile_indices(places), *(rounds.index for rounds in places.loops))]
    _check_own_names([*infos, *numbers, *places.names, *indices], indices, kernel)


def _check_own_names(names: list[str], indices: list[str], kernel: Kernel) -> None:
    _check_indices(names, indices)
    own = OWN_NAMES if kernel.uses_tma else OWN_NAMES | NAMES_OF_MULTISTAGE
    for name in names:
        is_made = name.startswith(OWN_STARTS) or name.endswith("_tile") or "_by_" in name
        if name in own or is_made or (name == "i" and name not in indices):
            raise _taken(name)


def _check_indices(names: Iterable[str], indices: list[str]) -> None:
    """Raises ValueError for an index with the name of an array, a number or a cell."""
    others = list(names)
    for name in dict.fromkeys(indices):
        if others.count(name) > indices.count(name):
            raise _taken(name)


def _taken(name: str) -> ValueError:
    return ValueError(f"{name}: the derived text has this name for its own; call the array, cell or index otherwise")


def _check_arrays(infos: dict[str, ArrayInfo], places: Places, kernel: Kernel) -> None:
    operands = {tile.parameter.name: rounds.line for rounds in places.loops for tile in rounds.tiles}
    _check_launch(infos, operands, _tile_indices(places), [rounds.index for rounds in places.loops],
                  {rounds.index.name: rounds.line for rounds in places.loops}, places.stores, kernel)


def _check_launch(infos: dict[str, ArrayInfo], operands: dict[str, str], tile: tuple[Index, ...], rounds: list[Index],
                  lines: dict[str, str], stores: list[Store], kernel: Kernel | None = None) -> None:
    """Raises ValueError where a kernel cannot bring an operand, a sum goes over nothing, or results share memory."""
    for index in rounds:
        if index.extent.size == 0:
            raise refused(ValueError, f"{index} goes along {index.extent}: a kernel's sums go over one element or more",
                          lines[index.name])
    if 0 not in (index.extent.size for index in tile):
        for name, line in operands.items():
            reason = None if kernel is None else kernel.why_not(infos[name])
            if reason is not None:
                raise refused(ValueError, f"{name} is an operand of a product, and {reason}", line)
    results = [store.parameter.name for store in stores]
    twice = next((name for name in results if results.count(name) > 1), None)
    if twice is not None:
        raise refused(ValueError, f"{twice} is stored twice; one store for each result is needed", stores[-1].line)
    for store in stores:
        info = infos[store.parameter.name]
        if info.readonly:
            raise refused(ValueError, f"{store.parameter.name} is a result, and read-only", store.line)
        if info.dtype.name not in ("float16", "bfloat16", "float32"):
            raise refused(TypeError, f"{store.parameter.name} is of {info.dtype}; results of float16, bfloat16 and float32 "
                                     "are stored", store.line)
    for (one, x), (other, y) in combinations(infos.items(), 2):
        if (one in results or other in results) and shares_memory(x, y):
            raise shared(one, other)


def _check_read(name: str, info: ArrayInfo, line: str) -> None:
    """Raises TypeError for elements that no float32 can meet."""
    if info.dtype.kind == "c" or info.dtype.names is not None:
        raise refused(TypeError, f"{name} is of {info.dtype}; arrays of real numbers are read where a tile is stored", line)


def _leaves_by_tma(info: ArrayInfo) -> bool:
    """TMA clips rows at multiples of 16 bytes alone."""
    return info.dtype.itemsize == 2 and info.shape[-1] * 2 % 16 == 0 and why_not(info, len(info.shape) - 1) is None


def _in_pairs(info: ArrayInfo) -> bool:
    """Whether two neighbours of a row are stored at once."""
    size = 2 * info.dtype.itemsize
    return (info.shape[-1] % 2 == 0 and info.strides[-1] == 1 and all(stride % 2 == 0 for stride in info.strides[:-1])
            and info.pointer % size == 0 and unit_axis(info) == len(info.shape) - 1)
