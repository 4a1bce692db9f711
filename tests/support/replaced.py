"""Functions of gemmkit that a test has replaced for a while."""

from __future__ import annotations

import sys

__all__ = ["forget_replaced"]


def forget_replaced() -> None:
    """Behind it, what was read of gemmkit while a function of it was another is forgotten: the next test that compiles a kernel
    by itself would be told that code has changed."""
    state = sys.modules.get("gemmkit.lang.fingerprint")
    if state is not None and not state.packages_stand():
        from gemmkit.lang.fingerprint import forget_readings

        forget_readings()
