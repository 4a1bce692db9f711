"""One-line faults in derived texts, and whether the emulator finds them: ``python -m tests.support.program_faults``.

| fault | what |
|---|---|
| dropped | a wait for the kernel before, a wait for a stage, an `acquire`, `expect`, `release`, `wgmma_commit`, `wgmma_fence`, a turn, the barriers' making |
| not added | a round's rows or columns are not added up, lanes do not exchange their parts, or nothing is put into shared memory |
| one group less | `wgmma_wait` leaves one group more in flight |
| too early | a stage is released before the wait for the group that reads it |
| not advanced | a slot stays where it is |
| one arrival less, more | a stage that warps or a cluster share is empty before all its readers have released it, or never |
| reaches no peer | a release arrives at the block's own barrier alone; or as often as all would |
| for itself | a block loads a shared operand's part, and its peers get none |
| one copy less | threads wait for all groups of copies but one more |
| no barrier | threads wait for their own copies, and do not meet |
| the barrier alone | threads meet, and do not wait for their copies |
| the stage that is read | is filled, in place of the one that has been; or read, where it is not yet full |

A fault is found where the emulator raises, or the result is wrong. One that changes nothing on a GPU either is harmless:
`HARMLESS` says of each of these why.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import gemmkit as gk
from gemmkit.emulator.errors import EmulatorError
from gemmkit.runtime.device import H100, assumed
from tests.support import programs as listing

__all__ = ["TEXTS", "Fault", "faults", "is_found", "planned"]

ONE = dataclasses.replace(H100, sm_count=1)            # a block goes on from tile to tile
DROPPED = re.compile(r"\.(?:acquire|expect|wait|release|initialise|give|give_first|commit|copy)\(|wgmma_commit\("
                     r"|wgmma_fence\(|grid_wait\(|mbarrier_fence_init\(\)$|cluster_barrier\(\)|  copy_blocks\w*\(")
ADDED = re.compile(r"\.(?:add|put)\(|= \w+\.whole\(")
IMPORTED = "from dataclasses import dataclass"
WAITS = f"{IMPORTED}\nfrom gemmkit.ptx.copy_async import wait_copies\nfrom gemmkit.ptx.special import barrier"
FENCED = "no instruction but a wgmma has touched the registers since the last fence"
FRESH = "a fresh ring: there is nothing to wait for"
ENDS = "nothing follows that would use the stage"
HELD_BACK = "the ring that rounds go around holds the producer back until the stage has been read"
READ = "the product that reads it has been waited for before"
#: Text, fault, its line, and which one of such lines: why nothing goes wrong, on a GPU either.
HARMLESS: dict[tuple[str, str, str, int], str] = {
    ("dual", "dropped", "wgmma_fence()", 1): FENCED,
    ("clusters", "dropped", "wgmma_fence()", 1): FENCED,
    ("columns", "dropped", "wgmma_fence()", 1): FENCED,
    ("loops", "dropped", "wgmma_fence()", 1): FENCED,
    ("loops", "dropped", "wgmma_fence()", 3): FENCED,
    ("attention", "dropped", "wgmma_fence()", 2): FENCED,
    ("attention", "dropped", "wgmma_fence()", 4): FENCED,
    ("attention", "dropped", "ring_q.acquire(at_q)", 0): FRESH,
    ("attention", "dropped", "ring_k.acquire(at_k)", 0): FRESH,
    ("attention", "dropped", "ring_q.acquire(at_q)", 1): HELD_BACK,
    ("attention", "too early", "ring_q.release(at_q.stage)", 0): READ,
    ("attention", "not advanced", "at_v = ring_v.advance(at_v)", 2): ENDS,
    ("attention", "dropped", "ring_v.release(at_v.stage)", 2): ENDS,
    ("attention", "too early", "ring_v.release(at_v.stage)", 2): ENDS,
    ("attention", "not advanced", "at_v = ring_v.advance(at_v)", 5): ENDS,
    ("MLP", "dropped", "ring_x.acquire(at_x)", 0): HELD_BACK,
    ("MLP", "too early", "ring_x.release(at_x.stage)", 0): HELD_BACK,
}


class Fault(NamedTuple):
    """``line`` counts from 0; ``said`` is the ``nth`` line that says so."""

    line: int
    kind: str
    said: str
    nth: int
    text: str

    def harmless(self, name: str) -> str | None:
        """Why it is no fault."""
        return HARMLESS.get((name, self.kind, self.said, self.nth))


def half(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape) * scale).astype(np.float16)


def _heads() -> list[np.ndarray]:
    return [half(1, 140, 64), half(1, 230, 64), half(1, 230, 64), np.full((1, 140, 64), np.nan, np.float16)]


#: (program, arrays, mapping, components) by name: several tiles a block, more rounds than stages.
TEXTS: dict[str, tuple[Any, list[np.ndarray], gk.Mapping, dict[str, Any]]] = {
    "dual": (listing.dual, [half(100, 264, scale=0.25), half(264, 72, scale=0.25), half(264, 72, scale=0.26),
                            np.full((100, 72), np.nan, np.float16)],
             gk.Mapping({"n": 64}, warpgroups=1, stages=2), dict(gate=listing.silu_times)),
    "clusters": (listing.gemm, [half(100, 264, scale=0.25), half(264, 200, scale=0.25), np.full((100, 200), np.nan, np.float16)],
                 gk.Mapping({"n": 64}, warpgroups=1, stages=2, cluster={"m": 2, "n": 2}), {}),
    "columns": (listing.zero_points, [half(140, 264, scale=0.25), half(264, 136, scale=0.25), half(140), half(136), half(136),
                                      np.full((140, 136), np.nan, np.float16)],
                gk.Mapping({"n": 64}, warpgroups=2, stages=2), {}),
    "loops": (listing.lstm, [half(100, 136, scale=0.25), half(136, 72, scale=0.25), half(100, 104, scale=0.25),
                             half(104, 72, scale=0.25), half(72), np.full((100, 72), np.nan, np.float16)],
              gk.Mapping({"n": 64}, warpgroups=1, stages=2), {}),
    "attention": (listing.attention, _heads(), gk.Mapping({"n": 32}, warpgroups=1, stages=2), dict(scale=0.125)),
    "attention in turns": (listing.attention, _heads(), gk.Mapping({"n": 32}, warpgroups=2, stages=2, turns=True, ahead=False),
                           dict(scale=0.125)),
    "multistage GEMM": (listing.gemm, [half(100, 264, scale=0.25), half(264, 72, scale=0.25), np.full((100, 72), np.nan, np.float16)],
                        gk.Mapping({"n": 64}, warpgroups=1, stages=3, kernel="multistage"), {}),
    "multistage loops": (listing.lstm, [half(70, 136, scale=0.25), half(136, 72, scale=0.25), half(70, 104, scale=0.25),
                                        half(104, 72, scale=0.25), half(72), np.full((70, 72), np.nan, np.float16)],
                         gk.Mapping({"n": 64}, warpgroups=1, stages=2, kernel="multistage"), {}),
    "multistage attention": (listing.attention, _heads(), gk.Mapping({"n": 32}, warpgroups=2, stages=3, kernel="multistage"),
                             dict(scale=0.125)),
    "multistage MLP": (listing.mlp, [half(140, 64), half(5, 64, 64, scale=0.125), half(5, 64), np.full((140, 64), np.nan, np.float16)],
                       gk.Mapping(warpgroups=1, stages=2, kernel="multistage"), {}),
    "MLP": (listing.mlp, [half(140, 64), half(4, 64, 64, scale=0.125), half(4, 64), np.full((140, 64), np.nan, np.float16)],
            gk.Mapping(warpgroups=1, stages=2), {}),
}


def planned(name: str, text: str | None = None) -> Any:
    program, arrays, mapping, components = TEXTS[name]
    with assumed(ONE):
        return program.plan(*arrays, mapping=mapping, text=text, **components)


def faults(text: str) -> Iterator[Fault]:
    """Every one-line fault of a text."""
    lines = text.splitlines()
    for n, line in enumerate(lines):
        said, indent = line.strip(), line[:len(line) - len(line.lstrip())]
        nth = sum(x.strip() == said for x in lines[:n])
        if said.startswith(("def ", "from ", "import ", '"')):
            continue

        def changed(new: str, at: int = n) -> str:
            return "\n".join([*lines[:at], new, *lines[at + 1:]]) + "\n"

        if DROPPED.search(line) and "wgmma_wait" not in line:
            yield Fault(n, "dropped", said, nth, changed(indent + "pass"))
        if ADDED.search(line):
            yield Fault(n, "not added", said, nth, changed(indent + "pass"))
        if waits := re.search(r"wgmma_wait\((\d)", line):
            yield Fault(n, "one group less", said, nth, changed(line.replace(waits[0], f"wgmma_wait({int(waits[1]) + 1}")))
        if ring := re.fullmatch(r"(ring\w*)\.wait\(\)", said):
            stages = re.search(rf"^{ring[1]} = CopyRing\(stages=(\d+)\)", text, re.M)
            assert stages is not None
            for kind, made in (("one copy less", f"wait_copies({int(stages[1]) - 1}); barrier()"),
                               ("no barrier", f"wait_copies({int(stages[1]) - 2})"), ("the barrier alone", "barrier()")):
                yield Fault(n, kind, said, nth, changed(indent + made).replace(IMPORTED, WAITS, 1))
        if "copy_blocks" in line and line.endswith(", before)"):
            slot = re.search(r"before, (slot\w*) =", text)
            assert slot is not None
            yield Fault(n, "the stage that is read", said, nth, changed(line.replace(", before)", f", {slot[1]})")))
        if "multiply" in line and "CopyRing" in text:
            yield Fault(n, "the stage that is read", said, nth, changed(re.sub(r"\bslot\w*", "before", line)))
        if "readers=" in line:
            arrivals = re.search(r"empty_arrivals=(\d+)", line)
            assert arrivals is not None
            for kind, count in (("one arrival less", int(arrivals[1]) - 1), ("one arrival more", int(arrivals[1]) + 1)):
                yield Fault(n, kind, said, nth, changed(line.replace(arrivals[0], f"empty_arrivals={count}")))
        if "readers=CLUSTER" in line:
            alone = line.replace("readers=CLUSTER", "readers='thread'")
            yield Fault(n, "reaches no peer", said, nth, changed(alone))
            yield Fault(n, "reaches no peer", said, nth, changed(re.sub(r"empty_arrivals=\d+", "empty_arrivals=1", alone)))
        if ".load_part(" in line:
            yield Fault(n, "for itself", said, nth, changed(re.sub(r"load_part(\(.*), rank\)", r"load\1)", line)))
        if ".advance(" in line:
            yield Fault(n, "not advanced", said, nth, changed(re.sub(r"\w+\.advance\((\w+)\)", r"\1", line)))
        if ".release(" in line and (before := [k for k in range(n) if "wgmma_wait" in lines[k]]):
            moved = [*lines[:n], *lines[n + 1:]]
            at = before[-1]
            moved.insert(at, lines[at][:len(lines[at]) - len(lines[at].lstrip())] + said)
            yield Fault(n, "too early", said, nth, "\n".join(moved) + "\n")


def is_found(name: str, fault: Fault, seeds: tuple[int, ...] = (1, 2)) -> bool:
    program, arrays, _, components = TEXTS[name]
    given = program.bound(tuple(arrays), components)
    exact = program.reference(*arrays, **components)
    plan = planned(name, fault.text)
    (out,) = (given[key] for key in plan.printed.outs)
    for seed in seeds:
        out[...] = np.nan
        try:
            with gk.emulate(seed=seed):
                plan.run(given)
        except (EmulatorError, TypeError, ValueError, NameError):
            return True
        if not np.abs(out - exact).max() <= 3e-3 * np.abs(exact).max():
            return True
    return False


def main() -> None:
    found = harmful = 0
    for name in TEXTS:
        for fault in faults(planned(name).text):
            got = is_found(name, fault)
            why = fault.harmless(name)
            if why is None:
                harmful += 1
                found += got
            if not got:
                print(f"{name}:{fault.line + 1}: {fault.kind}: {fault.said}: {'harmless: ' + why if why else 'NOT FOUND'}", flush=True)
    print(f"{found} of {harmful} harmful faults are found ({found / harmful:.1%})")


if __name__ == "__main__":
    main()
