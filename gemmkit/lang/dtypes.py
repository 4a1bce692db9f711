"""Dtypes in device code: conversions."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemmkit.lang.numba_hooks import (
    AttributeTemplate,
    OpaqueModel,
    lowering_registry,
    register_model,
    signature,
    target_context,
    typeof_impl,
    types,
    typing_registry,
)
from gemmkit.lang.number_types import numba_type


class DTypeType(types.Callable, types.Opaque):
    """A dtype in device code: calling it converts."""

    def __init__(self, target: types.Type):
        self.target = target
        super().__init__(f"dtype({target})")

    def get_call_type(self, context: Any, args: tuple, kws: dict) -> Any:
        if len(args) != 1 or kws:
            return None
        return signature(self.target, types.unliteral(args[0]))

    def get_call_signatures(self) -> Any:
        return [], True

    def get_impl_key(self, sig: Any) -> Any:
        return _conversion(sig)


def dtype_type(ty: Any) -> DTypeType | None:
    """The type of a dtype that device code names: also by NumPy's class (``np.float32``), as kernels of ``cuda.jit`` do."""
    if isinstance(ty, types.NumberClass):
        from numba.cuda.np.numpy_support import as_dtype

        return DTypeType(numba_type(as_dtype(ty.instance_type)))
    return ty if isinstance(ty, DTypeType) else None


register_model(DTypeType)(OpaqueModel)
_conversions: dict[Any, Any] = {}


def _conversion(sig: Any) -> Any:
    key = (sig.return_type, sig.args)
    if key not in _conversions:
        def convert(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return context.cast(builder, args[0], sig.args[0], sig.return_type)

        _conversions[key] = convert
        target_context().insert_func_defn([(convert, convert, sig.args)])
    return _conversions[key]


@typing_registry.register_attr
class _DTypeAttributes(AttributeTemplate):
    key = DTypeType

    def generic_resolve(self, ty: DTypeType, attr: str) -> Any:
        return ty if attr == "type" else None                 # ``dtype.type(x)`` is how Python converts


@lowering_registry.lower_getattr(DTypeType, "type")
def _dtype_type(context: Any, builder: Any, ty: Any, value: Any) -> Any:
    return value


@lowering_registry.lower_constant(DTypeType)
def _dtype_constant(context: Any, builder: Any, ty: Any, value: Any) -> Any:
    return context.get_dummy_value()


@typeof_impl.register(np.dtype)
def _typeof_dtype(value: np.dtype, c: Any) -> Any:
    return DTypeType(numba_type(value))
