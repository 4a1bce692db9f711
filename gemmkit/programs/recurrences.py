"""Recurrences: tiles that go through blocks of rows in order, with a state in registers, and store the rows of each block.

    for h, n in gp.parallel(q.count, v.columns):
        state = gp.zeros(k.columns, n)
        for t in gp.sequential(q.rows):
            scores = gp.where(lambda i, j: j <= i, q[h, t] @ k[h, t].T, 0.0)
            o[h, t, n] = q[h, t] @ state.astype(q.dtype) + scores.astype(v.dtype) @ v[h, t, n]
            state += k[h, t].T @ v[h, t, n]

1. **A producer** has TMA bring all blocks of a round into one stage of a ring.
2. **Matrices are accumulators.** Each warpgroup has 64 rows of every matrix, or several times 64. A computed left operand is
   taken from the registers that it is in. A computed right operand, and a computed transpose, go through swizzled shared
   memory. The warpgroups meet before they write there, when all have waited for what read it, and before they read it.
3. **A value of each row** of a block is in the lanes of every warp, a row each (and the row 32 further on), where cumulative
   sums take five shuffles. What a matrix needs of it comes by shuffles.
4. **An order.** `RoundSchedule` starts a product as soon as its operands are there, computes meanwhile what needs no
   product, and waits for the oldest product when nothing else is left.

Rows behind the end are zeros in what TMA brings. Computed operands that a product sums over become zeros there as well.

Sources: Sun et al., "Retentive network", 2023; Dao, Gu, "Transformers are SSMs", 2024; Yang et al., "Parallelizing linear
transformers with the delta rule over sequence length", 2024 (the same blocks, of the same length).
"""

from __future__ import annotations

from dataclasses import dataclass as plain_dataclass
from typing import Any

import numpy as np

from gemmkit.kernels.collectives.pipeline import Pipeline, SharedMemory
from gemmkit.kernels.sm90.store import Panels
from gemmkit.lang.errors import ConfigError
from gemmkit.programs.called import Callee, Callees
from gemmkit.programs.collectives import MEETING, PATTERN, ROWS, StagedTile, UnitLowerInverse, in_steps
from gemmkit.programs.mapping import Mapping, OutKind, Printed
from gemmkit.programs.rounds import LOG2_E, ElementText, Recurrence, RoundSchedule, RoundStep, listed, without_casts
from gemmkit.programs.sums import LANES, LINES_OF_WARP
from gemmkit.programs.text import name_of_stack, parts_of_stacks
from gemmkit.programs.trace import Carried, StoreStatement, Value
from gemmkit.programs.values import Axis, Parameter, number_text, refused, shown, unique
from gemmkit.runtime.device import DeviceInfo

# --------------------------------------------------------------------------------------------------
# The text.

SHARES, FACTORS = "state_shares", "state_factors"
OWN = {"at", "at_place", "before", "block", "end", "first", "rest", "room", "share", "which", SHARES, FACTORS}
IMPORTS = [
    ("dataclasses", "dataclass"), ("gemmkit.components", "Component, Scalar"),
    ("gemmkit.kernels.collectives.pipeline", "Pipeline, WARPS, Warpgroups"),
    ("gemmkit.kernels.collectives.scheduler", "Slot"), ("gemmkit.kernels.sm90.store", "own_column, own_row"),
    ("gemmkit.lang.aggregates", "convert, fill"), ("gemmkit.lang.registers", "apply, each, generate"),
    ("gemmkit.programs.called", "number_of, truth_of"),
    ("gemmkit.programs.collectives", "ComputedTile, F32, DirectOut, HandedProduct, Product, RowValues, StagedTile, TmaOut, "
                                     "UnitLowerInverse, WarpgroupPart, blocks, column_at, column_of, column_value, finite, "
                                     "own_sum, row_max, row_of, row_value, whole_sum"),
    ("gemmkit.programs.sums", "RowScan, block_of, columns_of_lanes, cumulative, lane_row, leave_share, in_room, "
                              "rows_of_lanes, take_share, total_of"),
    ("gemmkit.ptx.arithmetic", "exp2, log2, maximum, tanh"), ("gemmkit.ptx.barriers", "mbarrier_fence_init"),
    ("gemmkit.ptx.special", "barrier, block_x, grid_x, rolled, thread_index, udiv, uniform"),
    ("gemmkit.ptx.wgmma", "grid_launch_dependents, grid_wait, named_barrier, wgmma_commit, wgmma_fence, wgmma_wait")]
HANDED = 64                            # columns of a left operand that stays in registers, unless they are a block's rows
#: Of a thread's two rows; and what stands behind the end of columns.
FOLDED = dict(rowsum=("whole_sum(own_sum({}))", "0.0"), rowmax=("row_max({})", "-math.inf"))
OPERANDS = {np.dtype(np.float16), np.dtype("bfloat16")}          # of products


@plain_dataclass
class RoundValue:
    """A value that steps have made: the names of its parts of 64 rows, and the step."""

    names: tuple[str, ...]
    step: RoundStep | None


class RecurrencePrinter:
    """``outs``: how results leave. ``is_first``: of two kernels that share a tile's rounds."""

    def __init__(self, of: Recurrence, mapping: Mapping, outs: dict[str, OutKind], numbers: list[str], arrays: list[str],
                 device: DeviceInfo, is_first: bool = False):
        self.of, self.mapping, self.outs, self.numbers, self.is_first = of, mapping, outs, numbers, is_first
        self.blocks, self.length = dict(mapping.blocks), mapping.blocks[of.t.name]
        self.room = device.shared_memory_per_block
        self.half = device.shared_memory_per_sm // 2 - device.reserved_shared_memory
        self.memory, self.constants = SharedMemory(), list[str]()
        self.functions, self.steps, self.read = list[str](), list[RoundStep](), list[str]()
        self.before, self.begins = list[str](), list[str]()            # lines where a tile begins
        self.begin, self.fetched = list[str](), list[tuple[str, str]]()                # where a round begins
        self.tiles: dict[tuple[Any, ...], str] = {}
        self.loads: dict[str, tuple[Parameter, tuple]] = {}
        self.places: dict[Any, tuple[str, RoundStep]] = {}
        self.products: dict[str, str] = {}
        self.held: dict[Any, Any] = {}               # of values, of their forms, and of scaled values
        self.uncached: dict[Value, RoundValue] = {}      # the same of what one function takes
        self.callees: dict[str, Callee] = {}         # functions of numbers
        self.factors = of.factors or {}
        self.taken = {*arrays, *numbers, *(x.name for x in of.indices), *OWN}

    # -- names ----------------------------------------------------------------------------------------------------------

    def name(self, wanted: str) -> str:
        found = unique(wanted, self.taken)
        self.taken.add(found)
        return found

    def parts(self, x: Value) -> int:
        """Of a matrix, of 64 rows each, that a warpgroup has."""
        rows, whole = self.of.length(x.dims[0], self.blocks), ROWS * self.mapping.warpgroups
        if rows % whole:
            raise refused(ConfigError, f"{x!r} has {rows} rows, no multiple of {whole}: {self.mapping.warpgroups} "
                                       f"warpgroups have {ROWS} each", x.line)
        return rows // whole

    def group(self, part: int) -> str:
        """Which 64 rows a part is."""
        count = self.mapping.warpgroups
        return "group" if part == 0 else f"group + {part * count}"

    def columns(self, x: Value) -> int:
        """Of a matrix, in the whole steps of an instruction; those behind an array's end are zeros."""
        found = in_steps(self.of.length(x.dims[1], self.blocks))
        if found > 256:
            raise refused(ConfigError, f"{x!r} has {found} columns; 256 at most fit in an instruction", x.line)
        return found

    def step(self, names: tuple[str, ...], lines: list[str], needs: list[RoundStep | None], **more: Any) -> RoundStep:
        made = RoundStep(names, lines, [x for x in needs if x is not None], **more)
        self.steps.append(made)
        return made

    # -- operands -------------------------------------------------------------------------------------------------------

    def staged(self, x: Value) -> str:
        """The tile of a block that TMA brings every round."""
        parameter, key = x.data
        dims = [index for index in key if not index.stack]
        whole = not isinstance(x.dims[-1], Axis) or x.dims[-1].size == parameter._shape[-1]
        if dims[:1] != [self.of.t] or dims[1:] not in ([], [self.of.n]) or len(x.dims) != 2 or not whole:
            raise self.refusal(f"{parameter.name}[{shown(key)}]; a block has a round's rows, [..., {self.of.t}] or [..., "
                               f"{self.of.t}, {self.of.n or 'n'}]", x.line)
        if np.dtype(parameter.dtype).name not in ("float16", "bfloat16", "float32"):
            raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; blocks of rounds that store rows are "
                                     "float16, bfloat16 or, as values, float32", x.line)
        known = (parameter.name, *map(id, key))
        if known not in self.tiles:
            block = unique(parameter.name, [tile.removesuffix("_tile") for tile in self.loads])
            columns, name = self.columns(x), self.name(f"{block}_tile")
            self.tiles[known], self.loads[name] = name, (parameter, key)
            self.constants.append(f"{name} = StagedTile({np.dtype(parameter.dtype).name!r}, lines={self.length}, "
                                  f"columns={columns}, offset={{{name}}}, stage_bytes={{stage}}, "
                                  f"stacks={len(parameter._shape) - 2})")
        return self.tiles[known]

    @staticmethod
    def bytes_of(dtype: np.dtype, lines: int, columns: int) -> int:
        """Of a block in shared memory."""
        made = StagedTile(dtype, lines, columns, 0, 0)
        return int(-(-made.panels * made.held * made.line * made.size // PATTERN) * PATTERN)

    def refusal(self, what: str, line: str) -> Exception:
        return refused(ValueError, f"in rounds that store rows: {what} (only .reference(...) runs others)", line)

    def put(self, x: Value, dtype: Any) -> tuple[str, RoundStep]:
        """The place in shared memory where a computed value is an operand."""
        source, kind = without_casts(x), np.dtype(dtype)
        if (source, kind) not in self.places:
            held, lines, columns = self.matrix(source), self.of.length(source.dims[0], self.blocks), self.columns(source)
            name, nbytes = self.name(f"{source.name or source.op}_place"), self.bytes_of(kind, lines, columns)
            at = self.memory.take(nbytes, PATTERN)
            self.constants.append(f"{name} = ComputedTile({kind.name!r}, lines={lines}, columns={columns}, offset={at}, "
                                  f"stage_bytes={nbytes}, barrier={MEETING})")
            end = "room" if self.of.is_block(source.dims[0]) else str(lines)
            puts = [f"{name}.put({value}, at_place, {self.group(n)}, {end})" for n, value in enumerate(held.names)]
            self.places[source, kind] = name, self.step((), puts, [held.step], puts=name)
        return self.places[source, kind]

    def dtype_of(self, x: Value) -> Any:
        """Of an operand; None if it is left in float32."""
        x = x.args[0] if x.op == "transpose" else x
        return np.dtype(x.data[0].dtype) if x.op == "load" else np.dtype(x.data) if x.op == "cast" else None

    # -- products -------------------------------------------------------------------------------------------------------

    def product(self, x: Value, onto: RoundValue | None = None) -> RoundValue:
        """``onto``: what it is added to."""
        a, b = x.args
        kinds = {self.dtype_of(a), self.dtype_of(b)}
        if len(kinds) > 1 or not kinds <= OPERANDS:
            raise refused(TypeError, "a product in rounds takes float16 or bfloat16, both operands alike: round what is "
                                     "computed, x.astype(v.dtype)", x.line)
        (dtype,) = kinds
        inner = a.dims[1]
        if isinstance(inner, Axis) and inner.size != in_steps(inner.size) and not any(
                (y.args[0] if y.op == "transpose" else y).op == "load" for y in (a, b)):
            raise self.refusal(f"a product of two computed operands that sums over {inner.size} columns, no multiple of 16",
                               x.line)
        needs, takes = list[RoundStep | None](), list[str]()

        def operand(y: Value) -> tuple[str, str, bool]:
            """(the tile, its slot, whether it is transposed)."""
            inner = y.args[0] if y.op == "transpose" else y
            if inner.op == "load":
                return self.staged(inner), "at", y.op == "transpose"
            name, put = self.put(inner, dtype)
            needs.append(put)
            takes.append(name)
            return name, "at_place", y.op == "transpose"

        parts = self.parts(x)
        self.columns(x)
        right, right_slot, right_transposed = operand(b)
        more = ", b_transposed=True" if right_transposed else ""
        is_handed = a.op == "cast" and (self.of.is_block(a.dims[1]) or self.columns(a) <= HANDED)
        if is_handed:
            source = without_casts(a)
            held = self.masked(source)
            made = self.constant(f"{source.name or source.op}_by_{right}", f"HandedProduct({right}{more})")
            fragments = tuple(self.name(f"{name}_as_a") for name in held.names)
            needs.append(self.step(fragments, [f"{name} = {made}.fragments({value})"
                                               for name, value in zip(fragments, held.names)], [held.step]))
        else:
            left, left_slot, left_transposed = operand(a)
            more = f"{', a_transposed=True' if left_transposed else ''}{more}"
            made = self.constant(f"{left}_by_{right}", f"Product({left}, {right}{more})")
        names, lines = tuple(self.name(x.name or "product") for _ in range(parts)), list[str]()
        for n, name in enumerate(names):
            begin, adds = (f"{made}.begin(0.0)", 0) if onto is None else (onto.names[n], 1)
            if is_handed:
                lines.append(f"{name} = {made}.multiply({begin}, {fragments[n]}, {right_slot}, {adds})")
            else:
                lines.append(f"{name} = {made}.multiply_apart({begin}, {left_slot}, {right_slot}, {self.group(n)}, {adds})")
        onto_step = None if onto is None else onto.step
        step = self.step(names, lines, [*needs, onto_step], is_product=True, takes=tuple(takes),
                         onto=onto_step if onto_step is not None and onto_step.is_product else None)
        return RoundValue(names, step)

    def constant(self, wanted: str, made: str) -> str:
        if made not in self.products:
            self.products[made] = self.name(wanted)
            self.constants.append(f"{self.products[made]} = {made}")
        return self.products[made]

    def masked(self, x: Value) -> RoundValue:
        """A left operand in registers, with zeros where it has columns behind the end of a round's rows."""
        if not self.of.is_block(x.dims[1]) or self._is_lower(x):
            return self.matrix(x)
        if ("masked", x) not in self.held:
            held = self.matrix(x)
            names = tuple(self.name(f"{name}_there") for name in held.names)
            lines = [f"{name} = apply(in_room, {value}, room - own_column())" for name, value in zip(names, held.names)]
            self.held["masked", x] = RoundValue(names, self.step(names, lines, [held.step]))
        return self.held["masked", x]

    def _is_lower(self, x: Value) -> bool:
        """Whether a matrix of a block with itself has zeros right of the diagonal, and so behind the end, in rows that are
        there."""
        if x.op == "inverse":
            return True
        if x.op != "where" or x.args[2].op != "const" or x.args[2].data != 0.0 or x.args[0].op not in ("lt", "le"):
            return False
        small, large = x.args[0].args
        return small.op == large.op == "coordinate" and small.data is x.dims[1] and large.data is x.dims[0]

    # -- values ---------------------------------------------------------------------------------------------------------

    def matrix(self, x: Value) -> RoundValue:
        """The accumulators of a matrix. Blocks of arrays, and sums along rows, are made again wherever they are taken:
        registers are scarcer than shared memory."""
        held = self.uncached if x.op in ("load", "cumsum") else self.held
        if x not in held:
            held[x] = self._matrix(x)
        return held[x]

    def _matrix(self, x: Value) -> RoundValue:
        if x.op == "dot":
            return self.product(x)
        if x.op == "load":
            tile, names = self.staged(x), tuple(self.name(f"{x.data[0].name}_block") for _ in range(self.parts(x)))
            lines = [f"{name} = block_of({tile}, at, {self.group(n)})" for n, name in enumerate(names)]
            return RoundValue(names, self.step(names, lines, [], is_late=True))
        if x.op == "inverse":
            return self._inverse(x)
        if x.op == "cumsum":
            return self._sums_along(x)
        if x.op == "add":
            for product, other in (x.args, x.args[::-1]):
                if product.op == "dot" and self.of.uses[product] == 1 and other.dims == x.dims == product.dims:
                    return self.product(product, self.matrix(other))
        return self._mapped(x)

    def _inverse(self, x: Value) -> RoundValue:
        if self.mapping.warpgroups > 1:
            raise refused(ConfigError, "unit_lower_inverse: a warpgroup solves for a block of 64 rows; use warpgroups=1",
                          x.line)
        held, name = self.matrix(x.args[0]), self.name(x.name or "inverse")
        solver = self.constant("solver", f"UnitLowerInverse({self.memory.take(UnitLowerInverse.nbytes, 16)})")
        return RoundValue((name,), self.step((name,), [f"{name} = {solver}.of({held.names[0]})"], [held.step]))

    def scan(self, x: Value, parts: int = 0, after: bool = False) -> tuple[str, str, RoundValue]:
        """Of a block's sums along rows: the scan that has so many ``parts`` (0: those of warps), the place in shared memory
        where warps leave their sums, and the sums that each has of its own rows."""
        warps, columns = self.length // LINES_OF_WARP, self.columns(x)
        if ("scan", x) not in self.held:
            self.held["scan", x] = self.memory.take(4 * columns * warps, 16)
        shape = f"lines={self.length}, columns={columns}, offset={self.held['scan', x]}"
        place = self.constant("scan", f"RowScan({shape}, piece=1, after=False)")
        if ("sums", x) not in self.held:
            held, sums = self.matrix(x), self.name(f"{x.name or x.op}_sums")
            self.held["sums", x] = RoundValue((sums,), self.step(
                (sums,), [f"{sums} = {place}.of_warp({held.names[0]}, group, room)"], [held.step], puts=place))
        piece = warps // (parts or warps)
        made = f"RowScan({shape}, piece={piece}, after={after})"
        return self.constant(f"{place}_{'after' if after else 'of'}_{piece}", made), place, self.held["sums", x]

    def _sums_along(self, x: Value) -> RoundValue:
        scan, place, sums = self.scan(x.args[0], *x.data)
        if scan == place:
            return sums
        name, (given,) = self.name(x.name or "sums"), sums.names
        return RoundValue((name,), self.step((name,), [f"{name} = {scan}.of_piece({given}, group)"], [sums.step],
                                             takes=(place,), is_late=True))

    def _mapped(self, x: Value) -> RoundValue:
        """Element by element."""
        names, lines, needs = list[str](), list[str](), list[RoundStep | None]()
        function, outer, self.uncached = self.name(f"make_{x.name or x.op}"), self.uncached, {}
        for part in range(self.parts(x)):
            text = ElementText(self, x, part)
            body = text.of(x, top=True)
            extra, given = listed(text.extra), listed(text.extra.values())
            name = self.name(x.name or "value")
            if text.first:
                lines.append(f"{name} = apply({function}, {text.first}{given})")
                head = f"def {function}({text.formal[text.first]}, i{extra}):"
            else:
                lines.append(f"{name} = generate({self.columns(x) // 2}, {function}{given})")
                head = f"def {function}(i{extra}):"
            if part == 0:
                self.functions.append(f"{head}\n    return {body}")
            names.append(name)
            needs += text.needs
        self.uncached = outer
        return RoundValue(tuple(names), self.step(tuple(names), lines, needs))

    def vector(self, x: Value) -> RoundValue:
        """A value of each row of a block, in lanes."""
        x = x.args[0] if x.op == "transpose" else x
        if x not in self.held:
            self.held[x] = self._vector(x)
        return self.held[x]

    def _vector(self, x: Value) -> RoundValue:
        if not self.of.is_block(x.dims[0]):
            raise self.refusal(f"{x!r} is a value of ({shown(x.dims)}); vectors are of each row of the block", x.line)
        name, count = self.name(x.name or x.op), self.length // LANES
        if x.op == "load":
            coming = self.name(f"next_{name}")
            self.fetched.append((coming, f"generate({count}, {self.loader_of(x, 'lane_row(i)', '{}')})"))
            self.begin.append(f"{name} = {coming}")
            return RoundValue((name,), None)
        if x.op in FOLDED:
            place = self.constant(f"{name}_place", f"RowValues({self.memory.take(4 * self.length, 16)})")
            found, step = self.folded(x)
            put = self.step((), [f"{place}.put({row}, {self.group(n)})" for n, row in enumerate(found)], [step], puts=place)
            return RoundValue((name,), self.step((name,), [f"{name} = generate({count}, {place}.lane)"], [put],
                                                 takes=(place,)))
        if x.op == "cumsum":
            if x.data != (1, False):
                raise self.refusal("cumsum of a value of each row has neither parts= nor after=", x.line)
            held = self.vector(x.args[0])
            return RoundValue((name,), self.step((name,), [f"{name} = cumulative({held.names[0]})"], [held.step]))
        text, function = ElementText(self, x, 0), self.name(f"make_{name}")
        body = text.of(x, top=True)
        self.functions.append(f"def {function}(i{listed(text.extra)}):\n    return {body}")
        lines = [f"{name} = generate({count}, {function}{listed(text.extra.values())})"]
        return RoundValue((name,), self.step((name,), lines, text.needs))

    def loader_of(self, x: Value, place: str, first: str) -> str:
        """The function that reads an element of a vector from memory, ``place`` behind the ``first``, and what it is
        given."""
        parameter, key = x.data
        dim, stacks = x.dims[0], [index for index in key if index.stack]
        if tuple(key[len(stacks):]) not in ((), (dim,)):
            raise refused(ValueError, f"{parameter.name}[{shown(key)}]: its last axis has the rows, or the columns", x.line)
        at = ", ".join([*(index.text(name_of_stack) for index in stacks), "at"])
        own = list(dict.fromkeys(index.of_loop for index in stacks))
        function, formal = self.name(f"load_{parameter.name}"), listed(name_of_stack(stack) for stack in own)
        self.functions.append(f"def {function}(i, x, first, end{formal}):\n    at = first + {place}\n"
                              f"    return convert(F32, x[{at}]) if at < end else convert(F32, 0.0)")
        self.reads(parameter, x)
        return f"{function}, {parameter.name}, {first}, {self.begin_of(dim)[1]}{listed(stack.name for stack in own)}"

    def folded(self, x: Value) -> tuple[list[str], RoundStep | None]:
        """Sums along rows, or the largest elements, as a thread has them of its two rows: the text of each part."""
        matrix, (fold, other) = x.args[0], FOLDED[x.op]
        held, dim = self.matrix(matrix), matrix.dims[1]
        is_whole = isinstance(dim, Axis) and dim.size == self.columns(matrix)
        end = str(dim.size) if isinstance(dim, Axis) else "room"
        values = [name if is_whole else f"apply(in_room, {name}, {end} - own_column(), {other})" for name in held.names]
        return [fold.format(value) for value in values], held.step

    def reads(self, parameter: Parameter, x: Value) -> None:
        if np.dtype(parameter.dtype).kind != "f" and np.dtype(parameter.dtype).name != "bfloat16":
            raise refused(TypeError, f"{parameter.name} has dtype {parameter.dtype}; numbers of rows and tiles are floats",
                          x.line)
        if parameter.name not in self.read:
            self.read.append(parameter.name)

    def scaled(self, x: Value) -> Value:
        """A vector times log2(e)."""
        inner = x.args[0] if x.op == "transpose" else x
        if ("scaled", inner) not in self.held:
            factor = Value("const", data=LOG2_E, line=x.line)
            self.held["scaled", inner] = Value("mul", (inner, factor), inner.dims, name=f"{inner.name}_scaled", line=x.line)
        made = self.held["scaled", inner]
        return made if x is inner else Value("transpose", (made,), x.dims, line=x.line)

    def converted(self, x: Value, form: str) -> RoundValue:
        """A value of rows as a matrix takes it: of its ``rows``, or of its ``columns``."""
        if not self.of.is_block(x.dims[0]):
            return self.of_keys(x, form)
        held = self.vector(x)
        if (form, held.names) not in self.held:
            name = self.name(f"{held.names[0]}_{form}")
            how = "group" if form == "rows" else str(self.length // 4)
            self.held[form, held.names] = RoundValue((name,), self.step(
                (name,), [f"{name} = {form}_of_lanes({held.names[0]}, {how})"], [held.step]))
        return self.held[form, held.names]

    def of_keys(self, x: Value, form: str) -> RoundValue:
        """A value of each column of a block, as the rows or the columns of a matrix take it."""
        if (form, x) in self.held:
            return self.held[form, x]
        rows, wanted = self.of.length(x.dims[0], self.blocks), f"{x.name or x.op}_{form}"
        if rows % (ROWS * self.mapping.warpgroups) and form == "rows":
            raise self.refusal(f"a value of {rows} rows", x.line)
        groups = [self.group(n) for n in range(rows // (ROWS * self.mapping.warpgroups) if form == "rows" else 1)]
        names = tuple(self.name(wanted) for _ in groups)
        if x.op == "rowsum" and x.args[0].op == "transpose" and self.of.is_block(x.args[0].args[0].dims[0]):
            scan, place, sums = self.scan(x.args[0].args[0])
            lines = [f"{name} = {scan}.rows({group})" if form == "rows" else f"{name} = {scan}.own_columns()"
                     for name, group in zip(names, groups)]
            made = self.step(names, lines, [sums.step], takes=(place,))
        elif x.op == "load":
            begin = self.begin_of(x.dims[0])[0]
            given = [("i * 8", f"{begin} + ({group}) * {ROWS} + own_row()") if form == "rows" else
                     ("column_of(i)", f"{begin} + own_column()") for group in groups]
            count = 2 if form == "rows" else in_steps(rows) // 4
            made = self.step(names, [f"{name} = generate({count}, {self.loader_of(x, *own)})"
                                     for name, own in zip(names, given)], [], is_late=True)
        elif x.op in FOLDED and form == "rows" and x.args[0].op != "transpose":
            found, step = self.folded(x)
            made = self.step(names, [f"{name} = {row}" for name, row in zip(names, found)], [step])
        elif x.op in FOLDED:
            raise self.refusal(f"{x!r} is a value of ({shown(x.dims)}); vectors are of each row of the block, or sums of "
                               "its columns", x.line)
        else:
            count = 2 if form == "rows" else in_steps(rows) // 4
            lines, needs, function = [], list[RoundStep | None](), self.name(f"make_{wanted}")
            for part, name in enumerate(names):
                text = ElementText(self, x, part, form)
                body = text.of(x, top=True)
                if part == 0:
                    self.functions.append(f"def {function}(i{listed(text.extra)}):\n    return {body}")
                lines.append(f"{name} = generate({count}, {function}{listed(text.extra.values())})")
                needs += text.needs
            made = self.step(names, lines, needs)
        self.held[form, x] = RoundValue(names, made)
        return self.held[form, x]

    def scalar(self, x: Value) -> RoundValue:
        """A number of the tile, or of the round."""
        if x not in self.held:
            self.held[x] = self._scalar(x)
        return self.held[x]

    def _scalar(self, x: Value) -> RoundValue:
        if x.op == "scalar":
            return RoundValue((f"sizes.{x.data}",), None)
        name = self.name(x.name or x.op)
        if x.op == "load":
            parameter, key = x.data
            self.reads(parameter, x)
            self.before.append(f"{name} = convert(F32, {parameter.name}[{', '.join(index.text() for index in key)}])")
            return RoundValue((name,), None)
        if x.op == "total":
            held = self.vector(x.args[0])
            return RoundValue((name,), self.step((name,), [f"{name} = total_of({held.names[0]}, room)"], [held.step]))
        text = ElementText(self, x, 0)
        body = text.of(x, top=True)
        return RoundValue((name,), self.step((name,), [f"{name} = {text.outside(body)}"], text.needs))

    # -- the whole ------------------------------------------------------------------------------------------------------

    def store(self, store: StoreStatement, names: tuple[str, ...], after: bool) -> list[str]:
        """The lines that store a matrix of the tile."""
        of, key, value = self.of, [index for index in store.key if not index.stack], store.value
        own = [] if of.n is None else [of.n]
        if key != (own if after else [of.t, *own]) or list(value.dims[:len(key)]) != key or len(value.dims) != 2:
            raise self.refusal(f"{store.parameter.name}[{shown(store.key)}]; rounds store rows of their block, and tiles "
                               "their state", store.line)
        stacks = "".join(f"{index.text()}, " for index in reversed(store.key) if index.stack)
        (row, rows), (column, columns) = map(self.begin_of, value.dims)
        out = store.parameter.name
        return [f"out_{out}.store({name}, {out}, WarpgroupPart({row} + ({self.group(part)}) * {ROWS}, {column}, {rows}, "
                f"{columns}, ({stacks})), group)" for part, name in enumerate(names)]

    @staticmethod
    def begin_of(dim: Any) -> tuple[str, str]:
        """Where a tile's or a round's part of a dimension begins, and where the dimension ends."""
        return ("0", str(dim.size)) if isinstance(dim, Axis) else (dim.name, f"sizes.{dim.name}")

    def printed(self, program: str) -> Printed:
        of, cells, ends, after = self.of, self.of.rounds.carried, list[tuple[str, str]](), list[str]()
        for c in cells:
            self.cell(c)
        stores = [] if self.is_first else [x for x in of.stores if x in of.rounds.body]
        for store in stores:
            held = self.matrix(without_casts(store.value))
            self.step((), self.store(store, held.names, False), [held.step])
        for c in cells:
            ends += zip(self.held[c.inside].names, self.matrix(without_casts(c.out)).names)
        if self.is_first:
            ends += self.leave(after)
        elif self.mapping.splits > 1:
            self.take_on()
        for store in [x for x in of.stores if x not in of.rounds.body and not self.is_first]:
            cell = next((c for c in cells if c.after is without_casts(store.value)), None)
            if cell is None:
                raise self.refusal(f"{store.parameter.name}[{shown(store.key)}]; behind the rounds a tile stores its cells "
                                   "as they are", store.line)
            after += self.store(store, self.held[cell.inside].names, True)
            stores.append(store)
        if after and self.mapping.splits > 1 and not self.is_first:
            after = [f"if share == {self.mapping.splits - 1}:", *(f"    {line}" for line in after)]
        self.constants += [self.result(store) for store in stores]
        stages = self.ring()
        body = RoundSchedule(self.steps, f"named_barrier({MEETING}, {128 * self.mapping.warpgroups})").ordered()
        outs = [*(store.parameter.name for store in stores), *(self.shares if self.is_first else [])]
        lengths = ", ".join(f"{key} {size}" for key, size in self.blocks.items())
        title = f"{program}: blocks of {lengths}; {self.mapping.warpgroups} warpgroups; {stages} stages"
        return self.text(f"{title}{'; states of shares' * self.is_first}.", body, ends, after, outs)

    def cell(self, c: Carried) -> None:
        is_array = c.init.op == "load" and self.of.t not in c.init.dims and c.init.dims == c.inside.dims
        if len(c.inside.dims) != 2 or not (c.init.op == "const" or is_array):
            raise self.refusal(f"{c.inside!r}; a cell is a matrix that begins with a number or a tile's part of an array, "
                               "gp.zeros(k.columns, n)", c.inside.line)
        names = tuple(self.name(c.inside.name or "state") for _ in range(self.parts(c.inside)))
        self.held[c.inside] = RoundValue(names, None)
        count = self.columns(c.inside) // 2
        if is_array and not self.is_first:
            self.begins += [f"{name} = generate({count}, {self.loader(c.init, n)})" for n, name in enumerate(names)]
            return
        value = 0.0 if self.is_first else c.init.data
        self.begins += [f"{name} = fill(F32, {count}, {number_text(value)})" for name in names]

    def loader(self, x: Value, part: int) -> str:
        """The function that reads an element of a matrix from memory, and what it is given."""
        parameter, key = x.data
        self.reads(parameter, x)
        (row, rows), (column, columns) = map(self.begin_of, x.dims)
        stacks = [index.of_loop for index in key if index.stack]
        at = "".join(f"{index.text(name_of_stack)}, " for index in key if index.stack)
        function = self.name(f"load_{parameter.name}")
        formal = "".join(f", {name_of_stack(stack)}" for stack in stacks)
        self.functions.append(
            f"def {function}(i, x, at_row, at_column, rows, columns{formal}):\n"
            "    at_row, at_column = at_row + row_of(i), at_column + column_at(i)\n"
            "    is_there = at_row < rows and at_column < columns\n"
            f"    return convert(F32, x[{at}at_row, at_column]) if is_there else convert(F32, 0.0)")
        given = [function, parameter.name, f"{row} + ({self.group(part)}) * {ROWS} + own_row()", f"{column} + own_column()",
                 rows, columns, *(stack.name for stack in stacks)]
        return ", ".join(given)

    # -- shares of a tile's rounds: the first kernel leaves what each makes of zeros, the second one goes on from there -----

    def share_of(self, c: Carried) -> list[tuple[str, int]]:
        """The accumulators of a cell, and where they begin among all of a tile's."""
        cells = self.of.rounds.carried
        count = sum(len(self.held[d.inside].names) * self.columns(d.inside) // 2 for d in cells[:cells.index(c)])
        return [(name, count + n * self.columns(c.inside) // 2) for n, name in enumerate(self.held[c.inside].names)]

    @property
    def shares(self) -> dict[str, tuple[int, ...]]:
        """Arrays between the kernels: their names, and their shapes but for how many tiles there are."""
        of, splits = self.of, self.mapping.splits - 1
        count = sum(of.length(c.inside.dims[0], self.blocks) * self.columns(c.inside) // (128 * self.mapping.warpgroups)
                    for c in of.rounds.carried)
        return {SHARES: (splits, count, 128 * self.mapping.warpgroups), FACTORS: (splits, len(of.rounds.carried))}

    def leave(self, after: list[str]) -> list[tuple[str, str]]:
        """What a share's rounds make of zeros, and what they multiply by what is there before."""
        ends, thread = [], "thread_index() - 128"
        for n, c in enumerate(self.of.rounds.carried):
            factor, passed = self.factors[c], self.name("passed")
            if factor is not None:
                ends.append((passed, f"{passed} * {self.scalar(factor).names[0]}"))
            self.begins.append(f"{passed} = convert(F32, 1.0)")
            after += [f"each(leave_share, {name}, {SHARES}, which, share, {first}, {thread})"
                      for name, first in self.share_of(c)]
            after += ["if thread_index() == 128:", f"    {FACTORS}[which, share, {n}] = {passed}"]
        return ends

    def take_on(self) -> None:
        self.begins += ["before = zero", "while before < share:"]
        for n, c in enumerate(self.of.rounds.carried):
            self.begins += [f"    {name} = apply(take_share, {name}, {SHARES}, which, before, {first}, thread_index() - "
                            f"128, {FACTORS}[which, before, {n}])" for name, first in self.share_of(c)]
        self.begins.append("    before = rolled(before + 1)")
        self.read += [SHARES, FACTORS]

    def result(self, store: StoreStatement) -> str:
        name, kind = store.parameter.name, self.outs[store.parameter.name]
        if kind.kind != "TmaOut":
            return f"out_{name} = DirectOut({kind.dtype.name!r}, pairs={kind.pairs})"
        panels = Panels(kind.dtype, kind.columns)
        offset = self.memory.take(panels.count * panels.line * 2 * self.length, PATTERN)
        return (f"out_{name} = TmaOut({kind.dtype.name!r}, block_m={self.length}, columns={kind.columns}, o_offset="
                f"{offset}, stacks={len(store.parameter._shape) - 2})")

    def ring(self) -> int:
        """Lay the stages; how many."""
        widths = {name: self.bytes_of(np.dtype(parameter.dtype), self.length, self.columns_of(name))
                  for name, (parameter, _) in self.loads.items()}
        if not widths:
            raise self.refusal("no block of an array is taken", self.of.rounds.line)
        self.nbytes, used = sum(widths.values()), -(-self.memory.nbytes // PATTERN) * PATTERN + 512
        most = [(room - used) // self.nbytes for room in (self.half, self.room)]
        asked = self.mapping.stages if isinstance(self.mapping.stages, int) else 0
        self.resident = 2 if self.mapping.warpgroups == 1 and max(2, asked) <= most[0] else 1
        stages = asked or min(4, most[2 - self.resident])
        if stages > most[1] or not stages:
            raise ConfigError(f"{stages or 1} stages of {self.nbytes} bytes, and {self.memory.nbytes} bytes of computed "
                              "values and results, do not fit in shared memory; use shorter blocks")
        first, offsets = self.memory.take(stages * self.nbytes, PATTERN), dict[str, int]()
        for name, nbytes in widths.items():
            offsets[name], first = first, first + nbytes
        self.constants = [line.format(**offsets, stage=self.nbytes) if " = StagedTile(" in line else line
                          for line in self.constants]
        barriers = self.memory.take(Pipeline(stages, 0, 1, 1).nbytes)
        self.constants.append(f"ring = Pipeline(stages={stages}, offset={barriers}, full_arrivals=1, "
                              f"empty_arrivals={4 * self.mapping.warpgroups}, readers=WARPS)")
        return stages

    def columns_of(self, tile: str) -> int:
        parameter, key = self.loads[tile]
        return in_steps(parameter._shape[-1]) if key[-1] is self.of.t else self.blocks[key[-1].name]

    def text(self, title: str, body: list[str], ends: list[tuple[str, str]], after: list[str], outs: list[str]) -> Printed:
        of, t, length = self.of, self.of.t.name, self.length
        names, maps = tuple(x.name for x in of.indices), [f"map_{name.removesuffix('_tile')}" for name in self.loads]
        stored = [name for name in outs if name not in self.shares]
        loads = []
        for (name, (_, key)), tensor_map in zip(self.loads.items(), maps):
            at = [key[-1].name if key[-1] is not of.t else "0", t, *(x.text() for x in reversed(key) if x.stack)]
            loads.append(f"{name}.load({tensor_map}, ({', '.join(at)}), ring, at)")
        first, coming = ("first" if self.mapping.splits > 1 else "zero"), f"{t} + {length}"
        begun, next_ones = ([f"{name} = {made.format(at)}" for name, made in self.fetched] for at in (first, coming))
        rounds = [f"room = sizes.{t} - {t}", *self.begin, *next_ones,
                  "ring.wait(at)", *body, "ring.release(at.stage)", "at = ring.advance(at)",
                  *([f"{', '.join(x for x, _ in ends)} = {', '.join(x for _, x in ends)}"] if ends else []),
                  f"{t} = rolled({coming})"]
        registers = {(1, 1): "0, 0", (1, 2): "24, 232", (2, 1): "24, 240"}[self.mapping.warpgroups, self.resident]
        callees = Callees.of(self.callees.values())
        deep = [*self.before, *self.begins, *begun, f"{t} = {first}"]
        made = TEXT.format(
            title=title, imports="\n".join(f"from {module} import {names}" for module, names in IMPORTS),
            warpgroups=self.mapping.warpgroups, registers=registers, resident=self.resident, nbytes=self.memory.nbytes,
            constants="\n".join(self.constants), fields=lines_of(1, [f"{x}: Scalar" for x in (*names, *self.numbers)]),
            takes=", ".join(["sizes", *maps, *outs, *self.read, *callees.names]), maps=", ".join(["sizes", *maps]),
            rest=", ".join(["sizes", *outs, *self.read, *callees.names]), place="\n".join(self.place()), placed=self.placed,
            t=t, end="end" if self.mapping.splits > 1 else f"sizes.{t}", stage=self.nbytes, loads=lines_of(3, loads),
            length=length, first=first,
            deep=lines_of(2, deep), rounds=lines_of(3, rounds), after=lines_of(2, after),
            finish=lines_of(1, [f"out_{name}.finish()" for name in stored] or ["pass"]),
            functions="".join(f"\n\n{function}\n" for function in self.functions))
        blocks = tuple((name.removesuffix("_tile"), parameter.name) for name, (parameter, _) in self.loads.items())
        return Printed(made, blocks, tuple(outs), tuple(self.read), names, names[:-1], tuple(self.numbers),
                       128 * (1 + self.mapping.warpgroups), callees=callees)

    @property
    def placed(self) -> str:
        more = ["first", "end", "share", "which"] if self.mapping.splits > 1 else []
        return f"({''.join(f'{name}, ' for name in [*(x.name for x in self.of.indices[:-1]), *more])})"

    def place(self) -> list[str]:
        """Of tiles: those of a matrix come first, then the shares of their rounds, then the stacks."""
        stacks, n, t, splits = self.of.stacks, self.of.n, self.of.t.name, self.mapping.splits
        shares = splits - 1 if self.is_first else splits
        count = " * ".join(f"sizes.{x.name}" for x in stacks) or "1"
        blocks = "1" if n is None else f"blocks(sizes.{n.name}, {self.blocks[n.name]})"
        lines = ["def tiles(sizes):", f"    return {count} * {blocks}{f' * {shares}' * (splits > 1)}", "", "",
                 "def place(tile, sizes):", f"    rest = udiv(tile, {blocks})", f"    block = tile - rest * {blocks}"]
        if splits > 1:
            span = f"blocks(blocks(sizes.{t}, {self.length}), {splits}) * {self.length}"
            lines += [f"    share = rest - udiv(rest, {shares}) * {shares}", f"    rest = udiv(rest, {shares})",
                      f"    first = share * ({span})", f"    end = min(first + {span}, sizes.{t})"]
        found = [*parts_of_stacks(stacks, "rest"), *([] if n is None else [f"block * {self.blocks[n.name]}"]),
                 *(["first", "end", "share", f"rest * {blocks} + block"] if splits > 1 else [])]
        return [*lines, f"    return ({''.join(f'{x}, ' for x in found)})"]


def lines_of(depth: int, lines: list[str]) -> str:
    return "\n".join("    " * depth + line for line in lines)


TEXT = '''"""{title}"""

import math
{imports}

WARPGROUPS = Warpgroups(1, {warpgroups}, {registers})
RESIDENT = {resident}          # blocks of a multiprocessor
SHARED_BYTES = {nbytes}
{constants}


@dataclass(frozen=True)
class Sizes(Component):
{fields}


def kernel({takes}):
    group = uniform(udiv(thread_index(), 128))
    if thread_index() == 0:
        ring.initialise()
        mbarrier_fence_init()
    barrier()
    grid_launch_dependents()
    grid_wait()
    if group == 0:
        WARPGROUPS.release_registers()
        if thread_index() == 0:
            produce({maps})
    else:
        WARPGROUPS.claim_registers()
        consume({rest}, group - 1)


{place}


def produce({maps}):
    """1. Blocks of the operands: global -> shared."""
    zero = thread_index() * 0
    at = Slot(zero, zero + 1)          # fresh rings are empty
    tile = block_x()
    while tile < tiles(sizes):
        {placed} = place(tile, sizes)
        {t} = {first}
        while {t} < {end}:
            ring.acquire(at)
            ring.expect(at, {stage})
{loads}
            at = ring.advance(at)
            {t} = rolled({t} + {length})
        tile = rolled(tile + grid_x())


def consume({rest}, group):
    """2. Products, and what becomes of them in the registers. 3. Rows of results to global memory."""
    zero = thread_index() * 0
    at, at_place = Slot(zero, zero), Slot(zero, zero)
    tile = block_x()
    while tile < tiles(sizes):
        {placed} = place(tile, sizes)
{deep}
        while {t} < {end}:
{rounds}
{after}
        tile = rolled(tile + grid_x())
{finish}
{functions}'''
