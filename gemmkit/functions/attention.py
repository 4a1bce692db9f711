"""Attention in one launch: softmax(score(scale Q K^T)) V, with your own masks and scores.

>>> import numpy as np, gemmkit as gk
>>> q = k = v = np.eye(2, 64, dtype=np.float16)[None, None]
>>> with gk.emulate():
...     gk.attention(q, k, v, mask=gk.masks.Causal(), scale=0.0)[0, 0, :, :2].tolist()
[[1.0, 0.0], [0.5, 0.5]]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import import_module
from itertools import pairwise
from types import FunctionType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gemmkit import components
from gemmkit import programs as gp
from gemmkit.components import arrays_of, check_held
from gemmkit.emulator import current_mode
from gemmkit.kernels.masks import Causal, Everything, Mask, PlainScores, Score, ScoreFunction
from gemmkit.lang.checks import FLOAT32_MAX, check_flag, finite_number
from gemmkit.lang.errors import ConfigError
from gemmkit.plans.launch import KnownCall, KnownCalls
from gemmkit.plans.problem import check_places
from gemmkit.programs.calls import plan_of_call
from gemmkit.programs.decorated import Program, program
from gemmkit.programs.mapping import KERNELS, MULTISTAGE
from gemmkit.programs.plan import ProgramPlan
from gemmkit.programs.values import COUNTED, Parameter
from gemmkit.runtime import launch as workspace
from gemmkit.runtime.arrays import (
    KEYS,
    ArrayInfo,
    RequiresGradient,
    as_stream_handle,
    describe,
    empty_like,
    is_array,
    overlaps_itself,
    shares_memory,
    strided,
)
from gemmkit.runtime.device import launch_stream
from gemmkit.runtime.tensor_maps import why_not

# --------------------------------------------------------------------------------------------------
# Q, K, V and the result of attention as (batch, heads, rows, head size), whatever their layout; what does not fit is
# refused.

LAYOUTS = {"bhnd": (0, 1, 2, 3), "bnhd": (0, 2, 1, 3)}
DTYPES = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
WIDEST = {"q": 576, "k": 576, "v": 512}            # heads: those of MLA's latent
WIDE = 256                             # columns of heads; of wider ones v may lie in k, and none has a gradient
FEW = 64                               # queries whose heads are rows of one tile
LIMIT = 2**30                          # rows: coordinates are 32 bits wide, and masks add to them


class AttentionOperands(NamedTuple):
    """The arrays as (batch, heads, rows, head size); of K and V an axis of stride 0 has one element."""

    q: ArrayInfo
    k: ArrayInfo
    v: ArrayInfo

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def queries(self) -> int:
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        return self.k.shape[2]

    @property
    def head_dim(self) -> int:
        return self.q.shape[3]


def as_heads(info: ArrayInfo, name: str, layout: str, packed: bool) -> ArrayInfo:
    """The array's axes in the order (batch, heads, rows, head size); packed ones have a batch of 1.

    >>> from gemmkit.runtime.arrays import describe
    >>> as_heads(describe(np.zeros((2, 5, 3, 64), np.float16)), "q", "bnhd", False).shape
    (2, 3, 5, 64)
    """
    wanted = layout[1:] if packed else layout
    if len(info.shape) != len(wanted):
        axes = ", ".join(AXES[c] for c in wanted)
        raise ValueError(f"{name} has shape {info.shape}; {len(wanted)} axes are needed, {axes} (layout={layout!r}"
                         f"{', with lengths' if packed else ''})")
    shape, strides = ((1, *info.shape), (0, *info.strides)) if packed else (info.shape, info.strides)
    order = LAYOUTS[layout]
    return info._replace(shape=tuple(shape[axis] for axis in order), strides=tuple(strides[axis] for axis in order))


AXES = {"b": "batch", "h": "heads", "n": "rows", "d": "head size"}


def operands_of(q: ArrayInfo, k: ArrayInfo, v: ArrayInfo, layout: str, packed: bool,
                paged: bool = False) -> AttentionOperands:
    """Q, K and V, checked against each other; of K and V in pages these are a batch.

    Raises:
        TypeError: dtypes other than float16 and bfloat16, or different ones; arrays on the host outside of the emulator.
        ConfigError: a head size that is no multiple of 8, or too large.
        ValueError: shapes that do not go together.
    """
    infos = {"q": q, "k": k, "v": v}
    check_places(infos)                                                                        # type: ignore[arg-type]
    for name, info in infos.items():
        if info.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {info.dtype}; float16 or bfloat16 is needed")
        if info.dtype != q.dtype:
            raise TypeError(f"{name} has dtype {info.dtype} and q has {q.dtype}; q, k and v must have one dtype")
    found = {name: as_heads(info, name, layout, packed) for name, info in infos.items()}
    q, k, v = found.values()
    if k.shape[2] != v.shape[2]:
        raise ValueError(f"v has {v.shape[2]} rows and k has {k.shape[2]}; both must be equal")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k has head size {k.shape[3]} and q has {q.shape[3]}; both must be equal")
    for name, info in found.items():
        if info.shape[3] % 8 or not 0 < info.shape[3] <= WIDEST[name]:
            raise ConfigError(f"{name} has head size {info.shape[3]}; a multiple of 8 up to {WIDEST[name]} is needed; pad "
                              "it with zeros to one, and give scale")
        if info.shape[2] >= LIMIT:
            raise ValueError(f"{name} has {info.shape[2]} rows; less than 2**30 are needed")
        if paged and name == "v" and info.shape[0] != k.shape[0]:
            raise ValueError(f"{name} has {info.shape[0]} pages and k has {k.shape[0]}; both must be equal")
        if not paged and info.shape[0] not in (1, q.shape[0]):
            raise ValueError(f"{name} has a batch of {info.shape[0]} and q of {q.shape[0]}; it must be q's, or 1")
        if q.shape[1] and (info.shape[1] == 0 or q.shape[1] % info.shape[1]):
            raise ValueError(f"{name} has {info.shape[1]} heads and q has {q.shape[1]}; the number must divide q's")
    return AttentionOperands(q, *(_shared(found[name], paged) for name in "kv"))


def begins(v: ArrayInfo, k: ArrayInfo) -> bool:
    """Whether v is the first columns of k, as in MLA's cache: of heads that are wide both take one block from memory."""
    of_v, of_k = ((x.pointer, x.strides, x.dtype, x.shape[:-1]) for x in (v, k))
    return of_v == of_k and WIDE < k.shape[-1] >= v.shape[-1]


def check_loadable(operands: AttentionOperands) -> None:
    """Raise ValueError for arrays that no kernel can load."""
    for name, info in zip("qkv", operands):
        reason = KERNELS[MULTISTAGE].why_not(info)
        if reason is not None:
            raise ValueError(f"{name} cannot be loaded, as (batch, heads, rows, head size): {reason}; pass a contiguous "
                             "copy")


def _shared(info: ArrayInfo, paged: bool) -> ArrayInfo:
    """One element along axes of stride 0, which is what broadcasting leaves: all heads read it. Of pages there are all."""
    shape = tuple(1 if paged <= axis < 2 and info.strides[axis] == 0 else extent for axis, extent in enumerate(info.shape))
    return info._replace(shape=shape)


def check_out(out: ArrayInfo, operands: AttentionOperands, given: ArrayInfo) -> None:
    """Raise where ``out`` (``given`` as the caller passed it) does not fit the result."""
    if given.dtype != operands.q.dtype:
        raise TypeError(f"out has dtype {given.dtype}; the result has q's dtype, {operands.q.dtype}")
    if out.shape != (*operands.q.shape[:3], operands.v.shape[3]):
        raise ValueError(f"out has shape {given.shape}; q's shape with v's head size, {operands.v.shape[3]}, is needed")
    if out.readonly:
        raise ValueError("out is read-only; give a writable array, or leave it out")
    if overlaps_itself(out):
        raise ValueError(f"out has strides {given.strides}: several of its elements share memory")
    for name, info in zip("qkv", operands):
        if shares_memory(out, info):
            raise ValueError(f"out overlaps {name} in memory; blocks read {name} while others write out")


def lengths_of(given: dict[str, Any], q: ArrayInfo) -> dict[str, Any]:
    """What says where sequences begin, or how many keys they have, by its name: arrays of q's device, or int32 arrays of the
    host, which a launch takes along. Raises TypeError and ValueError for what is none, as far as the host can see."""
    found = dict[str, Any]()
    for name, x in given.items():
        if isinstance(x, (list, tuple, np.ndarray)):
            x = np.asarray(x)
        elif not is_array(x):
            raise TypeError(f"{name} is a {type(x).__name__}; a list or an array of whole numbers is needed")
        info, rank = describe(x, name), 2 if name == "pages" else 1
        if len(info.shape) != rank or info.dtype.kind not in "iu" or not info.shape[0]:
            raise TypeError(f"{name} is an array of {info.dtype} and shape {info.shape}; whole numbers in "
                            f"{'two dimensions' if rank == 2 else 'one dimension'} are needed")
        if isinstance(x, np.ndarray):
            x = np.clip(x.astype(np.float64, "C"), -2**31, 2**31 - 1).astype(np.int32)     # what is too large stays so
        elif info.device != q.device:
            raise ValueError(f"{name} is on another device than q; put it on q's, or on the host")
        elif info.dtype not in COUNTED:
            raise TypeError(f"{name} is an array of {info.dtype}; on a GPU int32 or int64 is needed")
        found[name] = x
    return found


def keys_of(operands: AttentionOperands, lengths: dict[str, Any]) -> int:
    """How many keys there may be."""
    return operands.keys * (describe(lengths["pages"], "pages").shape[1] if "pages" in lengths else 1)


def check_offsets(found: dict[str, Any], rows: dict[str, int]) -> None:
    """Raises ValueError for other numbers of sequences, and for offsets of the host that are none of so many rows."""
    counts = [describe(x, name).shape[0] - 1 for name, x in found.items()]
    for name, x in found.items():
        if isinstance(x, np.ndarray) and (x[0] or x[-1] != rows[name] or any(a > b for a, b in pairwise(x.tolist()))):
            raise ValueError(f"lengths: {name} goes from {x[0]} to {x[-1]}; offsets that begin with 0, never fall and end "
                             f"with the {rows[name]} rows are needed")
    if counts[0] != counts[1]:
        raise ValueError(f"lengths: q_offsets has {counts[0]} sequences and k_offsets has {counts[1]}; both must be equal")


# --------------------------------------------------------------------------------------------------
# Attention is a program: its kernels are derived, for all sizes, and rounds of few queries are split over blocks
# (`gemmkit.programs`).

@program
def softmax_attention(out: Parameter, q: Parameter, k: Parameter, v: Parameter | None, q_offsets: Parameter | None,
                      k_offsets: Parameter | None, key_starts: Parameter | None, key_lengths: Parameter | None,
                      pages: Parameter | None, lse: Parameter | None, scale: float, mask: Mask | None, score: Score | None,
                      k_stacks: str, v_stacks: str, k_share: int, v_share: int) -> None:
    """The online softmax (Milakov and Gimelshein, 2018; Dao et al., 2022). ``k_stacks``, ``v_stacks``: which of batch and
    heads k and v have; ``k_share``, ``v_share``: by how many heads of q one of theirs is shared. Without v it is the first
    columns of k, as many as out has: then each block is loaded once for both."""
    queries = None if q_offsets is None else gp.packed(q.rows, q_offsets)
    tiles = (*q.counts, q.rows) if queries is None else (queries.count, *q.counts, queries.rows)
    for b, h, m in gp.parallel(*tiles):                # of packed sequences b is the sequence
        at = (b, h, m) if queries is None else (h, m)
        k_of, v_of = stacks_of(b, h, k_stacks, k_share), stacks_of(b, h, v_stacks, v_share)
        keys = (gp.paged(k, pages)[b] if pages is not None else k.rows if k_offsets is None else
                gp.packed(k.rows, k_offsets)[b])
        best, total, sums = gp.full(m, -math.inf), gp.zeros(m), gp.zeros(m, out.columns)
        begin, end = (None if x is None else x[b] for x in (key_starts, key_lengths))
        for n in gp.sequential(keys, start=begin, stop=end):
            page = () if pages is None else (n.page,)
            s = scores(scale * (q[at] @ k[(*page, *k_of, n)].T), m, n, h, b, mask, score)
            top = gp.maximum(best, s.max(axis=1))
            zero = gp.finite(top)
            p, shrink = gp.exp(s - zero), gp.exp(best - zero)
            total[:] = total * shrink + p.sum(axis=1)
            values = v[(*page, *v_of, n)] if v is not None else k[(*page, *k_of, n, slice(out.columns))]
            sums[:] = sums * shrink + p.astype(k.dtype) @ values
            best[:] = top
        if mask is None and score is None and begin is None and end is None and k_offsets is None:
            out[at] = sums / total
        else:                                          # a query that sees no key gets zeros
            out[at] = sums * gp.where(best == -math.inf, 0.0, 1.0 / total)
        if lse is not None:
            lse[at] = best + gp.log(total)


def stacks_of(b: Any, h: Any, stacks: str, share: int) -> list[Any]:
    """Which of a batch and of its heads keys or values are read from."""
    return [{"b": b, "h": h // share}[which] for which in stacks]


def scores(s: Any, m: Any, n: Any, h: Any, b: Any, mask: Any, score: Any) -> Any:
    """What the softmax is of, from scaled products."""
    s = s if score is None else gp.call(score, s, m, n, h, b)
    return s if mask is None else gp.where(mask, s, -math.inf)


@program
def without_keys(out: Parameter, q: Parameter, lse: Parameter | None) -> None:
    for b, h, m in gp.parallel(*q.counts, q.rows):
        out[b, h, m] = gp.call(lambda x: 0.0, q[b, h, m])
        if lse is not None:
            lse[b, h, m] = gp.call(lambda x: -math.inf, q[b, h, m].max(axis=1))


def program_arguments(call: AttentionCall) -> dict[str, Any]:
    """Those of `softmax_attention`, or without keys of `without_keys`, with descriptions in place of arrays, which are in
    the order in which known calls bring them."""
    operands = call.operands
    if not call.keys:                                  # rows as long as out's, whatever is in them
        q, v = operands.q, operands.v
        rows = q if q.shape[3] == v.shape[3] else q._replace(shape=(*q.shape[:3], v.shape[3]), strides=(*q.strides[:3], 0))
        return dict(out=call.out, q=rows, lse=call.lse)
    mask = None if call.mask.is_everything else call.mask
    score = None if isinstance(call.score, PlainScores) else call.score
    (k, k_stacks, k_share), (v, v_stacks, v_share) = (_with_own_stacks(info, call) for info in (operands.k, operands.v))
    out, q, lse = call.out, operands.q, call.lse
    if call.is_packed:                                 # rows of all sequences, without a batch
        out, q, lse = _of_rows(out), _of_rows(q), lse and _of_rows(lse)
    found = dict(call.lengths, out=out, q=q, k=k, v=None if begins(operands.v, operands.k) else v, lse=lse,
                 scale=float(call.scale), mask=mask, score=score,
                 k_stacks=k_stacks, v_stacks=v_stacks, k_share=k_share, v_share=v_share)
    return {name: found.get(name) for name in softmax_attention.names}


def _of_rows(info: ArrayInfo) -> ArrayInfo:
    return info._replace(shape=info.shape[1:], strides=info.strides[1:])


def _with_own_stacks(info: ArrayInfo, call: AttentionCall) -> tuple[ArrayInfo, str, int]:
    """Keys or values without the axes of which they have one for all, the letters of the others, and how many heads of q
    share one of theirs."""
    operands, pages = call.operands, [0] if call.is_paged else []
    kept = [axis for axis, count in enumerate((operands.batch, operands.heads))
            if (info.shape[axis] > 1 or count == 1) and not (axis == 0 and (call.is_packed or call.is_paged))]
    axes = (*pages, *kept, 2, 3)
    shape, strides = (tuple(numbers[axis] for axis in axes) for numbers in (info.shape, info.strides))
    share = operands.heads // info.shape[1] if 1 in kept else 1
    return info._replace(shape=shape, strides=strides), "".join("bh"[axis] for axis in kept), share


def folded(call: AttentionCall) -> AttentionCall:
    """A call of few queries as one of more, whose rows are those of all heads that share a head of k: a tile then has them
    together, and keys are read once. Where rows depend on their place it stays as it is."""
    q, k, v = call.operands
    batch, heads, queries, _ = q.shape
    group = heads // k.shape[1]
    if (group == 1 or call.is_packed or queries > FEW or k.shape[1] != v.shape[1] or not isinstance(call.score, PlainScores)
            or not (call.mask.is_everything or (queries == 1 and call.mask == LAST_QUERY))):
        return call

    def joined(info: ArrayInfo) -> ArrayInfo | None:
        """(batch, heads of k, group x queries, ...), where a view can have it."""
        by_head, by_row = info.strides[1:3]
        if queries > 1 and by_head != queries * by_row:
            return None
        rows = by_head if queries == 1 else by_row
        return info._replace(shape=(batch, heads // group, group * queries, *info.shape[3:]),
                             strides=(info.strides[0], group * by_head, rows, *info.strides[3:]))

    views = [None if info is None else joined(info) for info in (q, call.out, call.lse)]
    if views[0] is None or views[1] is None or (why_not(views[0], 3) is not None and why_not(q, 3) is None):
        return call
    return call._replace(operands=call.operands._replace(q=views[0]), out=views[1], lse=views[2], mask=EVERYTHING)


# --------------------------------------------------------------------------------------------------
# Calls.

LARGEST = FLOAT32_MAX * math.log(2)    # as a scale: scores are computed with scale log2(e)


class AttentionCall(NamedTuple):
    """A checked call. ``lengths``: offsets of packed sequences, or starts and lengths of keys and their pages, by
    `softmax_attention`'s names. ``keys``: as many as there may be."""

    operands: AttentionOperands
    out: ArrayInfo
    lse: ArrayInfo | None
    mask: Mask
    score: Score
    scale: float
    lengths: dict[str, Any]
    keys: int

    @property
    def is_packed(self) -> bool:
        return "q_offsets" in self.lengths

    @property
    def is_paged(self) -> bool:
        return "pages" in self.lengths


def run_attention(call: AttentionCall, arrays: dict[str, Any], stream: int | None, seen: Seen | None,
                  out: Any = None) -> None:
    """Compute a call that has a result, on a stream (None: the library's current one), which is known as ``seen`` from then
    on; ``out``: the result that was given."""
    call = folded(call)
    used, arguments = softmax_attention if call.keys else without_keys, program_arguments(call)
    plan = launch(used, arguments, arrays, call.operands.q, stream)
    if seen is not None and call.keys and plan is not None:
        rest, given, behind, held = seen
        taken = *(describe(arguments[name], name).pointer for name in plan.given), 0
        at = [describe(x, "").pointer for x in given]
        if (call.out.pointer, *at, *behind)[:len(taken)] == taken:   # a known call brings them in this order
            _calls.keep(rest, given, held, out, lambda: KnownCall(plan.start, describe(arrays["out"], "out")))


def launch(used: Program, arguments: dict[str, Any], arrays: dict[str, Any], q: ArrayInfo,
           stream: int | None) -> ProgramPlan | None:
    """Run a program, some of whose arguments are descriptions of ``arrays``, by their names. Its plan, where that can be run
    again: not in the emulator, and not with arrays of the host."""
    if current_mode() is not None:                     # of the arrays, as they are described
        plan = plan_of_call(used, arguments, None)
        arguments.update((name, strided(arrays[name], describe(arrays[name], name), x.shape, x.strides))
                         for name, x in arguments.items() if isinstance(x, ArrayInfo))
        plan.run(arguments)
        return None
    handle = launch_stream(q, stream)
    of_host = [name for name, x in arguments.items() if isinstance(x, np.ndarray)]
    if not of_host:
        plan = plan_of_call(used, arguments, None)
        plan.run(arguments, handle)
        return plan
    with workspace.tables:                             # until what reads it is under way
        arguments.update(_copied([arguments[name] for name in of_host], of_host, q, handle))
        plan_of_call(used, arguments, None).run(arguments, handle)
    return None


def _copied(arrays: Sequence[np.ndarray], names: Sequence[str], q: ArrayInfo, stream: int) -> dict[str, ArrayInfo]:
    """Arrays of the host in the stream's memory, each at a multiple of 16 bytes."""
    data = b"".join(x.tobytes() + bytes(-x.nbytes % 16) for x in arrays)
    at, found = workspace.table(q.device, stream, data, np.frombuffer(data, np.uint8)), dict[str, ArrayInfo]()
    for name, x in zip(names, arrays):
        found[name] = ArrayInfo(at, x.shape, (x.shape[1], 1) if x.ndim == 2 else (1,), x.dtype, q.device, True, q.library)
        at += x.nbytes + -x.nbytes % 16
    return found


_calls = KnownCalls()

#: What is quickly seen of a call: what it is known by, its arrays, its numbers, and what its mask and score bring.
Seen = tuple[Any, tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]


def quickly(q: Any, k: Any, v: Any, mask: Any, score: Any, scale: Any, layout: str, lengths: Any, key_starts: Any,
            key_lengths: Any, pages: Any, lse: Any = None) -> Seen | None:
    """Of a call whose lengths are on the GPU; ``lse`` is an array for the logarithms of its sums."""
    if scale is not None and (type(scale) is not float or not -LARGEST <= scale <= LARGEST):
        return None
    shape = getattr(q, "shape", None)
    if not shape:
        return None
    factor = 1 / math.sqrt(shape[-1] or 1) if scale is None else scale or components.exact(scale)
    rest: tuple[Any, ...] = layout, lse is None, factor > 0 if type(factor) is float else False
    if shape[-1] > WIDE and begins(describe(v, "v"), describe(k, "k")):
        given, rest = [q, k], (*rest, describe(v, "v").shape[-1])
    else:
        given = [q, k, v]
    if mask is score is lengths is key_starts is key_lengths is pages is None:
        return rest, tuple(given) if lse is None else (*given, lse), (0, factor), ()
    for x in (key_starts, key_lengths, pages) if lengths is None else lengths if type(lengths) is tuple else (0,):
        if type(x) in KEYS and type(x) is not np.ndarray:
            given.append(x)
        elif x is not None:
            return None
    key: list[Any] = [*rest, lengths is None, key_starts is None, key_lengths is None, pages is None]
    given += () if lse is None else (lse,)
    held: list[Any] = []
    for rule in (mask, score):
        if rule is None:
            key.append(None)
            continue
        rule = ScoreFunction(rule) if rule is score and type(rule) is FunctionType else rule
        if not isinstance(rule, (Mask, Score)):
            return None
        components.seen(rule, key, held)
    return tuple(key), tuple(given), (0, factor, *held), tuple(held)


EVERYTHING, PLAIN, LAST_QUERY = Everything(), PlainScores(), Causal()         # what their properties cost is paid once


def attention(q: Any, k: Any, v: Any, *, mask: Mask | None = None, score: Any = None, scale: float | None = None,
              layout: str = "bhnd", lengths: Any = None, key_starts: Any = None, key_lengths: Any = None, pages: Any = None,
              out: Any = None, return_lse: bool = False, stream: Any = None) -> Any:
    """softmax(score(scale q k^T)) v of each head, with float32 sums; the same bits every time. PyTorch's autograd records it
    where q, k or v requires a gradient (`gemmkit.torch.attention`).

    Args:
        q: (batch, heads, queries, head size), float16 or bfloat16. Head sizes are multiples of 8: up to 576 of q and k, and
            up to 512 of v.
        k: (batch, heads, keys, head size), of q's dtype. Its heads divide q's: head h of q uses head h // (q's heads / k's).
            A batch of 1 serves all. Of all three the head size is contiguous, and rows begin at multiples of 4 bytes; where
            they begin at multiples of 16 bytes, and strides are positive or 0, Hopper takes about half of the time.
        v: (batch, heads, keys, its own head size), of k's dtype; its heads divide q's, too. A view of the first columns of
            a k that is wider than 256, ``k[..., :512]``, is not loaded a second time.
        mask: a `gemmkit.masks.Mask`, such as ``Causal()``, ``Window(1024)``, ``Documents(...)`` or your own;
            None hides nothing.
        score: a function ``f(s, m, n)``, ``f(s, m, n, head)`` or ``f(s, m, n, head, batch)`` of a scaled score, its query
            and its key, or a `gemmkit.masks.Score`; None leaves scores as they are.
        scale: the factor of q k^T; None for one over the root of the head size. A run-time number.
        layout: "bhnd", or "bnhd" for (batch, rows, heads, head size), of q, k, v and the result.
        lengths: ``(q_offsets, k_offsets)`` for packed sequences: sequence i has rows ``offsets[i]`` to ``offsets[i + 1]``.
            The arrays then have no batch axis, places count from each sequence's start, and the batch that a score and a
            mask receive is the sequence. Offsets are arrays of q's GPU, int32 or int64, which the host never reads: rows
            of no sequence are not written. Or they are lists or NumPy arrays, which are checked, and copied there in the
            order of the stream.
        key_starts: (batch,), the first key that each of the batch has, as of prompts that are padded on the left; lists or
            arrays as for lengths. Keys in front of it are not there, and not loaded. Keys keep their numbers.
        key_lengths: (batch,), the number behind the last key that each of the batch has; lists or arrays as for lengths. The
            other keys are not there: a causal mask's last query sees the last one that is.
        pages: (batch, pages of each), in which pages of a cache the keys of each of the batch are; an array or lists as for
            lengths. k and v then have pages for a batch, (pages, heads, rows of a page, head size) or with "bnhd" (pages,
            rows of a page, heads, head size), of a multiple of 8 rows: key n is row n % rows of page ``pages[batch, n //
            rows]``. Pages behind a length are not looked up.
        out: an array of the result's shape and dtype, of any strides, to write; None makes one.
        return_lse: whether to return the logarithms of the sums of exponentials, too: float32, (batch, heads, queries), or
            (heads, queries) with lengths.
        stream: the stream to launch on; None for the library's current one.

    Returns: ``out``, of q's shape with v's head size, or ``(out, lse)``. A query that sees no key gets zeros, and -inf. A
    key that is hidden has weight 0, so that its v must be finite, as with any softmax that multiplies by 0. The 127 rows of
    v behind a sequence's last key are such keys, too.

    Raises:
        TypeError: q, k, v or out is no array, of another dtype, or on the host outside of `gemmkit.emulate`; mask or score
            is none; lengths are no whole numbers.
        ValueError: shapes do not fit each other, heads do not divide, no kernel can load the strides, out overlaps an
            operand, an array of a mask or a score requires a gradient, out or stream is given where one of q, k and v does,
            offsets decrease, or scale is not finite or above 2.36e38.
        ConfigError: another head size; a GPU of a compute capability below 8.0, or whose shared memory wide heads do not fit
            in: 576 columns take 111 KB, which 8.0 and 9.0 have, and 8.6, 8.9 and 12.0 have not.
        ComponentError: code of the mask or the score cannot be compiled.

    >>> import numpy as np, gemmkit as gk
    >>> q = k = v = np.eye(2, 64, dtype=np.float16)[None, None]
    >>> with gk.emulate():
    ...     out, lse = gk.attention(q, k, v, score=lambda s, m, n: 0.0 * s, return_lse=True)
    >>> out[0, 0, :, :2].tolist(), lse.round(4).tolist()
    ([[0.5, 0.5], [0.5, 0.5]], [[[0.6930999755859375, 0.6930999755859375]]])
    """
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ValueError(f'layout={layout!r}: "bhnd" or "bnhd" is needed')
    check_flag(return_lse, "attention", "return_lse")
    try:
        lse = _logarithms(q, layout, lengths is not None) if return_lse and current_mode() is None else None
        seen = None
        if lse is not None or not return_lse:
            seen = quickly(q, k, v, mask, score, scale, layout, lengths, key_starts, key_lengths, pages, lse)
        if seen is not None:
            rest, given, behind, held = seen
            result = _calls.again(rest, given, behind, held, out, stream)
            if result is not None:
                return (result, lse) if return_lse else result
        of_keys = {"key_starts": key_starts, "key_lengths": key_lengths, "pages": pages}
        return _attention(q, k, v, mask, score, scale, layout, lengths, of_keys, out, return_lse, lse, stream, seen)
    except RequiresGradient:                           # nothing has been launched or written
        if not any(getattr(x, "requires_grad", False) for x in (q, k, v)):
            raise                                      # a component's tensor, or out itself
    recording = import_module("gemmkit.torch.attention")             # which imports PyTorch, and calls this function
    return recording.recorded(q, k, v, out, stream, mask=mask, score=score, scale=scale, layout=layout, lengths=lengths,
                              key_starts=key_starts, key_lengths=key_lengths, pages=pages, return_lse=return_lse)


def _attention(q: Any, k: Any, v: Any, mask: Any, score: Any, scale: Any, layout: str, lengths: Any, of_keys: dict[str, Any],
               out: Any, return_lse: bool, lse: Any, stream: Any, known_by: Seen | None) -> Any:
    """A call that is not known. ``lse``: an array for the logarithms, if there is one already."""
    rule, change = mask_given(mask), score_given(score)
    packed, handle = lengths is not None, None if stream is None else as_stream_handle(stream)
    operands = operands_of(describe(q, "q"), describe(k, "k"), describe(v, "v"), layout, packed,
                           of_keys["pages"] is not None)
    counted = _lengths(lengths, of_keys, operands)
    keys = keys_of(operands, counted)
    factor = 1 / math.sqrt(operands.head_dim) if scale is None else _scale(scale)
    if not packed:
        for part in (rule, change):
            part.check(operands.queries, keys, operands.heads, operands.batch)
    held = [(name, one) for name, part in (("mask", rule), ("score", change)) for one in arrays_of(part)]
    check_places({"q": operands.q, **{one.name: one.info for _, one in held}})
    if keys and math.prod(operands.q.shape):
        check_loadable(operands)
    shape = *describe(q, "q").shape[:-1], operands.v.shape[3]
    result = empty_like(q, shape, operands.q.dtype) if out is None else out
    given = describe(result, "out")
    check_places({"q": operands.q, "out": given})
    seen = as_heads(given, "out", layout, packed)
    check_out(seen, operands, given)
    check_held(held, {"q": operands.q, "k": operands.k, "v": operands.v, "out": given})
    if return_lse and lse is None:
        lse = empty_like(q, operands.q.shape[packed:3], np.dtype(np.float32))
    call = AttentionCall(operands, seen, None if lse is None else _lse(lse, packed), rule, change, factor, counted, keys)
    if math.prod(operands.q.shape):
        run_attention(call, {"q": q, "k": k, "v": v, "out": result, "lse": lse}, handle, known_by, out)
    return (result, lse) if return_lse else result


def _lengths(lengths: Any, of_keys: dict[str, Any], operands: AttentionOperands) -> dict[str, Any]:
    """`AttentionCall.lengths`. Raises TypeError and ValueError for what does not fit the arrays."""
    given = {name: x for name, x in of_keys.items() if x is not None}
    if lengths is None:
        found = lengths_of(given, operands.q)
        for name, x in found.items():
            count = describe(x, name).shape[0]
            if count != operands.batch:
                raise ValueError(f"{name} has {count} elements and q has a batch of {operands.batch}; both must be equal")
        if "pages" in given:
            if operands.keys % 8:
                raise ConfigError(f"k has pages of {operands.keys} rows; a multiple of 8 is needed")
            _check_pages(found["pages"], found.get("key_lengths"), operands)
        return found
    for name in given:
        raise ValueError(f"{name} and lengths are given, but packed sequences have lengths of their own; leave {name} out")
    if not isinstance(lengths, (tuple, list)) or len(lengths) != 2:
        raise TypeError(f"lengths={lengths!r}: a pair of offsets, of queries and of keys, is needed")
    found = lengths_of(dict(zip(("q_offsets", "k_offsets"), lengths)), operands.q)
    check_offsets(found, {"q_offsets": operands.queries, "k_offsets": operands.keys})
    return found


def _check_pages(pages: object, key_lengths: object, operands: AttentionOperands) -> None:
    """Raises ValueError for pages of the host that the cache does not have, in front of lengths of the host."""
    if not isinstance(pages, np.ndarray) or not (key_lengths is None or isinstance(key_lengths, np.ndarray)):
        return
    first, count = np.arange(pages.shape[1]) * operands.keys, operands.k.shape[0]
    wrong = (pages < 0) | (pages >= count)
    if key_lengths is not None:
        wrong &= first < key_lengths[:, None]
    for batch, n in np.argwhere(wrong)[:1]:
        raise ValueError(f"pages[{batch}, {n}] is {pages[batch, n]}, and k has {count} pages; pages behind key_lengths are "
                         "not looked up")


def mask_given(mask: Any) -> Mask:
    if mask is None:
        return EVERYTHING
    if not isinstance(mask, Mask):
        what = f"the class {mask.__name__}" if isinstance(mask, type) else f"a {type(mask).__name__}"
        raise TypeError(f"mask is {what}; a gemmkit.masks.Mask is needed, such as Causal(); for a function or an array of "
                        "truth values write a class of one with visible(self, m, n)")
    _ = mask.arities                                                    # refuses other numbers of arguments
    return mask


def score_given(score: Any) -> Score:
    if score is None:
        return PLAIN
    made = score if isinstance(score, Score) else ScoreFunction(score)
    _ = made.arity
    return made


def check_rules(mask: object, score: object, scale: object) -> None:
    """Raise TypeError and ValueError for what is no mask, no score and no scale."""
    mask_given(mask)
    score_given(score)
    if scale is not None:
        _scale(scale)


def _scale(scale: Any) -> float:
    number = finite_number(scale, "scale")
    if abs(number) > LARGEST:
        raise ValueError(f"scale={scale!r}: scores are computed in float32 with scale log2(e), so scale may be at most "
                         f"{LARGEST:.3g}")
    return number


def _logarithms(q: Any, layout: str, packed: bool) -> Any:
    """An array of (batch, heads, queries), or without a batch; None for a q that is none."""
    shape = getattr(q, "shape", ())
    if type(q) not in KEYS or len(shape) != 4 - packed:
        return None
    return empty_like(q, [shape[layout.index(axis) - packed] for axis in "bhn"[packed:]], np.dtype(np.float32))


def _lse(lse: Any, packed: bool) -> Any:
    info = describe(lse, "lse")
    return info._replace(shape=(1, *info.shape), strides=(0, *info.strides)) if packed else info
