"""A call, resolved once: its problem, its mapping, its kernel, its launch."""

from gemmkit.lang.deferred import public_names

__getattr__, __dir__ = public_names(globals())
