"""A process group as gemmkit uses it: ranks, its store, its timeout, and what its ranks have agreed on."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import gemmkit
from gemmkit import components as kept
from gemmkit.components import Array, Component, field_values, frozen, further_state
from gemmkit.emulator import current_mode
from gemmkit.epilogues import Epilogue
from gemmkit.functions.matmul import matmul
from gemmkit.kernels.config import KEYWORDS, TRANSFORMS, Config
from gemmkit.lang.aggregates import convert
from gemmkit.lang.component_products import StackShape
from gemmkit.lang.components import dataclass
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.fingerprint import Scalar, annotated, digest, package_digest, read_class, read_closure, read_value
from gemmkit.lang.functions import Frozen, captured
from gemmkit.lang.registers import apply
from gemmkit.layouts import RowMajor
from gemmkit.layouts.joined import Concat
from gemmkit.layouts.matrices import Matrix
from gemmkit.operators import Algebra, FPUOp, MMAOp, WGMMAOp, WMMAOp
from gemmkit.plans.compiled import PARTS
from gemmkit.plans.launch import Cache
from gemmkit.plans.plan import Plan, plan
from gemmkit.plans.problem import PLAIN
from gemmkit.runtime.arrays import KEYS, describe, dtype_to_torch, is_array
from gemmkit.tiling import Tile, translate
from gemmkit.transforms.base import transformed

if TYPE_CHECKING:
    from gemmkit.distributed.transport import Inbox
    from gemmkit.lang.host import Elements, Numeric

Statement = dict[str, str]

#: The entry of a statement that no two ranks may have alike: which GPU it is, where the group's backend needs one for each.
GPU = "the GPU"


class Ranks:
    """The ranks of a process group, by which a call's ranks check each other before anything is launched.

    They meet in the group's *store*, not by a collective: a collective that one rank starts and another does not would be
    paired with the other's next one, and would take its bytes. The store pairs statements by number, works for every
    backend, touches no stream, and gives up after the group's timeout.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rank, self.size = int(dist.get_rank(group)), int(dist.get_world_size(group))
        self.members = dist.get_process_group_ranks(group)             # their numbers in the world
        self.store: Any = dist.PrefixStore("gemmkit/", c10d._get_process_group_store(group))
        self.agreed: dict[tuple[tuple[str, str], ...], Any] = {}        # statements, and what was made for them
        self.inboxes: dict[Any, Inbox] = {}                             # in symmetric memory, by device and size
        self.repeated = Cache(64)                                       # calls over them (`Repeated`), and facts, by keys
        self.why_plain: str | None = None                               # why the last call did not use one
        self._facts: dict[str, str | None] = {}
        self._met = 0

    def backend(self, device: torch.device) -> str:
        """What moves tensors of a device: "nccl", "gloo", ...; "" where the group has nothing for it."""
        of = dict(one.split(":") for one in str(dist.get_backend_config(self.group)).split(","))
        return of.get(device.type, "")

    @property
    def timeout(self) -> timedelta:
        """How long the group's collectives wait, and agreements as well."""
        known = (self.group._get_backend(device) for device in self.group._device_types)
        longest: timedelta = max((backend.options._timeout for backend in known), default=c10d.default_pg_timeout)
        return longest

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which meet for this call, why this one does not compute it. (It need not wait for them.)"""
        self._say({"refuses": f"{type(error).__name__}: {error}"})

    def agree(self, statement: Statement) -> None:
        """Compare what each rank says of a call; return if all say the same.

        Raises on every rank alike: ValueError, naming the first rank that refused the call, or the first entry that two
        ranks have different and what each has; and RuntimeError where a rank did not come within the group's timeout.
        """
        said = self._heard(self._say(statement))
        for rank, other in enumerate(said):
            if "refuses" in other:
                raise ValueError(f"rank {rank} refuses the call, so no rank computes it; it says {other['refuses']}")
        places = [other.pop(GPU, str(rank)) for rank, other in enumerate(said)]
        for rank, place in enumerate(places):
            if (earlier := places.index(place)) != rank:
                raise ValueError(f"ranks {earlier} and {rank} have their tensors on one GPU ({place}), and NCCL needs one "
                                 "for each; call torch.cuda.set_device(local_rank) first, and put tensors on that device")
        for rank, other in enumerate(said):
            for name in {**said[0], **other}:
                first, second = said[0].get(name, "none"), other.get(name, "none")
                if first != second:
                    raise ValueError(f"{name} differs between the ranks: {first} on rank 0, {second} on rank {rank}; all "
                                     "ranks make the same call, and none computes this one")

    def once(self, name: str, ask: Callable[[], str | None]) -> str | None:
        """A fact of the group, asked of every rank once: what the first rank says that does not say None."""
        if name not in self._facts:
            said = self._heard(self._say({"says": ask() or ""}))
            self._facts[name] = next((f"{one['says']} (rank {rank})" for rank, one in enumerate(said) if one["says"]), None)
        return self._facts[name]

    def _say(self, own: Statement) -> int:
        """Put this rank's next statement into the store; its number."""
        number, self._met = self._met, self._met + 1
        self.store.set(f"{number}/{self.rank}", json.dumps(own))
        return number

    def _heard(self, number: int) -> list[Statement]:
        """The statements of all ranks, in their order."""
        said = []
        for rank in range(self.size):
            try:
                self.store.wait([f"{number}/{rank}"], self.timeout)
                said.append(json.loads(self.store.get(f"{number}/{rank}")))
            except RuntimeError as error:
                raise RuntimeError(f"rank {rank} did not come to this call within {self.timeout.total_seconds():g} s: it "
                                   "raised or ended before it, or made another call, one that the ranks had agreed on "
                                   "earlier") from error
        if self.store.add(f"{number}/read", 1) == self.size:           # the last to read: the store does not grow
            for rank in range(self.size):
                self.store.delete_key(f"{number}/{rank}")
            self.store.delete_key(f"{number}/read")
        return said


_known: dict[str, Ranks] = {}


def ranks_of(group: dist.ProcessGroup | None = None) -> Ranks:
    """The `Ranks` of a process group; None is the default group.

    Raises RuntimeError where torch.distributed has not been initialised, TypeError for what is no process group, ValueError
    in a process that is none of the group's.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised; start the processes with torchrun, and call "
                           "torch.distributed.init_process_group() first")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"group: rank {dist.get_rank()} of the world is not in it, and makes no call")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group={group!r}: a process group of torch.distributed is needed, or None for the default one")
    known = _known.get(group.group_name)
    if known is None or known.group is not group:
        known = _known[group.group_name] = Ranks(group)
    return known


# --------------------------------------------------------------------------------------------------
# Sums over ranks, in the order of ranks: the same bits in every call, and on every rank.

def plus(x: Numeric, y: Numeric) -> Any:
    return x + y


def least(x: Numeric, y: Numeric) -> Any:
    return min(x, y)


def most(x: Numeric, y: Numeric) -> Any:
    return max(x, y)


@dataclass(frozen=True)
class Rule(Component):
    """An associative function of two sums, called as an operator's own `merge`."""

    device_methods: ClassVar[tuple[str, ...]] = ("merge",)

    function: Any

    def merge(self, x: Numeric, y: Numeric) -> Any:
        return self.function(x, y)


@dataclass(frozen=True)
class InRankOrder(Epilogue):
    """Merges the partial sums of all ``ranks``, from the first to the last, in ``dtype``; with ``follows`` behind the value
    of D that is there already (a C).

    ``parts`` has ``rows`` rows from each rank, one rank's below the other's. With ``travels`` the value of D is rank
    ``own``'s partial sum, which was not sent, and is rounded to that dtype as the others were. ``rule`` has the
    ``merge(x, y)``: an operator, or a `Rule`.

    >>> parts = np.arange(6, dtype=np.float32).reshape(3, 2)                      # a row from each of three ranks
    >>> float(InRankOrder(parts, 1, Rule(plus), np.dtype(np.float32), 3)(np.float32(0), 0, 1))
    9.0
    """

    parts: Array
    rows: Scalar
    rule: Any
    dtype: Any
    ranks: int
    follows: bool = False
    travels: Any = None
    own: int = -1                      # static: a kernel for each rank, which loads nothing for its own
    layout: Any = None                 # of ``parts``: row-major, as ranks send them

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout is None:
            object.__setattr__(self, "layout", RowMajor(describe(self.parts, "parts").dtype))

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        total = self.part(0, x, m, n)
        if self.follows:
            total = convert(self.dtype, self.rule.merge(convert(self.dtype, x), total))
        for rank in range(1, self.ranks):
            total = convert(self.dtype, self.rule.merge(total, self.part(rank, x, m, n)))
        return total

    def part(self, rank: int, x: Numeric, m: int, n: int) -> Any:
        """A rank's partial sum: what it sent, or of its own the product's, rounded as if it had been sent."""
        if self.takes_own and rank == self.own:
            return convert(self.dtype, convert(self.travels, x))
        return convert(self.dtype, self.parts[rank * self.rows + m, n])

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        """The same of a thread's tile, whose parts it loads in vectors."""
        total = self.parts_at(0, values, tile, shape)
        if self.follows:
            total = apply(merge_parts, apply(as_sum, values, self), total, self)
        for rank in range(1, self.ranks):
            total = apply(merge_parts, total, self.parts_at(rank, values, tile, shape), self)
        return total

    def parts_at(self, rank: int, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        if self.takes_own and rank == self.own:
            return apply(as_sent, values, self)
        return apply(as_sum, self.layout.load(self.parts, translate(tile, rank * self.rows, 0), shape), self)

    @property
    def takes_own(self) -> bool:
        return self.travels is not None

    reads_tiles = True


def as_sum(x: Numeric, n: int, merging: InRankOrder) -> Any:
    return convert(merging.dtype, x)


def as_sent(x: Numeric, n: int, merging: InRankOrder) -> Any:
    return convert(merging.dtype, convert(merging.travels, x))


def merge_parts(x: Numeric, n: int, others: tuple[Any, ...], merging: InRankOrder) -> Any:
    return convert(merging.dtype, merging.rule.merge(x, others[n]))


@dataclass(frozen=True)
class WithOther(Epilogue):
    """`InRankOrder` of two ranks, whose own partial sums the product has. ``other`` are the other rank's, in an array of D's
    form, which Hopper's kernel fetches ahead of time; ``is_second``: they are rank 1's.

    >>> others = np.float32([[1, 2]])
    >>> float(WithOther(others, Rule(plus), np.dtype(np.float32), np.dtype(np.float32), True)(np.float32(3), 0, 1))
    5.0
    """

    other: Array
    rule: Any
    dtype: Any
    travels: Any
    is_second: bool
    layout: Any = None

    beside = "other"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout is None:
            object.__setattr__(self, "layout", RowMajor(describe(self.other, "other").dtype))

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return self.merged(x, self.other[m, n])

    def merged(self, x: Numeric, other: object) -> Any:
        """The product's sum, rounded as if it had been sent, and the other rank's, the first rank's first."""
        own, sent = convert(self.dtype, convert(self.travels, x)), convert(self.dtype, other)
        if self.is_second:
            return convert(self.dtype, self.rule.merge(own, sent))
        return convert(self.dtype, self.rule.merge(sent, own))

    def finish(self, values: Elements, tile: Tile, shape: StackShape) -> Elements:
        return apply(merge_other, values, self.layout.load(self.other, tile, shape), self)

    reads_tiles = True


def merge_other(x: Numeric, n: int, others: tuple[Any, ...], merging: Any) -> Any:
    return merging.merged(x, others[n])


@dataclass(frozen=True)
class OfTransform(Epilogue):
    """A transform of D as a part of the epilogue.

    >>> from gemmkit.transforms import Map
    >>> OfTransform(Map(lambda x, m, n: x + 10 * m))(0.5, 1, 2)
    10.5
    """

    transform: Any

    def __call__(self, x: Numeric, m: int, n: int) -> Any:
        return transformed(self.transform, x, m, n)


def rule_of(operator: Any, combine: Any) -> Component:
    """How two ranks' sums become one: by ``combine``, or by what the operator says of sums over parts of K.

    Raises TypeError for a ``combine`` that is no plain function, ConfigError where none is given and the operator says
    nothing.
    """
    if combine is not None:
        found = least if combine is min else most if combine is max else combine
        if not isinstance(found, FunctionType):
            raise TypeError(f"combine={combine!r}: a plain Python function of two numbers is needed, or min, or max")
        return Rule(found)
    base = operator.base if isinstance(operator, Algebra) else operator
    if isinstance(base, (MMAOp, WGMMAOp, WMMAOp)):                # tensor cores add, and a Rule adds numbers of any parts
        return Rule(plus)
    if not base.merges:
        raise ConfigError(f"combine: {type(base).__name__} does not declare that accumulators over parts of K may be "
                          "merged; if combine is associative and start is its neutral element, set merges = True in its "
                          "class, or give combine=")
    if isinstance(base, FPUOp) and base.is_ordinary:
        return Rule(plus)
    if isinstance(operator, Algebra):
        raise ConfigError(f"combine: give it with {operator!r}: numbers of several parts, whose base has a combine of its "
                          "own")
    own: Component = base
    return own


def accumulator_of(config: Any, dtype: np.dtype) -> np.dtype:
    """The dtype in which results of ``dtype`` are added up: the accumulator's, or complex numbers of two float32 or more."""
    if dtype.names is not None:
        return dtype
    if dtype.kind == "c":
        return np.result_type(dtype, np.complex64)
    accumulator: np.dtype = config.operator.fragment_c.dtype
    return accumulator


# --------------------------------------------------------------------------------------------------
# How an extent is shared out over ranks, and the checks of shards that each rank makes of its own.

def even_lengths(extent: int, ranks: int) -> tuple[int, ...]:
    """Shards as ``torch.chunk`` and `DTensor` make them: all of one length but the last ones.

    >>> even_lengths(10, 4), even_lengths(2, 3)
    ((3, 3, 3, 1), (1, 1, 0))
    """
    length = -(-extent // ranks)
    return tuple(min(length, max(0, extent - rank * length)) for rank in range(ranks))


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each shard begins, and where the last one ends.

    >>> offsets((3, 4, 0))
    [0, 3, 7, 7]
    """
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def lengths_of(ranks: Any, own: int, lengths: Any, name: str, what: str) -> tuple[int, ...]:
    """The lengths of all ranks' shards: those given, or this rank's for all. Raises ValueError for what is no length for
    each rank, and where this rank's shard has another."""
    if lengths is None:
        return (own,) * int(ranks.size)
    try:
        found = tuple(lengths)
    except TypeError:
        found = ()
    if len(found) != ranks.size or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in found):
        raise ValueError(f"lengths={lengths!r}: a length for each of the group's {ranks.size} ranks is needed, for example "
                         f"{even_lengths(10, ranks.size)}")
    if found[ranks.rank] != own:
        raise ValueError(f"lengths={found}: rank {ranks.rank} has {found[ranks.rank]} {what} by it, and {name} has {own}")
    return found


def dtypes(**tensors: Any) -> dict[str, Any]:
    """What a statement says of tensors that a call may lack."""
    return {f"the dtype of {name}": "none" if x is None else x.dtype for name, x in tensors.items()}


def check_tensors(**tensors: object) -> None:
    """Raise TypeError for what is no tensor (None is left out), ValueError for one that is no matrix, requires a gradient,
    or is on another device than the first."""
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if isinstance(x, Matrix):
            raise TypeError(f"{name} is a {type(x).__name__}; shards are plain matrices (torch.Tensor)")
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {type(x).__name__}; a torch.Tensor is needed, since torch.distributed moves it")
        if x.dim() != 2:
            raise ValueError(f"{name} has {x.dim()} dimensions; a shard of a matrix has 2")
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires a gradient, and products over several ranks record none; call it under "
                             f"torch.no_grad(), or give {name}.detach()")
        if first is None:
            first = name, x.device
        elif x.device != first[1]:
            raise ValueError(f"{name} is on {x.device} and {first[0]} on {first[1]}; a rank's operands are on one device")


# --------------------------------------------------------------------------------------------------
# What the ranks of a call have to have alike, as text.
#
# A statement holds what is the same on all ranks by the call's meaning. An array's values, address and strides are a
# rank's own matter, and so is the length of what is not shared out; they must not decide whether ranks meet, or one rank
# would wait for others that do not.

_texts = Cache()                                  # by the fingerprint, which has more in it (alignment)


def component_text(value: Any) -> str:
    """A component's class, code and constants; of arrays and run-time numbers only dtypes and dimensions.

    >>> import numpy as np
    >>> from gemmkit.epilogues import Bias, Scale
    >>> component_text(Scale(2.0)) == component_text(Scale(3.0)), component_text(Scale(2.0)) == component_text(
    ...     Bias(np.zeros(4, np.float32)))
    (True, False)
    """
    if not isinstance(value, Component):
        return digest(_text(value))
    key = frozen(value).fingerprint
    found: str | None = _texts.get(key)
    return found or _texts.keep(key, digest(_text(value)))


def _text(value: Any, is_runtime: bool = False) -> str:
    if isinstance(value, Component):
        kinds = annotated(type(value))
        parts = [f"{name}={_text(field, kinds.get(name) is Scalar)}"
                 for name, field in {**field_values(value), **further_state(value)}.items()]
        return "\n".join((read_class(type(value), Component).text, *parts))
    if is_array(value):
        info = describe(value)
        return f"array of {info.dtype}, {len(info.shape)} dimensions"
    if is_runtime or isinstance(value, np.generic):
        return f"number of {type(value).__name__}"
    if callable(value) and hasattr(value, "__code__"):
        held = captured(value)
        return "\n".join((read_closure(value, held.keys()).text, *(f"{name}={_text(x)}" for name, x in held.items())))
    return read_value(value, "value").text


def statement_of(call: str, tensor: torch.Tensor, facts: dict[str, Any], components: dict[str, Any]) -> dict[str, str]:
    """The statement of a call: its name, versions, the kind of a tensor's device, ``facts`` and its components' texts."""
    said = {"the call": call, "gemmkit's version": gemmkit.__version__, "gemmkit's source": package_digest(of_process=False),
            "PyTorch's version": str(torch.__version__), "Python's version": platform.python_version(),
            "the device": _device_text(tensor.device)}
    said |= {name: str(fact) for name, fact in facts.items()}
    for name in sorted(components):
        if components[name] is not None:
            said[name] = f"{type(components[name]).__name__} {component_text(components[name])[:16]}"
    return said


def _device_text(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{device.type}{', emulated' if current_mode() else ''}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def gpu_text(ranks: Ranks, device: torch.device) -> str | None:
    """Which GPU it is, of all hosts, where the group's backend needs one for each rank; else None."""
    if device.type != "cuda" or ranks.backend(device) != "nccl":
        return None
    return f"{platform.node()}, {torch.cuda.get_device_properties(device).uuid}"


# --------------------------------------------------------------------------------------------------
# What the calls over several ranks have in common: arguments checked by each rank, then by all; products of tensors.

Made = TypeVar("Made")

#: Components that act on operands, before sums are made; all others act on the sums.
BEFORE_SUM = (*(name for name in TRANSFORMS if name.endswith(("_a", "_b"))), "observe_a", "condition", "operator",
              "global_a_layout", "global_b_layout")


def check_keywords(call: str, components: dict[str, Any], refused: tuple[str, ...] = ()) -> None:
    """Raise TypeError for a keyword that the call does not take."""
    known = [name for name in KEYWORDS if name not in (*PLAIN, "order", *refused)]
    unknown = sorted(name for name, value in components.items() if name not in known and value is not None)
    if unknown:
        raise TypeError(f"{call}() got keywords {', '.join(unknown)}; of components it takes {', '.join(known)}")


def meet(ranks: Ranks, call: str, tensor: torch.Tensor, facts: Callable[[], dict[str, Any]], components: dict[str, Any],
         make: Callable[[], Made], all_know: Callable[[Any], bool] | None = None) -> Made:
    """All ranks make the same call, and each of them can compute it: or all refuse, and nothing has been launched.

    ``facts`` gives what all ranks have alike beside the components, and raises what is wrong with this rank's arguments.
    ``make`` is called where the ranks have not agreed on these facts yet; what it returned is returned for all later calls.
    These exchange nothing, unless torch.distributed's debug level says so (``TORCH_DISTRIBUTED_DEBUG=INFO``): a rank that
    repeats a known call while another makes a new one is found by the timeout otherwise. A call that exchanges numbers
    anyway gives ``all_know``, a collective that each rank runs once in every call, also in one that it refuses. It takes the
    agreed statement, or None, and says whether all ranks gave the same one. Then no rank needs the timeout.
    """
    place = key = None
    is_asked = alike = all_know is None
    try:
        said = facts()
        if all_know is not None and not components:      # a statement takes 1 to 4 ms of the host's time
            place = call, tensor.device, current_mode() is not None, str(said)
            key = ranks.repeated.get(place)
            if key is not None:
                is_asked, alike = True, all_know(_without_gpu(key))
                if alike and dist.get_debug_level() == dist.DebugLevel.OFF:
                    found: Made = ranks.agreed[key]
                    return found
        statement = statement_of(call, tensor, said, components)
        if (place_of_rank := gpu_text(ranks, tensor.device)) is not None:
            statement[GPU] = place_of_rank
        key = tuple(statement.items())
        known = key in ranks.agreed
        if all_know is not None and not is_asked:
            is_asked, alike = True, all_know(_without_gpu(key) if known else None)
        if known and alike and dist.get_debug_level() == dist.DebugLevel.OFF:
            agreed: Made = ranks.agreed[key]
            return agreed
        made = ranks.agreed[key] if known else make()
    except Exception as error:
        if all_know is not None and not is_asked:
            all_know(None)
        ranks.refuse(error)
        raise
    ranks.agree(statement)
    ranks.agreed[key] = made
    if place is not None:
        ranks.repeated.keep(place, key)
    return made


def _without_gpu(key: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """What all ranks of an agreed call have alike: each has a GPU of its own."""
    return tuple(entry for entry in key if entry[0] != GPU)


def planned(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None, conf: Config | None,
            components: dict[str, Any]) -> Plan:
    """The plan of a product of tensors, compiled: it raises all that is wrong with one."""
    return plan(a, b, c, conf, out=out, **components)


def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None, conf: Config | None,
             components: dict[str, Any]) -> Any:
    """`gemmkit.matmul` of tensors, as a tensor."""
    return matmul(a, b, c, conf, out=out, **components)


def new(like: torch.Tensor, shape: tuple[int, ...], dtype: np.dtype | torch.dtype) -> Any:
    """An uninitialised tensor on the device of another."""
    return torch.empty(shape, dtype=dtype if isinstance(dtype, torch.dtype) else dtype_to_torch(dtype), device=like.device)


# --------------------------------------------------------------------------------------------------
# Calls that come again: of arrays of the same kinds, with the same components.
#
# The ranks have agreed on such a call, and it is planned: what is left are the launches and the stream's commands. Looked
# up so, a call of two ranks takes a fifth of the host's time.

_A_LAYOUT = "global_a_layout"


class Repeated:
    """One call with all that it rests on: these components are read anew when their code or their arrays' memory change.
    ``why_plain`` says why it goes by the group; None where it goes by symmetric memory."""

    why_plain: str | None = None

    def __init__(self, device: torch.device, conf: Config | None, components: dict[str, Any], rule: object = None):
        self.device, self.conf, self._rule = device, conf, rule
        self.components = {name: value for name, value in components.items() if value is not None}
        self._frozen = self._read()

    def stands(self) -> bool:
        return all(found is known for found, known in zip(self._read(), self._frozen))

    def _read(self) -> list[Frozen]:
        """What is known of the components. (Looked at, not read: one that stands is the same object again.)"""
        of_conf = {} if self.conf is None else {name: getattr(self.conf, name) for name in PARTS}
        given = *self.components.items(), *of_conf.items(), ("combine", self._rule)
        return [kept.frozen(value, name) for name, value in given if isinstance(value, Component)]


def key_of_call(arrays: tuple[Any, ...], conf: Config | None, components: dict[str, Any],
                *more: object) -> tuple[Any, ...] | None:
    """What a call of device arrays is known by; None where an array is of no type that was multiplied yet, or something
    cannot be looked up. `Repeated` keeps the components, so that their ids stay their own."""
    kinds: list[Any] = []
    if any(isinstance(x, list) for x in more):           # lengths
        return None
    for x in arrays:
        keyed = None if x is None else KEYS.get(type(x))
        if keyed is None and x is not None:
            return None
        at, kind = (0, None) if keyed is None else keyed(x, "")
        kinds.append((kind, at & 15))
    return (*kinds, id(conf), *more, *((name, id(value)) for name, value in components.items()))


def known_call(ranks: Ranks, key: tuple[Any, ...] | None) -> Any:
    """The call of this key, where nothing has to be asked: neither the other ranks, nor what its components are now."""
    found = ranks.repeated.get(key)
    if found is None or current_mode() is not None or torch.cuda.is_current_stream_capturing():
        return None
    if found.device.index != torch.cuda.current_device() or dist.get_debug_level() != dist.DebugLevel.OFF:
        return None
    if not found.stands():
        del ranks.repeated[key]
        return None
    ranks.why_plain = found.why_plain
    return found


def remember(ranks: Ranks, key: tuple[Any, ...] | None, call: Any) -> Any:
    """The call, which `known_call` finds from then on."""
    if key is None:
        return call
    return ranks.repeated.keep(key, call)


class PlannedProduct:
    """A product of a call, of operands of one kind: planned when it is computed a second time."""

    def __init__(self, conf: Config | None, components: dict[str, Any]):
        self.conf, self.components = conf, components
        self._plan: Plan | None = None
        self._is_known = False

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        if self._plan is None:
            if not self._is_known:
                self._is_known = True
                return multiply(a, b, c, out, self.conf, self.components)
            self._plan = plan(a, b, c, self.conf, out=out, **self.components)
        return self._plan(a, b, c, out=out)

    def into(self, stream: int, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, begin: int, end: int,
             first: int) -> None:
        """Rows ``begin`` to ``end`` of A into as many of ``out``, from ``first`` on, on a stream's handle. ``out`` is the
        call's own, and the rows are always these. (Slices cost the host as much as launches.)"""
        if self._plan is None:
            self(a[begin:end], b, None, out[first:first + end - begin])
        else:
            self._plan.launch(stream, (out.data_ptr() + first * out.stride(0) * out.element_size(),
                                       a.data_ptr() + begin * a.stride(0) * a.element_size(), b.data_ptr(), 0))


class JoinedProduct(PlannedProduct):
    """The same, of an A whose rows lie in several arrays (`gemmkit.layouts.Concat`), wherever these lie."""

    def __init__(self, conf: Config | None, components: dict[str, Any]):
        super().__init__(conf, components)
        self._at = Cache()

    def of_parts(self, parts: tuple[Any, ...], b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor) -> Any:
        places = (*(part.data_ptr() for part in parts), 0 if out is None else out.data_ptr())
        found = self._at.get(places)
        if found is None:
            a = Concat(*parts, axis=0)
            if not self._is_known:
                self._is_known = True
                return multiply(a, b, c, out, self.conf, self.components)
            found = self._planned_at(a, b, c, out)
            self._at.keep(places, found)
        return found(parts[0], b, c, out)

    def _planned_at(self, a: Concat, b: Any, c: Any, out: Any) -> Any:
        """The plan with A's parts where they are now, which may overlap nothing that is written."""
        if self._plan is None:
            self._plan = plan(a, b, c, self.conf, out=out, **self.components)
            self._plan.forget_arrays((_A_LAYOUT,))               # a part's memory is the caller's to free
        frozen = {_A_LAYOUT: kept.frozen(a.layout, _A_LAYOUT)}
        brought = self._plan.with_components(frozen, {_A_LAYOUT: a.layout}, a.array, b, c, out)
        return lambda first, b, c, out: self._plan.run(brought, first, b, c, out, None)


# --------------------------------------------------------------------------------------------------
# Partial sums of ranks that share out K, and how they become rows of D: merged in the order of ranks, then finished.

#: Components that see a row's number, or rows together: A is then multiplied as a whole, not rank by rank.
_OF_ROWS = tuple(name for name in BEFORE_SUM if name.endswith("_a") or name in ("condition", "global_a_layout"))
#: Transforms of D, in the order in which a kernel applies them.
_OF_D = "transform_regs_to_shared_d", "transform_shared_to_global_d"


class ReductionRule(NamedTuple):
    """How a call's partial sums are merged: of which dtype they travel, in which they are added, and by which rule."""

    travels: np.dtype
    adds: np.dtype
    rule: Any
    result: np.dtype
    gates: Any = None                  # of this rank's own rows, where peers may push theirs


def before_sum(components: dict[str, Any]) -> dict[str, Any]:
    """The components of the partial products."""
    return {name: value for name, value in components.items() if name in BEFORE_SUM}


def given(components: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in components.items() if value is not None}


def sees_rows(conf: Config | None, components: dict[str, Any]) -> bool:
    """Whether a component before the sum sees rows of the whole A."""
    return conf is not None or any(components.get(name) is not None for name in _OF_ROWS)


def is_fused(a: torch.Tensor, c: torch.Tensor | None, conf: Config | None, components: dict[str, Any]) -> bool:
    """Whether this rank's own rows are one product with the merge in its epilogue, behind a gate: nothing stands between
    sums and epilogue, and every tile has a k-tile that waits."""
    between = any(components.get(name) is not None for name in (*_OF_D, "global_b_layout"))
    return c is None and a.shape[1] > 0 and not between and not sees_rows(conf, components)


def in_rank_order(parts: Any, how: ReductionRule, own: int | None, follows: bool = False) -> InRankOrder:
    """The epilogue that merges the ranks' partial sums; ``own`` is the rank whose sums the product itself has."""
    travels = None if own is None else how.travels
    ranks, rows, columns = parts.shape
    return InRankOrder(parts.view(ranks * rows, columns), rows, how.rule, how.adds, ranks, follows,
                       travels, -1 if own is None else own)


def with_own(parts: Any, how: ReductionRule, own: int, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a product of this rank's own rows that takes the others' partial sums."""
    epilogue: Any = components.get("epilogue")
    if parts.shape[0] == 2:
        merging: Any = WithOther(parts[1 - own], how.rule, how.adds, how.travels, own == 0)
    else:
        merging = in_rank_order(parts, how, own)
    return {**given(components), "epilogue": merging if epilogue is None else merging | epilogue}


def finishing(parts: object, how: ReductionRule, follows: bool, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a product of K = 0 that merges partial sums and finishes them; ``follows``: a C."""
    after = {name: value for name, value in given(components).items() if name not in BEFORE_SUM}
    merging: Any = in_rank_order(parts, how, None, follows)
    for name in _OF_D:                                   # in a kernel they stand before the epilogue, which merges here
        if name in after:
            merging = merging | OfTransform(after.pop(name))
    epilogue = after.pop("epilogue", None)
    return {**after, "epilogue": merging if epilogue is None else merging | epilogue}


def nothing(parts: Any, how: ReductionRule) -> tuple[Any, Any]:
    """Operands of K = 0, of which the merge is the epilogue."""
    return new(parts, (parts.shape[1], 0), how.adds), new(parts, (0, parts.shape[2]), how.adds)
