"""Launches of attention: a mapping for the head size, a table of tiles for the blocks, kernels kept by kind."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from gemmkit.attention_operands import Operands, Sequences
from gemmkit.compiled import Nothing
from gemmkit.component_arrays import arrays_of
from gemmkit.components import anew, freeze
from gemmkit.config import ConfigError
from gemmkit.emulator.mode import current_mode
from gemmkit.kernels.attention.kernel import attention
from gemmkit.kernels.attention.mapping import mapping_of
from gemmkit.kernels.attention.mma_kernel import attention_by_warps
from gemmkit.kernels.attention.mma_spec import BLOCK_N, MmaAttentionSpec
from gemmkit.kernels.attention.schedule import L2, Head, schedule
from gemmkit.kernels.attention.spec import AttentionSpec, HeadSpec
from gemmkit.kernels.attention.store import DirectOut
from gemmkit.kernels.attention.work import LOG2E, Sizes
from gemmkit.kernels.sm90.maps import Map
from gemmkit.lang.freezing import Frozen, freeze_array
from gemmkit.lang.references import is_gemmkit
from gemmkit.masks import Everything, Mask, check_ranges
from gemmkit.runtime import workspace
from gemmkit.runtime.arrays import ArrayInfo
from gemmkit.runtime.compile import CodeChanged
from gemmkit.runtime.device import target
from gemmkit.runtime.launchable import Launchable
from gemmkit.runtime.streams import launch_stream
from gemmkit.runtime.tensor_maps import why_not
from gemmkit.scores import Plain, Score

__all__ = ["AttentionCall", "AttentionLaunch", "run_attention"]

HOPPER, LEAST = (9, 0), (8, 0)
NOWHERE = 2**30                        # a row beyond all: what TMA brings from there is 0
_LIMIT = 1024                          # launches kept; beyond it the memory starts anew
_TRIES = 3                             # compilations that a change of code may interrupt


class AttentionCall(NamedTuple):
    """A checked call."""

    operands: Operands
    out: ArrayInfo
    lse: ArrayInfo | None
    mask: Mask
    score: Score
    scale: float
    sequences: Sequences | None


def run_attention(call: AttentionCall, arrays: dict[str, Any], stream: int | None) -> None:
    """Compute a call that has a result, on a stream; None: the library's current one."""
    if not call.operands.keys:                         # nothing to ask about: every row is empty
        call = call._replace(mask=Everything(), score=Plain())
    elif call.score.is_plain and call.scale <= 0:      # the largest score is not that of the largest product then
        call = call._replace(score=Plain(exact=True))
    mode = current_mode()
    if mode is not None:
        mode.run_attention(AttentionLaunch(call), arrays)
        return
    _launch(launch_stream(call.operands.q, stream), call)


class AttentionLaunch:
    """A kernel for arrays of one kind, its table of tiles, and its arguments."""

    def __init__(self, call: AttentionCall):
        operands, device = call.operands, target(call.operands.q.device)
        if device.arch < LEAST:
            raise ConfigError(f"attention runs on GPUs of compute capability 8.0 and later, and {device.name} has "
                              f"{device.arch[0]}.{device.arch[1]}; there gemmkit.matmul and gemmkit.softmax compute it in "
                              "steps")
        self.call = call
        self.spec = _hopper_spec(call) if device.arch == HOPPER else _warps_spec(call)
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
                                     self.blocks, device, operands.q.device, self.spec.shared_bytes, dependent=by_tma)

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


def _hopper_spec(call: AttentionCall) -> AttentionSpec:
    mapping = mapping_of(call.operands.head_dim, call.score, call.sequences is not None)
    by_tma = call.sequences is None and why_not(call.out, 3) is None
    store = mapping.store if by_tma or not mapping.store.uses_tma else DirectOut()
    return AttentionSpec(call.mask, call.score, store, call.operands.q.dtype, call.operands.head_dim, mapping.block_n,
                         call.lse is not None, call.sequences is not None, mapping.consumers, mapping.stages,
                         mapping.q_stages, mapping.turns, mapping.joins_tiles, mapping.skips)


def _warps_spec(call: AttentionCall) -> MmaAttentionSpec:
    head_dim = call.operands.head_dim
    return MmaAttentionSpec(call.mask, call.score, DirectOut(), call.operands.q.dtype, head_dim, BLOCK_N[head_dim],
                            call.lse is not None, call.sequences is not None)


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
    for number, (q_begin, q_end, k_begin, k_end) in enumerate(ranges):
        queries, keys = q_end - q_begin, k_end - k_begin
        lengths = _lengths(call.mask, spec, queries, keys)
        heads += [Head(lengths, (head, number, queries, keys, q_begin, k_begin if keys else NOWHERE))
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

@dataclass(frozen=True, eq=False)
class Bound:
    """A loaded kernel: its arguments, and where those stand that a call puts in. It stands for its table of tiles, too."""

    launch: Any
    values: tuple
    functions: slice                   # the mask's and the score's own values
    sizes: slice
    table: int
    order: np.ndarray
    arrays: tuple[tuple[int, str], ...]
    maps: tuple[tuple[int, str, Any], ...]


_bound: dict[Any, Bound] = {}


def _launch(stream: int, call: AttentionCall) -> None:
    rules = freeze(call.mask), freeze(call.score)
    leaves = [value for rule in rules for _, value in rule.leaves]
    arrays = {"q": call.operands.q, "k": call.operands.k, "v": call.operands.v, "out": call.out, "lse": call.lse}
    key = (tuple(info and (*info[1:6], info.pointer % 16) for info in arrays.values()), call.sequences, call.scale > 0,
           tuple((rule.kind, rule.fingerprint, tuple((info.shape, info.device) for info in rule.arrays)) for rule in rules),
           None if rules[0].arrays else tuple(value for _, value in rules[0].leaves))       # what the table rests on
    found = _bound.get(key)
    if found is None:
        if len(_bound) >= _LIMIT:
            _bound.clear()
        found = _bound[key] = _bind(call)
    values = list(found.values)
    values[found.functions] = leaves
    at = found.sizes.start + 2                         # the scale, and what takes scores to powers of 2
    values[at:at + 2] = float(np.float32(call.scale)), float(np.float32(call.scale * LOG2E))
    pointers = {name: info.pointer for name, info in arrays.items() if info is not None}
    if not call.operands.keys:
        pointers["k"] = pointers["v"] = pointers["q"]
    for slot, name in found.arrays:
        values[slot] = pointers[name]
    for slot, name, encoder in found.maps:
        values[slot] = encoder(pointers[name])
    with workspace.tables:
        values[found.table] = workspace.table(call.operands.q.device, stream, found, found.order)
        found.launch(stream, values)


def _bind(call: AttentionCall) -> Bound:
    for _ in range(_TRIES):
        made = AttentionLaunch(call)
        try:
            bound = made.launchable.bind()
        except CodeChanged:
            call = call._replace(mask=anew(call.mask), score=anew(call.score))
            continue
        made.launchable.forget_code()
        slots = [made.launchable.slot(n) for n in range(len(made.arguments))]
        arrays = tuple((slot, name) for slot, name in zip(slots[3:], made.views) if slot is not None and name is not None)
        maps = tuple((slot, name, one.encoder) for slot, (name, _), one in
                     zip(slots[3 + len(made.views):], made.maps, made.tensor_maps) if slot is not None)
        assert slots[1] is not None and slots[2] is not None
        return Bound(bound.launch, tuple(made.launchable.values), slice(0, slots[1]), slice(slots[1], slots[2]), slots[2],
                     made.order, arrays, maps)
    raise RuntimeError(f"code of {type(call.mask).__qualname__} or of the score changed {_TRIES} times while it was "
                       "compiled")
