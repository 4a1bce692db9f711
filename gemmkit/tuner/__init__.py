"""The tuner: candidates compiled side by side, checked and timed in a process of their own, the best kept for next time."""

from __future__ import annotations

from gemmkit.tuner.subjects import Tried, Tuned, TunedProgram
from gemmkit.tuner.tuner import tune

__all__ = ["Tried", "Tuned", "TunedProgram", "tune"]
