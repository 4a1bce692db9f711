"""An atom: one operation that hardware does, described once for both worlds.

``Atom(name, typer, emulate)`` is a callable. In device code, ``typer(context, *types)`` gives its signature and code; in
Python, and so in the emulator, ``emulate(*values)`` does what the hardware would.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gemmkit.lang.numba_hooks import global_callable, join_numba, typeof_impl, types


class Atom:
    """A hardware operation: its device code and its emulation."""

    def __new__(cls, name: str, typer: Callable[..., Any], emulate: Callable[..., Any], doc: str = "") -> Atom:
        # A class of its own, so that a call goes straight to the emulation: kernels call little else.
        return object.__new__(type(cls.__name__, (cls,), {"__call__": staticmethod(emulate)}))

    #: ``decided(context, *arguments)``: a result that follows from arguments' types, before types are inferred
    #: (`gemmkit.lang.static_branches`). Arguments are constants, or `Of` their types.
    decided: Callable[..., Any] | None = None

    def __init__(self, name: str, typer: Callable[..., Any], emulate: Callable[..., Any], doc: str = ""):
        self.__name__ = name
        self.__doc__ = doc or emulate.__doc__
        self.emulate = emulate
        self._typer = typer

    if TYPE_CHECKING:
        def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    @cached_property
    def device_type(self) -> types.Type:
        """Its type in device code."""
        return vars(self).setdefault("device_type", global_callable(self, self._typer, self.emulate))

    @property
    def _numba_type_(self) -> types.Type:
        """What Numba asks for in a kernel of ``cuda.jit``, until gemmkit's types are registered with it."""
        join_numba()
        return self.device_type

    def __repr__(self) -> str:
        return f"<atom {self.__name__}>"


def atom(typer: Callable[..., Any]) -> Callable[[Callable[..., Any]], Atom]:
    """Decorate the emulation with its typer: ``@atom(typer) def fma(a, b, c): ...``"""
    def wrap(emulate: Callable[..., Any]) -> Atom:
        return Atom(emulate.__name__, typer, emulate)

    return wrap


@typeof_impl.register(Atom)
def _typeof_atom(value: Atom, c: Any) -> types.Type:
    return value.device_type
