"""A call, resolved once: its problem, its mapping, its kernel, its launch."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = ["Plan"]

if TYPE_CHECKING:
    from gemmkit.plans.plan import Plan
else:
    __getattr__, __dir__ = public_names(globals())
