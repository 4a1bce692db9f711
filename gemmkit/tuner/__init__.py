"""The tuner: candidates compiled side by side, checked and timed in a process of their own, the best kept for next time."""

from __future__ import annotations

from gemmkit.tuner.search import Tried, Tuned, tune

__all__ = ["Tried", "Tuned", "tune"]
