"""One-line faults in derived texts, and whether the emulator finds them: ``python -m tests.mutation --derived``.

A text is run for several sizes by one multiprocessor, so that a block goes on from tile to tile: with more rounds a tile than its
rings have stages, and with so few that producers come to the next tile first.

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
| another phase | a wait or an `acquire` takes the other parity; or a ring's first phase is the other one |
| another stage | what is expected, loaded, waited for, multiplied or released is the next stage's |
| <= in place of <, and alike | a bound of a loop, or a mask's, takes one place more or one less |
| a block more | `blocks(...) - 1` is `blocks(...)` |
| no origin | rows or keys of a piece are taken from the array's first on |
| another piece | a piece begins where the next one does, or ends where it begins |
| all rows | a piece has all rows or keys of the array |
| the tile before | a block goes on with the place of the tile that it has done |
| too few tiles | there is none for the part of a block that each piece may begin with |
| no start | rounds begin at the array's first row, or a bound counts from there |
| in front of the axis | rounds may begin there |
| across pages | a block of rows in pages begins where its sequence does, within a page |
| one more in front | of a block's places in front of the start the last is taken for one that is there |

A fault is found where the emulator raises, the text is refused, or the result is wrong. One that changes nothing on a GPU either
is harmless: `HARMLESS` says of each of these why.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import gemmkit as gk
from tests.mutation.products import multiprocessors
from tests.mutation.running import in_processes
from tests.support import programs as listing

__all__ = ["HARMLESS", "TEXTS", "Fault", "faults", "is_found", "planned", "report"]

DROPPED = re.compile(r"\.(?:acquire|expect|wait|release|initialise|give|give_first|commit|copy)\(|wgmma_commit\("
                     r"|wgmma_fence\(|grid_wait\(|mbarrier_fence_init\(\)$|cluster_barrier\(\)|  copy_blocks\w*\(")
ADDED = re.compile(r"\.(?:add|put)\(|= \w+\.whole\(")
IMPORTED = "from dataclasses import dataclass"
WAITS = f"{IMPORTED}\nfrom gemmkit.ptx.copy_async import wait_copies\nfrom gemmkit.ptx.special import barrier"
FENCED = "no instruction but a wgmma has touched the registers since the last fence"
FRESH = "a fresh ring: there is nothing to wait for"
ENDS = "nothing follows that would use the stage"
EMPTY = "a tile without rows is computed, and stores none"
MASKED = "a round more is masked, and slower"
NONE = "without rounds the one that shows nothing may be anywhere"
FREE = "rounds without tests do not begin in front of the first block"
OF_X = "what fills the stage next waits for x's, which is released behind all that has read this one"
#: Text, fault, its line, and which one of such lines: why nothing goes wrong, on a GPU either.
HARMLESS: dict[tuple[str, str, str, int], str] = {
    ("GEMM", "dropped", "wgmma_fence()", 1): FENCED,
    ("dual", "dropped", "wgmma_fence()", 1): FENCED,
    ("clusters", "dropped", "wgmma_fence()", 1): FENCED,
    ("columns", "dropped", "wgmma_fence()", 1): FENCED,
    ("loops", "dropped", "wgmma_fence()", 1): FENCED,
    ("loops", "dropped", "wgmma_fence()", 3): FENCED,
    ("attention", "dropped", "ring_q.acquire(at_q)", 0): FRESH,
    ("attention", "dropped", "ring_k.acquire(at_k)", 0): FRESH,
    ("attention", "another stage", "ring_v.release(at_v.stage)", 2): ENDS,
    ("attention", "not advanced", "at_v = ring_v.advance(at_v)", 2): ENDS,
    ("attention", "dropped", "ring_v.release(at_v.stage)", 2): ENDS,
    ("attention", "too early", "ring_v.release(at_v.stage)", 2): ENDS,
    ("attention", "not advanced", "at_v = ring_v.advance(at_v)", 5): ENDS,
    ("packed", "> in place of >=", "while tile < tiles(sizes) and (m < 0 or m >= m_count):", 0): EMPTY,
    ("packed", "all rows", "while tile < tiles(sizes) and (m < 0 or m >= m_count):", 0): EMPTY,
    ("packed", "dropped", "ring_q.acquire(at_q)", 0): FRESH,
    ("packed", "dropped", "ring_k.acquire(at_k)", 0): FRESH,
    ("packed", "another stage", "ring_v.release(at_v.stage)", 2): ENDS,
    ("packed", "not advanced", "at_v = ring_v.advance(at_v)", 2): ENDS,
    ("packed", "dropped", "ring_v.release(at_v.stage)", 2): ENDS,
    ("packed", "not advanced", "at_v = ring_v.advance(at_v)", 5): ENDS,
    ("without a loop", "dropped", "wgmma_fence()", 1): FENCED,
    ("without a loop", "dropped", "ring_w.acquire(at_w)", 0): OF_X,
    ("without a loop", "too early", "ring_w.release(at_w.stage)", 1): OF_X,
    ("multistage starts", "no start", "n_end = max(n_length, n_start + 1)", 0): NONE,
    ("multistage starts", "a block more", "n = n_start + (blocks(n_end - n_start, 32) - 1) * 32", 0): MASKED,
    ("multistage starts", ">= in place of >", "while n >= n_start and n + 32 > n_length:", 0): MASKED,
    ("starts in pages", "> in place of >=", "while n >= n_start and n >= n_free:", 0): FREE,
    ("starts in pages", "no start", "while n >= n_start and n >= n_free:", 0): FREE,
    ("starts in pages", "no start", "n_end = max(n_length, n_start + 1)", 2): NONE,
    ("starts in pages", "no start", "n_end = max(n_length, n_start + 1)", 3): NONE,
    ("starts in pages", "dropped", "ring_q.acquire(at_q)", 0): FRESH,
    ("starts in pages", "dropped", "ring_k.acquire(at_k)", 0): FRESH,
    ("starts in pages", "too early", "ring_v.release(at_v.stage)", 3): ENDS,
    ("starts in pages", "another stage", "ring_v.release(at_v.stage)", 3): ENDS,
    ("starts in pages", "not advanced", "at_v = ring_v.advance(at_v)", 2): ENDS,
    ("starts in pages", "dropped", "ring_v.release(at_v.stage)", 3): ENDS,
    ("starts in pages", "not advanced", "at_v = ring_v.advance(at_v)", 6): ENDS,
    ("multistage packed", "all rows", "if m >= 0 and m < m_count:       # where a piece begins in a tile, one has none", 0): EMPTY,
    ("multistage packed", "a block more", "n = (blocks(n_end, 32) - 1) * 32", 0): MASKED,
    ("multistage packed", ">= in place of >", "while n >= 0 and n + 32 > n_length:", 0): MASKED,
    ("multistage attention", "a block more", "n = (blocks(sizes.n, 32) - 1) * 32", 0): MASKED,
    **{(name, ">= in place of >", "while n >= 0 and n + 32 > sizes.n:", 0): MASKED
       for name in ("attention in turns", "attention of 192", "multistage attention")},
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


class Text(NamedTuple):
    """A program and the arrays of each run; of all of them one text is derived."""

    program: Any
    runs: list[list[np.ndarray]]
    mapping: gk.Mapping
    components: dict[str, Any] = {}


def out(*shape: int) -> np.ndarray:
    return np.full(shape, np.nan, np.float16)


def heads(rows: int, keys: int, columns: int = 64) -> list[np.ndarray]:
    return [half(1, rows, columns), half(1, keys, columns), half(1, keys, columns), out(1, rows, columns)]


def gemm(m: int, n: int, k: int) -> list[np.ndarray]:
    return [half(m, k, scale=0.25), half(k, n, scale=0.25), out(m, n)]


def dual(m: int, n: int, k: int) -> list[np.ndarray]:
    return [half(m, k, scale=0.25), half(k, n, scale=0.25), half(k, n, scale=0.26), out(m, n)]


def columns(m: int, n: int, k: int) -> list[np.ndarray]:
    return [half(m, k, scale=0.25), half(k, n, scale=0.25), half(m), half(n), half(n), out(m, n)]


def cell(m: int, n: int, k: int, of_h: int) -> list[np.ndarray]:
    return [half(m, k, scale=0.25), half(k, n, scale=0.25), half(m, of_h, scale=0.25), half(of_h, n, scale=0.25), half(n), out(m, n)]


def layers(m: int, count: int) -> list[np.ndarray]:
    return [half(m, 64), half(count, 64, 64, scale=0.125), half(count, 64), out(m, 64)]


def widths(m: int, k: int, h: int, n: int) -> list[np.ndarray]:
    return [half(m, k, scale=0.25), half(k, h, scale=0.125), half(h, n, scale=0.125), half(h), out(m, n)]


def pieces(of_q: list[int], of_k: list[int]) -> list[np.ndarray]:
    """Two heads of packed rows; some rows and keys are of no piece."""
    q, k = half(2, of_q[-1] + 3, 64), half(2, of_k[-1] + 5, 64)
    return [q, k, k[:, ::-1].copy(), np.array(of_q, np.int32), np.array(of_k, np.int32), out(*q.shape)]


def bounds(rows: int, starts: list[int], lengths: list[int]) -> list[np.ndarray]:
    """Some keys in front of a start, and behind a length; of one of the stack none are left, or all."""
    q, k = half(len(starts), rows, 64), half(len(starts), 150, 64)
    return [q, k, k[:, ::-1].copy(), np.array(starts, np.int32), np.array(lengths, np.int32), out(*q.shape)]


def pages(rows: int, starts: list[int]) -> list[np.ndarray]:
    """Of 16 rows, where blocks are of 32."""
    q, k = half(len(starts), rows, 64), half(7 * len(starts), 16, 64)
    table = np.random.default_rng(1).permutation(len(k)).reshape(len(starts), 7).astype(np.int32)
    return [q, k, k[::-1].copy(), table, np.array(starts, np.int32), out(*q.shape)]


#: Offsets of rows and of keys: of several tiles, of none, of one; of as many keys, of more, and of one round.
UNEVEN, EVEN, NONE = ([2, 70, 70, 71, 75], [3, 80, 84, 184, 200]), ([0, 30, 34, 34, 90], [0, 33, 37, 40, 130]), ([4] * 5, [0, 33, 37, 40, 130])
MANY, FEW, ONE_ROUND = (140, 140), (140, 60), (280, 30)            # rows and keys of an attention
BY_COPIES = dict(kernel="multistage")
SCALE = dict(scale=0.125)
MOST_SECONDS = 90                      # of CPU that a text may take: sound ones take up to 8
TEXTS: dict[str, Text] = {
    "GEMM": Text(listing.gemm, [gemm(100, 72, 200), gemm(200, 136, 64)], gk.Mapping({"n": 64}, warpgroups=1, stages=3)),
    "dual": Text(listing.dual, [dual(100, 72, 200), dual(100, 136, 64)], gk.Mapping({"n": 64}, warpgroups=1, stages=2),
                 dict(gate=listing.silu_times)),
    "clusters": Text(listing.gemm, [gemm(100, 200, 200), gemm(200, 200, 64)],
                     gk.Mapping({"n": 64}, warpgroups=1, stages=2, cluster={"m": 2, "n": 2})),
    "columns": Text(listing.zero_points, [columns(140, 136, 256)],
                    gk.Mapping({"n": 64}, warpgroups=2, stages=2)),
    "loops": Text(listing.lstm, [cell(100, 72, 136, 104), cell(100, 136, 64, 64)], gk.Mapping({"n": 64}, warpgroups=1, stages=2)),
    "attention": Text(listing.attention, [heads(*MANY), heads(*FEW), heads(*ONE_ROUND)],
                      gk.Mapping({"n": 32}, warpgroups=1, stages=2), SCALE),
    "attention in turns": Text(listing.attention, [heads(*MANY), heads(*FEW), heads(*ONE_ROUND)],
                               gk.Mapping({"n": 32}, warpgroups=2, stages=2, turns=True, ahead=False), SCALE),
    "attention of 192": Text(listing.attention, [heads(70, 140, 192), heads(*FEW, 192), heads(*ONE_ROUND, 192)],
                             gk.Mapping({"n": 32}, warpgroups=1, stages=2, ahead=False), SCALE),
    "packed": Text(listing.packed_attention, [pieces(*UNEVEN), pieces(*EVEN), pieces(*NONE)], gk.Mapping({"n": 32}, warpgroups=1, stages=2), SCALE),
    "multistage packed": Text(listing.packed_attention, [pieces(*UNEVEN), pieces(*EVEN)],
                              gk.Mapping({"n": 32}, warpgroups=1, stages=2, **BY_COPIES), SCALE),
    "starts in pages": Text(listing.attention_in_pages, [pages(70, [41, -3, 96]), pages(30, [200, 23, -3]), pages(30, [-3, 300]), pages(30, [100, 99])], gk.Mapping({"n": 32}, warpgroups=1, stages=2), SCALE),
    "multistage starts": Text(listing.bounded_attention, [bounds(70, [39, -4, 97], [150, 70, 99]), bounds(30, [39, 70, 200], [90, 70, 150])],
                              gk.Mapping({"n": 32}, warpgroups=1, stages=2, **BY_COPIES), SCALE),
    "multistage GEMM": Text(listing.gemm, [gemm(100, 72, 200), gemm(40, 72, 64)],
                            gk.Mapping({"n": 64}, warpgroups=1, stages=3, **BY_COPIES)),
    "multistage loops": Text(listing.lstm, [cell(70, 72, 136, 104), cell(40, 72, 64, 64)],
                             gk.Mapping({"n": 64}, warpgroups=1, stages=2, **BY_COPIES)),
    "multistage attention": Text(listing.attention, [heads(*MANY), heads(70, 90), heads(70, 30)],
                                 gk.Mapping({"n": 32}, warpgroups=2, stages=3, **BY_COPIES), SCALE),
    "multistage MLP": Text(listing.mlp, [layers(140, 5), layers(140, 1)], gk.Mapping(warpgroups=1, stages=2, **BY_COPIES)),
    "MLP": Text(listing.mlp, [layers(140, 4), layers(200, 1)], gk.Mapping(warpgroups=1, stages=2)),
    "without a loop": Text(listing.two_layers, [widths(140, 256, 128, 24), widths(200, 256, 128, 24)], gk.Mapping(warpgroups=2, stages={"w": 2})),
    "multistage without a loop": Text(listing.two_layers, [widths(70, 96, 136, 24), widths(140, 96, 136, 24)],
                                      gk.Mapping(warpgroups=1, stages={"w": 3}, **BY_COPIES)),
}


def planned(name: str, text: str | None = None, run: int = 0) -> Any:
    program, runs, mapping, components = TEXTS[name]
    with multiprocessors():
        return program.plan(*runs[run], mapping=mapping, text=text, **components)


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
        yield from _places(text, n, line, said, nth, changed)
        yield from _pieces(n, line, said, nth, changed)
        yield from _starts(text, n, line, said, nth, changed)
        if ".advance(" in line:
            yield Fault(n, "not advanced", said, nth, changed(re.sub(r"\w+\.advance\((\w+)\)", r"\1", line)))
        if ".release(" in line and (before := [k for k in range(n) if "wgmma_wait" in lines[k]]):
            moved = [*lines[:n], *lines[n + 1:]]
            at = before[-1]
            moved.insert(at, lines[at][:len(lines[at]) - len(lines[at].lstrip())] + said)
            yield Fault(n, "too early", said, nth, "\n".join(moved) + "\n")


PLACE = r"\b((?:at|slot|before)(?:_\w+)?)\b"           # a stage and its phase, as texts call it
SHIFTED = re.compile(rf"(?:ring\w*\.(?:expect|wait|release)\(|\.load(?:_part)?\(.*, ring\w*, |\.multiply\w*\(.*){PLACE}")
BOUNDS = {" < ": " <= ", " >= ": " > ", " <= ": " < ", " > ": " >= "}


def _places(text: str, n: int, line: str, said: str, nth: int, changed: Callable[[str], str]) -> Iterator[Fault]:
    """Faults of phases, stages and bounds."""
    if waits := re.search(rf"ring\w*\.(?:wait|acquire)\({PLACE}\)", line):
        at = waits[1]
        yield Fault(n, "another phase", said, nth, changed(line.replace(f"({at})", f"({at}._replace(phase={at}.phase ^ 1))")))
    if re.match(rf"{PLACE} = Slot\(zero, zero", said) and "Pipeline" in text:
        other = line.replace("zero + 1", "zero") if "zero + 1" in line else line.replace("(zero, zero)", "(zero, zero + 1)")
        yield Fault(n, "another phase", said, nth, changed(other))
    if (shifted := SHIFTED.search(line)) and "Pipeline" in text:
        at = shifted[1]
        ring = re.search(rf"(ring\w*)\.advance\({at.replace('before', 'slot')}\)", text)
        assert ring is not None, line
        if f"{ring[1]} = Pipeline(stages=1," not in text:
            yield Fault(n, "another stage", said, nth, changed(f"{line[:shifted.start(1)]}{ring[1]}.advance({at}){line[shifted.end(1):]}"))
    if said.startswith(("while ", "if ", "return s if")):
        for old, new in BOUNDS.items():
            # (Of copies by threads one block more is zeros that nobody reads.)
            if old in line and not (said.startswith("if ") and old == " < " and "CopyRing" in text):
                yield Fault(n, f"{new.strip()} in place of {old.strip()}", said, nth, changed(new.join(line.rsplit(old, 1))))
    if " - 1) * " in line and "blocks(" in line:
        yield Fault(n, "a block more", said, nth, changed(line.replace(" - 1) * ", ") * ")))


def _pieces(n: int, line: str, said: str, nth: int, changed: Callable[[str], str]) -> Iterator[Fault]:
    """Faults of packed rows: where they begin, how many they are, and which tile has some."""
    for found in re.finditer(r"\b\w+_origin \+ ", line):
        yield Fault(n, "no origin", said, nth, changed(line[:found.start()] + line[found.end():]))
    if found := re.search(r"begin_of\(\w+, i(?: \+ 1)?,", line):
        other = found[0].replace("i + 1,", "i,") if " + 1," in found[0] else found[0].replace("i,", "i + 1,")
        yield Fault(n, "another piece", said, nth, changed(line.replace(found[0], other, 1)))
    if said.startswith(("return ", "last = ", "if ", "while ", "n_count = ")) or ".store(" in line:
        for found in re.finditer(r"\b(?:before_)?([mn])_(?:count|length)\b(?! =)", line):
            yield Fault(n, "all rows", said, nth, changed(f"{line[:found.start()]}sizes.{found[1]}{line[found.end():]}"))
    if re.search(r"m_origin, m_count = next_", line):
        yield Fault(n, "the tile before", said, nth, changed(line[:len(line) - len(line.lstrip())] + "pass"))
    if said.startswith("return ") and " + sizes.i)" in line:
        yield Fault(n, "too few tiles", said, nth, changed(line.replace(" + sizes.i)", ")")))


def _starts(text: str, n: int, line: str, said: str, nth: int, changed: Callable[[str], str]) -> Iterator[Fault]:
    """Faults of where rounds begin."""
    if found := re.fullmatch(r"(n_start|n_shown) = max\((.*), 0\)", said):
        for kind, made in (("no start", "0 * tile"), ("in front of the axis", found[2])):
            yield Fault(n, kind, said, nth, changed(line.replace(f"max({found[2]}, 0)", made)))
    elif said.startswith("n_start = udiv("):
        yield Fault(n, "across pages", said, nth, changed(re.sub(r"udiv\(.*", "n_shown", line)))
    elif not said.startswith(("n_start = ", "n_shown = ", "n_length = ", "if n ")):              # (a copy more is one that nobody reads)
        is_masked = "CopyRing" in text                 # more rounds of threads that copy show nothing
        for found in re.finditer(r"(?<!n_end - )\bn_start\b" if is_masked else r"\bn_start\b", line):
            yield Fault(n, "no start", said, nth, changed(f"{line[:found.start()]}0{line[found.end():]}"))
    if "n_shown - n - column" in line:
        yield Fault(n, "one more in front", said, nth, changed(line.replace("n_shown - n - column", "n_shown - n - column - 1")))


def is_found(name: str, fault: Fault) -> bool:
    """Whether a run says so, of those that the text is for."""
    return any(_run_finds(name, fault.text, run) for run in range(len(TEXTS[name].runs)))


def _run_finds(name: str, text: str, run: int) -> bool:
    try:
        return not is_right(name, text, run)
    except Exception:                                  # the emulator, a rule of configurations, or Python itself
        return True


def is_right(name: str, text: str | None = None, run: int = 0) -> bool:
    """Whether a run gives what the reference gives. Raises what the emulator raises."""
    program, runs, _, components = TEXTS[name]
    arrays = runs[run]
    given, exact = program.bound(tuple(arrays), components), program.reference(*arrays, **components)
    plan = planned(name, text, run)
    (result,) = (given[key] for key in plan.printed.outs)
    result[...] = np.nan
    with gk.emulate(seed=1):
        plan.run(given)
    stored = ~np.isnan(exact)
    return bool(np.isnan(result[~stored]).all() and np.abs(result - exact)[stored].max(initial=0.0) <= 3e-3 * np.abs(exact[stored]).max(initial=0.0))


def report(only: list[str], jobs: int) -> int:
    """Print the faults that are not found, and what there is to say of them; 0 where each of these is harmless."""
    todo = {f"derived {name}:{fault.line + 1}: {fault.kind}: {fault.said} ({fault.nth})": (name, fault)
            for name in TEXTS for fault in faults(planned(name).text)}
    chosen = [shown for shown in todo if any(text in shown for text in only or [""])]

    def judged(shown: str) -> bool:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_SECONDS, resource.RLIM_INFINITY))
        return is_found(*todo[shown])

    found = harmful = surprises = 0
    for shown, got in in_processes(chosen, judged, jobs):
        name, fault = todo[shown]
        got, why = got is not False, fault.harmless(name)              # seconds, of one that does not end
        found, harmful, surprises = found + (got and why is None), harmful + (why is None), surprises + (got != (why is None))
        if why is not None or not got:
            print(f"{'found' if got else 'missed'}: {shown}{': harmless: ' + why if why else ''}", flush=True)
    print(f"found {found} of {harmful} faults of derived texts that are not harmless; {surprises} surprises")
    return 0 if surprises == 0 else 1
