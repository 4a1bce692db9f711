"""Gradients that `gemmkit.torch` asks for: of norms, and of attention.

Those of layer norms and RMS norms read x and the gradient of the result once (`gemmkit.kernels.norm_gradients`).

`gemmkit.torch` calls it with tensors that it has checked. dgamma and dbeta are summed by blocks of rows, and then over
blocks, in one order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from gemmkit import components
from gemmkit import programs as gp
from gemmkit.components import freeze
from gemmkit.emulator import current_mode
from gemmkit.functions.attention import scores, stacks_of
from gemmkit.functions.rows import frozen_rows
from gemmkit.kernels.masks import Mask, OfLengths, PlainScores, Score, seen_from_keys
from gemmkit.kernels.norm_gradients import ADDING, AddingSpec, NormGradientsSpec, add_blocks, norm_gradients
from gemmkit.kernels.rows import LANES, BlockTeam, RegisterRow, RowSource, StreamedRow
from gemmkit.lang.errors import ConfigError
from gemmkit.lang.functions import Frozen, freeze_array, freeze_scalar
from gemmkit.plans.launch import KnownCall, KnownCalls, Launch, Put, cache, launch_of
from gemmkit.programs.decorated import program
from gemmkit.programs.mapping import Mapping, kernel_of
from gemmkit.programs.values import Parameter
from gemmkit.runtime.arrays import ArrayInfo, allocator, describe, empty_like
from gemmkit.runtime.device import DeviceInfo, launch_stream, target
from gemmkit.runtime.launch import Launchable
from gemmkit.tuning.problems import WORDS, Choice, MappingProblem, choose

F32 = np.dtype(np.float32)
EACH = 16                              # elements of a row that a thread has of x, and of g
WHOLE = 1024                           # threads of the largest block, which have half as many registers
HELD = WHOLE * EACH                    # columns that a block can hold
IN_REGISTERS = 64                      # elements that a thread has there, of rows and of sums
RESIDENT = 512                         # threads of a multiprocessor, with as many registers as these need
ROWS_OF_A_BLOCK = 4                    # at least: what blocks leave is read again


class NormMapping(NamedTuple):
    """``warps`` of a row, ``blocks`` at most, how many of them a multiprocessor has, and whether rows are copied ahead."""

    warps: int
    blocks: int
    per_sm: int
    ahead: bool

    @classmethod
    @lru_cache(1024)
    def of(cls, count: int, columns: int, device: DeviceInfo) -> NormMapping:
        """That of so many rows of so many columns.

        >>> from gemmkit.runtime.device import H100
        >>> NormMapping.of(8192, 4096, H100)
        NormMapping(warps=8, blocks=264, per_sm=2, ahead=True)
        """
        warps = 1
        while warps * LANES < WHOLE and warps * LANES * EACH < columns:
            warps *= 2
        per_sm = max(1, min(device.max_blocks_per_sm // 2, RESIDENT // (warps * LANES)))
        blocks = min(-(-count // ROWS_OF_A_BLOCK), device.sm_count * per_sm)
        return cls(warps, max(1, blocks), per_sm, True)


class NormProblem(MappingProblem):
    """Gradients of a norm of the rows of ``x``, by those of its result, ``grad``, stored into ``dx``; with ``totals`` sums
    of columns. Rows are copied ahead where they can be, and where there is memory for them."""

    def __init__(self, grad: ArrayInfo, x: ArrayInfo, dx: ArrayInfo, scaled: bool, centred: bool, totals: int):
        self.arrays, self.scaled, self.centred, self.totals = (grad, x, dx), scaled, centred, totals

    def candidates(self, device: DeviceInfo) -> Iterator[NormMapping]:
        first = NormMapping.of(*self.arrays[1].shape, device)
        yield from (first, first._replace(ahead=False))

    def specialise(self, mapping: NormMapping, device: DeviceInfo) -> Choice:
        grad, x, dx = self.arrays
        columns = x.shape[1]
        vector = math.gcd(columns, WORDS // max(info.dtype.itemsize for info in self.arrays)) or 1
        threads, pieces = mapping.warps * LANES, -(-columns // vector)
        held = -(-pieces // threads)
        if mapping.ahead and not (columns <= HELD and all(_is_copied(info, vector) for info in (grad, x))):
            raise ConfigError("rows are not copied ahead by 16 bytes")
        source: RowSource = RegisterRow(held, pieces // threads) if columns <= HELD else StreamedRow()
        most = IN_REGISTERS // 2 if threads == WHOLE else IN_REGISTERS
        in_registers = columns <= HELD and held * vector * (2 + self.totals) <= most
        spec = NormGradientsSpec(BlockTeam(mapping.warps, F32), source, vector, F32, self.centred, self.scaled,
                                 self.totals, in_registers, mapping.ahead, (x.dtype, grad.dtype), dx.dtype,
                                 device.starts_early)
        if spec.shared_bytes(columns) > device.shared_memory_per_block:
            raise ConfigError(f"sums of {columns} columns take {spec.shared_bytes(columns)} bytes of shared memory; the "
                              f"device has {device.shared_memory_per_block}")
        return Choice((spec, mapping))


class NormGradients:
    """The two kernels, and their arguments. ``of_gamma`` and ``of_beta`` are None where they are not wanted, and ``gamma``
    where there is none."""

    def __init__(self, grad: ArrayInfo, x: ArrayInfo, dx: ArrayInfo, eps: float, centred: bool, *,
                 gamma: ArrayInfo | None = None, sums: ArrayInfo | None = None, of_gamma: ArrayInfo | None = None,
                 of_beta: ArrayInfo | None = None):
        device, (count, columns) = target(x.device), x.shape
        totals = (of_gamma is not None) + (of_beta is not None)
        problem = NormProblem(grad, x, dx, gamma is not None, centred, totals)
        self.spec, how = choose(problem, device).spec
        self.shape, self.blocks, self.eps = (count, columns), how.blocks, eps
        dependent = self.spec.starts_early
        given = [frozen_rows(grad), frozen_rows(x), _vector(gamma or x._replace(shape=(columns,), strides=(1,))),
                 frozen_rows(dx, False), frozen_rows(sums or dx, False)]
        self.arguments = [freeze(self.spec), *given, freeze_scalar(count), freeze_scalar(columns),
                          freeze_scalar(np.float32(eps))]
        self.launchable = Launchable(norm_gradients, self.arguments, how.warps * LANES, how.blocks, device, x.device,
                                     self.spec.shared_bytes(columns), blocks_per_sm=how.per_sm, dependent=dependent)
        self.adding: Launchable | None = None
        if sums is not None and of_gamma is not None:
            outs = [_vector(of_gamma, False), _vector(of_beta or of_gamma, False)]
            self.adding_spec = AddingSpec(dependent)
            self.adding = Launchable(add_blocks, [freeze(self.adding_spec), frozen_rows(sums), *outs,
                                                  freeze_scalar(how.blocks), freeze_scalar(columns)],
                                     ADDING * LANES, totals * -(-columns // LANES), device, x.device,
                                     ADDING * LANES * F32.itemsize, dependent=dependent)

    def launch(self, names: tuple[str, ...]) -> Launch:
        """Of calls that bring dx, then arrays of these names, then eps."""
        places = {"dx": 0, **{name: n for n, name in enumerate(names, 1)}}

        def puts(kernel: Launchable, arguments: dict[str, int]) -> list[Put]:
            return [Put(slot, places[name]) for name, n in arguments.items()
                    if name in places and (slot := kernel.slot(n)) is not None]

        at_eps = self.launchable.slot(8)
        assert at_eps is not None
        first = puts(self.launchable, {"grad": 1, "x": 2, "gamma": 3, "dx": 4, "sums": 5})
        first.append(Put(at_eps, len(places), encoder=components.number))
        behind = () if self.adding is None else (
            Launch(self.adding, puts(self.adding, {"sums": 1, "of_gamma": 2, "of_beta": 3})),)
        return Launch(self.launchable, first, behind=behind)

    # -- without a GPU (`gemmkit.emulator`) ----------------------------------------------------------------------------

    def filled(self, arrays: dict[str, Any]) -> list[Any]:
        return [array for name, array in arrays.items() if name not in READ]

    def emulated(self, arrays: dict[str, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        def views(arguments: Sequence[Frozen], names: tuple[str, ...], read: tuple[str, ...]) -> list[Any]:
            found = []
            for name, frozen in zip(names, arguments):
                how = dict(readonly=True) if name in read else dict(written=False)
                info, kind = frozen.arrays[0], frozen.kind
                array = arrays.get(name)
                found.append(None if array is None else arena.view_of(info, array, name, kind.unit, kind.alignment, **how))
            return found

        given = views(self.arguments[1:6], ("grad", "x", "gamma", "dx", "sums"), READ)
        yield self.launchable, (self.spec, *given, *self.shape, np.float32(self.eps))
        if self.adding is not None:
            outs = views(self.adding.arguments[1:4], ("sums", "of_gamma", "of_beta"), ("sums",))
            yield self.adding, (self.adding_spec, *outs, self.blocks, self.shape[1])


READ = "grad", "x", "gamma"


def norm_gradients_of(grad: Any, x: Any, gamma: Any, eps: float, centred: bool, of_gamma: Any = None,
                      of_beta: Any = None) -> Any:
    """dx, a new matrix like x; dgamma and dbeta are stored into ``of_gamma`` and ``of_beta``, where these are given.

    Args:
        grad, x: (M, N) float16, bfloat16 or float32, M and N above 0, on one device.
        gamma: (N,) of these dtypes, or None.
        eps: what is added to the variance, or to the mean of squares.
        centred: whether it is a layer norm.
        of_gamma, of_beta: arrays (N,); of_beta is given with of_gamma alone.

    Raises ConfigError if sums of so many columns fit no block (from 28,000 for both on Hopper).

    >>> x, grad, gamma = np.float32([[1, 3]]), np.float32([[1, 0]]), np.ones(2, np.float32)
    >>> from gemmkit.emulator import emulate
    >>> of_gamma = np.empty(2, np.float32)
    >>> with emulate():
    ...     dx = norm_gradients_of(grad, x, gamma, 0.0, False, of_gamma)
    >>> dx.astype(float).round(2).tolist(), of_gamma.astype(float).round(2).tolist()
    ([[0.4, -0.13]], [0.45, 0.0])
    """
    named = [("x", x), ("grad", grad), ("gamma", gamma), ("of_gamma", of_gamma), ("of_beta", of_beta)]
    mode, totals = current_mode(), (of_gamma is not None) + (of_beta is not None)
    if totals:
        named.append(("sums", _space(x, totals)))
    names, arrays = zip(*[(name, array) for name, array in named if array is not None])
    rest = centred, names
    if mode is None:
        found = _calls.again(rest, arrays, (eps or components.exact(eps),))
        if found is not None:
            return found
    infos = {name: describe(array, name) for name, array in zip(names, arrays)}
    dx = empty_like(x, x.shape, infos["x"].dtype)
    infos["dx"] = given = describe(dx, "dx")

    def made() -> NormGradients:
        given = {name: infos.get(name) for name in ("gamma", "sums", "of_gamma", "of_beta")}
        return NormGradients(infos["grad"], infos["x"], infos["dx"], eps, centred, **given)

    if mode is not None:
        mode.run(made(), {**dict(zip(names, arrays)), "dx": dx})
        return dx
    key = norm_gradients, centred, *((name, info[1:6], info.pointer % WORDS) for name, info in infos.items())
    start = launch_of(key, lambda current: made().launch(names), "norm_gradients").start
    brought = given.pointer, *(infos[name].pointer for name in names), eps or components.exact(eps)
    start(launch_stream(infos["x"], None), brought)
    _calls.keep(rest, arrays, (), None, lambda: KnownCall(start, given))
    return dx


def _space(x: Any, totals: int) -> Any:
    """An array for the sums of blocks."""
    key = totals, x.shape, x.dtype, getattr(x, "device", None)
    allocate = None if current_mode() is not None else _spaces.get(key)
    if allocate is None:
        info = describe(x, "x")
        shape = totals * NormMapping.of(*info.shape, target(info.device)).blocks, info.shape[1]
        if current_mode() is not None:
            return empty_like(x, shape, F32)
        allocate = _spaces.keep(key, allocator(info, shape, F32)[0])
    return allocate()


_calls, _spaces = KnownCalls(), cache()


def _is_copied(info: ArrayInfo, vector: int) -> bool:
    """Whether a thread copies pieces of its rows by 16 bytes."""
    return (vector * info.dtype.itemsize == WORDS and info.pointer % WORDS == 0 and info.strides[1] == 1
            and info.strides[0] * info.dtype.itemsize % WORDS == 0)


def _vector(info: ArrayInfo, readonly: bool = True) -> Frozen:
    return freeze_array(info, 0 if info.strides[0] == 1 or info.shape[0] == 1 else None, readonly=readonly)


# --------------------------------------------------------------------------------------------------
# The gradients of attention: those of q in one program, those of k and v in another, as FlashAttention 2 has them.
#
#     S = scale Q K^T,  T = score(S),  P = exp(T - lse),  O = P V
#     dV = P^T dO,   dP = dO V^T,   delta = rowsum(dO * O) - dlse,   dT = P * (dP - delta)
#     dS = dT * score'(S),   dQ = scale dS K,   dK = scale dS^T Q
#
# Nothing of the size of S is stored: both programs compute S anew. The one has tiles of queries and rounds over keys, the
# other tiles of keys and rounds over queries. Each element of a result has one writer, so that results are the same bits
# every time.
#
# A head of k and v that several heads of q share has a tile for each of these: a tile's head is then q's, as masks and
# scores are told, and a tile's rounds are those of one head. Their results are float32, and are added up in the order of
# the heads. Source: Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023.

# --------------------------------------------------------------------------------------------------
# The programs. Their arguments are those of `gemmkit.functions.attention.softmax_attention`, and lse, what it has returned.

@program
def row_sums(delta: Parameter, shift: Parameter, do: Parameter, out: Parameter, lse: Parameter,
             dlse: Parameter | None) -> None:
    """What the softmax takes from all scores of a row; a change of lse changes them by the weights themselves. And what
    their exponents are shifted by, which rounds then need not test: 4 instructions less for each of a thread's columns."""
    for b, h, m in gp.parallel(*do.counts, do.rows):
        sums = (do[b, h, m] * out[b, h, m]).sum(axis=1)
        delta[b, h, m] = sums if dlse is None else sums - dlse[b, h, m]
        shift[b, h, m] = gp.finite(lse[b, h, m])


@program
def gradient_of_queries(dq: Parameter, q: Parameter, k: Parameter, v: Parameter, do: Parameter, lse: Parameter,
                        delta: Parameter, q_offsets: Parameter | None, k_offsets: Parameter | None,
                        key_lengths: Parameter | None, scale: float, mask: Mask | None, score: Score | None,
                        slope: Score | None, k_stacks: str, v_stacks: str, k_share: int, v_share: int) -> None:
    queries = None if q_offsets is None else gp.packed(q.rows, q_offsets)
    tiles = (*q.counts, q.rows) if queries is None else (queries.count, *q.counts, queries.rows)
    for b, h, m in gp.parallel(*tiles):
        at = (b, h, m) if queries is None else (h, m)
        k_of, v_of = stacks_of(b, h, k_stacks, k_share), stacks_of(b, h, v_stacks, v_share)
        keys = k.rows if k_offsets is None else gp.packed(k.rows, k_offsets)[b]
        sums = gp.zeros(m, k.columns)
        for n in gp.sequential(keys, stop=None if key_lengths is None else key_lengths[b]):
            s = scale * (q[at] @ k[(*k_of, n)].T)
            p = gp.exp(scores(s, m, n, h, b, mask, score) - gp.finite(lse[at]))
            dp = do[at] @ v[(*v_of, n)].T
            ds = _by_slope(p * (dp - delta[at]), s, m, n, h, b, mask, slope)
            sums += ds.astype(k.dtype) @ k[(*k_of, n)]
        dq[at] = scale * sums


@program
def gradients_of_keys(dk: Parameter | None, dv: Parameter | None, q: Parameter, k: Parameter, v: Parameter, do: Parameter,
                      shift: Parameter, delta: Parameter, q_offsets: Parameter | None, k_offsets: Parameter | None,
                      key_lengths: Parameter | None, scale: float, mask: Mask | None, score: Score | None,
                      slope: Score | None, k_stacks: str, v_stacks: str, k_share: int, v_share: int,
                      sums_q: Parameter | None = None) -> None:
    """``mask`` is `seen_from_keys`. Of dk and dv one may be None. Tiles add dS K to ``sums_q`` in any order."""
    pieces = None if k_offsets is None else gp.packed(k.rows, k_offsets)
    tiles = (*q.counts, k.rows) if pieces is None else (pieces.count, *q.counts, pieces.rows)
    for b, h, n in gp.parallel(*tiles):
        at, stacks = ((b, h, n), (b, h)) if pieces is None else ((h, n), (h,))
        k_of, v_of = stacks_of(b, h, k_stacks, k_share), stacks_of(b, h, v_stacks, v_share)
        queries = q.rows if q_offsets is None else gp.packed(q.rows, q_offsets)[b]
        sums_k, sums_v = dk is not None and gp.zeros(n, q.columns), dv is not None and gp.zeros(n, do.columns)
        for m in gp.sequential(queries):
            s = scale * (k[(*k_of, n)] @ q[(*stacks, m)].T)
            p = gp.exp(scores(s, m, n, h, b, mask, score) - shift[(*stacks, m)])
            if dv is not None:
                sums_v += p.astype(v.dtype) @ do[(*stacks, m)]
            if dk is not None:
                dp = v[(*v_of, n)] @ do[(*stacks, m)].T
                ds = _by_slope(p * (dp - delta[(*stacks, m)]), s, m, n, h, b, mask, slope).astype(k.dtype)
                if sums_q is not None:
                    sums_q[(*stacks, m)] += ds.T @ k[(*k_of, n)]
                sums_k += ds @ q[(*stacks, m)]
        for result, sums in ((dk, dk is not None and scale * sums_k), (dv, sums_v)):
            if result is not None:                     # what lies behind a length is no key, whatever is there
                result[at] = sums if key_lengths is None else gp.where(gp.place(n) < key_lengths[b], sums, 0.0)


@program
def scaled_sums(dq: Parameter, sums: Parameter, scale: float) -> None:
    for b, h, m in gp.parallel(*sums.counts, sums.rows):
        dq[b, h, m] = scale * sums[b, h, m]


def _by_slope(dt: Any, s: Any, m: Any, n: Any, h: Any, b: Any, mask: Any, slope: Any) -> Any:
    """The gradient of scaled products from that of scores; a hidden one has none, whatever the score does there."""
    if slope is None:
        return dt
    ds = dt * gp.call(slope, s, m, n, h, b)
    return ds if mask is None else gp.where(mask, ds, 0.0)


# --------------------------------------------------------------------------------------------------
# What is launched: sums of rows, the gradient of q, those of k and v.

WIDEST_OF_BOTH = 256                   # head sizes of k and v together whose gradients one launch has the registers for
SHORT_HEAD, LONG_HEAD = 64, 128        # head sizes of k whose tiles add to dq: up to the one, or the other
IN_ORDER, IN_ANY_ORDER = Mapping(ordered=True), Mapping(ordered=False)
WIDE_ROWS = 2048                       # columns of rows that sums are converted as
KEYS_OF_A_TILE = 128
LEAST_VISITED = 1280                   # rows that a tile visits: of 1024 causal rows two kernels took 599 us, and one 687


#: Masks, scores and head sizes of which this is known: to find it out takes 10 ms a call.
_without_room: set[tuple[Any, ...]] = set()


class Rules(NamedTuple):
    """What a call of attention was given beside its arrays. ``offsets``: of queries and of keys in packed sequences; they
    and ``key_lengths`` are where the arrays are."""

    mask: Mask
    score: Score
    slope: Score | None                # `gemmkit.functions.slope.slope_of` the score
    scale: float
    layout: str = "bhnd"
    offsets: tuple[Any, Any] | None = None
    key_lengths: Any = None
    deterministic: bool = True         # else dq may be added up in any order (`pays`)


def adds_queries(given: list[ArrayInfo]) -> bool:
    """Whether the tiles of keys add the gradient of q, by TMA: on Hopper, of heads that the sums of a round have registers
    for. Else there are two kernels, and their results are the same bits every time."""
    _, size, width, _ = (info.shape[-1] for info in given)
    kernel = kernel_of(IN_ANY_ORDER, target(given[0].device))
    fits = max(size, width) <= SHORT_HEAD or size == LONG_HEAD >= width
    return fits and kernel.uses_tma and all(kernel.why_not(x) is None for x in given)


def pays(rules: Rules, q: Any, columns: int) -> bool:
    """Whether one kernel takes less time than two: tiles visit enough rows, and they add the gradient of q in any order or
    hardly wait for each other. They do not if those of a head run at once, and each begins at rows of its own."""
    everything = rules.mask.is_everything and rules.key_lengths is None and rules.offsets is None
    visited: int = q.shape[-2] if everything else q.shape[-2] // 2
    if visited < LEAST_VISITED or not rules.deterministic:
        return visited >= LEAST_VISITED
    return everything and columns <= KEYS_OF_A_TILE * target(describe(q, "q").device).sm_count


def gradients(rules: Rules, do: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, dlse: Any = None,
              needed: tuple[bool, ...] = (True, True, True), stream: Any = None) -> list[Any]:
    """The gradients of q, k and v, each of its array's shape and dtype, from those of ``out`` and (None: zero) of ``lse``;
    None of what is not ``needed``. Arrays and rules are those of a call of `gemmkit.attention`, with what it returned."""
    packed = rules.offsets is not None
    dtype = describe(q, "q").dtype
    made: list[Any] = [empty_like(q, x.shape, dtype) if is_needed else None for x, is_needed in zip((q, k, v), needed)]
    do, q, k, v, out, dq, *dkv = (None if x is None else _by_heads(x, rules.layout) for x in (do, q, k, v, out, *made))
    columns = k.shape[-2]
    is_nothing = not columns or not math.prod(q.shape)
    if packed or is_nothing:                           # rows that are in no sequence
        for x in made:
            _put(x, 0)
    if is_nothing:
        return made
    delta, shift = (empty_like(q, lse.shape, F32) for _ in range(2))
    may_add = dq is not None and dkv[0] is not None and pays(rules, q, columns)
    needs = type(rules.mask), type(rules.score), q.shape[-1], v.shape[-1], dtype, rules.deterministic
    is_added = may_add and needs not in _without_room and adds_queries([describe(x, "x") for x in (q, k, v, do)])
    sums = empty_like(q, made[0].shape, F32) if is_added else None
    _put(sums, 0)
    row_sums(*(x[None] if packed and x is not None else x for x in (delta, shift, do, out, lse, dlse)), stream=stream)
    (of_k, k_stacks, k_share), (of_v, v_stacks, v_share) = (_own_stacks(x, q, packed) for x in (k, v))
    offsets = rules.offsets or (None, None)
    mask = None if rules.mask.is_everything else rules.mask
    score = None if isinstance(rules.score, PlainScores) else rules.score
    scored = score, rules.slope, k_stacks, v_stacks, k_share, v_share
    seen = None if mask is None else seen_from_keys(mask)
    if rules.key_lengths is not None:
        seen = OfLengths(seen_from_keys(rules.mask), rules.key_lengths, columns)
    partial: list[Any] = [x if x is None or x.shape[:-2] == q.shape[:-2] else
                          empty_like(q, (*q.shape[:-2], *x.shape[-2:]), F32) for x in dkv]     # of each head of q
    if packed:
        for x in partial:
            _put(x, 0)
    given = q, of_k, of_v, do, shift, delta, *offsets, rules.key_lengths, rules.scale, seen, *scored
    if sums is not None:
        try:
            gradients_of_keys(*partial, *given, _by_heads(sums, rules.layout),
                              mapping=IN_ORDER if rules.deterministic else IN_ANY_ORDER, stream=stream)
        except ConfigError:                            # a score or a mask that needs more registers than a round has left
            sums = None
            _without_room.add(needs)
    if sums is not None:
        wide = max(math.gcd(math.prod(sums.shape), WIDE_ROWS), q.shape[-1])
        scaled_sums(made[0].reshape(1, 1, -1, wide), sums.reshape(1, 1, -1, wide), rules.scale, stream=stream)
    elif dq is not None:
        gradient_of_queries(dq, q, of_k, of_v, do, lse, delta, *offsets, rules.key_lengths, rules.scale, mask, *scored,
                            stream=stream)
    together = partial if sum(x.shape[-1] for x in partial if x is not None) <= WIDEST_OF_BOTH else None
    for dk, dv in [together] if together else [(partial[0], None), (None, partial[1])]:
        if sums is None and (dk is not None or dv is not None):
            gradients_of_keys(dk, dv, *given, stream=stream)
    for result, of_heads in zip(dkv, partial):
        if result is not None and result is not of_heads:
            _put(result, _summed(of_heads, result.shape))
    return made


def _by_heads(x: Any, layout: str) -> Any:
    """A view (batch, heads, rows, head size), or without a batch."""
    return x if layout == "bhnd" else x.swapaxes(-2, -3)


def _own_stacks(x: Any, q: Any, packed: bool) -> tuple[Any, str, int]:
    """Keys or values without the axes of which they have one for all, the letters of the others, and how many heads of q
    share one of theirs."""
    info, letters = describe(x, "k"), "h" if packed else "bh"
    kept = [axis for axis, count in enumerate(q.shape[:-2]) if count == 1 or (info.shape[axis] > 1 and info.strides[axis])]
    for axis in reversed(range(len(letters))):
        if axis not in kept:
            x = x[(slice(None),) * axis + (0,)]
    heads = len(letters) - 1
    return x, "".join(letters[axis] for axis in kept), q.shape[heads] // info.shape[heads] if heads in kept else 1


def _put(x: Any, value: Any) -> None:
    if x is not None:
        x[...] = value


def _summed(of_heads: Any, shape: tuple[int, ...]) -> Any:
    """The sum over the heads of q that share one, and over the batch where all share it."""
    *stacks, heads, rows, columns = of_heads.shape
    of_heads = of_heads.reshape((*stacks, shape[-3], heads // shape[-3], rows, columns)).sum(-3)
    return of_heads if tuple(of_heads.shape) == tuple(shape) else of_heads.sum(0)[None]
