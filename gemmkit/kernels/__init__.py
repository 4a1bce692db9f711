"""The kernel families, and the collectives that they share."""

from gemmkit.lang.deferred import public_names

__getattr__, __dir__ = public_names(globals())
