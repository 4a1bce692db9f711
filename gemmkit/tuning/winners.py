"""Mappings that were measured to be the fastest, where the model does not find them: the table that ships.

An entry is a plain product of `bench.choice` whose best mapping beat the model's by more than 7 % on an H200. It
stands for its shape class: the same dtype, orders and alignments, and sizes within a quarter of an octave (19 %) of
it, of several entries the nearest. ``winners.json`` has them, as `Candidate.plain` writes mappings; `python -m
bench.winners` makes it of result files. What `gemmkit.tune` found on a machine stands above it, and so does all that
a caller says.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from gemmkit.layouts import Plain
from gemmkit.runtime.array_info import ArrayInfo, alignment
from gemmkit.runtime.device import DeviceInfo
from gemmkit.tuning.candidates import Candidate
from gemmkit.tuning.hopper import is_unaligned
from gemmkit.tuning.model import LINE, Asked, Proposal
from gemmkit.tuning.operators import SIXTEEN
from gemmkit.tuning.store import is_as_new

FILE = Path(__file__).with_name("winners.json")
ARCH, SM_COUNT = (9, 0), 132           # of an H200 and of an H100 alike
NEAR = 0.25                            # octaves between a size and an entry's, at most

_is_without: ContextVar[bool] = ContextVar("gemmkit_without_winners", default=False)


@dataclass(frozen=True)
class Winner:
    """An entry: its shape ``kind`` (`class_of`), its ``sizes`` M, N, K, the mapping, and its time by that of the model's
    choice."""

    kind: str
    sizes: tuple[int, int, int]
    candidate: Candidate
    ratio: float

    def distance(self, sizes: tuple[int, int, int]) -> float:
        """Octaves by which the sizes differ, the most of the three."""
        return max(abs(math.log2(size / mine)) for size, mine in zip(sizes, self.sizes))


def class_of(infos: Mapping[str, ArrayInfo | None], a: Plain, b: Plain, columns: int) -> str:
    """What products have in common that take the same routes: A's and B's dtype and orders, where their rows begin, and
    whether TMA can store rows of D, of so many columns: "float16 tn 16 2 -"."""
    orders = "".join("nt"[layout.axis == 0] for layout in (a, b))
    starts = [_start(info) for info in (infos["a"], infos["b"])]
    stored = "d" if columns * a.dtype.itemsize % 16 == 0 else "-"
    dtype = SIXTEEN[0] if a.dtype in SIXTEEN else a.dtype                # bfloat16 takes the same time
    return " ".join(map(str, (dtype, orders, *starts, stored)))


def _start(info: ArrayInfo | None) -> int:
    """The bytes at whose multiples an operand's rows begin: what vectors can be of, or a line of the L2."""
    assert info is not None
    found = alignment(info)
    return LINE if found == 16 and not is_unaligned(info) else found


def table() -> tuple[Winner, ...]:
    """The entries of the file."""
    return tuple(one for kind in dict.fromkeys(one["class"] for one in _read(FILE)) for one in of_class(FILE, kind))


@cache
def of_class(file: Path, kind: str) -> tuple[Winner, ...]:
    """The entries of a shape class."""
    return tuple(Winner(kind, tuple(one["sizes"]), Candidate.of_plain(one["mapping"]), one["ratio"])
                 for one in _read(file) if one["class"] == kind)


@cache
def _read(file: Path) -> list[dict[str, Any]]:
    return list(json.loads(file.read_text())["winners"])


def nearest(entries: Sequence[Winner], kind: str, sizes: tuple[int, int, int]) -> Winner | None:
    """The entry of a shape class that is nearest to these sizes; None where none is near.

    >>> one = Winner("float16 nn 16 16 d", (512, 512, 64), Candidate("singlestage", (32, 32, 64)), 0.8)
    >>> nearest([one], one.kind, (600, 500, 64)) is one, nearest([one], one.kind, (650, 500, 64))
    (True, None)
    """
    found = [one for one in entries if one.kind == kind and one.distance(sizes) <= NEAR]
    return min(found, key=lambda one: one.distance(sizes), default=None)


def propose(asked: Asked, device: DeviceInfo) -> Proposal | None:
    """The operator (None: the default one) and the fields of a winner's mapping, for a product of two matrices for which
    nothing else is given; None where there is none."""
    (a, b), infos, sizes, d = asked.operands, asked.infos, asked.sizes, asked.layouts["d"]
    out = infos.get("out")
    if asked.fields or asked.products != 1 or 0 in sizes or infos.get("c") is not None or _is_without.get():
        return None
    if device.arch != ARCH or device.sm_count != SM_COUNT or not a.dtype == b.dtype == (a if d is None else d).dtype:
        return None
    if not (isinstance(a, Plain) and a.is_plain and isinstance(b, Plain) and b.is_plain):
        return None
    if out is not None and not is_as_new(out, a.dtype, sizes, 1):
        return None
    kind = class_of(infos, a, b, sizes[1])
    found = nearest(of_class(FILE, kind), kind, sizes)
    return None if found is None else found.candidate.proposal(asked, device)


@contextlib.contextmanager
def without() -> Iterator[None]:
    """Within it every product takes the model's mapping."""
    token = _is_without.set(True)
    try:
        yield
    finally:
        _is_without.reset(token)
