"""Epilogues: what happens to D between shared and global memory; ``a | b | c`` is one after the other."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = [
    "GELU", "Bias", "Binary", "CausalMask", "Clamp", "ColumnReduce", "Combine", "ComposedEpilogue", "Default", "Elementwise",
    "Epilogue", "Fold",
    "LayerNorm", "LinearCombination", "Pack", "Pairs", "RMSNorm", "ReLU", "Residual", "Rotary", "RowReduce", "Saturate",
    "Scale", "SiLU", "Softmax", "Store", "Tanh", "Where", "parts", "result_layout",
]

if TYPE_CHECKING:
    from gemmkit.epilogues.base import ComposedEpilogue, Default, Epilogue, parts, result_layout
    from gemmkit.epilogues.elementwise import (
        GELU,
        Bias,
        Binary,
        CausalMask,
        Clamp,
        Elementwise,
        LinearCombination,
        ReLU,
        Residual,
        Saturate,
        Scale,
        SiLU,
        Store,
        Tanh,
        Where,
    )
    from gemmkit.epilogues.norms import LayerNorm, RMSNorm, Softmax
    from gemmkit.epilogues.pairs import Fold, Pack, Pairs, Rotary
    from gemmkit.epilogues.reductions import ColumnReduce, Combine, RowReduce
else:
    __getattr__, __dir__ = public_names(globals())
