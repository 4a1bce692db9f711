"""The protocol of slots and flags: streams of several ranks in any order, and what each kernel then finds in its slot."""

from __future__ import annotations

import ctypes
import random
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from gemmkit.distributed import transport  # noqa: E402
from gemmkit.distributed.transport import Inbox, Peers  # noqa: E402
from tests.support.patches import Seeded  # noqa: E402

SLOT = 1 << 20
Command = Callable[[], bool]                              # False: it cannot go on yet


class World:
    """Queues of streams, and the memory of all ranks: flags by address, and who wrote which bytes of a slot last."""

    def __init__(self, ranks: int):
        self.ranks = ranks
        self.queues: dict[Any, deque[Command]] = defaultdict(deque)
        self.flags: dict[int, int] = defaultdict(int)
        self.parts: dict[tuple[int, int, int], Any] = {}               # (rank, slot, source): the epoch of what lies there
        self.current: Any = None

    def run(self, order: random.Random) -> None:
        speed = {stream: order.random() ** 3 for stream in self.queues}          # some streams are slow
        while any(self.queues.values()):
            waiting = [stream for stream, queue in self.queues.items() if queue]
            while waiting:
                stream = order.choices(waiting, [speed[one] + 1e-3 for one in waiting])[0]
                if self.queues[stream][0]():
                    self.queues[stream].popleft()
                    break
                waiting.remove(stream)
            else:
                raise RuntimeError("the streams wait for each other")

    def write(self, stream: Any, address: int, value: int) -> None:
        def command() -> bool:
            self.flags[address] = value
            return True

        self.queues[stream].append(command)

    def wait(self, stream: Any, address: int, value: int) -> None:
        self.queues[stream].append(lambda: self.flags[address] >= value)


class Event:
    """What it is now is what the streams that wait for it are told to wait for."""

    def __init__(self) -> None:
        self.now: list[bool] = [True]


class Bytes:
    """A rank's memory, of which the inbox sees addresses."""

    device = SimpleNamespace(index=0)

    def __init__(self, rank: int):
        self.rank = rank

    def __getitem__(self, part: slice) -> Bytes:
        return self

    def view(self, dtype: Any) -> Bytes:
        return self

    def data_ptr(self) -> int:
        return (self.rank + 1) << 32


def faked(world: World, patch: pytest.MonkeyPatch) -> None:
    """The inbox's commands go to the world's queues."""
    count = iter(range(100, 200))

    def copy(stream: Any, to: int, source: int, nbytes: int) -> None:
        """In two steps, between which anything may happen."""
        rank, first = (to >> 32) - 1, to & 0xFFFFFFFF
        key = rank, (first - Inbox.flag_bytes(world.ranks)) // SLOT, source // 1000

        def put(value: Any) -> Command:
            def command() -> bool:
                world.parts[key] = value
                return True

            return command

        world.queues[stream].extend([put("half a copy"), put(source % 1000)])

    def record(event: Event, stream: Any) -> None:
        event.now = done = [False]

        def command() -> bool:
            done[0] = True
            return True

        world.queues[stream].append(command)

    def wait_event(stream: Any, event: Event) -> None:
        world.queues[stream].append(lambda of=event.now: of[0])                    # type: ignore[misc]

    cuda = SimpleNamespace(Stream=lambda device, priority: SimpleNamespace(cuda_stream=next(count)))
    patch.setattr(transport, "torch", SimpleNamespace(cuda=cuda, uint8=None, uint32=None))
    patch.setattr(transport, "stream_finder", lambda library, index: lambda: world.current)
    for name, command in dict(write_value=world.write, wait_value=world.wait, copy=copy, record=record, wait_event=wait_event,
                              new_event=Event).items():
        patch.setattr(transport, name, command)


def simulate(ranks: int, calls: int, seed: int, monkeypatch: pytest.MonkeyPatch, slots: int = 2,
             flag_first: bool = False, made_first: bool = True, stores: bool = False) -> None:
    """``stores``: a kernel of the call's stream writes a peer's part where it belongs, in place of a copy engine."""
    world = World(ranks)
    faked(world, monkeypatch)
    monkeypatch.setattr(transport, "SLOTS", slots)
    peers = Peers(tuple(Bytes(rank) for rank in range(ranks)), None)
    boxes = [Inbox(SimpleNamespace(rank=rank, size=ranks), peers, SLOT) for rank in range(ranks)]      # type: ignore[arg-type]

    def kernel(box: Inbox, rank: int) -> None:
        """It waits for each part's flag, and reads the part when it finds the time."""
        epoch, slot, stream = box.epoch, box.epoch % slots, world.current
        for source in range(ranks):
            if source == rank:
                continue
            address = box._flag(rank, box._row(0), source)
            world.queues[stream].append(lambda a=address, e=epoch: world.flags[a] == e)                # type: ignore[misc]

            def read(s: int = source) -> bool:
                found = world.parts.get((rank, slot, s))
                assert found == epoch, f"rank {rank} reads {found} of rank {s} in call {epoch}"
                return True

            world.queues[stream] += [read, lambda: True, lambda: True, read]

    def store(box: Inbox, to: int, part: int) -> None:
        transport.copy(world.current, box._memory[to] + box._slot_begin(), part, 2)

    for _ in range(calls):
        for rank, box in enumerate(boxes):
            world.current = rank
            box.begin()
            if made_first and not stores:
                box.made()
            box.own()
            for step in range(1, ranks):
                to, part = (rank - step) % ranks, rank * 1000 + box.epoch        # what is sent, as an address
                if flag_first:
                    world.write(rank if stores else box._pushes, box._flag(to, box._row(0), rank), box.epoch)
                if stores:
                    store(box, to, part)
                    box.stored(to)
                else:
                    box.push(to, part, 2, 0)
            kernel(box, rank)
            box.end()
    world.run(random.Random(seed))


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("stores", [False, True])
def test_every_kernel_reads_its_call(ranks: int, stores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        simulate(ranks, 9, seed, monkeypatch, stores=stores)


@pytest.mark.parametrize("fault", [dict(slots=1), dict(flag_first=True), dict(made_first=False), dict(slots=1, stores=True),
                                   dict(flag_first=True, stores=True)], ids=str)
def test_faults_show(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, which is filled again before it has been read, flags before the data, and pushes that do not wait for the
    kernel of the call before."""
    with pytest.raises((AssertionError, RuntimeError), match=r"reads|the streams wait for each other"):
        for seed in range(40):
            simulate(3, 9, seed, monkeypatch, **fault)


def test_a_trial_finds_what_does_not_come(monkeypatch: pytest.MonkeyPatch, replaced: Seeded) -> None:
    """Two ranks in one process: the first is alone until the second has pushed."""

    def at_once(stream: int, at: int, value: int) -> None:
        ctypes.c_uint32.from_address(at).value = value

    cuda = SimpleNamespace(Stream=lambda device, priority: SimpleNamespace(cuda_stream=7))
    replaced(transport, "torch", SimpleNamespace(**{**vars(torch), "cuda": cuda}))
    replaced(transport, "stream_finder", lambda library, index: lambda: 0)
    for name, command in dict(write_value=at_once, copy=lambda stream, to, source, nbytes: ctypes.memmove(to, source, nbytes),
                              record=lambda event, stream: None, wait_event=lambda stream, event: None,
                              new_event=lambda: None).items():
        replaced(transport, name, command)
    monkeypatch.setattr(transport, "_TRIAL", 0.1)
    memory = tuple(torch.zeros(Inbox.total(2, SLOT), dtype=torch.uint8) for _ in range(2))
    boxes = [Inbox(SimpleNamespace(rank=rank, size=2, timeout=timedelta(seconds=9)), Peers(memory, None), SLOT)  # type: ignore
             for rank in range(2)]
    assert "the flags [1, 0], where each is to be 1" in (transport._tried(boxes[0]) or "")
    assert transport._tried(boxes[1]) is None
    memory[1][boxes[1].flag_bytes(2) + SLOT] = 77                          # what rank 0 pushed is not what lies there
    replaced(Inbox, "begin", lambda box: None)
    assert "found [77, 2] after the flags" in (transport._tried(boxes[1]) or "")
