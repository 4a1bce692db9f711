"""The template kernels by name."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.singlestage import singlestage

KERNELS: dict[str, Any] = {"singlestage": singlestage}

# The least compute capability whose instructions each needs.
MINIMUM_ARCH: dict[str, tuple[int, int]] = {"singlestage": (5, 0)}
