"""The page of a fault: where its access lies in a tile, in the banks, or in an array; and that it fetches nothing."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit.emulator import errors
from gemmkit.emulator.errors import ElementRange, _in_array, _in_stage, _said, fault_page
from gemmkit.kernels import simt as template
from gemmkit.layouts import RowMajor
from tests.kernels.simt.test_kernel import drop, run
from tests.support.patches import Seeded
from tests.tools.test_explain import check_alone


def test_a_race_in_shared_memory(seeded: Seeded) -> None:
    seeded(template, "barrier", drop(1))
    with pytest.raises(errors.RaceError) as caught:
        run()
    fault = caught.value
    text = fault.html()
    check_alone(text)
    assert "RaceError" in text and "first a " in text and "then a " in text
    assert text.count('stroke-width="2.5"') == -(-fault.size // 4)                    # the words of the access
    found = _in_stage(fault.launched.spec, fault)
    assert found is not None and _said(found) in text
    operand = fault.launched.spec.a if " A" in found.name else fault.launched.spec.b
    shared = operand.shared
    at = int(shared.position(found.place, shared.leading(operand.tile.size))) * shared.dtype.itemsize
    assert at + operand.offset == fault.address and found.many * shared.dtype.itemsize == fault.size
    frame = re.search('srcdoc="(.*)"', fault._repr_html_(), re.DOTALL)
    assert frame is not None and "&lt;svg" in frame[1]


@dataclass(frozen=True)
class OffByOne(RowMajor):
    def store(self, data: Any, tile: Any, values: Any, shape: Any) -> None:
        for n in range(tile.size[1]):
            data[tile.index[0], tile.index[1] + n + 1] = values[n]


def test_an_index_outside_of_its_array() -> None:
    a = np.ones((8, 8), np.float32)
    with gk.emulate(), pytest.raises(errors.BoundsError) as caught:
        gk.matmul(a, a, global_d_layout=OffByOne("float32"), out=np.empty((8, 8), np.float32))
    text = caught.value.html()
    check_alone(text)
    assert caught.value.index == (0, 8) or caught.value.index[1] == 8
    assert "outside of it" in text and "8 x 8" in text and "array &#x27;out&#x27;" in text


def test_an_address_of_an_array() -> None:
    class View:
        array = np.zeros((5, 7), np.float32)

        class memory:
            name = "out"

    class Launched:
        spec, arrays = None, {"out": View}

    class Fault:
        memory, size = "out", 8
        address = View.array.ctypes.data + 4 * (2 * 7 + 3)

    found = _in_array(Launched, Fault)          # type: ignore[arg-type]
    assert found == ElementRange("array 'out'", (5, 7), (2, 3), 2, 1)
    assert _said(found) == "row 2, columns 3 to 4 of array 'out' (5 x 7)"


def test_a_fault_outside_of_a_product() -> None:
    """A launch that knows no specialisation: what the message says is shown, and no tile."""
    text = fault_page(errors.ProtocolError("a warp has no such registers"), None)
    check_alone(text)
    assert "no such registers" in text and "<svg" not in text
