"""Methods of numbers: ``n.bit_count()``. (Numba's own counts the bits of a negative number's complement.)"""

from __future__ import annotations

from typing import Any, ClassVar

from gemmkit.lang.numba_hooks import (
    AbstractTemplate,
    AttributeTemplate,
    TypingError,
    compiles_ours,
    lowering_registry,
    signature,
    types,
    typing_registry,
)
from gemmkit.lang.scalars import i32, index

_CUDA = {"target": "cuda"}                                    # before Numba's own


class _BitCount(AbstractTemplate):
    key = "gemmkit int.bit_count"
    metadata: ClassVar[dict[str, str]] = _CUDA

    def generic(self, args: tuple, kws: dict) -> Any:
        return None if args or kws else signature(index, recvr=types.unliteral(self.this))


@typing_registry.register_attr
class _OfIntegers(AttributeTemplate):
    key, metadata = types.Integer, _CUDA

    def generic_resolve(self, ty: Any, attr: str) -> Any:
        return types.BoundFunction(_BitCount, types.unliteral(ty)) if attr == "bit_count" and compiles_ours() else None


@typing_registry.register_attr
class _OfNumbers(AttributeTemplate):
    key, metadata = types.Number, _CUDA

    def generic_resolve(self, ty: Any, attr: str) -> Any:
        if attr == "item" and compiles_ours():
            raise TypingError("item() makes a Python number, which device code has none of; write the number itself")


@lowering_registry.lower("gemmkit int.bit_count", types.Integer)
def _bit_count(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    """Of the absolute value, as in Python."""
    (ty,), (value,) = sig.args, args
    if ty.signed:
        value = builder.select(builder.icmp_signed("<", value, value.type(0)), builder.neg(value), value)
    count = builder.ctpop(value)
    return builder.trunc(count, i32) if ty.bitwidth > 32 else count if ty.bitwidth == 32 else builder.zext(count, i32)


__all__: list[str] = []
