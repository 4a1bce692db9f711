"""What `gemmkit.tuning.problems.choose` may take for a product or a group, and the configuration that becomes of it.

Swap-AB is taken where it is faster, else the first table that has the product, else the operator for the dtypes in default
tiles. `complete` gives a configuration the fields that are not given.

**Swap-AB.** Hopper's kernel computes some products as their transpose, D^T = B^T A^T: B is then the first operand. The
kernel's two operands are not alike. The first has 64 rows a wgmma, and may come from registers, where threads transform it,
or pick its elements in any order. The second lies in shared memory, where producer warps have to rewrite it: it is read and
written once more there, which is what limits such products.

| product | computed as it is | with swap-AB |
|---|---|---|
| of a few rows | most rows of a tile are padding | B's columns are the rows of tiles |
| float32 as tf32, A and B contiguous along rows (nn) | B is transposed in place | B comes through registers as it lies |
| 16-bit, with a transform of B alone | B is rewritten in place | B is transformed in registers |

With A contiguous along its columns (tt) it is the operand that has to be transposed, and comes through registers as it is.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gemmkit.emulator import takes_small_mappings
from gemmkit.epilogues import Default, Epilogue, result_layout
from gemmkit.kernels.collectives.scheduler import Grouped, Hilbert, at_once
from gemmkit.kernels.collectives.split_k import StreamK
from gemmkit.kernels.config import (
    ChosenFields,
    Config,
    check_fields,
    check_stream_k,
    device_given,
    names_keywords,
    products_given,
    sizes_given,
    with_swap_ab,
)
from gemmkit.kernels.spec import FAMILIES, can_be_asked, rule
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.fingerprint import when_forgetting
from gemmkit.layouts import ArrayLayout, ColMajor, GlobalLayout, GroupQuantised, Plain, RowMajor, Zero
from gemmkit.layouts.quantised import QuantisedTranspose
from gemmkit.operators import FPUOp, MMAOp, Operator, Semiring, WGMMAOp, WMMAOp
from gemmkit.operators.base import units
from gemmkit.runtime.arrays import ArrayInfo, flipped, whole
from gemmkit.runtime.device import DeviceInfo
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.tiling import Tile
from gemmkit.transforms import Map
from gemmkit.tuning import candidates, simt, sm80, sm90, tables
from gemmkit.tuning.candidates import Candidate, Narrow, small_candidates
from gemmkit.tuning.model import CLOCK, LINE, VECTORS, Asked, Infos, Layouts, RowAlignment
from gemmkit.tuning.operators import (
    EIGHT,
    LARGE,
    SIXTEEN,
    AccumulatorRule,
    algebra_of,
    new_layout,
    of_bytes,
    operator_for,
    result_dtype,
    sized,
)
from gemmkit.tuning.problems import Choice, MappingProblem, choose

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["MAPPINGS", "OZAKI", "Asked", "ProductProblem", "batch_invariant", "by_precision", "get_config", "moduli_of"]

F32 = np.dtype(np.float32)


@dataclasses.dataclass(frozen=True)
class ProductProblem(Asked, MappingProblem):
    """A product or a group, as `choose` asks for its mapping. Mappings are what is asked with more of its fields said, or
    a `Candidate`: a tuned one, or one that is tried."""

    read = staticmethod(Candidate.of_plain)

    def candidates(self, device: DeviceInfo) -> Iterator[Asked | Candidate]:
        if self.group is not None:
            yield from _of_group(self, device)
        elif not _is_of_bytes(self) or isinstance(self.layouts["b"], GroupQuantised):
            yield _swap_ab(self, device) or self
            yield from _of_blocks(self, device)
        else:                                          # on tensor cores, or on the ordinary units
            with suppress(ConfigError):
                narrow = candidates.narrow(self, device)
                if narrow is not None:
                    swapped = _narrow_swap_ab(self, narrow, device)
                    if swapped is not None:
                        yield swapped
                    yield dataclasses.replace(self, fields={**narrow.fields, **self.fields})
                    yield _with_operator(self, narrow.operator)
            for operator in of_bytes(self.sums, self.sizes, device, self.products):
                yield _with_operator(self, operator)

    def specialise(self, mapping: Asked | Candidate, device: DeviceInfo) -> Choice:
        if isinstance(mapping, Asked):
            config, by = _configured(mapping, device)
            if mapping.new is ColMajor:                # of D^T
                return Choice(config, "swap_ab", True)
            return Choice(config, "units" if by == "operator" and _is_of_bytes(self) else by)
        if _is_of_bytes(self):                         # what keeps their sums is decided for all mappings
            return choose(dataclasses.replace(self, key=None), device)
        return Choice(*_configured(self, device, mapping))

    def refusal(self, refused: list[ConfigError], last: Any) -> ConfigError:
        """Of tiles for a mask the first reason, which has the usual tiles."""
        return refused[0 if "condition" in self.fields else -1]

    def settled(self, choice: Choice, device: DeviceInfo) -> Choice:
        """In the emulator tiles are small, unless the kernel's way rests on them."""
        if not takes_small_mappings() or choice.by in ("boxes", "quantised", "swap_ab") or _is_of_bytes(self):
            return choice
        return choose(SmallTiles(self, choice), device)


def _is_of_bytes(asked: Asked) -> bool:
    return asked.fields.get("operator") is None and asked.sums.is_of_bytes


def _of_blocks(asked: Asked, device: DeviceInfo) -> Iterator[Candidate]:
    """Mappings whose tiles divide the blocks of a mask, for a product whose usual tiles do not: those of the tables, then
    the smallest of the single-stage kernel."""
    condition, (a, b), infos = asked.fields.get("condition"), asked.operands, asked.infos
    if condition is None or condition.is_always or set(asked.fields) & sm90.MAPPING_FIELDS:
        return
    given = asked.fields.get("operator")
    operator = operator_for(a.dtype, b.dtype, asked.sizes, device) if given is None else given
    lanes = tables.LANES[16, 16] if type(operator) is FPUOp else None
    listed = candidates.candidates(a, b, given, asked.sizes, device, asked.products, (infos["a"], infos["b"]))
    listed += [Candidate("singlestage", (*tile, size), (16, 16), lanes)
               for size, other in itertools.product((32, 16), (64, 32)) for tile in ((size, other), (other, size))]
    yield from (one for one in listed if can_be_asked(condition, Tile(M=one.block[0], N=one.block[1], K=one.block[2])))


def _with_operator(asked: Asked, operator: Operator) -> Asked:
    return dataclasses.replace(asked, fields={**asked.fields, "operator": operator})


class SmallTiles(MappingProblem):
    """A product in tiles that are quickly emulated: the kernel of its choice and its operator's arithmetic stay. The last
    mapping, None, is the choice itself: for what the caller names of a mapping, and kernels that take no such tiles."""

    def __init__(self, asked: Asked, choice: Choice):
        self.asked, self.choice = asked, choice

    def candidates(self, device: DeviceInfo) -> list[Candidate | None]:
        return [*small_candidates(self.asked, self.choice.spec), None]

    def specialise(self, mapping: Candidate | None, device: DeviceInfo) -> Choice:
        if mapping is None:
            return self.choice
        made, operator = _configured(self.asked, device, mapping)[0], self.choice.spec.operator
        if type(made.operator) is not type(operator) or any(
                getattr(made.operator, f"fragment_{x}").dtype != getattr(operator, f"fragment_{x}").dtype for x in "abc"):
            raise ConfigError(f"{made.operator!r} computes otherwise than {operator!r}")
        return Choice(made, self.choice.by)


def _configured(asked: Asked, device: DeviceInfo, candidate: Candidate | None = None) -> tuple[Config, str]:
    """The configuration, and what chose its mapping."""
    layouts, sizes, products = asked.layouts, asked.sizes, asked.products
    (a, b), c = asked.operands, layouts["c"]
    fields = dict(asked.fields)
    operator = fields.get("operator")
    observes = fields.get("observe_a") is not None
    if observes:
        fields.setdefault("splits", 1)
    by = "units" if operator is None else "operator"
    sums = asked.sums
    if operator is None and sums.widens:               # the tables are of products whose operands alone decide
        operator = fields["operator"] = operator_for(a.dtype, b.dtype, sizes, device, products, sums)
    given = dataclasses.replace(asked, fields=dict(fields))
    for name, propose in _families(asked, candidate):
        found = propose(given, device)
        if found is not None:
            by, (operator, completed) = name, found
            fields = {**completed, **fields}
            break
    else:
        if observes:
            fields.setdefault("kernel", "singlestage")
    if operator is None and algebra_of(a.dtype) is not None and a.dtype == b.dtype:
        operator = algebra_of(a.dtype)
    fields["operator"] = operator
    sm90.give_algebra(fields, a, b, sizes, device, products)
    operator = fields.pop("operator")
    if operator is None:
        operator = operator_for(a.dtype, b.dtype, sizes, device, products, sums)
    operator = sized(operator, a.dtype, b.dtype, sizes, device, products, sums)
    fields["global_a_layout"], fields["global_b_layout"] = a, b
    fields["global_c_layout"] = c if c is not None else Zero(operator.fragment_c.dtype)
    if layouts["d"] is not None:
        fields["global_d_layout"] = layouts["d"]
    elif "global_d_layout" not in fields:
        own = getattr(fields.get("epilogue"), "result_dtype", None)
        fields["global_d_layout"] = new_layout(a, b, result_dtype(a.dtype, b.dtype, c, operator, own), asked.new)
    return complete({"operator": operator, **fields}, sizes, device, products), by


def _families(asked: Asked, candidate: Candidate | None) -> Sequence[tuple[str, Callable[..., Any]]]:
    """Who is asked for a mapping, by name, in this order: each gives an operator and fields, or None. A ``candidate`` that
    is being tried stands for all."""
    if candidate is not None:
        return [("candidate", candidate.proposal)]
    return OBSERVING if asked.fields.get("observe_a") is not None else PROPOSALS


PROPOSALS = (("winners", candidates.propose), ("boxes", sm80.propose_boxes),
             ("quantised", candidates.propose_quantised), ("multistage", sm80.propose),
             ("gathered", candidates.propose_gathered), ("hopper", sm90.propose))
OBSERVING = PROPOSALS[-1:]


#: Words of ``precision=`` that compute products by int8 ones (`gemmkit.plans.ozaki`), and how many moduli they take; None
#: is as many as are about as exact as the operands' dtype. "auto" does so where it is faster.
OZAKI = {"auto": None, "ozaki": None, **{f"ozaki{count}": count for count in range(7, 17)}}
USUAL = {np.dtype(name): count for name, count in (("float32", 7), ("float64", 14), ("complex64", 7), ("complex128", 15))}


def moduli_of(precision: object, a: np.dtype) -> int:
    """How many moduli a product takes whose first operand has this dtype; 0: it is not one of `OZAKI`'s words, or "auto" of
    numbers that have nothing to choose."""
    if not isinstance(precision, str) or precision not in OZAKI:
        return 0
    return OZAKI[precision] or USUAL.get(a, 0 if precision == "auto" else 14)


def by_precision(precision: Any, asked: Asked, device: DeviceInfo) -> Operator:
    """The operator of a product for which ``precision=`` is given. Raises ValueError and ConfigError where there is none."""
    a, b = (layout.dtype for layout in asked.operands)
    of = {"tf32": ((F32,), "float32"), "fast": (EIGHT, "float8")}
    if not isinstance(precision, str) or precision not in of:
        raise ValueError(f"precision={precision!r}: 'tf32' (of float32 operands), 'fast' (of float8 ones) or, for products "
                         "and stacks, 'ozaki' or 'auto' (of ones of 32 and 64 bits) is needed")
    if not {a, b} <= {*of[precision][0]}:
        raise ValueError(f"precision={precision!r}: {of[precision][1]} operands are needed; a is {a}, b {b}")
    if asked.sums.accumulator != F32:
        raise ConfigError(f"precision={precision!r}: accumulators are float32, but the result holds more; leave it out")
    narrow = candidates.narrow(asked, device, promote=False)
    if narrow is None or (a == F32 and not takes_small_mappings() and _suits_mma(asked, device, narrow.nanoseconds)):
        return MMAOp(dtype=a, b_dtype=b)
    return narrow.operator


def _suits_mma(asked: Asked, device: DeviceInfo, nanoseconds: float) -> bool:
    """Whether mma.sync multiplies float32 as tf32 in less time than Hopper's kernel takes by its model: TMA does not take
    rows that begin elsewhere than at multiples of 16 bytes, which threads copy, and small tiles share a long K."""
    return sm80.propose_tf32(asked, device, nanoseconds if _is_by_tma(asked) else math.inf) is not None


def _is_by_tma(asked: Asked) -> bool:
    """Whether TMA takes both operands."""
    return all(isinstance(layout, Plain) and (of := asked.infos[name]) is not None and why_not(of, layout.axis) is None
               for name, layout in zip("ab", asked.operands))


# -- one order of sums for all numbers of rows ------------------------------------------------------------------------
#
# ``mapping="batch_invariant"``: a row of D has the same bits whatever other rows there are, and however many.
#
# The bits of an element follow from the order in which its products are added up. The instruction that multiplies decides
# it, and the shares of K, and neither may depend on M. Which rows and columns are in one tile decides nothing: every tile
# walks along K from its beginning to its end, and adds one k-step of the instruction after the other.
#
# So the product of `DECIDING` rows decides: its `SumOrder`, with all of K in one share, is that of all. The default mapping
# for the actual M is taken if it has that order, else one that is chosen with one share, else the mapping of `DECIDING`
# rows. Tuned mappings are not asked for.
#
# Hopper's kernel computes a few rows of 16-bit floats as D^T = B^T A^T. wgmma adds the same products in the same order,
# whichever factor comes first and however many columns an instruction has: tests/tuning/test_invariant.py compares bits on a
# GPU.

MAPPINGS = "batch_invariant",          # words of ``mapping=``
DECIDING = 256                         # rows
INVARIANT = *SIXTEEN, F32, np.dtype(np.float64)


class SumOrder(NamedTuple):
    """What decides the bits of an element: the kernel, its instruction, how much of K that takes at a time, the dtypes of
    operands and sums, and the shares of K."""

    kernel: str
    operator: type[Operator]
    depth: int
    dtypes: tuple[np.dtype, ...]
    splits: int | StreamK

    @classmethod
    def of(cls, choice: Choice) -> SumOrder:
        operator = units(choice.spec.operator)
        dtypes = tuple(getattr(operator, f"fragment_{x}").dtype for x in "abc")
        return cls(str(choice.spec.kernel), type(operator), operator.shape[2], dtypes, choice.spec.splits)


def batch_invariant(asked: ProductProblem, precision: str | None, device: DeviceInfo) -> Choice:
    """The choice for a product whose order of sums is that of `DECIDING` rows. ``precision`` is the caller's."""
    _check_invariant(asked)
    if takes_small_mappings():                         # tiles of the emulator's fit M, and NumPy adds as tiles are
        asked = _of_deciding_rows(asked)
    usual = next(choice for choice in _by_shares(_of_deciding_rows(asked), precision, device) if choice.spec.splits == 1)
    wanted = SumOrder.of(usual)
    if asked.sizes[0] != DECIDING:
        for choice in _by_shares(asked, precision, device):
            if SumOrder.of(choice) == wanted:
                return choice
    return usual


def _check_invariant(asked: Asked) -> None:
    """Raise ConfigError for what has no such mapping."""
    (a, b), given = asked.operands, asked.fields
    said = "mapping='batch_invariant': "
    if not (isinstance(a, Plain) and a.is_plain and isinstance(b, Plain) and b.is_plain and a.dtype == b.dtype in INVARIANT):
        raise ConfigError(f"{said}plain matrices of one dtype are needed, float16, bfloat16, float32 or float64; a is {a!r} "
                          f"and b {b!r}")
    if a.axis != 1 and asked.sizes[0] > 1:
        raise ConfigError(f"{said}a is {a!r}; rows whose elements are neighbours in memory are needed, since a single row "
                          "has no other order")
    if asked.sums.widens:
        raise ConfigError(f"{said}the result holds more than products of {a.dtype}; give out, c and dtype of the operands'")
    epilogue = given.get("epilogue", Default())
    if not isinstance(epilogue, Epilogue) or epilogue.finishes_blocks or epilogue.stores_itself or epilogue.reduces:
        raise ConfigError(f"{said}epilogue={epilogue!r} sees more than an element, and adds up along rows in an order that "
                          "tiles decide; compute it by a function of rows behind the product")
    for name in set(given) - {"epilogue", "operator", "global_d_layout"}:
        raise ConfigError(f"{said}{name}={given[name]!r} is given beside it; leave one out")


def _of_deciding_rows(asked: ProductProblem) -> ProductProblem:
    """The product of `DECIDING` rows with the same B: its other matrices are rows without gaps."""
    _, N, K = asked.sizes

    def matrix(info: ArrayInfo | None, columns: int) -> ArrayInfo | None:
        return info and info._replace(pointer=0, shape=(DECIDING, columns), strides=(columns, 1), steps=())

    infos = {**asked.infos, "a": matrix(asked.infos["a"], K), "c": matrix(asked.infos["c"], N), "out": None}
    return dataclasses.replace(asked, sizes=(DECIDING, N, K), products=1, is_stack=False, key=None, infos=infos)


def _by_shares(asked: Asked, precision: str | None, device: DeviceInfo) -> Iterator[Choice]:
    """Mappings, the preferred ones first: each as it is by default, and with one share of K."""
    if precision is not None:
        asked = _with_operator(asked, by_precision(precision, asked, device))
    # What comes through registers is rounded to tf32, and what comes from shared memory is cut off: float32 stays as it is.
    swapped = _swap_ab(asked, device) if asked.operands[0].dtype in SIXTEEN else None
    for tried in (asked,) if swapped is None else (swapped, asked):
        for splits in {}, {"splits": 1}:
            of = dataclasses.replace(tried, fields={**tried.fields, **splits}, key=None)
            made = _configured(of, device)
            if takes_small_mappings() and of.new is not ColMajor:
                others = {name: value for name, value in of.fields.items() if name != "splits"}
                made = choose(SmallTiles(dataclasses.replace(of, fields=others), Choice(*made)), device).spec, made[1]
            yield Choice(made[0], MAPPINGS[0], of.new is ColMajor)


# -- operands that are copied first ------------------------------------------------------------------------------------
#
# TMA takes rows that begin at multiples of 16 bytes. Others are copied by threads, element by element or a word at a time,
# which takes them longer than the tensor cores, and each tile copies them again. A product that is long beside an operand
# first copies it into a workspace, whose rows begin at such multiples, and TMA brings it from there.

ROWS_BEGIN = 16                        # at multiples of so many bytes for TMA; of `LINE` where that adds an eighth at most
COPIED, BEGUN = 2300, 4000             # bytes a copy reads and writes in a ns, and ns that it takes to begin and to end
STORED = 2150, 1150                    # bytes of D a ns: where TMA stores its rows, and where threads do
WORTH_COPYING, SAVED = 0.85, 5000      # of the modelled time as it is that the other way takes at most, and ns that it saves
MOST_MOVED = 2**32                     # bytes that a copy reads and writes at most: its places have 31 bits


def in_lines(asked: ProductProblem, device: DeviceInfo, precision: object = None) -> ProductProblem | None:
    """The product behind copies of operands, which have other strides there: of 16-bit floats, or of float32 as tf32, whose
    operands are contiguous along K then. None for a product that is computed as it is: with components but an epilogue, or
    where copies cost more than they save."""
    (a, b), infos, sizes, products = asked.operands, asked.infos, asked.sizes, asked.products
    of_a, of_b = infos["a"], infos["b"]
    if device.arch != (9, 0) or asked.group is not None or 0 in (*sizes, products) or not set(asked.fields) <= {"epilogue"}:
        return None
    is_tf32 = precision == "tf32" and a.dtype == F32
    if not (isinstance(a, Plain) and isinstance(b, Plain) and a.is_plain and b.is_plain and a.dtype == b.dtype):
        return None
    if not (is_tf32 or (precision is None and a.dtype in SIXTEEN)) or asked.sums.widens or of_a is None or of_b is None:
        return None
    axes = {"a": 1, "b": 0} if is_tf32 else {"a": a.axis, "b": b.axis}
    copied = {name: _lines(of, axes[name]) for name, of, layout in (("a", of_a, a), ("b", of_b, b))
              if layout.axis != axes[name] or why_not(of, layout.axis) is not None}
    if not copied or any(of is None for of in copied.values()) or of_a.dtype != a.dtype or of_b.dtype != b.dtype:
        return None
    moved = [2 * math.prod(whole(of).shape) * of.dtype.itemsize for of in copied.values() if of is not None]
    copying = sum(nbytes / COPIED + BEGUN for nbytes in moved)
    as_it_is = _nanoseconds(asked, device)
    most = min(WORTH_COPYING * as_it_is, as_it_is - SAVED)
    if copying > most or max(moved) >= MOST_MOVED:
        return None
    layouts = {name: (RowMajor, ColMajor)[1 - axes[name]](a.dtype) for name in copied}
    changed = dataclasses.replace(asked, infos={**infos, **copied}, layouts={**asked.layouts, **layouts})
    rows_of_d = RowAlignment.of(a, b, of_a, of_b, infos["out"], sizes[1]).of_d
    storing = products * sizes[0] * sizes[1] * a.dtype.itemsize / STORED[rows_of_d != VECTORS]
    return changed if copying + max(storing, _nanoseconds(changed, device)) <= most else None


def _nanoseconds(asked: ProductProblem, device: DeviceInfo) -> float:
    """The modelled time of a product of 16-bit floats, or of float32 as tf32, by the faster of two kernels."""
    (a, b), infos, sizes, products = asked.operands, asked.infos, asked.sizes, asked.products
    if a.dtype == F32:
        narrow, other = candidates.narrow(asked, device, promote=False), sm80.fastest_tf32(asked, device)
        by_hoppers = narrow.nanoseconds if narrow is not None and _is_by_tma(asked) else math.inf
        return by_hoppers if other is None else min(by_hoppers, other[2])
    if _is_by_tma(asked):
        mapping = sm90.mapping_for(asked, device)
        return math.inf if mapping is None else mapping.cycles(sizes, device, a.dtype.itemsize, None, products) / CLOCK
    kinds = RowAlignment.of(a, b, infos["a"], infos["b"], infos["out"], sizes[1])               # type: ignore[arg-type]
    by_hoppers = candidates.nanoseconds_of_hoppers(kinds, asked, device, candidates.MOST_SHARED)
    found = sm80.fastest(sm80.copied(kinds), a, b, sizes, device, products, may_stream=True)
    return by_hoppers if found is None else min(by_hoppers, found[0].launch(sizes, products, 0, device.sm_count, found[1]))


def _lines(info: ArrayInfo, axis: int) -> ArrayInfo | None:
    """A matrix, or a stack, in a workspace where its rows begin as TMA wants them; None for one that has elements twice."""
    if any(stride < 0 or (stride == 0 and extent > 1) for extent, stride in zip(info.shape, info.strides)):
        return None
    extent, size = info.shape[axis], info.dtype.itemsize
    width = -(-extent * size // LINE) * LINE
    if 8 * width > 9 * extent * size:
        width = -(-extent * size // ROWS_BEGIN) * ROWS_BEGIN
    width //= size
    steps, at = list[tuple[int, int]](), width * info.shape[1 - axis]
    for count, stride in reversed(info.steps):
        steps.append((count, at if stride else 0))
        at *= count if stride else 1
    return info._replace(pointer=0, strides=(width, 1) if axis == 1 else (1, width), steps=tuple(reversed(steps)))


# -- groups -----------------------------------------------------------------------------------------------------------

def _of_group(asked: Asked, device: DeviceInfo) -> Iterator[Asked]:
    """What is asked for a group, with a kernel that computes groups, the operator for its largest product, and tiles of
    tensor cores: the larger ones where there are enough to fill the device."""
    a, b = asked.infos["a"], asked.infos["b"]
    assert asked.group is not None and a is not None and b is not None
    sums = AccumulatorRule.of(asked.layouts, asked.fields, max(of[0].shape[1] for of in asked.group))
    operator = asked.fields.get("operator") or (algebra_of(a.dtype) if a.dtype == b.dtype else None)
    operator = operator or operator_for(a.dtype, b.dtype, asked.sizes, device, asked.products, sums)
    check_fields({"operator": operator})
    for mapping in _tiles_of_group(operator, asked.group, device):
        yield dataclasses.replace(asked, fields={**mapping, **asked.fields, "operator": operator})


def _tiles_of_group(operator: Operator, infos: Sequence[Any], device: DeviceInfo) -> Iterator[dict[str, Any]]:
    if device.arch < FAMILIES["multistage"].minimum_arch:
        yield {"kernel": "singlestage", "splits": 1}
        return
    fields: dict[str, Any] = {"kernel": "multistage", "splits": 1}
    if not (isinstance(operator, MMAOp) and operator.fragment_a.dtype is not None):
        yield fields
        return
    itemsize, sums = operator.fragment_a.dtype.itemsize, operator.fragment_c.dtype.itemsize
    depth, stages = max(128 // itemsize, operator.shape[2]), sm80.stages_on(device)
    large = sum(-(-a.shape[0] // 128) * -(-b.shape[1] // 128) for a, b, _, _ in infos) >= device.sm_count
    if large and sm80.shared_bytes((128, 128, depth), stages, itemsize, sums) <= device.shared_memory_per_block:
        yield fields | {"block_shape": Tile(M=128, N=128, K=depth)}
    yield fields | {"block_shape": Tile(M=64, N=64, K=depth)}


# -- swap-AB ----------------------------------------------------------------------------------------------------------

OF_B = {"transform_global_to_shared_b", "transform_shared_to_regs_b"}
MOST_ROWS = 64                         # of so many, where blocks that share K fill the multiprocessors; else of
FEW_ROWS, PADDED_ROWS = 32, 48         # the first, whose blocks share K anyway, or of up to the second, which share none
LEAST = 1024                           # columns, and elements along K
LEAST_ROWS = MOST_ROWS + 1             # of A, where B is transformed: of fewer nothing is measured
SWAP_WORTH = 0.97                      # of the product's modelled time as it is, where both have the same tables


def _swap_ab(asked: Asked, device: DeviceInfo) -> Asked | None:
    """The transposed product with its mapping's fields; None where it is not the one to compute.

    The caller's components see coordinates of A, B and D. An epilogue that finishes elements and transforms of B are asked
    with them (`gemmkit.plans.adapters`); with any other component a product is computed as it is.
    """
    given, layouts, infos = asked.fields, asked.layouts, asked.infos
    if device.arch[0] != 9 or asked.is_stack or not _sees_elements(given) or asked.sums.widens:
        return None
    mapping = candidates.propose_dequantised(asked, device) if isinstance(layouts["b"], GroupQuantised) else None
    if mapping is None:
        if not _suit_tma(infos, layouts):
            return None
        if set(given) <= {"epilogue"}:
            mapping = _of_few_rows(asked, device) or _of_few_columns(asked, device) or _of_some_rows(asked, device)
    if mapping is None and not _is_rewritten(asked):
        return None
    swapped = _flipped(asked)
    if mapping is None and "operator" not in given:
        without_results = {**swapped.layouts, "c": None, "d": None}
        operator, mapping = sm90.propose(dataclasses.replace(swapped, layouts=without_results), device) or (None, None)
        mapping = mapping and dict(mapping, operator=operator, kernel="warp_specialised")
    return dataclasses.replace(swapped, fields={**(mapping or {}), **swapped.fields})


def _flipped(asked: Asked) -> Asked:
    """What is asked of the transposed product."""
    (M, N, K), infos, layouts = asked.sizes, asked.infos, asked.layouts
    # The transposed arrays do not tell their layouts: the strides of one row, (1, 1) or (1, 9), are a row's in both orders.
    of = dict(zip("abcd", "bacd"))
    return Asked({name: flipped(infos[of.get(name, name)]) for name in infos},
                 {name: _transposed(layouts[of[name]]) for name in layouts}, (N, M, K),
                 {with_swap_ab(name): value for name, value in asked.fields.items()}, asked.products, asked.key,
                 new=ColMajor)


def _narrow_swap_ab(asked: Asked, narrow: Narrow, device: DeviceInfo) -> Asked | None:
    """The transposed product of float8, whose sums are promoted, with its mapping's fields, where its tiles fit the product
    better: those of a few rows are as wide as there are rows, and no part of them is padding."""
    d, given = asked.layouts["d"], asked.fields
    if not narrow.operator.promote or asked.is_stack or not set(given) <= {"epilogue"} or takes_small_mappings():
        return None
    if not _sees_elements(given) or asked.infos["c"] is not None or not _suit_tma(asked.infos, asked.layouts):
        return None
    if d is not None and d.vector_axis != 1:
        return None
    swapped = _flipped(asked)
    found = candidates.narrow(swapped, device)
    if found is None or found.nanoseconds > SWAP_WORTH * narrow.nanoseconds:
        return None
    return dataclasses.replace(swapped, fields={**found.fields, **swapped.fields})


def _transposed(layout: ArrayLayout | None) -> ArrayLayout | None:
    """The layout of the transpose of a plain matrix, or of packed weights."""
    if isinstance(layout, GroupQuantised):
        return QuantisedTranspose(layout)
    return (ColMajor, RowMajor)[1 - layout.axis](layout.dtype) if isinstance(layout, Plain) else None


def _sees_elements(given: dict[str, Any]) -> bool:
    """Whether the epilogue sees single elements: one that stores tiles in its own way, or sees more of a row, would have to
    be told of the other dimension."""
    epilogue = given.get("epilogue")
    return epilogue is None or (isinstance(epilogue, Epilogue) and not (epilogue.stores_itself or epilogue.finishes_blocks))


def _suit_tma(infos: Infos, layouts: Layouts) -> bool:
    """Whether all matrices are plain, and TMA takes A and B, of one dtype."""
    if any(layout is not None and not (isinstance(layout, Plain) and layout.is_plain) for layout in layouts.values()):
        return False
    dtypes = set()
    for name in "ab":
        info, layout = infos[name], layouts[name]
        assert info is not None and isinstance(layout, Plain)
        if why_not(info, layout.axis) is not None:
            return False
        dtypes |= {info.dtype, layout.dtype}
    return len(dtypes) == 1


def _is_rewritten(asked: Asked) -> bool:
    """Whether producer warps would rewrite B and leave A alone, and consumers of the transpose can do it on the way.

    C, and an array that an epilogue reads beside D, come ahead of time to a D that is contiguous along rows alone, and an
    epilogue that writes stores pairs of a row: with these a product is computed as it is.
    """
    given, layouts, sizes = asked.fields, asked.layouts, asked.sizes
    epilogue = given.get("epilogue", Default())
    if not set(given) <= {"epilogue", "operator", *OF_B}:
        return False
    if 0 in sizes or asked.infos["c"] is not None or epilogue.reads_tiles or epilogue.writes:
        return False
    transforms = [given[name] for name in OF_B & set(given) if not given[name].is_identity]
    if any(transform.with_batch for transform in transforms):
        return False
    a, b, operator = layouts["a"], layouts["b"], given.get("operator")
    assert isinstance(a, Plain) and isinstance(b, Plain)
    if a.dtype == F32:
        return (isinstance(operator, WGMMAOp) and operator.dtype == operator.b_dtype == F32 and a.axis == b.axis == 1)
    return a.dtype in SIXTEEN and operator is None and bool(transforms) and sizes[0] >= LEAST_ROWS


# Products of a few rows (decoding). All time goes to B, which is read once. A tile of wgmma's has 64 rows at least: of A
# most would be padding, and few tiles would be left to read B. So D^T = B^T A^T is computed: B's columns are the rows of
# tiles, 64 each, and A's rows their 16 columns or more. Blocks of a cluster share K until the multiprocessors are filled.
#
# Microseconds on an H200, f16, B contiguous along K (nt), and cuBLAS's (2026-11-22):
#
# | N x K | 1 row | 8 | 16 | 32 |
# |---|---|---|---|---|
# | 4096 x 4096 | 10.3, 12.3 | 10.4, 12.8 | 10.5, 12.6 | 10.7, 13.1 |
# | 4096 x 14336 | 30.2, 30.3 | 30.0, 33.4 | 30.0, 31.4 | 30.3, 31.9 |
# | 14336 x 4096 | 31.3, 29.7 | 31.1, 30.1 | 31.1, 30.0 | 31.2, 30.4 |
#
# As it is, the product of 1 to 32 rows took 11.5 to 62 us there. 33 to 64 rows have tiles as wide as they are. Where a block
# for each tile fills the multiprocessors, these share no K, and up to 48 rows gain: a tile of 64 rows would be padded, and
# TMA takes its time for lines beyond a matrix (36 x 6144 x 4096 nt: 17.1 us, 22.0 as it is; 48 x 28672 x 4096 60.9, 64.2;
# 48 x 11168 x 2368 nn 17.9, 19.8; 36 x 14336 x 4096 33.8, 33.6; but 64 x 14336 x 4096 34.4, 33.3). Lines of B that cross
# those of the L2 come twice, in stages of 128 of K: 48 x 8192 x 4104 nt 29.1, 25.8. (2026-11-30.)

ROWS, DEPTH = 64, 128                  # of a tile: B's columns, and along K
SLICE = 8                              # columns of D^T that a block of a cluster finishes, at least
RING = 170 * 1024                      # bytes of stages: what is on its way hides the latency of memory


def _of_few_rows(asked: Asked, device: DeviceInfo) -> dict[str, Any] | None:
    """The fields of the transposed product's mapping, of plain operands of one dtype that suit TMA; None for others."""
    M, N, K = asked.sizes
    a, d = asked.infos["a"], asked.layouts["d"]
    assert a is not None
    if a.dtype not in SIXTEEN or not 0 < M <= MOST_ROWS or N < LEAST or K < LEAST:
        return None
    if d is not None and d.vector_axis != 1:           # of rows of D^T a block would finish 16 columns or more
        return None
    tiles = -(-N // ROWS)
    splits = next((n for n in (8, 4, 2) if tiles * n <= device.sm_count), 2 if M <= FEW_ROWS else 1)
    of_a, of_b = asked.layouts["a"], asked.layouts["b"]
    assert isinstance(of_a, Plain) and isinstance(of_b, Plain)
    lies_along_k = of_a.axis == 1
    if splits == 1 and (M > PADDED_ROWS or not lies_along_k or (of_b.axis == 0 and sm90.is_unaligned(asked.infos["b"]))):
        return None
    piece = SLICE * max(splits, 2)                     # all blocks finish as many columns, and D's lines have 16
    columns = -(-M // piece) * piece
    if not lies_along_k:
        columns = 1 << (columns - 1).bit_length()      # one panel
    stage = (ROWS + columns) * DEPTH * a.dtype.itemsize
    return dict(kernel="warp_specialised", operator=WGMMAOp(columns, dtype=a.dtype), splits=splits, schedule="cooperative",
                block_shape=Tile(M=ROWS, N=columns, K=DEPTH), warps_per_block=4, stages=RING // stage)


# Products of a few columns and many rows: all time goes to A, and the more blocks ask for it the sooner it is there. As it
# is, a tile has 64 rows and all columns, and the last wave of them may be short; as D^T a tile is as wide as fits the
# multiprocessors, and blocks of a cluster share K. (H200, 2026-11-28: 9059 x 64 x 3824 nt 23.5 us by 57 tiles of 64x160 in
# two shares, 28.9 as it is; 4608 x 64 x 11200 tt 30.9 in four, 37.0.)

WIDE, LONG_K = 4096, 2048              # rows, and elements along K, at least
WIDTHS = 160, 192, 128, 96             # of tiles of D^T
MORE_BLOCKS = 1.2                      # times those of the product as it is


def _of_few_columns(asked: Asked, device: DeviceInfo) -> dict[str, Any] | None:
    """The fields of the transposed product's mapping, of plain operands of one dtype that suit TMA; None for others."""
    (M, N, K), a, d = asked.sizes, asked.infos["a"], asked.layouts["d"]
    assert a is not None
    if a.dtype not in SIXTEEN or not 0 < N <= ROWS or M < WIDE or K < LONG_K or asked.infos["c"] is not None:
        return None
    if d is not None and d.vector_axis != 1:
        return None
    ways = ((-(-M // width) * splits, width, splits) for width in WIDTHS for splits in (1, 2, 4)
            if -(-M // width) <= at_once(splits, device.sm_count))
    blocks, width, splits = max(ways, key=lambda way: way[0], default=(0, 0, 0))
    tiles = -(-M // ROWS)
    is_worth = blocks >= MORE_BLOCKS * tiles / -(-tiles // device.sm_count)
    if not is_worth or candidates.propose(asked, device) is not None:      # a winner stands above
        return None
    return dict(kernel="warp_specialised", operator=WGMMAOp(width, dtype=a.dtype), splits=splits, schedule="cooperative",
                block_shape=Tile(M=ROWS, N=width, K=LINE // a.dtype.itemsize), warps_per_block=4)


def _of_some_rows(asked: Asked, device: DeviceInfo) -> dict[str, Any] | None:
    """The fields of the transposed product's mapping, whose tiles are as wide as A has rows (`model.fitted_tiles`); None
    where it is not the faster."""
    a, d = asked.layouts["a"], asked.layouts["d"]
    if not tables.FEWEST <= asked.sizes[0] <= tables.WIDEST or (d is not None and d.vector_axis != 1):
        return None
    if not isinstance(a, Plain) or a.axis != 1 or any(map(sm90.is_unaligned, (asked.infos["a"], asked.infos["b"]))):
        return None
    swapped = _flipped(asked)
    own, other = (sm90.mapping_for(one, device) for one in (asked, dataclasses.replace(
        swapped, layouts={**swapped.layouts, "c": None, "d": None})))
    if own is None or other is None or candidates.propose(asked, device) is not None:      # a winner stands above
        return None
    if other.fetching(swapped.sizes, device) > SWAP_WORTH * own.fetching(asked.sizes, device):
        return None
    operator = WGMMAOp(other.N, dtype=asked.operands[0].dtype)
    return dict(other.fields, operator=operator, kernel="warp_specialised")


# -- what is not given of a configuration -----------------------------------------------------------------------------

def _itself(x: Any) -> Any:
    return x


AS_IT_IS = Map(_itself)


@names_keywords
def get_config(*, operator: Operator, global_a_layout: GlobalLayout, gemm_shape: Any = None,
               device: DeviceInfo | None = None, **fields: Unpack[ChosenFields]) -> Config:
    """Complete a configuration from an operator, A's layout and any other fields.

    Args:
        operator: what multiplies, such as ``operators.WGMMAOp()`` or ``operators.FPUOp()``.
        global_a_layout: how A lies in global memory, with its dtype: ``layouts.RowMajor("float16")``.
        gemm_shape: M, N and K as a dict, a Tile or a tuple of three; a dict may have ``batch``, the number of products of
            a stack. It helps to choose tiles and decides nothing else.
        device: the GPU to choose for, a `gemmkit.runtime.device.DeviceInfo`; None is the current one, or an H100.
        fields: any other field of `gemmkit.Config`. If a field is missing or None: B's layout is that of A, there is no C,
            D's layout is that of A in the accumulator's dtype, `gemmkit.tuning` chooses the block shape, warps and
            stages, and shared layouts have the order of the global ones, padded by 16 bytes.

    Returns:
        A `gemmkit.Config`, for ``conf=`` of every function that multiplies. ``repr(config)`` can be pasted into a program.

    Raises:
        ConfigError: no kernel can carry out the combination, or it does not fit the device; the message says why.
        TypeError: an unknown field, or a field of the wrong type.

    >>> from gemmkit import layouts, operators
    >>> row_major = layouts.RowMajor("float16")
    >>> config = get_config(operator=operators.MMAOp(), global_a_layout=row_major)
    >>> config.block_shape, config.warps_per_block
    (Tile(M=128, N=256, K=128), 8)
    """
    known = {field.name for field in Config.fields()}
    unknown = set(fields) - known
    if unknown:
        raise TypeError(f"get_config() got unknown fields {', '.join(sorted(unknown))}; the fields are "
                        + ", ".join(sorted(known)))
    values = {name: value for name, value in fields.items() if value is not None}
    values.update(operator=operator, global_a_layout=global_a_layout)
    check_fields(values)
    d: Any = values.get("global_d_layout")
    rule(d is None or d.dtype is not None, "global_d_layout", d, "a configuration says the type of D's elements: "
         "Discarded('float32')")
    return complete(values, sizes_given(gemm_shape), device_given(device), products_given(gemm_shape))


def complete(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, products: int = 1) -> Config:
    """The configuration of these fields, completed for ``products`` of these sizes, on a device.

    Raises ConfigError for a combination that no kernel can carry out, or that does not fit the device.
    """
    tiles = sm90.LIKELY.fields.keys() if type(values["operator"]) is WGMMAOp else TILES
    if values.keys() >= tiles and all(map(_is_constant, values.values())):
        return _of_tiles(frozenset(values.items()), device)
    return _complete(dict(values), sizes, device, products)


#: With these fields given (of Hopper's kernel with all of a mapping), sizes decide nothing more. Constants of these types
#: are gemmkit's own, and hold no array. (NumPy's equality of dtypes leaves out an algebra's table.)
TILES = {"block_shape", "warps_per_block"}
CONSTANT = {RowMajor, ColMajor, Zero, WGMMAOp, MMAOp, FPUOp, Tile, Grouped, Hilbert, StreamK, int, str}


def _is_constant(value: Any) -> bool:
    return type(value) in CONSTANT and getattr(getattr(value, "dtype", None), "names", None) is None


@lru_cache(maxsize=1024)
def _of_tiles(values: frozenset[tuple[str, Any]], device: DeviceInfo) -> Config:
    """The configuration of plain operands on tiles that a table chose: products of other sizes have the same one."""
    return _complete(dict(values), None, device, 1)


when_forgetting(_of_tiles.cache_clear)


def _complete(values: dict[str, Any], sizes: tuple[int, int, int] | None, device: DeviceInfo, products: int) -> Config:
    a_layout = values["global_a_layout"]
    b_layout = values.get("global_b_layout", a_layout)
    sm90.give_algebra(values, a_layout, b_layout, sizes, device, products)
    layouts = {"a": a_layout, "b": b_layout, **{name: values.get(f"global_{name}_layout") for name in "cd"}}
    sums = AccumulatorRule.of(layouts, values, sizes[2] if sizes else LARGE)
    operator = values["operator"] = sized(values["operator"], a_layout.dtype, b_layout.dtype, sizes, device, products, sums)
    if isinstance(operator, Semiring):                 # what its zero is not a number of is converted on the way
        for name, layout, fragment in (("a", a_layout, operator.fragment_a), ("b", b_layout, operator.fragment_b)):
            if fragment.dtype != layout.dtype and np.can_cast(layout.dtype, fragment.dtype, "safe"):
                values.setdefault(f"transform_global_to_shared_{name}", AS_IT_IS)
    is_wgmma = operator.threads == 128
    check_stream_k(values.get("kernel", "warp_specialised" if is_wgmma else "singlestage"), values.get("splits"))
    accumulator = operator.fragment_c.dtype
    values.setdefault("global_b_layout", a_layout)
    values.setdefault("global_d_layout", (ColMajor if a_layout.vector_axis == 0 else RowMajor)(accumulator))
    values["global_d_layout"] = result_layout(values["global_b_layout"], values.get("epilogue"), values["global_d_layout"])
    values.setdefault("global_c_layout", Zero(accumulator))
    made: tuple[Config | None, int | None] = (None, None)
    if is_wgmma:
        made = sm90.fill(values, sizes, device, products) or made
    elif values.get("kernel") == "multistage":
        sm80.fill(values, sizes, device, products)
    else:
        simt.fill(values, operator, sizes, device, products)
    if isinstance(operator, WMMAOp):
        orders: dict[str, Any] = {f"{name}_order": ("col", "row")[values[f"shared_{name}_layout"].axis] for name in "ab"}
        values["operator"] = dataclasses.replace(operator, **orders)
    config, needed = made
    config = config or Config(**values)
    config.check_device(device, needed)
    return config
