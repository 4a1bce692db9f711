"""How results are compared: by norm, against a reference in float64, and NaN never passes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import gemmkit

PACKAGE = str(Path(gemmkit.__file__).parent)


def relative_error(out: Any, ref64: Any) -> float:
    """norm(out - ref64) / norm(ref64), computed in float64 (complex128 for complex arrays).

    A reference that is all zeros gives norm(out): only zeros are right then. Infinite elements count as right
    where both have the same infinity (min-plus products have them). Anything else that is not finite gives
    infinity.

    Raises:
        ValueError: the shapes differ, or the reference has NaN.
    """
    out, ref64 = np.asarray(out), np.asarray(ref64)
    if out.shape != ref64.shape:
        raise ValueError(f"out has shape {out.shape}, its reference {ref64.shape}")
    wide = np.complex128 if np.iscomplexobj(out) or np.iscomplexobj(ref64) else np.float64
    out, ref64 = out.astype(wide), ref64.astype(wide)
    if np.isnan(ref64).any():
        raise ValueError("the reference has NaN: nothing can be compared with it")
    finite = np.isfinite(ref64)
    if not np.isfinite(out[finite]).all() or not np.array_equal(out[~finite], ref64[~finite]):
        return float("inf")
    norm = float(np.linalg.norm(ref64[finite]))
    difference = float(np.linalg.norm(out[finite] - ref64[finite]))
    return difference / norm if norm > 0.0 else difference


def assert_close(out: Any, ref64: Any, tolerance: float) -> None:
    """Assert that the relative error is at most `tolerance` (0: exactly equal)."""
    error = relative_error(out, ref64)
    assert error <= tolerance, f"relative error {error:.3g}, more than {tolerance:.3g}"


def functions_run(call: Callable[[], object]) -> list[str]:
    """The functions of gemmkit that a call runs, in Python: what it costs, on any machine and under any load."""
    found: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found.append(frame.f_code.co_name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def named_functions_run(call: Callable[[], object]) -> int:
    """How many, without comprehensions and lambdas, of which newer versions of Python call fewer."""
    return sum(not name.startswith("<") for name in functions_run(call))
