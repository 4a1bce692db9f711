"""The template kernels by name."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.simt.kernel import singlestage
from gemmkit.kernels.sm90.kernel import warp_specialised

KERNELS: dict[str, Any] = {"singlestage": singlestage, "warp_specialised": warp_specialised}

# The least compute capability whose instructions each needs.
MINIMUM_ARCH: dict[str, tuple[int, int]] = {"singlestage": (5, 0), "warp_specialised": (9, 0)}
