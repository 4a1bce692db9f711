"""The template kernels by name."""

from __future__ import annotations

from typing import Any

from gemmkit.kernels.singlestage import singlestage

KERNELS: dict[str, Any] = {"singlestage": singlestage}
