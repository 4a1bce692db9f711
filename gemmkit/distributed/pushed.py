"""Calls over symmetric memory: copy engines push, or kernels store to a peer, while what is there is computed."""

from __future__ import annotations

from typing import Any

import torch

from gemmkit.config import TRANSFORMS, Config
from gemmkit.distributed.again import JoinedProduct, Product, Repeated
from gemmkit.distributed.gates import Gates, beside, gated
from gemmkit.distributed.inbox import Inbox
from gemmkit.distributed.partial_sums import Reduction, before_sum, finishing, is_fused, nothing, sees_rows, with_own
from gemmkit.distributed.ranks import Ranks
from gemmkit.distributed.sending import Sending
from gemmkit.distributed.shards import even_lengths, offsets
from gemmkit.layouts import RowMajor
from gemmkit.runtime.arrays import dtype_to_torch

_OF_A = tuple(name for name in TRANSFORMS if name.endswith("_a"))
_TMA = 16                              # bytes: where arrays begin that TMA reads


class AllGather(Repeated):
    """`all_gather_matmul` in one launch that begins with this rank's own rows.

    A is the peers' rows in the slot and this rank's where the caller has them, joined by `gemmkit.Concat` where it can be
    (`joins`): copied to the slot first, 64 MiB took 41 us of 746.
    """

    def __init__(self, ranks: Ranks, inbox: Inbox, gates: Gates, lengths: tuple[int, ...], returns_a: bool, conf: Any,
                 components: dict[str, Any]):
        super().__init__(inbox.device, conf, components)
        self.inbox, self.lengths, self.returns_a = inbox, lengths, returns_a
        self._rank, self._size, self._gates = ranks.rank, ranks.size, gates
        self._begin, self._end = offsets(lengths)[ranks.rank:ranks.rank + 2]
        self._products: dict[int, Any] = {}              # by the slot
        self._parts: dict[int, list[Any]] = {}           # of A in the slot, with a place for this rank's

    def __call__(self, a_shard: Any, b: Any, c: Any, out: Any) -> Any:
        inbox, rank = self.inbox, self._rank
        # 1. This rank's rows to the peers, the next one's first.
        inbox.begin()
        product = self._products.get(inbox.turn) or self._prepare(a_shard, b, c, out)
        own = a_shard
        if not self._joins:
            own = self._whole()[self._begin:self._end]
            own.copy_(a_shard)
        inbox.made()
        inbox.own()
        first = self._begin * a_shard.shape[1] * a_shard.element_size()
        for step in range(1, self._size):
            inbox.push((rank - step) % self._size, own.data_ptr(), own.numel() * own.element_size(), first)
        # 2. The product, whose tiles wait for the rows that they read; without a gate the stream does.
        if not self._is_gated:
            inbox.await_all()
        if self._joins:
            d = product.of_parts(tuple(a_shard if part is None else part for part in self._parts[inbox.turn]), b, c, out)
        else:
            d = product(self._whole(), b, c, out)
        # 3. The slot may be filled again.
        if self._is_gated and 0 in self.lengths:         # shards that no tile has waited for
            inbox.await_all()
        whole = self._copied(a_shard) if self.returns_a else None
        inbox.end()
        return (d, whole) if self.returns_a else d

    def _prepare(self, a_shard: Any, b: Any, c: Any, out: Any) -> Any:
        """What is this slot's: its product, with its flags, and A's parts."""
        turn = self.inbox.turn
        self._shape, self._dtype = (sum(self.lengths), a_shard.shape[1]), a_shard.dtype
        whole = self._whole()
        gate = self._gates.of(whole, b, c, out, self.conf, self.components)
        self._is_gated = gate is not None
        self._joins = gate is not None and joins(gate.conf, a_shard, self.lengths)
        self._parts[turn] = parts_of(whole, self.lengths, self._rank)
        kind = JoinedProduct if self._joins else Product
        self._products[turn] = (kind(self.conf, self.components) if gate is None else
                                kind(gate.conf, gated(self._gates, gate, self.inbox, self.components)))
        return self._products[turn]

    def _whole(self) -> Any:
        return self.inbox.matrix(*self._shape, self._dtype)

    def _copied(self, a_shard: Any) -> Any:
        """The gathered A, in memory of the caller's."""
        whole = self._whole().clone()
        if self._joins:
            whole[self._begin:self._end].copy_(a_shard)
        return whole


def joins(conf: Config, a_shard: Any, lengths: tuple[int, ...]) -> bool:
    """Whether A is joined: Hopper's kernel fetches each of its tiles, as it is, from one array. (The other kernels look for
    the array line by line.)"""
    rows = int(conf.block_shape.M)
    return (conf.kernel == "warp_specialised" and type(conf.global_a_layout) is RowMajor and conf.observe_a is None
            and conf.condition.is_always and all(getattr(conf, name).is_identity for name in _OF_A)
            and a_shard.is_contiguous() and a_shard.data_ptr() % _TMA == 0
            and len(lengths) > 1 and 0 not in lengths and all(end % rows == 0 for end in offsets(lengths)[1:-1]))


def parts_of(whole: Any, lengths: tuple[int, ...], rank: int) -> list[Any]:
    """The rows before a rank's own, None in their place, and those behind them."""
    begin, end = offsets(lengths)[rank:rank + 2]
    return [part for part in (whole[:begin], None, whole[end:]) if part is None or part.shape[0]]


class ReduceScatter(Repeated):
    """`matmul_reduce_scatter`: the peers' rows first, which are stored or pushed to them (`Sending`); then this rank's own
    rows, whose epilogue merges what has arrived."""

    def __init__(self, ranks: Ranks, inbox: Inbox, how: Reduction, lengths: tuple[int, ...], sending: Sending, conf: Any,
                 components: dict[str, Any]):
        super().__init__(inbox.device, conf, components, how.rule)
        self.inbox, self.how, self.lengths, self.sending = inbox, how, lengths, sending
        self._rank, first = ranks.rank, offsets(lengths)
        self._begin, self._end = first[ranks.rank:ranks.rank + 2]
        #: (to, begin, end, first row in the peer's slot, chunk), chunk by chunk, so that a peer's first ones arrive first.
        self._pieces = []
        for chunk in range(sending.chunks):
            for step in range(1, ranks.size):
                to = (ranks.rank + step) % ranks.size
                begin, end = offsets(even_lengths(lengths[to], sending.chunks))[chunk:chunk + 2]
                self._pieces.append((to, first[to] + begin, first[to] + end, ranks.rank * lengths[to] + begin, chunk))
        self._travels, self._result = dtype_to_torch(how.travels), dtype_to_torch(how.result)
        self._whole = Product(conf, before_sum(self.components)) if sees_rows(conf, self.components) else None
        self._partial: dict[Any, Product] = {}           # of some rows, by which: they may be aligned otherwise than others
        self._places: dict[Any, Any] = {}                # by the slot and whose: where this rank's sums go
        self._merged: dict[int, Any] = {}                # by the slot: see `_prepare`

    def __call__(self, a: Any, b: Any, c: Any, out: Any) -> Any:
        inbox, chunks = self.inbox, self.sending.chunks
        if out is None:
            out = torch.empty((self.lengths[self._rank], b.shape[1]), dtype=self._result, device=a.device)
        inbox.begin()
        inbox.own(chunks)                                # what a tile merges of this rank's is its own
        # 1. The peers' rows.
        sums = self._store(a, b) if self.sending.stores else self._push(a, b)
        # 2. This rank's rows: tiles wait for their chunks from all ranks, or the stream does.
        mine = a[self._begin:self._end]
        merged, own = self._merged.get(inbox.turn) or self._prepare(mine, b, c, out)
        if own is None:
            d = merged(mine, b, None, out)
        else:
            if self._whole is not None:
                own.copy_(sums[self._begin:self._end])
            else:
                self._product(self._begin, self._end).into(inbox.main, a, b, own, self._begin, self._end, 0)
            inbox.await_all(chunks)
            d = merged(*self._nothing, c, out)
        # 3. The slot may be filled again.
        inbox.end()
        return d

    def _store(self, a: Any, b: Any) -> Any:
        """A peer's rows straight to its slot; no sums are at home."""
        inbox = self.inbox
        for to, begin, end, _, _ in self._pieces:
            place = self._places.get((inbox.turn, to))
            if place is None:
                place = inbox.part_of(to, end - begin, b.shape[1], self._travels)
                self._places[inbox.turn, to] = place
            self._product(begin, end).into(inbox.main, a, b, place, begin, end, 0)
            inbox.stored(to)
        return None

    def _push(self, a: Any, b: Any) -> Any:
        """Chunks of the peers' rows, each on its way while the next is computed; returns all sums that are at home."""
        inbox, columns = self.inbox, b.shape[1]
        sums = torch.empty((a.shape[0], columns), dtype=self._travels, device=a.device)
        if self._whole is not None:                      # all at once where a component sees rows
            self._whole(a, b, None, sums)
        row_bytes = columns * self._travels.itemsize
        for to, begin, end, first, chunk in self._pieces:
            if self._whole is None:
                self._product(begin, end).into(inbox.main, a, b, sums, begin, end, begin)
            inbox.made()
            inbox.push(to, sums.data_ptr() + begin * row_bytes, (end - begin) * row_bytes, first * row_bytes, chunk)
        return sums

    def _product(self, begin: int, end: int) -> Product:
        """That of these rows."""
        found = self._partial.get((begin, end))
        if found is None:
            conf = self.sending.conf
            found = self._partial[begin, end] = Product(conf, beside(conf, before_sum(self.components)))
        return found

    def _prepare(self, mine: Any, b: Any, c: Any, out: Any) -> Any:
        """What is this slot's: the product of the own rows, behind a gate; or the one that merges, and the place of this
        rank's sums among all ranks'."""
        how, turn, gate = self.how, self.inbox.turn, None
        parts = self.inbox.parts(mine.shape[0], b.shape[1], self._travels)
        if is_fused(mine, c, self.conf, self.components):
            conf, merging = self.sending.own, with_own(parts, how, self._rank, self.components)
            gate = how.gates.of(mine, b, None, out, conf, beside(conf, merging))
        if gate is not None:
            self._merged[turn] = Product(gate.conf, gated(how.gates, gate, self.inbox, merging)), None
        else:
            self._nothing = nothing(parts, how)
            self._merged[turn] = (Product(None, finishing(parts, how, c is not None, self.components)), parts[self._rank])
        return self._merged[turn]


class AllReduce(Repeated):
    """`matmul_all_reduce`: all partial sums to all ranks; each merges them in the order of ranks."""

    def __init__(self, ranks: Ranks, inbox: Inbox, how: Reduction, conf: Any, components: dict[str, Any]):
        super().__init__(inbox.device, conf, components, how.rule)
        self.inbox, self.how = inbox, how
        self._rank, self._size = ranks.rank, ranks.size
        self._travels, self._result = dtype_to_torch(how.travels), dtype_to_torch(how.result)
        self._products: dict[int, tuple[Product, Product]] = {}          # by the slot: partial, and merging

    def __call__(self, a: Any, b: Any, c: Any, out: Any) -> Any:
        inbox, rank = self.inbox, self._rank
        if out is None:
            out = torch.empty((a.shape[0], b.shape[1]), dtype=self._result, device=a.device)
        inbox.begin()
        parts = inbox.parts(a.shape[0], b.shape[1], self._travels)
        own = parts[rank]
        partial, merging = self._products.get(inbox.turn) or self._prepare(parts, c)
        partial(a, b, None, own)
        nbytes = own.numel() * own.element_size()
        inbox.made()
        inbox.own()
        for step in range(1, self._size):
            inbox.push((rank - step) % self._size, own.data_ptr(), nbytes, rank * nbytes)
        inbox.await_all()
        d = merging(*self._nothing, c, out)
        inbox.end()
        return d

    def _prepare(self, parts: Any, c: Any) -> tuple[Product, Product]:
        self._nothing = nothing(parts, self.how)
        self._products[self.inbox.turn] = found = (
            Product(self.conf, before_sum(self.components)),
            Product(None, finishing(parts, self.how, c is not None, self.components)))
        return found
