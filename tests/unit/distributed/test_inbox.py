"""The protocol of slots and flags: streams of several ranks in any order, and what each kernel then finds in its slot."""

from __future__ import annotations

import contextlib
import ctypes
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from gemmkit.distributed import inbox, overlapped  # noqa: E402
from gemmkit.distributed.inbox import Inbox  # noqa: E402
from gemmkit.distributed.peers import Peers  # noqa: E402

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
    def __init__(self) -> None:
        self.done = False


class FakeStream:
    def __init__(self, world: World, name: Any):
        self.world, self.cuda_stream = world, name

    def record_event(self) -> Event:
        event = Event()

        def command() -> bool:
            event.done = True
            return True

        self.world.queues[self.cuda_stream].append(command)
        return event

    def wait_event(self, event: Event) -> None:
        self.world.queues[self.cuda_stream].append(lambda: event.done)

    def wait_stream(self, other: FakeStream) -> None:
        self.wait_event(other.record_event())


class FakeBytes:
    """A rank's memory; a copy into a part of its slots takes two steps, between which anything may happen."""

    def __init__(self, world: World, rank: int, first: int = 0):
        self.world, self.rank, self.first = world, rank, first
        self.device = "cuda:0"

    def __getitem__(self, part: slice) -> FakeBytes:
        return FakeBytes(self.world, self.rank, self.first + (part.start or 0))

    def view(self, dtype: Any) -> FakeBytes:
        return self

    def data_ptr(self) -> int:
        return (self.rank + 1) << 32

    def copy_(self, source: Any, non_blocking: bool) -> None:
        slot = (self.first - Inbox.flag_bytes(self.world.ranks)) // SLOT
        key = self.rank, slot, source.rank

        def begin() -> bool:
            self.world.parts[key] = "half a copy"
            return True

        def end() -> bool:
            self.world.parts[key] = source.epoch
            return True

        self.world.queues[self.world.current].extend([begin, end])


class Source:
    """What a rank sends in a call."""

    def __init__(self, rank: int, epoch: int):
        self.rank, self.epoch = rank, epoch

    def numel(self) -> int:
        return 1

    def element_size(self) -> int:
        return 2

    def view(self, *kind: Any) -> Source:
        return self


def fake_torch(world: World) -> Any:
    count = iter(range(100, 200))

    @contextlib.contextmanager
    def on(stream: FakeStream) -> Iterator[None]:
        before, world.current = world.current, stream.cuda_stream
        yield
        world.current = before

    cuda = SimpleNamespace(Stream=lambda device, priority: FakeStream(world, next(count)), stream=on,
                           current_stream=lambda device: FakeStream(world, world.current))
    return SimpleNamespace(cuda=cuda, uint8=None, uint32=None)


def simulate(ranks: int, calls: int, seed: int, monkeypatch: pytest.MonkeyPatch, slots: int = 2,
             flag_first: bool = False) -> None:
    world = World(ranks)
    monkeypatch.setattr(inbox, "torch", fake_torch(world))
    monkeypatch.setattr(inbox, "write_value", world.write)
    monkeypatch.setattr(inbox, "wait_value", world.wait)
    monkeypatch.setattr(inbox, "SLOTS", slots)
    peers = Peers(tuple(FakeBytes(world, rank) for rank in range(ranks)), None)
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

    for _ in range(calls):
        for rank, box in enumerate(boxes):
            world.current = rank
            box.begin()
            box.own()
            for step in range(1, ranks):
                to = (rank - step) % ranks
                if flag_first:
                    world.write(box.stream.cuda_stream, box._flag(to, box._row(0), rank), box.epoch)
                box.push(to, Source(rank, box.epoch), 0)
            box.pushed()
            kernel(box, rank)
            box.end()
    world.run(random.Random(seed))


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_kernel_reads_its_call(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(10):
        simulate(ranks, 9, seed, monkeypatch)


@pytest.mark.parametrize("fault", [dict(slots=1), dict(flag_first=True)], ids=str)
def test_faults_show(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One slot, which is filled again before it has been read, and flags before the data."""
    with pytest.raises(AssertionError, match="reads"):
        for seed in range(40):
            simulate(3, 9, seed, monkeypatch, **fault)


def test_a_trial_finds_what_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks in one process: the first is alone until the second has pushed."""

    class Now:
        cuda_stream = 0

        def record_event(self) -> None: ...
        def wait_stream(self, other: Any) -> None: ...

    cuda = SimpleNamespace(Stream=lambda device, priority: Now(), current_stream=lambda device: Now(),
                           stream=lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(inbox, "torch", SimpleNamespace(cuda=cuda, uint8=torch.uint8, uint32=torch.uint32))
    monkeypatch.setattr(inbox, "write_value", lambda stream, at, value: setattr(ctypes.c_uint32.from_address(at), "value", value))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(overlapped, "_TRIAL", 0.1)
    memory = tuple(torch.zeros(Inbox.total(2, SLOT), dtype=torch.uint8) for _ in range(2))
    boxes = [Inbox(SimpleNamespace(rank=rank, size=2, timeout=timedelta(seconds=9)), Peers(memory, None), SLOT)  # type: ignore
             for rank in range(2)]
    assert "the flags [1, 0], where each is to be 1" in (overlapped._tried(boxes[0]) or "")
    assert overlapped._tried(boxes[1]) is None
    memory[1][boxes[1].flag_bytes(2) + SLOT] = 77                          # what rank 0 pushed is not what lies there
    monkeypatch.setattr(Inbox, "begin", lambda box: None)
    assert "found [77, 2] behind the flags" in (overlapped._tried(boxes[1]) or "")
