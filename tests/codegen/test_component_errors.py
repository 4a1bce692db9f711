"""What Numba cannot compile in a user's function is reported with the user's file and line, whoever in Numba says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import gemmkit as gk
from gemmkit import layouts, operators, transforms
from gemmkit.plans import ahead
from gemmkit.runtime.device import H100

pytestmark = pytest.mark.compile


def helper(x: Any) -> Any:
    return x @ x                          # HELPER


def compiled(function: Callable[..., Any]) -> ahead.CompiledKernel:
    conf = gk.get_config(operator=operators.MMAOp(), global_a_layout=layouts.RowMajor("float16"), device=H100,
                         block_shape=gk.Tile(M=32, N=32, K=32), compute_warp=gk.Tile(M=16, N=16, K=16),
                         transform_regs_to_shared_d=transforms.Elementwise(function))
    return ahead.compile_config(conf, device=H100)


@pytest.mark.kin(2)
@pytest.mark.sample(2)
@pytest.mark.parametrize(("function", "name", "marker", "reason"), [
    (lambda x: x.clipped(0, 1), "<lambda>", "ATTRIBUTE", "Unknown attribute 'clipped' of type float32"),  # ATTRIBUTE
    (lambda x: helper(x), "helper", "HELPER", "matmul(float32, float32)"),
    (lambda x: np.linalg.norm(x), "<lambda>", "NORM", "NumPy's function norm has no device code"),  # NORM
    (lambda x: not_there(x), "<lambda>", "NAME", "name 'not_there' is not defined"),  # type: ignore[name-defined]  # noqa: F821  # NAME
], ids=["attribute", "helper", "library", "name"])
def test_the_users_line_comes_first(function: Any, name: str, marker: str, reason: str) -> None:
    with pytest.raises(gk.ComponentError) as caught:
        compiled(function)
    first, place, source, *_, why = str(caught.value).splitlines()
    assert first == f"{name} cannot be compiled as device code"
    assert place.startswith(f'  File "{__file__}", line ') and source.endswith(f"# {marker}") and reason in why


@pytest.mark.kin(2)
def test_the_same_function_repaired() -> None:
    assert compiled(lambda x: math.exp(x) + 1).usage.stack_bytes == 0
