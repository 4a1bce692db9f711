"""How shards get from rank to rank: by torch.distributed's own operations, as bytes, or by copies over symmetric memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from gemmkit.distributed.ranks import (
    JoinedProduct,
    PlannedProduct,
    Ranks,
    ReductionRule,
    Repeated,
    before_sum,
    even_lengths,
    finishing,
    is_fused,
    nothing,
    offsets,
    planned,
    sees_rows,
    with_own,
)
from gemmkit.kernels.collectives.batched import Gated, arrivals
from gemmkit.kernels.config import TRANSFORMS, Config
from gemmkit.layouts import RowMajor
from gemmkit.plans.plan import Plan
from gemmkit.plans.problem import Call, resolve
from gemmkit.runtime.arrays import ArrayInfo, describe, dtype_to_torch
from gemmkit.runtime.device import copy, new_event, record, stream_finder, wait_event, wait_value, write_value


def as_bytes(x: torch.Tensor) -> Any:
    """A dense tensor's bytes, without a copy: gloo knows no bfloat16, and NCCL no complex numbers."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(torch.uint8)


def all_gather(ranks: Ranks, slots: Sequence[Any]) -> None:
    """Fill dense tensors, one for each rank, of which each rank has filled its own. They may be of different lengths."""
    if ranks.size == 1:
        return
    alike = all(slot.shape == slots[0].shape for slot in slots)
    if alike and slots[0].numel() == 0:
        return
    if alike and slots[0].is_cuda and ranks.backend(slots[0].device) == "nccl" and _are_one(slots):
        whole = slots[0].as_strided((len(slots), *slots[0].shape), (slots[0].numel(), *slots[0].stride()))
        dist.all_gather_into_tensor(as_bytes(whole).view(-1), as_bytes(slots[ranks.rank]).view(-1), group=ranks.group)
        return
    started = [dist.broadcast(as_bytes(slot), member, group=ranks.group, async_op=True)
               for slot, member in zip(slots, ranks.members) if slot.numel()]
    for work in started:
        work.wait()


def all_to_all(ranks: Ranks, x: torch.Tensor, outgoing: Sequence[int], incoming: Sequence[int], zeros: int = 0) -> Any:
    """A matrix of the rows that this rank receives, ``incoming[r]`` from rank r, in the order of ranks, which each send the
    rows of their own x, ``outgoing[r]`` to rank r. ``zeros`` rows of zeros stand before them."""
    received = x.new_empty(zeros + sum(incoming), x.shape[1])
    if zeros:
        received[:zeros].zero_()
    dist.all_to_all_single(as_bytes(received[zeros:]), as_bytes(x), list(incoming), list(outgoing), group=ranks.group)
    return received


def check_sends(ranks: Ranks, x: torch.Tensor, name: str = "a") -> None:
    """Raise ValueError where the group's backend sends no tensors of a tensor's device from one rank to another."""
    backend = ranks.backend(x.device)
    if not backend or (x.is_cuda and backend == "gloo" and ranks.size > 1):
        raise ValueError(f"{name} is on {x.device}, and the group's backend ({backend or 'none for it'}) sends no such "
                         "tensors; make a group with backend='nccl'")


def _are_one(slots: Sequence[Any]) -> bool:
    """Whether they lie one behind the other."""
    nbytes = slots[0].numel() * slots[0].element_size()
    return all(slot.data_ptr() == slots[0].data_ptr() + n * nbytes for n, slot in enumerate(slots))


class Sent:
    """Tensors on their way; `wait` has the current stream (on the CPU: the process) wait for all of them."""

    def __init__(self) -> None:
        self._works: list[Any] = []
        self._tensors: list[Any] = []                    # they live until they have been sent

    def add(self, works: list[Any], *tensors: torch.Tensor) -> None:
        self._works += works
        self._tensors += tensors

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()
        self._tensors.clear()


def send_and_receive(ranks: Ranks, sent: Sent, to: int, outgoing: torch.Tensor, source: int, incoming: torch.Tensor) -> None:
    """Start sending a dense tensor to rank ``to`` of the group, and receiving one from rank ``source``. All ranks make such
    calls in one order. Empty tensors are not sent."""
    operations = []
    if outgoing.numel():
        operations.append(dist.P2POp(dist.isend, as_bytes(outgoing), ranks.members[to], ranks.group))
    if incoming.numel():
        operations.append(dist.P2POp(dist.irecv, as_bytes(incoming), ranks.members[source], ranks.group))
    if operations:
        sent.add(dist.batch_isend_irecv(operations), outgoing, incoming)


def pass_on(ranks: Ranks, sent: Sent, outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
    """One step of a ring: to the rank before, from the rank behind."""
    send_and_receive(ranks, sent, (ranks.rank - 1) % ranks.size, outgoing, (ranks.rank + 1) % ranks.size, incoming)


# --------------------------------------------------------------------------------------------------
# Memory of every rank that this rank reaches by its own addresses: PyTorch's symmetric memory.

class Peers(NamedTuple):
    """``buffers[r]`` is rank r's memory, of as many bytes on each (uint8), zero when it is new. ``keeps`` holds it."""

    buffers: tuple[Any, ...]
    keeps: Any


def why_not_symmetric(ranks: Ranks, device: torch.device) -> str | None:
    """Why this rank cannot have symmetric memory with the group's others; None where it can, as far as it knows alone."""
    if device.type != "cuda":
        return f"tensors are on the {device.type}"
    if ranks.size == 1:
        return "there is one rank"
    if ranks.backend(device) != "nccl":
        return f"the group's backend is {ranks.backend(device)}, and PyTorch makes symmetric memory for nccl"
    try:
        import torch.distributed._symmetric_memory  # noqa: F401
    except ImportError as error:
        return f"this PyTorch has no symmetric memory ({error})"
    return None


def symmetric_peers(ranks: Ranks, nbytes: int, device: torch.device) -> Peers:
    """New memory of ``nbytes`` bytes on each rank. All ranks of the group call this together, and meet before they write.

    Raises RuntimeError where PyTorch cannot map the peers' memory: ranks of several hosts, or GPUs without peer access.
    """
    import torch.distributed._symmetric_memory as symmetric

    own = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    own.zero_()
    handle = symmetric.rendezvous(own, ranks.group)
    buffers = tuple(own if rank == ranks.rank else handle.get_buffer(rank, (nbytes,), torch.uint8)
                    for rank in range(ranks.size))
    torch.cuda.current_stream(device).synchronize()              # zeros are there before a peer writes; once for each size
    return Peers(buffers, handle)


# --------------------------------------------------------------------------------------------------
# Products that a rank launches before all of their operands are there: the configuration, with `Gated` as the order.

_SOON = 2**31 - 1                      # milliseconds: the longest that a kernel waits

Table = Callable[[Plan], np.ndarray]


def by_shards(lengths: tuple[int, ...], rank: int) -> Table:
    """Own rows first, then those of the ranks behind; a tile waits for the shards that it reads."""
    return lambda made: arrivals(made.config.order, lengths, rank, *made.tiles)


def by_chunks(rows: int, chunks: int, ranks: int) -> Table:
    """The rows in chunks, one after the other; a tile waits for its chunks from all ranks."""
    def table(made: Plan) -> np.ndarray:
        found = arrivals(made.config.order, even_lengths(rows, chunks), 0, *made.tiles)
        found[:, 2:] *= ranks
        return found

    return table


class Gate(NamedTuple):
    """A configuration, and the table of its tiles on the device."""

    conf: Any
    table: Any
    orders: dict[int, Gated]           # by the flags' address: a component that comes again is not read anew


class Gates:
    """The gated configurations of one agreed call, by what is this rank's own matter: the arrays' kinds."""

    def __init__(self, ranks: Ranks, table: Table, of_sums: bool = False):
        self.rank, self.of_sums = ranks.rank, of_sums
        self.patience = min(int(ranks.timeout.total_seconds() * 1000), _SOON)
        self._table = table
        self._known: dict[Any, Gate | None] = {}

    def of(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None, conf: Config | None,
           components: dict[str, Any]) -> Gate | None:
        """None where the product cannot be gated: its transpose is computed, or it has no tiles or no K.

        Raises what `gemmkit.plan` raises.
        """
        key = tuple(None if x is None else (describe(x, name)[1:4], x.data_ptr() & 15)
                    for x, name in ((a, "a"), (b, "b"), (c, "c"), (out, "out")))
        if key not in self._known:
            self._known[key] = self._made(planned(a, b, c, out, conf, components), a)
        return self._known[key]

    def _made(self, made: Plan, a: torch.Tensor) -> Gate | None:
        if made.swap_ab or 0 in made.shape:
            return None
        table = torch.from_numpy(self._table(made)).to(a.device)
        return Gate(made.config, table, {})

    def order(self, gate: Gate, flags: torch.Tensor) -> Gated:
        found = gate.orders.get(flags.data_ptr())
        if found is None:
            found = gate.orders[flags.data_ptr()] = Gated(gate.table, flags, self.rank, self.patience, self.of_sums)
        return found

    def check(self, gate: Gate | None, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None,
              components: dict[str, Any]) -> None:
        """Compile the gated kernel; ``a`` may be a `gemmkit.layouts.Concat`."""
        if gate is not None:
            flags = torch.zeros(1, dtype=torch.uint32, device=b.device)
            order = Gated(gate.table, flags, 0, self.patience, self.of_sums)
            planned(a, b, c, out, gate.conf, {**beside(gate.conf, components), "order": order})


def beside(conf: Config | None, components: dict[str, Any]) -> dict[str, Any]:
    """The components to give beside a configuration that was made with them, which has the operator; all without one."""
    return components if conf is None else {name: value for name, value in components.items() if name != "operator"}


def gated(gates: Gates, gate: Gate, inbox: Any, components: dict[str, Any]) -> dict[str, Any]:
    """The components of a gated product, beside its configuration."""
    return {**beside(gate.conf, components), "order": gates.order(gate, inbox.arrived)}


# --------------------------------------------------------------------------------------------------
# What the ranks of a group put into each other's memory: two slots, used in turn, and flags behind the data.
#
# Call number e (the *epoch*) uses slot e % 2 on every rank. ``arrived[slot, i, r]`` = e, which rank r writes behind its
# data, means that chunk i of rank r's part of call e lies in the slot. The data are copied on a stream of the inbox's own
# (`Inbox.push`), or a kernel of the call's stream has stored them there itself (`Inbox.stored`).
#
# No barrier stands between calls, since each waits for a part from every rank. What rank r sends in call e stands behind
# its kernel of call e - 1 (`Inbox.made`); that kernel has waited for what rank p sent in call e - 1; and that stood
# behind p's kernel of call e - 2, the last to read the slot in p's memory that call e goes to. So two slots are enough,
# and one is not.
#
# Copies are the copy engines', and flags are stream commands: neither needs a multiprocessor, which a persistent kernel
# that waits for them would not give away.

_FLAG = 4
_ALIGNED = 1024                        # bytes: where slots begin
CHUNKS = 4                             # of a rank's part, at most
SLOTS = 2


def size_class(nbytes: int) -> int:
    """Slots are powers of two, from 1 MiB on, so that calls of many sizes share few inboxes.

    >>> size_class(3) == 1 << 20, size_class((1 << 20) + 1) == 1 << 21
    (True, True)
    """
    return max(1 << 20, 1 << (nbytes - 1).bit_length()) if nbytes > 0 else 1 << 20


class Inbox:
    """The slots of ``slot_bytes`` bytes and the flags of all ranks, in memory of `total` bytes each.

    A call is `begin`, then what is sent, products of what has arrived, and `end`. Its commands go to the stream that is
    current when it begins, and to the inbox's own, which pushes.
    """

    def __init__(self, ranks: Ranks, peers: Peers, slot_bytes: int):
        self.ranks, self.peers, self.slot_bytes = ranks, peers, slot_bytes
        self.device = peers.buffers[0].device
        self.epoch = 0
        self.stream = torch.cuda.Stream(self.device, priority=-1)           # kept, since the commands have its handle alone
        self._pushes = int(self.stream.cuda_stream)
        self._find_stream: Any = stream_finder("torch", self.device.index)
        self.main, self._last = 0, -1                                       # streams: of this call, and of the last one
        self._made, self._sent, self._ended = new_event(), new_event(), new_event()
        self._is_pushing = False
        self._memory: list[int] = [int(buffer.data_ptr()) for buffer in peers.buffers]
        count = _FLAG * CHUNKS * ranks.size
        self._arrived = [peers.buffers[ranks.rank][slot * count:(slot + 1) * count].view(torch.uint32)
                         for slot in range(SLOTS)]

    @staticmethod
    def flag_bytes(ranks: int) -> int:
        return -(-SLOTS * CHUNKS * ranks * _FLAG // _ALIGNED) * _ALIGNED

    @classmethod
    def total(cls, ranks: int, slot_bytes: int) -> int:
        return cls.flag_bytes(ranks) + SLOTS * slot_bytes

    @property
    def turn(self) -> int:
        """Which slot is this call's."""
        return self.epoch % SLOTS

    @property
    def arrived(self) -> Any:
        """This call's flags of this rank, uint32: those of the ranks' first chunks, then of their second ones, ..."""
        return self._arrived[self.turn]

    def slot(self, of: int | None = None) -> Any:
        """This call's slot of this rank, or of another, as bytes."""
        first = self._slot_begin()
        return self.peers.buffers[self.ranks.rank if of is None else of][first:first + self.slot_bytes]

    def matrix(self, rows: int, columns: int, dtype: torch.dtype) -> Any:
        """This rank's slot as a matrix."""
        return self.slot()[:rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def parts(self, rows: int, columns: int, dtype: torch.dtype) -> Any:
        """This rank's slot as a matrix from each rank, (ranks, rows, columns)."""
        return self.matrix(self.ranks.size * rows, columns, dtype).view(self.ranks.size, rows, columns)

    def part_of(self, to: int, rows: int, columns: int, dtype: torch.dtype) -> Any:
        """This rank's matrix among those in rank ``to``'s slot, which a kernel of this rank's may write."""
        nbytes = rows * columns * dtype.itemsize
        return self.slot(to)[self.ranks.rank * nbytes:(self.ranks.rank + 1) * nbytes].view(dtype).view(rows, columns)

    # -- a call, in this order ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The next call begins on the current stream, behind the one before."""
        self.epoch += 1
        self.main = self._find_stream()
        if self._last not in (-1, self.main):
            wait_event(self.main, self._ended)

    def made(self) -> None:
        """What is pushed from here on is there when the current stream has come here."""
        record(self._made, self.main)
        wait_event(self._pushes, self._made)
        self._is_pushing = True

    def push(self, to: int, source: int, nbytes: int, first_byte: int, chunk: int = 0) -> None:
        """Copy bytes from an address to rank ``to``'s slot, and set this rank's flag there."""
        if nbytes:
            copy(self._pushes, self._memory[to] + self._slot_begin() + first_byte, source, nbytes)
        write_value(self._pushes, self._flag(to, self._row(chunk), self.ranks.rank), self.epoch)

    def stored(self, to: int, chunk: int = 0) -> None:
        """Set this rank's flag in rank ``to``'s memory, where a kernel has stored this rank's part (`part_of`), once the
        current stream has come here. (The command is ordered behind the kernel's stores, at system scope.)"""
        write_value(self.main, self._flag(to, self._row(chunk), self.ranks.rank), self.epoch)

    def own(self, chunks: int = 1) -> None:
        """This rank's own part, of so many chunks, is there, once the current stream has come here."""
        for chunk in range(chunks):
            self.stored(self.ranks.rank, chunk)

    def await_all(self, chunks: int = 1) -> None:
        """Have the current stream wait for all ranks' parts: what a kernel without a gate needs."""
        for rank in range(self.ranks.size):
            for chunk in range(chunks):
                wait_value(self.main, self._flag(self.ranks.rank, self._row(chunk), rank), self.epoch)

    def end(self) -> None:
        """The current stream has waited for every rank's part, and read the slot. It waits for the pushes, so that what was
        pushed may be written over behind the call."""
        if self._is_pushing:
            record(self._sent, self._pushes)
            wait_event(self.main, self._sent)
            self._is_pushing = False
        record(self._ended, self.main)
        self._last = self.main

    def _slot_begin(self) -> int:
        return self.flag_bytes(self.ranks.size) + self.turn * self.slot_bytes

    def _row(self, chunk: int) -> int:
        return self.turn * CHUNKS + chunk

    def _flag(self, of: int, row: int, column: int) -> int:
        """The address of a flag in rank ``of``'s memory: a row for each slot and chunk."""
        return self._memory[of] + _FLAG * (row * self.ranks.size + column)


# --------------------------------------------------------------------------------------------------
# Which way a call takes: by symmetric memory, over which copy engines push while the kernel computes, or by the group.

WAYS = "plain", "symmetric"
_TRIAL = 20                            # seconds that a new inbox's first call may take


def check_way(way: object) -> None:
    """Raise ValueError for another ``way`` than `WAYS` and None."""
    if way not in (None, *WAYS):
        raise ValueError(f"way={way!r}: {' or '.join(map(repr, WAYS))} is needed, or None, which takes what there is")


def inbox_for(ranks: Ranks, device: torch.device, nbytes: int, way: str | None) -> Inbox | None:
    """The group's inbox with slots of ``nbytes`` bytes; None where a call takes the plain way, of which
    ``ranks.why_plain`` says why. All ranks call this alike.

    Raises RuntimeError where the symmetric way is asked for and cannot be had.
    """
    if way == "plain":
        why: str | None = "way='plain' was given"
    elif nbytes == 0:
        why = "nothing is to be sent"
    elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        why = "the stream is being captured, and a graph's epochs would be stale"
    else:
        why = ranks.once("symmetric memory", lambda: why_not_symmetric(ranks, device))
    key = device, size_class(nbytes)
    if why is None:
        why = ranks.once(f"an inbox of {key}", lambda: _make(ranks, key))
    if why is None:
        why = ranks.once(f"the first call over {key}", lambda: _tried(ranks.inboxes[key]))
    ranks.why_plain = why
    if why is None:
        return ranks.inboxes[key]
    if way == "symmetric":
        raise RuntimeError(f"way='symmetric': {why}; way=None takes the plain way here")
    return None


def _make(ranks: Ranks, key: Any) -> str | None:
    """The inbox; or why PyTorch cannot map the peers' memory: several hosts, GPUs without peer access."""
    device, slot_bytes = key
    with torch.cuda.device(device):
        # A capture takes the plain way, and no communicator can be made in it: the first inbox sees to that.
        if not ranks.inboxes and ranks.backend(device) == "nccl":
            dist.all_reduce(torch.zeros(1, device=device), group=ranks.group)
        try:
            peers = symmetric_peers(ranks, Inbox.total(ranks.size, slot_bytes), device)
        except RuntimeError as error:
            return f"PyTorch makes no symmetric memory: {error}"
        ranks.inboxes[key] = Inbox(ranks, peers, slot_bytes)
    return None


def _push_number(inbox: Inbox) -> None:
    rank, size = inbox.ranks.rank, inbox.ranks.size
    inbox.begin()
    own = torch.full((1,), rank + 1, dtype=torch.int32, device=inbox.device)
    inbox.made()
    for step in range(1, size):
        inbox.push((rank - step) % size, own.data_ptr(), own.element_size(), rank * own.element_size())
    inbox.own()
    inbox.end()


def _tried(inbox: Inbox) -> str | None:
    """What is wrong with the inbox's first call, in which each rank pushes its number to all; None where all have come."""
    rank, size = inbox.ranks.rank, inbox.ranks.size
    try:
        with torch.cuda.device(inbox.device) if inbox.device.type == "cuda" else nullcontext():
            _push_number(inbox)
    except RuntimeError as error:
        return f"pushing to a peer fails: {error}"
    last = time.monotonic() + min(_TRIAL, inbox.ranks.timeout.total_seconds())
    flags = inbox.arrived[:size].view(torch.int32)
    while (found := flags.tolist()) != [inbox.epoch] * size:
        if time.monotonic() > last:
            return f"a trial found the flags {found}, where each is to be {inbox.epoch}"
    numbers = inbox.slot()[:4 * size].view(torch.int32).tolist()
    numbers[rank] = rank + 1
    return None if numbers == [*range(1, size + 1)] else f"a trial found {numbers} after the flags"


# --------------------------------------------------------------------------------------------------
# How a rank's partial sums reach a peer: the kernel that computes them stores them there, or copy engines fetch them.

_SMALL = 32 << 20                      # bytes for a peer
_TILE = 128, 256                       # of D: what `chunks_of` counts in
_ELSEWHERE = 1 << 56                   # an address that no operand has


class Sending(NamedTuple):
    """``stores``: a peer's rows are one product, whose kernel writes to the peer's slot over NVLink. Else they are computed
    in ``chunks``, by the mapping ``conf``, and each is copied while the next is computed. ``own`` is the mapping of this
    rank's own rows, which become D.

    Of two H100, a reduce-scatter of 4096^3 takes 142 us with stores and 187 with copies: two launches in place of three, and
    no wait of one stream for another. A kernel that stores 67 MB to a peer takes 417 us, and 355 at home, however many
    subtiles of D are on their way; so copies are ahead at 8192^3 (807 us, 855 with stores).
    """

    stores: bool
    chunks: int
    conf: Config | None = None
    own: Config | None = None


def sending_of(lengths: tuple[int, ...], a: torch.Tensor, b: torch.Tensor, how: ReductionRule, conf: Config | None,
               components: dict[str, Any]) -> Sending:
    """The way of a reduction on this rank's GPU; ``lengths`` are the rows of all ranks, ``a`` and ``b`` its operands."""
    if sees_rows(conf, components):                      # all rows are multiplied at once
        return Sending(False, 1)
    if max(lengths) * b.shape[1] * how.travels.itemsize < _SMALL:
        return Sending(True, 1)
    sm_count = torch.cuda.get_device_properties(b.device).multi_processor_count
    mapping = alone(max(lengths), a, b, len(lengths), how, components)
    return Sending(False, chunks_of(lengths, b.shape[1], sm_count), mapping, mapping if how.travels == how.result else None)


def alone(rows: int, a: torch.Tensor, b: torch.Tensor, ranks: int, how: ReductionRule,
          components: dict[str, Any]) -> Config | None:
    """The mapping of the product that gives the sum without other ranks: of one rank's rows and all of K. None where its
    transpose would be computed.

    It is that of the partial products, too. A reduce-scatter of 8192 x 14336 x 4096 over two H100 takes 753 us so, and 786
    with the model's mapping for half of K (128 x 128 in turns); one of 8192^3 807, and 859 with that of all ranks' rows,
    whose tiles of 192 columns leave the sixth wave of a chunk a fifth full.
    """
    out = describe(a, "a")._replace(pointer=_ELSEWHERE, shape=(rows, b.shape[1]), strides=(b.shape[1], 1), dtype=how.travels)
    found = single(rows, a, b, None, out, ranks, before_sum(components))
    return None if found.swap_ab else found.config


def single(rows: int, a: torch.Tensor, b: torch.Tensor, c: ArrayInfo | None, out: ArrayInfo | None, ranks: int,
           components: dict[str, Any]) -> Call:
    """The product that gives ``rows`` of D without other ranks, of all of K. Raises what `gemmkit.matmul` raises."""
    of_a, of_b = describe(a, "a"), describe(b, "b")
    return resolve(_longer(of_a, (rows, a.shape[1] * ranks), ranks), _longer(of_b, (b.shape[0] * ranks, b.shape[1]), ranks),
                   c, out, None, components)


def _longer(info: ArrayInfo, shape: tuple[int, int], ranks: int) -> ArrayInfo:
    """An array that continues along K as this one does: lines along K become longer."""
    inner = info.strides.index(1) if 1 in info.strides else 1
    return info._replace(shape=shape, strides=tuple(s if n == inner else s * ranks for n, s in enumerate(info.strides)))


def chunks_of(lengths: tuple[int, ...], columns: int, sm_count: int) -> int:
    """In how many chunks a rank's rows are computed and pushed. A chunk is pushed while the next is computed, so two ranks
    have two at least, unless that takes more waves of tiles; with more ranks the next chunk is another rank's.

    3 chunks of 4096 x 8192 are 9 waves of 132 tiles, where 2 and 4 are 8, as is one:

    >>> chunks_of((4096, 4096), 8192, 132), chunks_of((256, 256), 512, 132), chunks_of((4096,) * 4, 8192, 132)
    (2, 1, 1)
    """
    def waves(chunks: int) -> int:
        tiles = (math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
                 for rows in even_lengths(max(lengths), chunks))
        return sum(math.ceil(one / sm_count) for one in tiles)

    if len(lengths) > 2:
        return 1
    best = min(range(2, CHUNKS + 1), key=waves)
    return best if waves(best) <= waves(1) else 1


# --------------------------------------------------------------------------------------------------
# Calls over symmetric memory: copy engines push, or kernels store to a peer, while what is there is computed.

_OF_A = tuple(name for name in TRANSFORMS if name.endswith("_a"))
_TMA = 16                              # bytes: where arrays begin that TMA reads


class AllGather(Repeated):
    """`all_gather_matmul` in one launch that begins with this rank's own rows.

    A is the peers' rows in the slot and this rank's where the caller has them, joined by `gemmkit.layouts.Concat` where it
    can be (`joins`): copied to the slot first, 64 MiB took 41 us of 746.
    """

    def __init__(self, ranks: Ranks, inbox: Inbox, gates: Gates, lengths: tuple[int, ...], returns_a: bool,
                 conf: Config | None, components: dict[str, Any]):
        super().__init__(inbox.device, conf, components)
        self.inbox, self.lengths, self.returns_a = inbox, lengths, returns_a
        self._rank, self._size, self._gates = ranks.rank, ranks.size, gates
        self._begin, self._end = offsets(lengths)[ranks.rank:ranks.rank + 2]
        self._products: dict[int, Any] = {}              # by the slot
        self._parts: dict[int, list[Any]] = {}           # of A in the slot, with a place for this rank's

    def __call__(self, a_shard: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
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

    def _prepare(self, a_shard: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        """What is this slot's: its product, with its flags, and A's parts."""
        turn = self.inbox.turn
        self._shape, self._dtype = (sum(self.lengths), a_shard.shape[1]), a_shard.dtype
        whole = self._whole()
        gate = self._gates.of(whole, b, c, out, self.conf, self.components)
        self._is_gated = gate is not None
        self._joins = gate is not None and joins(gate.conf, a_shard, self.lengths)
        self._parts[turn] = parts_of(whole, self.lengths, self._rank)
        kind = JoinedProduct if self._joins else PlannedProduct
        self._products[turn] = (kind(self.conf, self.components) if gate is None else
                                kind(gate.conf, gated(self._gates, gate, self.inbox, self.components)))
        return self._products[turn]

    def _whole(self) -> Any:
        return self.inbox.matrix(*self._shape, self._dtype)

    def _copied(self, a_shard: torch.Tensor) -> Any:
        """The gathered A, in memory of the caller's."""
        whole = self._whole().clone()
        if self._joins:
            whole[self._begin:self._end].copy_(a_shard)
        return whole


def joins(conf: Config, a_shard: torch.Tensor, lengths: tuple[int, ...]) -> bool:
    """Whether A is joined: Hopper's kernel fetches each of its tiles, as it is, from one array. (The other kernels look for
    the array line by line.)"""
    rows = int(conf.block_shape.M)
    return (conf.kernel == "warp_specialised" and type(conf.global_a_layout) is RowMajor and conf.observe_a is None
            and conf.condition.is_always and all(getattr(conf, name).is_identity for name in _OF_A)
            and a_shard.is_contiguous() and a_shard.data_ptr() % _TMA == 0
            and len(lengths) > 1 and 0 not in lengths and all(end % rows == 0 for end in offsets(lengths)[1:-1]))


def parts_of(whole: torch.Tensor, lengths: tuple[int, ...], rank: int) -> list[Any]:
    """The rows before a rank's own, None in their place, and those behind them."""
    begin, end = offsets(lengths)[rank:rank + 2]
    return [part for part in (whole[:begin], None, whole[end:]) if part is None or part.shape[0]]


class ReduceScatter(Repeated):
    """`matmul_reduce_scatter`: the peers' rows first, which are stored or pushed to them (`Sending`); then this rank's own
    rows, whose epilogue merges what has arrived."""

    def __init__(self, ranks: Ranks, inbox: Inbox, how: ReductionRule, lengths: tuple[int, ...], sending: Sending,
                 conf: Config | None, components: dict[str, Any]):
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
        self._whole = PlannedProduct(conf, before_sum(self.components)) if sees_rows(conf, self.components) else None
        self._partial: dict[Any, PlannedProduct] = {}  # of some rows, by which: they may be aligned otherwise than others
        self._places: dict[Any, Any] = {}                # by the slot and whose: where this rank's sums go
        self._merged: dict[int, Any] = {}                # by the slot: see `_prepare`

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        inbox, chunks, is_new = self.inbox, self.sending.chunks, out is None
        if out is None:
            out = torch.empty((self.lengths[self._rank], b.shape[1]), dtype=self._result, device=a.device)
        inbox.begin()
        inbox.own(chunks)                                # what a tile merges of this rank's is its own
        # 1. The peers' rows.
        sums = self._store(a, b) if self.sending.stores else self._push(a, b)
        # 2. This rank's rows: tiles wait for their chunks from all ranks, or the stream does.
        merged, own = self._merged.get(inbox.turn) or self._prepare(a[self._begin:self._end], b, c, out)
        if own is None and is_new:
            merged.into(inbox.main, a, b, out, self._begin, self._end, 0)
            d = out
        elif own is None:                                # where an array given may overlap others
            d = merged(a[self._begin:self._end], b, None, out)
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

    def _store(self, a: torch.Tensor, b: torch.Tensor) -> Any:
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

    def _push(self, a: torch.Tensor, b: torch.Tensor) -> Any:
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

    def _product(self, begin: int, end: int) -> PlannedProduct:
        """That of these rows."""
        found = self._partial.get((begin, end))
        if found is None:
            conf = self.sending.conf
            found = self._partial[begin, end] = PlannedProduct(conf, beside(conf, before_sum(self.components)))
        return found

    def _prepare(self, mine: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
        """What is this slot's: the product of the own rows, behind a gate; or the one that merges, and the place of this
        rank's sums among all ranks'."""
        how, turn, gate = self.how, self.inbox.turn, None
        parts = self.inbox.parts(mine.shape[0], b.shape[1], self._travels)
        if is_fused(mine, c, self.conf, self.components):
            conf, merging = self.sending.own, with_own(parts, how, self._rank, self.components)
            gate = how.gates.of(mine, b, None, out, conf, beside(conf, merging))
        if gate is not None:
            self._merged[turn] = PlannedProduct(gate.conf, gated(how.gates, gate, self.inbox, merging)), None
        else:
            self._nothing = nothing(parts, how)
            self._merged[turn] = (PlannedProduct(None, finishing(parts, how, c is not None, self.components)),
                                  parts[self._rank])
        return self._merged[turn]


class AllReduce(Repeated):
    """`matmul_all_reduce`: all partial sums to all ranks; each merges them in the order of ranks."""

    def __init__(self, ranks: Ranks, inbox: Inbox, how: ReductionRule, conf: Config | None, components: dict[str, Any]):
        super().__init__(inbox.device, conf, components, how.rule)
        self.inbox, self.how = inbox, how
        self._rank, self._size = ranks.rank, ranks.size
        self._travels, self._result = dtype_to_torch(how.travels), dtype_to_torch(how.result)
        self._products: dict[int, tuple[PlannedProduct, PlannedProduct]] = {}          # by the slot: partial, and merging

    def __call__(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, out: torch.Tensor | None) -> Any:
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

    def _prepare(self, parts: object, c: torch.Tensor | None) -> tuple[PlannedProduct, PlannedProduct]:
        self._nothing = nothing(parts, self.how)
        self._products[self.inbox.turn] = found = (
            PlannedProduct(self.conf, before_sum(self.components)),
            PlannedProduct(None, finishing(parts, self.how, c is not None, self.components)))
        return found
