"""A number that is of one type on one way and of another on the other: refused in a user's code.

``x if c else y`` of float32 and float64 would be float64 on both ways when compiled. Python, and so the emulator, takes the
one as it is: what is computed with it then has another type. A literal or a plain float takes the type of the number on the
other way, where that holds it.
"""

from __future__ import annotations

from typing import Any

from numba.cuda import types

from gemmkit.lang.complex_scalars import WEAK_COMPLEX
from gemmkit.lang.numba_hooks import compiles_users
from gemmkit.lang.scalars import WEAK_FLOATS, IndexType, NarrowFloatType, WeakIntLiteral

_NUMBERS = (types.Number, types.Boolean, NarrowFloatType, *WEAK_FLOATS, *WEAK_COMPLEX)


def unify_ways(context: Any) -> Any:
    """``unify_pairs`` of a typing context: the type of a variable that several ways give a value."""
    ask = context.unify_pairs

    def unify(first: Any, second: Any) -> Any:
        if first != second and isinstance(first, _NUMBERS) and isinstance(second, _NUMBERS) and compiles_users():
            if not (_takes(first, second) or _takes(second, first)):
                return None
        return ask(first, second)

    return unify


def _takes(ty: Any, other: Any) -> bool:
    """Whether a number of type ``other`` is, beside one of type ``ty``, the same number of that type in both worlds."""
    if isinstance(other, WeakIntLiteral):
        return _holds(types.unliteral(ty), other.literal_value)
    if isinstance(ty, WeakIntLiteral):                        # whether it is held is asked the other way about
        return isinstance(other, _PLAIN)
    if isinstance(other, IndexType):
        if isinstance(ty, types.Integer):
            return bool(ty.signed and ty.bitwidth >= other.bitwidth)
        return not isinstance(ty, types.Boolean)
    if isinstance(other, (*WEAK_FLOATS, *WEAK_COMPLEX)):
        whole = isinstance(ty, (types.Integer, types.Boolean)) and not isinstance(ty, (IndexType, WeakIntLiteral))
        return not whole and not (isinstance(other, WEAK_COMPLEX) and not isinstance(ty, (types.Complex, *_PLAIN)))
    return bool(types.unliteral(ty) == types.unliteral(other))


_PLAIN = (*WEAK_FLOATS, *WEAK_COMPLEX, IndexType, WeakIntLiteral)


def _holds(ty: Any, value: int) -> bool:
    """Whether an integer literal is a number of this type."""
    if isinstance(ty, types.Boolean):
        return False
    if not isinstance(ty, types.Integer):
        return True
    low = -2 ** (ty.bitwidth - 1) if ty.signed else 0
    return bool(low <= value < low + 2 ** ty.bitwidth)
