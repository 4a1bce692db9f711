"""What users call: products, contractions, attention, functions of rows."""

from gemmkit.lang.deferred import public_names

__getattr__, __dir__ = public_names(globals())
