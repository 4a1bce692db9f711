"""Tensors compiled: what is known when a kernel is compiled leaves nothing in it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from gemmkit import specs
from tests.kernels.specs.test_tensors import Spec, by_registers, through_shared
from tests.support.harness import Out, compiled

pytestmark = pytest.mark.compile
A = np.zeros((4, 8), "f4")


@pytest.mark.parametrize("kernel", [through_shared, by_registers])
def test_no_stack_and_no_call(kernel: Any) -> None:
    ptx = compiled(kernel, Spec(), Out((4, 8), "f4"), A)
    assert not re.search(r"\.local|\bcall|\b(div|rem)\.", ptx)


def allocated(spec: Spec) -> Any:
    return specs.Allocate(spec.held)


def of_another_function(spec: Spec, out: Any, a: Any) -> None:
    out[0, 0] = allocated(spec).storage[0, 0][0]


def test_registers_are_not_returned() -> None:
    """They are the function's stack, which is gone when it returns."""
    with pytest.raises(Exception, match="registers"):
        compiled(of_another_function, Spec(), Out((4, 8), "f4"), A)
