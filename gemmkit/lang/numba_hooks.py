"""The few places where gemmkit touches Numba's typing and lowering internals.

Everything else in :mod:`gemmkit.lang` registers its types and operations through the helpers here, so a change inside
numba-cuda is met in one file.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gemmkit.lang.deferred import at_load, load, names_later
from gemmkit.lang.references import Owner, owner_of

__all__ = [
    "AbstractTemplate", "Context", "Conversion", "DataModelManager", "FunctionPass", "NumbaError", "OwnCallable",
    "RefType", "Signature", "StateDict", "TypingContext", "TypingError", "Values", "attributes_of", "build_definitions",
    "call_iternext", "cgutils", "compiles_ours", "compiles_users", "compute_cfg_from_blocks", "fold_arguments",
    "global_callable", "global_compiler_lock", "inlines_calls", "ir", "iternext_impl", "join_numba", "kept_as",
    "lowering_registry", "models", "numba_ir", "operation", "register_model", "register_pass", "replace_vars",
    "rules_hold_in", "signature", "target_context", "typeof_impl", "types", "typing_registry", "unify_weakly",
]


if TYPE_CHECKING:
    from llvmlite import ir
    from numba.core.errors import NumbaError  # the base of numba.cuda's errors; its types raise these, too
    from numba.cuda import cgutils, types
    from numba.cuda.core import ir as numba_ir
    from numba.cuda.core.analysis import compute_cfg_from_blocks
    from numba.cuda.core.base import BaseContext as Context
    from numba.cuda.core.compiler import CompilerBase, StateDict
    from numba.cuda.core.compiler_lock import global_compiler_lock
    from numba.cuda.core.compiler_machinery import FunctionPass, register_pass
    from numba.cuda.core.errors import TypingError
    from numba.cuda.core.imputils import RefType, call_iternext, iternext_impl
    from numba.cuda.core.ir_utils import build_definitions, replace_vars
    from numba.cuda.cudadecl import registry as typing_registry
    from numba.cuda.cudaimpl import registry as lowering_registry
    from numba.cuda.datamodel import models
    from numba.cuda.datamodel.manager import DataModelManager
    from numba.cuda.extending import register_model, typeof_impl
    from numba.cuda.typeconv import Conversion
    from numba.cuda.typing.context import BaseContext as TypingContext
    from numba.cuda.typing.templates import AbstractTemplate, AttributeTemplate, Signature, fold_arguments, signature
else:
    names_later(globals())                                    # for what each will be: imported at the first compilation


Typer = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
Values = Sequence["ir.Value"]                                 # a call's arguments in LLVM


def target_context() -> Any:
    from numba.cuda.descriptor import cuda_target

    return cuda_target.target_context


def join_numba() -> None:
    """Register gemmkit's types and operations, while Numba compiles a kernel of ``cuda.jit`` that refers to one of them."""
    load()
    import_module("gemmkit.lang.aggregates")                # which registers the arithmetic of coordinates
    contexts = import_module("gemmkit.lang.compile").contexts      # (both import this file)

    typing_context, _ = contexts()
    typing_context.refresh()


_pipelines = threading.local()


def rules_hold_in(pipeline: type) -> None:
    """Let `compiles_ours` be true while a compiler of this class runs, from type inference to code, and not in one of
    Numba's that runs inside it (for a ``cuda.jit`` helper, or a library function of Numba's)."""
    load()
    run = CompilerBase._compile_core

    def run_and_note(self: CompilerBase) -> Any:
        stack = _pipelines.__dict__.setdefault("stack", [])
        stack.append(self.state.func_id.func if issubclass(type(self), pipeline) else None)
        try:
            return run(self)
        finally:
            stack.pop()

    CompilerBase._compile_core = run_and_note


def compiles_ours() -> bool:
    """Whether the function that is being compiled is one of gemmkit's, so that its rules hold for Numba's own numbers."""
    stack = _pipelines.__dict__.get("stack")
    return bool(stack and stack[-1])


def compiles_users() -> bool:
    """Whether the function that is being compiled is a user's."""
    stack: list = _pipelines.__dict__.get("stack", [])
    return bool(stack and stack[-1]) and owner_of(stack[-1]) is Owner.USER


class OwnCallable(types.Callable):
    """A type whose calls `get_call_type` infers anew: Numba lists none of their signatures."""

    def get_call_signatures(self) -> Any:
        return [], True


def kept_as(kind: type, form: Callable[[Any], Any] | None) -> None:
    """How values of a type are kept: ``form(ty)`` is a list of (name, type), a type of LLVM's, or another type, whose values
    are kept alike. With None they are constants, of which nothing is there when a kernel runs."""
    def model(manager: Any, ty: types.Type) -> Any:
        found = cast(Any, form)(ty)
        if isinstance(found, list):
            return models.StructModel(manager, ty, found)
        own = manager.lookup(found).get_value_type() if isinstance(found, types.Type) else found
        return models.PrimitiveModel(manager, ty, own)

    register_model(kind)(models.OpaqueModel if form is None else model)
    if form is None:
        lowering_registry.lower_constant(kind)(lambda context, builder, ty, value: context.get_dummy_value())


def attributes_of(kind: type) -> Callable[[F], F]:
    """Have a function say of ``(ty, name)`` the type of an attribute of values of ``kind``; None where they have none."""
    def register(function: F) -> F:
        at_load(_register_attributes, kind, function)
        return function

    return register


def _register_attributes(kind: type, function: Callable[..., Any]) -> None:
    """Before Numba's own (``target: cuda``)."""
    typing_registry.register_attr(type(f"gemmkit_{kind.__name__}", (AttributeTemplate,), dict(
        key=kind, metadata={"target": "cuda"}, generic_resolve=lambda self, ty, name: function(ty, name))))


def _template(key: object, typer: Typer, python: Callable[..., Any] | None = None) -> type:
    """A template that asks ``typer(typing_context, *argument_types)`` for ``(signature, codegen)`` or None. Where there
    is no result, ``codegen`` returns none.

    Numba finds the code again by the signature's argument types alone: ``codegen`` may depend on nothing else (a constant
    that it depends on must stay a literal type in the signature; keyword names are in ``sig.pysig``).

    Unlike Numba's ``@intrinsic``, the key may be any callable (``operator.add``, ``max``, an instance), arguments keep
    their literal types, and the template goes before the built-in ones (``target: cuda``), which would widen.
    ``python`` is the function that ``key`` is in Python: its signature says where a keyword belongs.
    """
    implementations: dict[Any, Any] = {}
    takes_keywords = any(p.kind is p.VAR_KEYWORD for p in inspect.signature(typer).parameters.values())

    def generic(self: AbstractTemplate, args: tuple, kws: dict) -> Signature | None:
        names = None
        if kws and takes_keywords:
            result = typer(self.context, *args, **kws)
            names = _keyword_signature(len(args), tuple(kws))
        else:
            if kws:
                bound = _by_position(python, args, kws)
                if bound is None:
                    return None
                args, names = bound
            result = typer(self.context, *args)
        if result is None:
            return None
        sig, codegen = result
        if names is not None:
            sig = sig.replace(pysig=names)
        known = implementations.get(sig.args)
        if known is None:
            def lowered(context: Context, builder: ir.IRBuilder, sig: Signature, values: Values) -> Any:
                found = codegen(context, builder, sig, values)
                return context.get_dummy_value() if found is None else found

            implementations[sig.args] = lowered
            target_context().insert_func_defn([(lowered, lowered, sig.args)])
        return sig

    def get_impl_key(self: AbstractTemplate, sig: Signature) -> Any:
        return implementations[sig.args]

    name = f"gemmkit_{getattr(key, '__name__', 'callable')}"
    return type(name, (AbstractTemplate,), dict(
        key=staticmethod(key) if callable(key) else key, generic=generic, get_impl_key=get_impl_key,
        prefer_literal=True, metadata={"target": "cuda"}))


def _by_position(python: Callable[..., Any] | None, args: tuple, kws: dict) -> tuple[tuple, inspect.Signature] | None:
    """All arguments in order, and the signature that Numba folds the call's keywords by; None when they do not fit."""
    if python is None:
        return None
    declared = inspect.signature(python)
    try:
        bound = declared.bind(*args, **kws)
    except TypeError:
        return None
    if bound.kwargs or len(bound.args) != len(args) + len(kws):       # a default would have to be filled in between
        return None
    parameters = [p.replace(default=p.empty, annotation=p.empty) for p in declared.parameters.values()]
    return bound.args, inspect.Signature(parameters[:len(bound.args)])


def _keyword_signature(positional: int, keywords: tuple[str, ...]) -> inspect.Signature:
    """What Numba folds a call's keywords by: the positional ones first, then the keywords in the call's order."""
    parameter = inspect.Parameter
    return inspect.Signature([parameter(f"_{n}", parameter.POSITIONAL_OR_KEYWORD) for n in range(positional)]
                             + [parameter(name, parameter.POSITIONAL_OR_KEYWORD) for name in keywords])


def operation(key: object) -> Callable[[Typer], Typer]:
    """Give an existing operator or built-in (``operator.add``, ``max``, ``len``) a meaning for our types.

    The decorated typer must return None for argument types that are not ours, so that other people's kernels are
    typed just as they were.
    """
    def register(typer: Typer) -> Typer:
        at_load(_give_meaning, key, typer)
        return typer

    return register


def _give_meaning(key: object, typer: Typer) -> None:
    template = _template(key, typer)
    template.key = key                                        # type: ignore[attr-defined]
    typing_registry.register_global(key)(template)


def global_callable(key: object, typer: Typer, python: Callable[..., Any] | None = None) -> types.Type:
    """The Numba type of a new global callable ``key`` (a function or an instance); ``python`` is what it is in Python."""
    template = _template(key, typer, python)
    template.key = key                                        # type: ignore[attr-defined]
    return types.Function(template)


def unify_weakly(weak: tuple[type, ...]) -> None:
    """Let a number type and one of the ``weak`` types unify to the former: ``x if x > 0 else 0`` has the type of x.

    Numba asks the first of two types, which would be float32 here, and that makes float64 of the pair.
    """
    ask = types.Number.unify

    def unify(self: types.Type, typing_context: TypingContext, other: types.Type) -> Any:
        if isinstance(other, weak) and not isinstance(self, (types.Literal, types.Boolean, *weak)):
            if isinstance(self, (types.Float, types.Complex)) or isinstance(other, types.Literal):
                return self
        return ask(self, typing_context, other)

    types.Number.unify = unify


# --------------------------------------------------------------------------------------------------
# The device that is compiled for: of the thread that compiles.

_target = threading.local()


def target_arch() -> tuple[int, int, str] | tuple[int, int]:
    """The compute capability that is compiled for, as Numba writes it: ``(9, 0, "a")``."""
    return getattr(_target, "cc", (9, 0, "a"))


def set_target_arch(cc: tuple, inlines_calls: bool = False) -> None:
    _target.cc, _target.inlines_calls = cc, inlines_calls


def inlines_calls() -> bool:
    """Whether small functions are put in place of their calls in the kernel that is compiled (`gemmkit.lang.lowering`)."""
    return getattr(_target, "inlines_calls", False)


@contextmanager
def compiling() -> Iterator[None]:
    """While Numba compiles, the device that it asks for is the one that is compiled for."""
    _target.compiling = getattr(_target, "compiling", 0) + 1
    try:
        yield
    finally:
        _target.compiling -= 1


def _answer_for_the_device() -> None:
    """Numba's own library functions ask which device is current while they compile; without one, ours is the answer."""
    from numba.cuda import dispatcher

    asked = dispatcher.get_current_device

    def get_current_device() -> Any:
        if getattr(_target, "compiling", 0):
            return SimpleNamespace(compute_capability=target_arch())
        return asked()

    dispatcher.get_current_device = get_current_device


at_load(_answer_for_the_device)


# --------------------------------------------------------------------------------------------------
# An atom: one operation that hardware does, described once for both worlds.
#
# ``Atom(name, typer, emulate)`` is a callable. In device code, ``typer(context, *types)`` gives its signature and code;
# in Python, and so in the emulator, ``emulate(*values)`` does what the hardware would.

class Atom:
    """A hardware operation: its device code and its emulation."""

    def __new__(cls, name: str, typer: Callable[..., Any], emulate: Callable[..., Any], doc: str = "") -> Atom:
        # A class of its own, so that a call goes straight to the emulation: kernels call little else.
        return object.__new__(type(cls.__name__, (cls,), {"__call__": staticmethod(emulate)}))

    #: ``decided(context, *arguments)``: a result that follows from arguments' types, before types are inferred
    #: (`gemmkit.lang.passes`). Arguments are constants, or `Of` their types.
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

    @property
    def __signature__(self) -> inspect.Signature:
        """For ``help``: Python would take the first argument for ``self``."""
        return inspect.signature(self.emulate)

    def __repr__(self) -> str:
        return f"<atom {self.__name__}>"


def atom(typer: Callable[..., Any]) -> Callable[[F], F]:
    """Decorate the emulation with its typer: ``@atom(typer) def fma(a, b, c): ...``"""
    def wrap(emulate: F) -> F:
        return cast(F, Atom(emulate.__name__, typer, emulate))

    return wrap


@typeof_impl.register(Atom)
def _typeof_atom(value: Atom, c: object) -> types.Type:
    return value.device_type
