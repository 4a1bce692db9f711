"""Functions of one float32 in one instruction, for functions of your own where their last bits do not matter.

`tanh` (to 2^-11), `exp2`, `log2` and `reciprocal` (to the last bits), and `maximum`, which of a number and a NaN gives the
number. ``math.tanh`` is exact to the last bit and takes some twenty instructions.

>>> import gemmkit as gk
>>> float(gk.epilogues.fast.exp2(3.0))
8.0
"""

from gemmkit.ptx.arithmetic import exp2, log2, maximum, reciprocal, tanh

__all__ = ["exp2", "log2", "maximum", "reciprocal", "tanh"]
