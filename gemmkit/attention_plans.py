"""Launches of attention: a mapping for the head size, a table of tiles for the blocks, kernels kept by kind."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit import kept
from gemmkit.attention_operands import Operands, Sequences
from gemmkit.compiled import Nothing
from gemmkit.component_arrays import arrays_of
from gemmkit.components import freeze
from gemmkit.config import ConfigError
from gemmkit.emulator.mode import current_mode
from gemmkit.kernels.attention.kernel import attention
from gemmkit.kernels.attention.mapping import Mapping, mappings
from gemmkit.kernels.attention.mapping import why_not as why_not_mapped
from gemmkit.kernels.attention.mma_kernel import attention_by_warps
from gemmkit.kernels.attention.mma_spec import BLOCK_N, MmaAttentionSpec
from gemmkit.kernels.attention.schedule import L2, Head, schedule
from gemmkit.kernels.attention.spec import AttentionSpec, HeadSpec
from gemmkit.kernels.attention.store import DirectOut
from gemmkit.kernels.attention.work import LOG2E, Sizes
from gemmkit.kernels.sm90.maps import Map
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.lang.references import is_gemmkit
from gemmkit.launch import Current, KnownCall, Launch, Put, Table, cache, launch_of
from gemmkit.masks import Everything, Mask, check_ranges
from gemmkit.problem import FLOAT32_MAX
from gemmkit.runtime import workspace
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.device import DeviceInfo, target
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.recognition import KEYS, key_if_given, key_of
from gemmkit.runtime.streams import launch_stream
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.scores import Plain, Score
from gemmkit.tuning.problems import Choice, MappingProblem, choose

HOPPER, LEAST = (9, 0), (8, 0)
NOWHERE = 2**30                        # a row beyond all: what TMA brings from there is 0
LARGEST = FLOAT32_MAX / LOG2E          # as a scale


class Quick(NamedTuple):
    """What is quickly seen of a call: what it is known by (None: it has to be described), the address of out (0: a new one),
    what else it brings, and an array like its result."""

    key: Any
    at_out: int
    brought: tuple[Any, ...]
    like: Any = None


UNKNOWN = Quick(None, 0, ())


class AttentionCall(NamedTuple):
    """A checked call."""

    operands: Operands
    out: ArrayInfo
    lse: ArrayInfo | None
    mask: Mask
    score: Score
    scale: float
    sequences: Sequences | None


def run_attention(call: AttentionCall, arrays: dict[str, Any], stream: int | None, quick: Quick = UNKNOWN) -> None:
    """Compute a call that has a result, on a stream (None: the library's current one), which is known as ``quick`` from then
    on."""
    if not call.operands.keys:                         # nothing to ask about: every row is empty
        call = call._replace(mask=Everything(), score=Plain())
    elif call.score.is_plain and call.scale <= 0:      # the largest score is not that of the largest product then
        call = call._replace(score=Plain(exact=True))
    mode = current_mode()
    if mode is not None:
        mode.run(AttentionLaunch(call), arrays)
        return
    _launch(launch_stream(call.operands.q, stream), call, quick)


class AttentionLaunch:
    """A kernel for arrays of one kind, its table of tiles, and its arguments."""

    def __init__(self, call: AttentionCall):
        operands, device = call.operands, target(call.operands.q.device)
        if device.arch < LEAST:
            raise ConfigError(f"attention runs on GPUs of compute capability 8.0 and later, and {device.name} has "
                              f"{device.arch[0]}.{device.arch[1]}; there gemmkit.matmul and gemmkit.softmax compute it in "
                              "steps")
        self.call = call
        self.spec: AttentionSpec | MmaAttentionSpec = choose(AttentionProblem(call), device).spec
        heads = tiles_of(call, self.spec)
        tiles = sum(len(head.lengths) for head in heads)
        by_tma = isinstance(self.spec, AttentionSpec)
        self.blocks = min(device.sm_count, tiles) if by_tma else tiles
        self.order = schedule(heads, self.spec.block_m, self._section, self.blocks)
        # Where there are no keys, K and V are read from beyond Q's rows.
        k, v = (operands.k, operands.v) if operands.keys else (operands.q, operands.q)
        self.infos: dict[str, ArrayInfo | None] = {"out": call.out, "lse": call.lse, "q": operands.q, "k": k, "v": v}
        self.maps = [(name, spec) for name, spec in zip(("q", "k", "v", "out"), self.spec.map_specs)
                     if name != "out" or self.spec.store.uses_tma]
        mapped = [name for name, _ in self.maps]
        #: The arrays that the kernel takes as views, in its order; None where it takes none.
        self.views = ["out" if "out" not in mapped else None, "lse" if call.lse is not None else None,
                      *(name for name in "qkv" if name not in mapped)]
        table = ArrayInfo(workspace.PLACES["places"], self.order.shape, (self.order.shape[1], 1), self.order.dtype, -1, True,
                          "workspace")
        views = [freeze(Nothing()) if name is None else _frozen(self.infos[name], name) for name in self.views]
        maps = [made.frozen for made in self.tensor_maps]
        if by_tma and len(maps) < len(self.spec.map_specs):
            maps.append(freeze(Nothing()))
        self.arguments = [freeze(self.spec), freeze(self.sizes), freeze_array(table, 1, 4, readonly=True), *views, *maps]
        self.launchable = Launchable(attention if by_tma else attention_by_warps, self.arguments, self.spec.threads,
                                     self.blocks, device, operands.q.device, self.spec.shared_bytes, dependent=by_tma,
                                     registers=self.spec.warpgroups.warp_registers)

    # -- without a GPU (`gemmkit.emulator.mode`) -----------------------------------------------------------------------

    def filled(self, arrays: dict[str, Any]) -> list[Any]:
        return [arrays[name] for name in ("out", "lse") if arrays[name] is not None]

    def emulated(self, arrays: dict[str, Any], arena: Any) -> Iterator[tuple[Launchable, tuple[Any, ...]]]:
        """Of q, k, v, out, and lse or None."""
        self.check_mask()
        views: dict[str, Any] = {}
        for name, info in self.infos.items():              # the results first: they say what has been written
            if info is not None:
                how = dict(written=False) if name in ("out", "lse") else dict(readonly=True)
                views[name] = arena.view_of(info, arrays[name], name, **how)
        order = arena.view(self.order, "order", 1, 4, readonly=True)
        maps: list[Any] = [arena.map(one, views[name]) for (name, _), one in zip(self.maps, self.tensor_maps)]
        maps += [None] * (len(self.spec.map_specs) - len(maps))
        given = [name and views[name] for name in self.views]
        yield self.launchable, (arena.component(self.spec), self.sizes, order, *given, *maps)

    def check_mask(self) -> None:
        """Ask a mask of the user's about every query and key (`gemmkit.masks.check_ranges`)."""
        operands, mask = self.call.operands, self.call.mask
        if self.call.sequences is None and not is_gemmkit(type(mask)):
            check_ranges(mask, operands.queries, operands.keys, operands.heads, operands.batch, self.spec.block_m)

    @property
    def _section(self) -> int:
        """Heads of Q whose K and V fit the L2 together."""
        operands = self.call.operands
        keys = max(1, operands.keys if self.call.sequences is None else max(np.diff(self.call.sequences.keys), default=1))
        return max(1, L2 // (4 * int(keys) * operands.head_dim)) * (operands.heads // operands.k.shape[1])

    @cached_property
    def sizes(self) -> Sizes:
        operands, scale = self.call.operands, self.call.scale
        k_share, v_share = (operands.heads // info.shape[1] for info in (operands.k, operands.v))
        k_batch, v_batch = (int(self.call.sequences is None and info.shape[0] > 1) for info in (operands.k, operands.v))
        return Sizes(operands.queries, operands.keys, np.float32(scale), np.float32(scale * LOG2E), k_share, v_share,
                     k_batch, v_batch, 0 if operands.keys else NOWHERE)

    @cached_property
    def tensor_maps(self) -> list[Map]:
        made = []
        for ordinal, (name, spec) in enumerate(self.maps):
            info = self.infos[name]
            assert info is not None
            made.append(Map(ordinal, ordinal, info, 3, spec))
        return made


class AttentionProblem(MappingProblem):
    """Mappings are Hopper's, or of other GPUs how many keys are taken at a time."""

    def __init__(self, call: AttentionCall):
        self.call = call

    def candidates(self, device: DeviceInfo) -> list[Any]:
        head_dim = self.call.operands.head_dim
        return mappings(head_dim, self.call.score) if device.arch == HOPPER else [BLOCK_N[head_dim]]

    def specialise(self, mapping: Mapping | int, device: DeviceInfo) -> Choice:
        call, is_packed = self.call, self.call.sequences is not None
        asked = call.mask, call.score
        heads = call.operands.q.dtype, call.operands.head_dim
        if isinstance(mapping, int):
            return Choice(MmaAttentionSpec(*asked, DirectOut(), *heads, mapping, call.lse is not None, is_packed))
        reason = why_not_mapped(mapping, call.score, is_packed)
        if reason is not None:
            raise ConfigError(reason)
        by_tma = not is_packed and why_not(call.out, 3) is None
        store = mapping.store if by_tma or not mapping.store.uses_tma else DirectOut()
        return Choice(AttentionSpec(*asked, store, *heads, mapping.block_n, call.lse is not None, is_packed,
                                    mapping.consumers, mapping.stages, mapping.q_stages, mapping.turns, mapping.joins_tiles,
                                    mapping.skips))


def _frozen(info: ArrayInfo | None, name: str) -> Frozen:
    assert info is not None
    return freeze_array(info, 3, readonly=True) if name in "qkv" else freeze_array(info)


# -- tiles ----------------------------------------------------------------------------------------------------------------

def tiles_of(call: AttentionCall, spec: HeadSpec) -> list[Head]:
    """The tiles of all heads, with how long they take: in blocks of keys, as far as the mask says so without its arrays."""
    operands = call.operands
    if call.sequences is None:
        lengths = _lengths(call.mask, spec, operands.queries, operands.keys)
        return [Head(lengths, (head, batch)) for batch in range(operands.batch) for head in range(operands.heads)]
    heads = []
    ranges = zip(call.sequences.queries, call.sequences.queries[1:], call.sequences.keys, call.sequences.keys[1:])
    for sequence, (q_begin, q_end, k_begin, k_end) in enumerate(ranges):
        queries, keys = q_end - q_begin, k_end - k_begin
        lengths = _lengths(call.mask, spec, queries, keys)
        heads += [Head(lengths, (head, sequence, queries, keys, q_begin, k_begin if keys else NOWHERE))
                  for head in range(operands.heads)]
    return heads


def _lengths(mask: Mask, spec: HeadSpec, queries: int, keys: int) -> list[float]:
    whole = float(max(1, -(-keys // spec.block_n)))
    starts = range(0, queries, spec.block_m)
    if mask.is_everything or any(True for _ in arrays_of(mask)):
        return [whole] * len(starts)
    try:
        ranges = [mask.visited(m, min(m + spec.block_m, queries), keys, 0, 0, keys - queries) for m in starts]
        return [float(max(1, -(-min(int(last), keys) // spec.block_n) - max(int(first), 0) // spec.block_n))
                for first, last in ranges]
    except Exception:                                  # the user's code, as Python: balance alone rests on it
        return [whole] * len(starts)


# -- on a GPU -------------------------------------------------------------------------------------------------------------

ARRAYS = "out", "q", "k", "v", "lse"   # what a call brings, in this order; then the scale, times 1 and log2(e)


def _launch(stream: int, call: AttentionCall, quick: Quick) -> None:
    held = kept.given_by(call.mask, call.score)
    of_mask = held.frozen[0]
    given = call.out, call.operands.q, call.operands.k, call.operands.v, call.lse
    pointers = [0 if info is None else info.pointer for info in given]
    if not call.operands.keys:
        pointers[2:4] = pointers[1], pointers[1]

    def made(current: Current) -> Launch:
        launch = AttentionLaunch(call._replace(mask=current(call.mask), score=current(call.score)))
        slots = [launch.launchable.slot(n) for n in range(len(launch.arguments))]
        assert slots[1] is not None and slots[2] is not None
        views = zip(slots[3:], launch.views)
        maps = zip(slots[3 + len(launch.views):], launch.maps, launch.tensor_maps)
        puts = [Put(slot, ARRAYS.index(name)) for slot, name in views if slot is not None and name is not None]
        puts += [Put(slot, ARRAYS.index(name), encoder=one.encoder) for slot, (name, _), one in maps if slot is not None]
        numbers = slots[1] + 2, slots[1] + 3, *held.slots                 # the scale, and what takes scores to powers of 2
        puts += [Put(slot, n, encoder=kept.number) for n, slot in enumerate(numbers, len(ARRAYS))]
        return Launch(launch.launchable, [*puts, Put(slots[2], len(ARRAYS) + len(numbers))], Table(launch.order))

    key = (attention, tuple(info and (*info[1:6], info.pointer % 16) for info in given), call.sequences, call.scale > 0,
           held.key, None if of_mask.arrays else tuple(value for _, value in of_mask.leaves))  # what the table rests on
    start = launch_of(key, made, f"{type(call.mask).__qualname__} or of the score").start
    start(stream, (*pointers, call.scale, call.scale * LOG2E, *held.brought))
    if quick.key is not None and call.operands.keys:
        known = _calls.get(quick.key) or _calls.keep(quick.key, KnownCall(start, quick.like))
        known.allow(quick.at_out, *quick.brought)


_calls = cache()


def quickly(q: Any, k: Any, v: Any, out: Any, mask: Any, score: Any, scale: Any, layout: str) -> Quick:
    """Of a call without packed sequences and sums."""
    if current_mode() is not None:
        return UNKNOWN
    at_q, of_q = KEYS.get(type(q), key_of)(q, "q")
    at_k, of_k = KEYS.get(type(k), key_of)(k, "k")
    at_v, of_v = KEYS.get(type(v), key_of)(v, "v")
    at_out, of_out = key_if_given(out, "out")
    key: list[Any] = [layout, of_q, of_k, of_v, of_out, at_q & 15, at_k & 15, at_v & 15, at_out & 15]
    held: list[Any] = []
    for rule in (mask, score):
        if rule is None:
            key.append(None)
        elif not isinstance(rule, (Mask, Score)):
            return UNKNOWN
        else:
            kept.seen(rule, key, held)
            if rule is mask:
                key += held            # numbers of a mask decide which blocks are visited
    if scale is None:
        scale = 1 / math.sqrt(q.shape[-1] if q.shape and q.shape[-1] else 1)
    elif type(scale) is not float or not -LARGEST <= scale <= LARGEST:
        return UNKNOWN
    key.append(scale > 0)
    return Quick(tuple(key), at_out, (at_q, at_k, at_v, 0, scale or abs(scale), scale * LOG2E or 0.0, *held))


def again(quick: Quick, q: Any, out: Any, stream: Any) -> Any:
    """The result of a call that is known; None for another one."""
    known: KnownCall | None = _calls.get(quick.key)
    return None if known is None else known.again(q, quick.at_out, quick.brought, out, stream)
