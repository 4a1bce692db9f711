"""The kernel families, and the collectives that they share."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = ["StreamK"]

if TYPE_CHECKING:
    from gemmkit.kernels.collectives.split_k import StreamK
else:
    __getattr__, __dir__ = public_names(globals())
