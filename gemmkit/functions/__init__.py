"""What users call: products, contractions, convolutions, attention, functions of rows."""

from typing import TYPE_CHECKING

from gemmkit.lang.deferred import public_names

__all__ = ["BlockSparse", "Dual", "GroupPlan", "conv_input_gradient", "conv_weight_gradient", "lstm_cell", "plan_grouped",
           "select"]

if TYPE_CHECKING:
    from gemmkit.functions.block_sparse import BlockSparse
    from gemmkit.functions.conv import conv_input_gradient, conv_weight_gradient
    from gemmkit.functions.glu import lstm_cell
    from gemmkit.functions.grouped import GroupPlan, plan_grouped
    from gemmkit.functions.number_systems import Dual, select
else:
    __getattr__, __dir__ = public_names(globals())
