"""The smallest kernel with a user's transform in it, compiled through the same keys as a product's."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import numpy as np

from gemmkit.components import freeze
from gemmkit.ptx.special import thread_index
from gemmkit.runtime import compile as compiling
from gemmkit.runtime.compile import Assembled, ResourceUsage
from gemmkit.runtime.device import H100
from gemmkit.transforms.base import transformed

_USAGE = ResourceUsage(0, 0, 0, 0, 0, 0)


def transforming(out: Any, a: Any, transform: Any) -> None:
    i = thread_index()
    out[i] = transformed(transform, a[i], i, i)


def ptx_of(transform: Any) -> str:
    """The PTX that is found for the kernel with this transform: in memory, on disk, or compiled now. (ptxas is left out: the
    cache keeps the PTX in place of a cubin.)"""
    out, a = np.zeros(32), np.ones(32, np.float32)
    with mock.patch.object(compiling, "assemble", lambda ptx, arch: Assembled(ptx.encode(), _USAGE, "none")):
        entry = compiling.cubin_of(transforming, [freeze(out), freeze(a), freeze(transform)], 32, H100)
    return without_places(entry.cubin.decode())


def without_places(ptx: str) -> str:
    """PTX without comments, line numbers and Numba's names: an edit leaves the lines of what it did not touch where they
    were, and names count what the process has compiled."""
    lines = (re.sub(r"//.*", "", line).strip() for line in ptx.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith((".loc", ".file", ".section", ".common", "$L__info"))
                     and not re.match(r"^(\.b\d+|\}|\{)", line))
