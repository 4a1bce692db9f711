"""Epilogues: what happens to D between shared and global memory; ``a | b | c`` is one after the other."""

from typing import TYPE_CHECKING

from gemmkit.lang.later import public_names

__all__ = [
    "GELU", "Bias", "Causal", "Clamp", "ColumnReduce", "Combine", "Composed", "Default", "Elementwise", "Epilogue", "Fold",
    "LayerNorm", "LinearCombination", "Pack", "Pairs", "RMSNorm", "ReLU", "Residual", "Rotary", "RowReduce", "Saturate",
    "Scale", "SiLU", "Softmax", "Store", "Tanh", "Where", "parts", "result_layout",
]

if TYPE_CHECKING:
    from gemmkit.epilogues.base import Composed, Default, Epilogue, parts, result_layout
    from gemmkit.epilogues.combine import Combine
    from gemmkit.epilogues.elementwise import GELU, Causal, Clamp, Elementwise, ReLU, SiLU, Tanh, Where
    from gemmkit.epilogues.fold import Fold
    from gemmkit.epilogues.library import Bias, LinearCombination
    from gemmkit.epilogues.norms import LayerNorm, RMSNorm
    from gemmkit.epilogues.operands import Residual, Scale, Store
    from gemmkit.epilogues.pack import Pack
    from gemmkit.epilogues.pairs import Pairs, Rotary
    from gemmkit.epilogues.reduce import ColumnReduce, RowReduce
    from gemmkit.epilogues.saturate import Saturate
    from gemmkit.epilogues.softmax import Softmax
else:
    __getattr__, __dir__ = public_names(globals(), {
        "base": "Composed Default Epilogue parts result_layout", "combine": "Combine",
        "elementwise": "GELU Causal Clamp Elementwise ReLU SiLU Tanh Where", "fold": "Fold",
        "library": "Bias LinearCombination", "norms": "LayerNorm RMSNorm", "operands": "Residual Scale Store",
        "pack": "Pack", "pairs": "Pairs Rotary", "reduce": "ColumnReduce RowReduce", "saturate": "Saturate",
        "softmax": "Softmax"})
